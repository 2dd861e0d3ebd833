"""--enable-log-requests: a line of JSON for what goes to the engine, before it does."""

import dataclasses
import logging
from typing import Any

from jaxpaged.core.params import SamplingParams
from jaxpaged.openai.job import Job
from jaxpaged.openai.prompts import as_list, as_object
from server.access_log import json_line

log = logging.getLogger("server.requests")

MAX_VALUE = 1000  # characters of one parameter, which may be a schema of megabytes


def log_job(job: Job, kind: str, max_len: int | None) -> None:
    """The parameters that are not the defaults; at the level debug the prompts as well, each with
    so many characters and token ids at most.
    """
    fields: dict[str, Any] = {
        "id": job.envelope.answer_id,
        "request_id": job.body.request_id,
        "kind": kind,
        "model": job.envelope.model,
        "num_prompts": len(job.prompts),
        "params": _given(job.params),
    }
    if log.isEnabledFor(logging.DEBUG):
        fields["prompts"] = [_cut(prompt, max_len) for prompt in job.prompts]
    log.info("%s", json_line(fields))


def _given(params: SamplingParams) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value in (field.default, None, ()) or field.name == "output_kind":
            continue
        text = str(value)
        is_short = isinstance(value, int | float | str | tuple) and len(text) <= MAX_VALUE
        given[field.name] = value if is_short else text[:MAX_VALUE]
    return given


def _cut(prompt: Any, max_len: int | None) -> Any:
    fields = as_object(prompt)
    if fields is not None:
        return {name: _cut(value, max_len) for name, value in fields.items()}
    texts = as_list(prompt)
    if texts is not None:
        return texts[:max_len]
    return prompt[:max_len] if isinstance(prompt, str) else prompt
