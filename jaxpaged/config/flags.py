"""Flags and keyword arguments made from the settings' fields, so that no name is written twice."""

import argparse
import dataclasses
import difflib
import json
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, Union, cast, get_args, get_origin, get_type_hints

from jaxpaged.config.settings import GROUPS, EngineConfig
from jaxpaged.config.spellings import KEYWORDS, add_spellings, respelled
from jaxpaged.errors import ConfigError

# keyword arguments of LLM(...) that have another name than the field
KEYWORD_ALIASES = {"block_size": "page_size", "kv_offloading_size": "swap_space"}


class ArgumentParser(argparse.ArgumentParser):
    """argparse, but a mistake is one line with the nearest known flag, and exit code 2."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore
        """As argparse's; bytes that are no text are refused here: no file format can hold them."""
        for word in sys.argv[1:] if args is None else args:
            if not word.isascii() and any("\ud800" <= char <= "\udfff" for char in word):
                self.error(f"{word!r} is no UTF-8: rename it, or set LC_ALL=C.UTF-8")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: ") and message.split()[2][0] != "-":
            message += " (several values of a flag are written with commas)"
        known = [flag for action in self._actions for flag in action.option_strings]
        for word in message.split():
            near = (
                difflib.get_close_matches(word.split("=")[0], known, 1)
                if word.startswith("--")
                else []
            )
            if near and near[0] != word and "unrecognized" in message:
                message += f" (did you mean {near[0]}?)"
                break
        self.exit(2, f"{self.prog}: {message}\n")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag a setting, grouped; `--model` may be given without its flag by the caller."""
    for name, kind in GROUPS.items():
        group = parser.add_argument_group(name)
        hints = get_type_hints(kind)
        for f in dataclasses.fields(kind):
            flag = f.metadata["flag"] or "--" + f.name.replace("_", "-")
            options = _argument(hints[f.name])
            default = "" if f.default in (None, (), "") else f" (default: {_default(f)})"
            group.add_argument(
                flag,
                *f.metadata["aliases"],
                dest=f"{name}.{f.name}",
                default=argparse.SUPPRESS,
                help=(f.metadata["help"] + default).replace("%", "%%"),
                **options,
            )
    add_spellings(parser)


def config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the parsed flags give; those not given keep their defaults."""
    groups: dict[str, Any] = {}
    for name, kind in GROUPS.items():
        given = {
            f.name: getattr(args, f"{name}.{f.name}")
            for f in dataclasses.fields(kind)
            if hasattr(args, f"{name}.{f.name}")
        }
        groups[name] = kind(**given)
    return EngineConfig(**groups)


def config_from_keywords(**keywords: Any) -> EngineConfig:
    """The configuration for `LLM(...)`'s keyword arguments.

    Raises:
        ConfigError: a keyword that no setting has, with the nearest one, or a value that is no
            choice of its setting.
    """
    owners = {f.name: group for group, kind in GROUPS.items() for f in dataclasses.fields(kind)}
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for keyword, value in respelled(keywords).items():
        name = KEYWORD_ALIASES.get(keyword, keyword)
        if name not in owners:
            near = difflib.get_close_matches(name, [*owners, *KEYWORD_ALIASES, *KEYWORDS], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"there is no setting {keyword!r}{hint}")
        if name == "served_model_name" and isinstance(value, str):
            value = (value,)
        if isinstance(value, list):
            value = tuple(cast("list[Any]", value))
        choices = _choices(get_type_hints(GROUPS[owners[name]])[name])
        if isinstance(value, str) and choices and value not in choices:
            raise ConfigError(f"{keyword} is {value!r}, allowed are {', '.join(choices)}")
        groups[owners[name]][name] = value
    made: dict[str, Any] = {group: GROUPS[group](**given) for group, given in groups.items()}
    return EngineConfig(**made)


def _choices(kind: Any) -> tuple[str, ...]:
    """The texts that a setting of this type is one of; empty where it is any."""
    literals = (part for part in (kind, *get_args(kind)) if get_origin(part) is Literal)
    return tuple(choice for literal in literals for choice in get_args(literal))


def add_embedding_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a second model, beside one that generates."""
    group = parser.add_argument_group("embedding")
    group.add_argument(
        "--embedding-model",
        metavar="MODEL",
        help="a second model, for /v1/embeddings, /score and /rerank: directory or hub id",
    )
    group.add_argument(
        "--embedding-settings",
        type=json_object,
        default={},
        metavar="JSON",
        help='its settings by name, as {"served_model_name": "minilm", "max_model_len": 256}',
    )


def embedding_config(args: argparse.Namespace) -> EngineConfig | None:
    """What these flags say of the second model; None where there is none."""
    given: dict[str, Any] = args.embedding_settings
    if args.embedding_model is None:
        if given:
            raise ConfigError("--embedding-settings needs --embedding-model")
        return None
    return config_from_keywords(**given | {"model": args.embedding_model, "runner": "pooling"})


def whole_number(text: str) -> int:
    """An integer, also as 1k (1000) or 1K (1024), and m, M, g, G likewise; auto is -1."""
    if text == "auto":
        return -1
    units = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
    unit = units.get(text[-1:], 1)
    return int(float(text[:-1]) * unit) if unit > 1 else int(text)


whole_number.__name__ = "whole number"


def _argument(hint: Any) -> dict[str, Any]:
    """What argparse needs to read a value of this type."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is dict:
        return {"type": json_object, "metavar": "JSON"}
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        return {"type": _several(whole_number if element is int else str), "metavar": "A,B,..."}
    return {"type": whole_number if hint is int else hint, "metavar": hint.__name__.upper()}


def _several(element: Callable[[str], Any]) -> Callable[[str], Sequence[Any]]:
    def comma_separated(text: str) -> Sequence[Any]:
        return tuple(element(part.strip()) for part in text.split(",") if part.strip())

    return comma_separated


def json_object(text: str) -> dict[str, Any]:
    """A flag's value that is an object in JSON."""
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast("dict[str, Any]", value)


json_object.__name__ = "JSON object"


def _default(f: dataclasses.Field[Any]) -> Any:
    return "{}" if f.default is dataclasses.MISSING else f.default
