"""`response_format` and `structured_outputs` of a request."""

from typing import Any

import msgspec

from jaxpaged.core.structured import StructuredOutputsParams
from jaxpaged.errors import RequestError, UnsupportedParameter
from jaxpaged.openai.schema import SamplingFields

_KINDS = "text, json_object, json_schema and structural_tag"


def structured_outputs(body: SamplingFields) -> StructuredOutputsParams | None:
    """What the answer must look like, where the request says so.

    Raises:
        RequestError: no such format, or one in each of the two fields.
    """
    from_format = _of_response_format(body.response_format)
    if body.structured_outputs is None:
        return from_format
    if from_format is not None:
        raise RequestError(
            "response_format and structured_outputs both say what the answer looks like: leave "
            "one out",
            param="structured_outputs",
        )
    try:
        return msgspec.convert(body.structured_outputs, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"structured_outputs: {error}", param="structured_outputs") from None


def _of_response_format(given: Any) -> StructuredOutputsParams | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        return StructuredOutputsParams(json=_schema(given.get("json_schema")))
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=msgspec.json.encode(given).decode())
    if kind is None:
        raise RequestError(
            f'response_format must be an object with a type, as {{"type": "text"}}: {_KINDS} are '
            "served",
            param="response_format",
        )
    raise UnsupportedParameter(
        f"response_format has type {str(kind)[:40]!r}: {_KINDS} are served",
        param="response_format",
    )


def _schema(given: Any) -> dict[str, Any]:
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "response_format of type json_schema needs a schema: "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            param="response_format",
        )
    return schema
