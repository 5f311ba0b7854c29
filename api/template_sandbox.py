"""The sandbox in which a model's chat template runs: bounded in time, output and memory.

A template comes with a model file, so it is code from a stranger. On top of jinja2's immutable sandbox (no attribute tricks,
no changes to arguments) every loop iteration, macro and call checks a deadline, and sizes that one expression could blow up
(``'x' * 10**9``, ``'%999999999d' % 1``, ``center(10**9)``) are refused. Extensions and filters are those that chat templates
are written for: trimmed blocks, ``break``/``continue``, ``tojson`` without escapes, ``{% generation %}``.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REPEAT = 100_000
"""Largest count, width or factor that a template may use, and the longest result of one multiplication."""

_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d{6}|\*|\d*\.(\d{6}|\*))")
_WIDE_BRACES = re.compile(r"\{[^{}]*\d{6}")
"""Format specifications that ask for a width or precision of six digits and more, or take it from an argument."""
_deadline: ContextVar[float] = ContextVar("kvalet_template_deadline", default=float("inf"))


class TemplateRefusal(TemplateError):
    """The template called ``raise_exception``: it does not allow these messages. The text is the template's."""


class TemplateTooLong(TemplateError):
    """The template ran out of its time or output bound."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Templates rendered inside end with ``TemplateTooLong`` after ``seconds`` of wall time (checked at each iteration)."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def raise_exception(message: object = "") -> str:
    raise TemplateRefusal(str(message))


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Characters stay as they are: no ``\\u`` escapes and no HTML escapes, as models were trained."""
    allowed = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    ensure_ascii = bool(options.get("ensure_ascii", False))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


class Generation(Extension):
    """``{% generation %}`` marks what was generated, for training. Here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration is an instance-typed set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """One environment per template; rendering is thread-safe."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
        self.filters["tojson"] = to_json
        self.filters = {name: _bounded(filter_) for name, filter_ in self.filters.items()}
        self.globals["raise_exception"] = raise_exception

    def tick(self) -> str:
        """Called at each iteration of a loop and each macro call; "" so that it may stand anywhere."""
        if time.monotonic() > _deadline.get():
            raise TemplateTooLong("the chat template runs too long")
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None))
            node.body.insert(0, tick.set_lineno(node.lineno))  # type: ignore[attr-defined]
        return tree

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        _check_arguments(args, kwargs)
        method = getattr(obj, "__wrapped__", obj)  # jinja2 hands out str.format in a wrapper of its own
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and getattr(method, "__name__", "") in ("format", "format_map"):
            _check_format(owner, _WIDE_BRACES)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left, _WIDE_PERCENT)
        elif operator == "**" and (abs(left) > MAX_REPEAT or abs(right) > 64):
            raise SecurityError("the chat template computes a power that is too large")
        elif operator == "*" and _length(left) * _length(right) > MAX_REPEAT and (_sized(left) or _sized(right)):
            raise SecurityError("the chat template repeats a value too often")
        return super().call_binop(context, operator, left, right)


def _sized(value: Any) -> bool:
    return isinstance(value, (str, list, tuple))


def _length(value: Any) -> int:
    return len(value) if _sized(value) else abs(int(value)) if isinstance(value, (int, float)) else 0


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_REPEAT:
            raise SecurityError(f"the chat template asks for {value} of something: more than {MAX_REPEAT}")


def _check_format(text: str, wide: re.Pattern[str]) -> None:
    if wide.search(text):
        raise SecurityError("the chat template formats to a width that is too large")


def _bounded(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its numbers bounded. Its jinja2 markers (what it wants passed first) are kept by ``wraps``."""

    @functools.wraps(filter_)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args[1:], kwargs)
        if filter_.__name__ == "do_format":
            _check_format(str(args[0]), _WIDE_PERCENT)
        return filter_(*args, **kwargs)

    return checked
