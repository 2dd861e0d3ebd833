"""What a request says of tools, checked, and what that means for prompt and answer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxpaged.config.settings import ModelSettings
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.structured import StructuredOutputsParams
from jaxpaged.errors import RequestError, UnsupportedParameter
from jaxpaged.openai.prompts import as_list, as_object
from jaxpaged.openai.schema import ChatRequest
from jaxpaged.text.tools import FORMATS, NEED_SPECIAL_TOKENS, ToolParser, read_named, read_required

MAX_NAME = 256  # characters

type Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and whether its answer may or must call them."""

    tools: tuple[dict[str, Any], ...]  # as the client sent them
    mode: Mode
    name: str  # of the tool that must be called, in mode named
    parallel: bool
    format_name: str  # of calls in free text, in mode auto

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """What the chat template gets."""
        return list(self.tools) if self.mode != "none" and self.tools else None

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """`params` for an answer with these tools: held to calls where they are forced.

        What stops other answers would cut a forced call's arguments, which end by themselves.

        Raises:
            RequestError: the answer is to have another form too.
        """
        if self.is_forced:
            if params.structured_outputs is not None:
                raise RequestError(
                    "tool_choice and response_format or structured_outputs both say what the "
                    "answer looks like: leave one out",
                    param="tool_choice",
                )
            schema = StructuredOutputsParams(json=self.schema())
            return replace(params, structured_outputs=schema, stop=None, stop_token_ids=None)
        if self.mode == "auto" and self.format_name in NEED_SPECIAL_TOKENS:
            return replace(params, skip_special_tokens=False)
        return params

    def parser(self) -> ToolParser | None:
        """A parser for one answer; None where there is nothing to look for."""
        if self.mode == "none":
            return None
        if self.mode == "named":
            read = read_named(self.name)
        else:
            read = read_required if self.mode == "required" else FORMATS[self.format_name]
        schemas = {_function(tool)["name"]: _parameters(tool) for tool in self.tools}
        return ToolParser(read, schemas, parallel=self.parallel)

    def schema(self) -> dict[str, Any]:
        """What a forced answer is, as a JSON schema."""
        if self.mode == "named":
            return next(_parameters(t) for t in self.tools if _function(t)["name"] == self.name)
        options = [_call_schema(tool, f"#/items/anyOf/{i}") for i, tool in enumerate(self.tools)]
        calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": options}}
        return calls if self.parallel else calls | {"maxItems": 1}


def tool_use(body: ChatRequest, settings: ModelSettings) -> ToolUse:
    """Check `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        RequestError: a tool or choice of another shape; a choice that no tool allows.
        UnsupportedParameter: calls in free text, where the server has no parser for them.
    """
    tools = tuple(_checked_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ()))
    mode, name, allowed = _choice(body.tool_choice)
    names = [_function(tool)["name"] for tool in tools]
    for wanted in (*allowed, *([name] if mode == "named" else ())):
        if wanted not in names:
            raise RequestError(
                f"tool_choice names {wanted[:100]!r}, which is none of tools", param="tool_choice"
            )
    if allowed:
        tools = tuple(tool for tool in tools if _function(tool)["name"] in allowed)
    if not tools:
        if mode == "required":
            raise RequestError("tool_choice is required, and tools is empty", param="tool_choice")
        mode = "none"
    parser = settings.tool_call_parser
    if mode == "auto" and not (settings.enable_auto_tool_choice and parser):
        raise UnsupportedParameter(
            "tool_choice auto needs a server started with --enable-auto-tool-choice and "
            "--tool-call-parser; here tool_choice may be none, required or one tool",
            param="tool_choice",
        )
    return ToolUse(tools, mode, name, body.parallel_tool_calls is not False, parser or "")


def _choice(given: Any) -> tuple[Mode, str, list[str]]:
    """(mode, name of the one tool, names of the allowed tools where not all are)."""
    if given is None:
        return "auto", "", []
    if given in ("none", "auto", "required"):
        return given, "", []
    choice = as_object(given) or {}
    if choice.get("type") == "function":
        name = (as_object(choice.get("function")) or {}).get("name")
        if isinstance(name, str):
            return "named", name, []
    if choice.get("type") == "allowed_tools":
        allowed = as_object(choice.get("allowed_tools")) or {}
        mode, tools = allowed.get("mode"), as_list(allowed.get("tools")) or []
        names = [(as_object((as_object(t) or {}).get("function")) or {}).get("name") for t in tools]
        texts = [name for name in names if isinstance(name, str)]
        if mode in ("auto", "required") and texts and len(texts) == len(names):
            return mode, "", texts
    raise RequestError(
        "tool_choice must be none, auto, required, one tool as "
        '{"type": "function", "function": {"name": ...}}, or allowed_tools',
        param="tool_choice",
    )


def _checked_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedParameter(
            f"{where}.type is {str(tool.get('type'))[:40]!r}: only function is served",
            param=f"{where}.type",
        )
    function = as_object(tool.get("function")) or {}
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise RequestError(
            f"{where}.function.name must be text of 1 to {MAX_NAME} characters",
            param=f"{where}.function.name",
        )
    if parameters is not None and as_object(parameters) is None:
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema, an object",
            param=f"{where}.function.parameters",
        )
    kind = (parameters or {}).get("type", "object")
    if kind != "object" and "object" not in (as_list(kind) or ()):
        raise RequestError(
            f"{where}.function.parameters has the type {str(kind)[:40]!r}: arguments are an object",
            param=f"{where}.function.parameters",
        )
    return dict(tool)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return tool["function"]


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever it says."""
    return (_function(tool).get("parameters") or {}) | {"type": "object"}


def _call_schema(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """One call; the references in a tool's own schema are led to where it stands now."""
    parameters = _moved(_parameters(tool), f"{place}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"const": _function(tool)["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved
