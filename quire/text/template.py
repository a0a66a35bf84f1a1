"""Jinja chat templates: the sandbox they run in, its limits, and what can be derived from a template's syntax.

Imported only when a chat is rendered (jinja2 is slow to import). In: template text and variables. Out: text.
Limits of one rendering, all in TemplateLimits: length of the template, loop iterations and macro calls, seconds
(checked at every iteration), characters of output, size of any value made by * + ~ % ** and by the string methods and
filters that can grow a value, and range(). Parsing a malicious template, or one operation on shared data, can still
exceed them in this process, and parsed templates stay in a cache: untrusted templates are neither parsed nor
rendered here but by text/template_child.py, which is limited by the system.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.base.clock import now
from quire.schema.errors import InputError


@dataclass(frozen=True)
class TemplateLimits:
    template_chars: int = 1 << 20
    turns: int = 2_000_000
    seconds: float = 5.0
    output_chars: int = 1 << 26
    value_size: int = 1 << 26  # characters of a string, entries of a list
    width: int = 100_000  # numbers that set a width or a count
    power_bits: int = 4096


LIMITS = TemplateLimits()


_ENDS = ("<", ">")  # after a mark: a part written by the model starts, and ends


class LimitError(TemplateError):
    """The template exceeded a limit."""


class Meter:
    """What one rendering has used, and the mark it writes where {% generation %} starts and ends."""

    def __init__(self, limits: TemplateLimits, mark: str = "") -> None:
        self.limits = limits
        self.mark = mark
        self.turns = 0
        self.end = now() + limits.seconds

    def turn(self) -> None:
        self.turns += 1
        if self.turns > self.limits.turns:
            raise LimitError(f"more than {self.limits.turns} loop turns")
        if now() > self.end:
            raise LimitError(f"more than {self.limits.seconds:g} seconds")


_meter: ContextVar[Meter] = ContextVar("quire_template_meter")


class Generation(Extension):
    """{% generation %}…{% endgeneration %} encloses the model's parts. It is rendered as if it was absent,
    or with marks at both ends, by which `split_marks` finds them."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ends = [nodes.Output([self.call_method("_end", [nodes.Const(end)])], lineno=line) for end in _ENDS]
        return nodes.Scope([ends[0], *body, ends[1]], lineno=line)

    def _end(self, end: str) -> str:
        mark = _meter.get().mark
        return mark and mark + end


class SafeNamespace(Namespace):
    """namespace(), without names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a keyword here too
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


class Sandbox(ImmutableSandboxedEnvironment):
    """No attributes that escape the sandbox, no mutation of inputs, and nothing that grows without limit."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        for name, guard in _FILTER_GUARDS.items():
            self.filters[name] = _guarded(guard, self.filters[name])
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=SafeNamespace, dict=_make_dict
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metered().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def turn(self) -> None:
        _meter.get().turn()

    def concatenate(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _BINARY_GUARDS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped: Callable[..., str] | None = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # jinja2's own names
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            guard = _METHOD_GUARDS.get(__obj.__name__)
            if guard is not None:
                guard(__obj.__self__, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Metered(NodeTransformer):
    """Counts every loop iteration and macro call, and applies the size limit to `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _environment_call("concatenate", node.nodes, node.lineno)

    def _counted(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("turn", [], node.lineno), lineno=node.lineno))
        return node


def _environment_call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), args, [], None, None, lineno=line)


def render(source: str, variables: Mapping[str, Any], limits: TemplateLimits = LIMITS, mark: str = "") -> str:
    """Template text and variables -> the rendered text; any failure of the template is an InputError.

    With a `mark`, which must not occur elsewhere in the text, the text is for `split_marks`.
    """
    template = compile_template(source)
    token = _meter.set(Meter(limits, mark))
    chunks: list[str] = []
    total = 0
    try:
        for chunk in template.generate(**variables):
            total += len(chunk)
            if total > limits.output_chars:
                raise LimitError(f"more than {limits.output_chars} characters of output")
            chunks.append(chunk)
    except TemplateError as wrong:
        raise InputError(f"the chat template failed: {wrong.message or wrong}", param="chat_template") from wrong
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as wrong:
        what = f"{type(wrong).__name__}: {wrong}"
        raise InputError(f"the chat template failed on these messages: {what}", param="chat_template") from wrong
    finally:
        _meter.reset(token)
    return "".join(chunks)


def split_marks(text: str, mark: str) -> tuple[str, list[tuple[int, int]]]:
    """A text rendered with marks -> the text without them, and (start, end) characters of the model's parts.
    A part whose end was cut off extends to the end of the text."""
    first, *segments = text.split(mark)
    out, at, begun = [first], len(first), -1
    spans: list[tuple[int, int]] = []
    for segment in segments:
        end, text_part = segment[:1], segment[1:]
        if end == _ENDS[0]:
            begun = at
        elif begun >= 0:
            spans.append((begun, at))
            begun = -1
        out.append(text_part)
        at += len(text_part)
    if begun >= 0:
        spans.append((begun, at))
    return "".join(out), spans


@lru_cache(maxsize=1)
def _sandbox() -> Sandbox:
    return Sandbox()


@lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    _check_source(source)
    try:
        return _sandbox().from_string(source)
    except TemplateSyntaxError as wrong:
        raise InputError(
            f"the chat template is not valid Jinja, line {wrong.lineno}: {wrong.message}", param="chat_template"
        ) from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, TypeError, ArithmeticError, LookupError) as wrong:
        # limits of the compiler or of Python, or a constant expression that fails while it is folded
        raise InputError(
            f"the chat template cannot be compiled: {type(wrong).__name__}: {wrong}", param="chat_template"
        ) from None


def parse_template(source: str) -> nodes.Template:
    """The syntax tree, for looking at."""
    compile_template(source)
    return _sandbox().parse(source)


def _check_source(source: str) -> None:
    if len(source) > LIMITS.template_chars:
        raise InputError(
            f"the chat template has {len(source)} characters; the limit is {LIMITS.template_chars}",
            param="chat_template",
        )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: no HTML escapes, keys in their order."""
    _check_numbers(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_size(size: int) -> None:
    if size > LIMITS.value_size:
        raise LimitError(f"a value of {size} characters or entries; the limit is {LIMITS.value_size}")


def _check_numbers(*args: Any, **kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and value > LIMITS.width:
            raise LimitError(f"a width or count of {value}; the limit is {LIMITS.width}")


def _check_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(sequence, (str, list, tuple)):
            _check_size(len(sequence) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        _check_size(len(left) + len(right))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > LIMITS.power_bits:
        raise LimitError(f"a number of {bits} bits; the limit is {LIMITS.power_bits}")


def _check_format(form: Any, *args: Any, **kwargs: Any) -> None:
    """A width in a format is at most five digits and never an argument."""
    if isinstance(form, str) and re.search(r"\d{6}|%[^a-zA-Z%]*\*|:[^}]*{", form):
        raise LimitError("a format with a width over 99999")


def _check_replace(text: Any, old: Any, new: Any, *args: Any, **kwargs: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    if len(new) > len(old):
        _check_size(len(text) + (text.count(old)) * (len(new) - len(old)))


def _check_join(separator: Any, values: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(values, (list, tuple)):
        _check_size(len(str(separator)) * len(values) + sum(len(v) for v in values if isinstance(v, str)))


def _check_join_filter(values: Any, separator: Any = "", *args: Any, **kwargs: Any) -> None:
    _check_join(separator, values)


def _check_width(text: Any, *args: Any, **kwargs: Any) -> None:
    _check_numbers(*args, **kwargs)
    if isinstance(text, str) and args and isinstance(args[0], int):
        _check_size((text.count("\n") + text.count("\t") + 1) * max(args[0], 1))


_BINARY_GUARDS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "%": lambda left, right: _check_format(left),
}
_METHOD_GUARDS: dict[str, Callable[..., None]] = {
    "ljust": _check_width,
    "rjust": _check_width,
    "center": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_width,
    "replace": _check_replace,
    "join": _check_join,
}
_FILTER_GUARDS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "indent": _check_width,
    "wordwrap": _check_width,
    "batch": _check_width,
    "slice": _check_width,
    "replace": _check_replace,
    "join": _check_join_filter,
    "format": _check_format,
}


def _guarded(guard: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, after its arguments passed the guard. Jinja's own leading arguments are marked on the function."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    def filtered(*args: Any, **kwargs: Any) -> Any:
        guard(*args[passed:], **kwargs)
        return function(*args, **kwargs)

    if passed:
        filtered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return filtered
