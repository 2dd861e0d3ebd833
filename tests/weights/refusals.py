"""What every refusal must be."""

from collections.abc import Callable

import pytest

from jaxpaged.errors import JaxPagedError


def refusal(error: type[JaxPagedError], call: Callable[[], object]) -> str:
    """The text of the error that `call` raises: one printable line of at most 300 characters."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) <= 300
    return text
