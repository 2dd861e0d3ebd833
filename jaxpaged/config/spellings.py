"""Flags and keywords of vLLM's for what a setting of another name says here."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.errors import ConfigError

SPECULATION = {
    "spec_method": ("method", str),
    "spec_model": ("model", str),
    "spec_tokens": ("num_speculative_tokens", int),
}
ONLY = {  # what there is no other choice of
    "kv_cache_dtype": ("auto",),
    "kv_offloading_backend": ("native",),
    "prefix_caching_hash_algo": ("sha256",),
}
EAGER = "enforce_eager"
SIZES = "cudagraph_capture_sizes"
KEYWORDS = (*SPECULATION, *ONLY, EAGER, SIZES)


def add_spellings(parser: argparse.ArgumentParser) -> None:
    """Add the flags; what they say is stored as that of the settings that they mean."""
    group = parser.add_argument_group("spellings", "vLLM's flags that others stand for here")
    for name, (part, kind) in SPECULATION.items():
        group.add_argument(
            _flag(name),
            action=_IntoSpeculation,
            dest=part,
            type=kind,
            default=argparse.SUPPRESS,
            metavar=part.upper(),
            help=f"{part} of --speculative-config",
        )
    for name, choices in ONLY.items():
        help = f"known; {choices[0]} is the only one"
        group.add_argument(_flag(name), choices=choices, default=argparse.SUPPRESS, help=help)
    group.add_argument(
        _flag(EAGER),
        action=_Eager,
        default=argparse.SUPPRESS,
        help="--warmup lazy: no program is compiled before a request needs it",
    )
    group.add_argument(
        _flag(SIZES),
        action=_Sizes,
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="ROWS",
        help="--batch-buckets",
    )


def respelled(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `LLM(...)` under the names of the settings that they mean.

    Raises:
        ConfigError: a choice that there is not.
    """
    given = {name: value for name, value in keywords.items() if name not in KEYWORDS}
    parts = {part: keywords.get(name) for name, (part, _) in SPECULATION.items()}
    parts = {part: value for part, value in parts.items() if value is not None}
    if parts:
        given["speculative_config"] = (given.get("speculative_config") or {}) | parts
    for name, choices in ONLY.items():
        value = keywords.get(name)
        if value is not None and value not in choices:
            raise ConfigError(f"{name} is {value!r}, served is {choices[0]}")
    if keywords.get(SIZES):
        given["batch_buckets"] = tuple(keywords[SIZES])
    if keywords.get(EAGER):
        given["warmup"] = "lazy"
    return given


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _IntoSpeculation(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        place = "scheduler.speculative_config"
        setattr(namespace, place, getattr(namespace, place, {}) | {self.dest: values})


class _Sizes(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = ",".join(values or ()).split(",")
        if not all(word.isdecimal() for word in words):
            parser.error(f"argument {option_string}: {' '.join(words)} are no whole numbers")
        setattr(namespace, "compile.batch_buckets", tuple(map(int, words)))


class _Eager(argparse.BooleanOptionalAction):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if option_string == _flag(EAGER):
            setattr(namespace, "compile.warmup", "lazy")
