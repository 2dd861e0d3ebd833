"""What can go wrong, and whose fault it is.

JaxPagedError
├── ConfigError        the operator's: a setting that cannot work        exit 2
├── WeightsError       the checkpoint's: missing, extra or misshapen     exit 2
├── RequestError       the client's: this can never be served            HTTP 400
│   ├── PromptTooLong
│   └── UnsupportedParameter
├── CapacityError      nobody's: full now, may work later                HTTP 503, Retry-After
│   ├── QueueFull
│   └── Draining
├── RateLimited        a key's own limit                                 HTTP 429, Retry-After
├── OutOfTime          a request's own timeout_s has passed              HTTP 408
├── GenerationFailed   the model failed on this one request              HTTP 500
├── EngineStopped      the engine is gone; the cause is in the text      HTTP 500
└── InvariantError     ours: a bug; the engine stops                     HTTP 500
"""

import re

_LIMIT = re.compile(r"(?<![\w.'\"])max_tokens(?![\w.'\"])")


class JaxPagedError(Exception):
    """Anything that jaxpaged raises on purpose."""


class ConfigError(JaxPagedError):
    """A setting that cannot work; the text names the setting, what it got and what it allows."""


class WeightsError(JaxPagedError):
    """A checkpoint that cannot be loaded: the text names file, tensor and both shapes."""


class RequestError(JaxPagedError):
    """The client asked for something that can never be served.

    `param` names the offending field as the client wrote it, or None.
    """

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param

    def name_field(self, param: str | None) -> None:
        """Name the field that the client wrote instead of the one that was made of it.

        A text that begins with the name of the whole field, not of a part of it, begins with the
        client's.
        """
        before, self.param = self.param, param
        if before and param and re.match(re.escape(before) + "[ :,]", str(self)):
            self.args = (param + str(self).removeprefix(before),)

    def name_limit(self, name: str) -> None:
        """Say `name` where the text speaks of `max_tokens`, but not within what a client wrote."""
        self.args = (_LIMIT.sub(name, str(self)),)


class PromptTooLong(RequestError):
    """Prompt and requested completion do not fit the model's context.

    Clients look for "maximum context length" in the text, as they do with other servers.
    """

    def __init__(self, prompt_len: int, max_tokens: int, context_len: int):
        room = context_len - prompt_len
        asked = f" and {max_tokens} more are asked for" if max_tokens else ""
        less = f", or lower max_tokens to {room}" if room > 0 else ""
        super().__init__(
            f"the prompt has {prompt_len} tokens{asked}, over the model's maximum context length "
            f"of {context_len} tokens: shorten the prompt by {max_tokens - room}{less}",
            param="prompt",
        )


class UnsupportedParameter(RequestError):
    """A field that is known and that this engine does not serve."""


class CapacityError(JaxPagedError):
    """Full now; the same request may work after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(CapacityError):
    """More requests or tokens wait than the operator allows."""


class Draining(CapacityError):
    """The server is shutting down and takes no new work."""


class RateLimited(JaxPagedError):
    """A key used up its own limit; it may come back after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfTime(JaxPagedError):
    """The time that a request gave itself has passed; what it was doing is given up."""


class GenerationFailed(JaxPagedError):
    """The model's logits broke for this request; others are not touched."""


class EngineStopped(JaxPagedError):
    """The engine no longer runs; the text holds the first cause."""


class InvariantError(JaxPagedError):
    """Ours: something that cannot be so. The engine stops rather than go on."""
