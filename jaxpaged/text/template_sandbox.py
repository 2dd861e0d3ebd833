"""A Jinja environment for templates that nobody has read: no code, no endless loop, no huge text.

Every loop round, macro call and filter call looks at a deadline, and what can multiply text is
measured first. The checks are put into the parsed template as attributes of the environment, which
a template cannot name or change.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 8_000_000  # of any text that a template puts together
MAX_BITS = 100_000  # of any whole number
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"}
_WIDE_FIELD = re.compile(r"\d{4}")  # a width or precision that no prompt needs


class TemplateLimitError(TemplateError):
    """The template took too long or made too much text."""


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment for a model's templates; rendering is safe from several threads."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        extensions: list[str | type[Extension]] = [GenerationBlock, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._limits = threading.local()
        self.filters = {name: self._watched(function) for name, function in self.filters.items()}
        self.filters["tojson"] = to_json
        self.filters["checked_text"] = checked_text
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def compile_checked(self, source: str) -> Template:
        """Compile with the checks in place.

        Raises:
            jinja2.TemplateSyntaxError: the source is no template.
        """
        tree = _InsertChecks().visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Within it, this thread's rendering ends with `TemplateLimitError` after `seconds`."""
        self._limits.end, self._limits.seconds = time.monotonic() + seconds, seconds
        try:
            yield
        finally:
            self._limits.end = None

    def check_time(self) -> str:
        end = getattr(self._limits, "end", None)
        if end is not None and time.monotonic() > end:
            raise TemplateLimitError(f"it takes over {self._limits.seconds:g} s")
        return ""

    def concat_checked(self, *values: Any) -> str:
        """The `~` operator."""
        texts = [str(value) for value in values]
        check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple | bytes) and isinstance(other, int):
                    check_size(len(one) * other)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_BITS:
                raise TemplateLimitError(f"a power has over {MAX_BITS} bits")
        elif operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            raise TemplateLimitError("the % operator on text is not served: use ~")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Any call in a template; jinja2's odd names leave all others to the template."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return checked_text(result) if isinstance(result, str) else result

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # it keeps the marks by which jinja2 passes its own arguments
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            if function.__name__ == "do_format" and _WIDE_FIELD.search(str(args[0])):
                raise TemplateLimitError("a format's width has over three digits")
            check_size(_largest_number(args, kwargs))
            return function(*args, **kwargs)

        return checked


class _InsertChecks(NodeTransformer):
    """Put a look at the deadline into every loop and macro, and measure the `~` operator."""

    def _check(self, node: Any) -> Any:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call))
        return node

    visit_For = visit_Macro = visit_CallBlock = _check

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "checked_text", [], [], None, None)  # pyright: ignore
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        function = nodes.EnvironmentAttribute("concat_checked")
        return nodes.Call(function, node.nodes, [], None, None, lineno=node.lineno)


def _largest_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return max((a for a in (*args, *kwargs.values()) if isinstance(a, int)), default=0)


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Measure what a method of a text would make."""
    if name in _PADDING:
        check_size(_largest_number(args, kwargs) + len(owner))
        if name.startswith("format") and _WIDE_FIELD.search(owner):
            raise TemplateLimitError("a format's width has over three digits")
    if name == "replace" and len(args) > 1:
        check_size(owner.count(str(args[0])) * len(str(args[1])))


def checked_text(text: str) -> str:
    check_size(len(text))
    return text


def check_size(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes over {MAX_CHARACTERS} characters")


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise TemplateError(str(message))


def strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter would escape it for HTML."""
    if indent is not None:
        indent = min(indent, 16)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
