"""Reading a checkpoint's own configuration: every value checked, every refusal one line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.config.architecture import Activation
from jaxpaged.errors import ConfigError

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
REQUIRED = object()  # in place of a default: the field must be there


@dataclass(frozen=True)
class Fields:
    """The values of a Hugging Face configuration; `source` says in errors where they came from.

    A value of null counts as missing, as it does in transformers.
    """

    values: Mapping[str, Any]
    source: str

    def get(self, name: str) -> Any:
        """The value as it stands, or None."""
        return self.values.get(name)

    def count(
        self, name: str, default: Any = REQUIRED, *, least: int = 1, most: int = 2**24
    ) -> Any:
        """A whole number from `least` to `most`."""
        value = self._value(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(name, f"allowed are whole numbers from {least} to {most}")
        return value

    def number(self, name: str, default: Any = REQUIRED, *, above: float = 0.0) -> Any:
        """A finite number over `above`."""
        value = self._value(name, default)
        if value is default:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= above:
            self.refuse(name, f"allowed are finite numbers over {above:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "allowed are true and false")
        return value

    def section(self, name: str) -> "Fields | None":
        """A nested mapping, whose fields are named `name.field` in errors."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, "allowed is a mapping")
        return Fields({f"{name}.{key}": entry for key, entry in value.items()}, self.source)

    def activation(self, name: str, default: str) -> Activation:
        value = self._value(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.refuse(name, f"served are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def refuse(self, name: str, allowed: str) -> Any:
        """Raise the one line that says what stands there and what may."""
        shown = repr(self.get(name))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ConfigError(f"{self.source}: {name} is {shown}: {allowed}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConfigError(f"{self.source}: {name} is missing: the model's shape needs it")
        return default
