"""CallForm: how a family's calls are written word for word, for calls that are held to a schema (strict.py).

A parser reads a call in any of the ways its model may write it; a form is the one way that a grammar allows, which is
the way of the model's chat template. In: literal text. Must not know: schemas, grammars.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JsonValues:
    """All arguments as one JSON object."""


@dataclass(frozen=True)
class TaggedValues:
    """Each argument between tags of its own, text as it stands and anything else as JSON. In `begin`, {name} is the
    parameter's, {text} says "true" or "false", and {type} is JSON's word for what the value is (number for integers).
    `ends`: what would end a text before `end` does."""

    begin: str
    end: str
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class ElementValues:
    """Each argument between tags of its name; an object's members are tags within it, and so are a list's, whose name
    is `item`. Text as it stands and anything else as JSON. `mark` is before every tag, `after` follows an argument."""

    mark: str
    after: str = ""


@dataclass(frozen=True)
class PythonValues:
    """name=value, name=value, as Python writes them."""


@dataclass(frozen=True)
class BareValues:
    """{name:value,name:value}, with text between two marks."""

    quote: str


@dataclass(frozen=True)
class CallForm:
    """trigger open [call arguments close] between [call arguments close] … end

    `triggers`: any of them begins calls, wherever it stands in an answer. `between` None: one call, and then `end`.
    In `call`, {name} is the function's and {number} any number. `others`: what the parser would take for the beginning
    of a call too; an answer may not say it. `bare`: calls also begin an answer, without a trigger (and without `end`'s
    tags, which is `bare_end`); one that begins with any of these letters is calls. `alone`: nothing follows a call.
    `in_thought`: calls are made there too.
    """

    call: str
    close: str = ""
    values: JsonValues | TaggedValues | ElementValues | PythonValues | BareValues = JsonValues()
    triggers: tuple[str, ...] = ()
    open: str = ""
    between: str | None = None
    end: str = ""
    others: tuple[str, ...] = ()
    bare: str = ""
    bare_end: str = ""
    alone: bool = False
    in_thought: bool = False


def json_call(name: str = "name", arguments: str = "arguments", first: str = "") -> str:
    """The beginning of {"name": …, "arguments": …}."""
    return f'{{{first}"{name}": "{{name}}", "{arguments}": '
