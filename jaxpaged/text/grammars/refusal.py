"""The one error of grammars: the client's, about one field."""

from jaxpaged.errors import RequestError, UnsupportedParameter

FIELD = "structured_outputs"


def refusal(text: str) -> RequestError:
    """A grammar that cannot be used, and why."""
    return RequestError(text, param=FIELD)


def not_served(text: str) -> RequestError:
    """A grammar that asks for what is not served."""
    return UnsupportedParameter(text, param=FIELD)
