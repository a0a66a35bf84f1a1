"""FlexibleArgumentParser: argparse that accepts the common spellings of engine options.

Dashes or underscores; `--flag.key.sub value` and `-cc.key=value` for keys of a JSON option, `key+` to append to a
list; `--config file.yaml` below the command line; `--help=GroupName|word|all|page`. In: strings. Out: a namespace.
Must not know: which options exist (flags.py adds them), except those of other programs, for hints (foreign.py).
"""

import argparse
import copy
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from quire.base.registry import load
from quire.config.foreign import meant_by

_FILES = (".yaml", ".yml", ".json")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser whose flags may be written with dashes or underscores, and whose JSON flags take dotted keys."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation that works today is ambiguous tomorrow
        super().__init__(*args, **kwargs)
        self.topic = ""  # the argument of --help=...
        self.first: tuple[str, ...] = ()  # flags that --help lists although their groups are folded

    def parse_args(  # type: ignore[override]  # one signature instead of argparse's overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        self._refuse_foreign(list(sys.argv[1:] if args is None else args))
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self.nearest(rest)}")
        return parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        arguments = list(sys.argv[1:] if args is None else args)
        arguments = [self._known_spelling(arg) if i < _end(arguments) else arg for i, arg in enumerate(arguments)]
        self._answer_help(arguments)
        if self._has_commands():  # the subparser does the rest
            return super().parse_known_args(arguments, namespace)
        arguments, from_file = _OptionFile(self).cut(arguments)
        arguments = _Dotted(self, from_file).fold(arguments)
        defaults = [(action, action.default) for action in from_file]
        try:
            for action, value in from_file.items():
                action.default = value
            return super().parse_known_args(arguments, namespace)
        finally:
            for action, value in defaults:
                action.default = value

    def _refuse_foreign(self, args: list[str]) -> None:
        """Before argparse sees them: it would take -c for a prefix of -cc."""
        if self._has_commands():
            return
        flags = [arg.partition("=")[0] for arg in args[: _end(args)]]
        hints = {flag: advice for flag in flags if self.find(flag) is None and (advice := meant_by(flag))}
        if hints:
            self.error("; ".join(f"there is no flag {flag}: {advice}" for flag, advice in hints.items()))

    def find(self, flag: str) -> argparse.Action | None:
        return self._option_string_actions.get(flag)

    def format_usage(self) -> str:
        formatter = self._get_formatter()
        folded = {id(action) for group in self._folded() for action in group._group_actions}
        shown = [action for action in self._actions if id(action) not in folded]
        formatter.add_usage(self.usage, shown, self._mutually_exclusive_groups)
        tail = " [engine options]\n" if folded else ""
        return formatter.format_help().rstrip("\n") + (tail or "\n")

    def format_help(self) -> str:
        """Groups of engine options are only named, unless --help=... requests them."""
        if not self._folded():
            return super().format_help()
        if self.topic and self.topic != "all":
            return self._format_topic()
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for group in self._action_groups:
            if self.topic == "all" or group not in self._folded():
                _add_section(formatter, group, group._group_actions)
        if self.first and not self.topic:
            formatter.start_section("most used")
            formatter.add_arguments([self._option_string_actions[flag] for flag in self.first])
            formatter.end_section()
        formatter.add_text(self.epilog)
        if self.topic:
            return f"usage: {self.prog} [options]\n\n{formatter.format_help()}"
        lines = ["", "engine options (--help=all lists them, --help=word finds one):"]
        for group in self._folded():
            number = sum(action.help is not argparse.SUPPRESS for action in group._group_actions)
            if not number:
                continue
            lines.append(f"  --help={group.title or '':26} {number:3} option{'s' if number > 1 else ''}")
        return f"{self.format_usage()}\n{formatter.format_help()}" + "\n".join(lines) + "\n"

    def _format_topic(self) -> str:
        formatter = self._get_formatter()
        word = self.topic.lower().lstrip("-").replace("_", "-")
        shown = 0
        hidden: list[str] = []
        for group in self._action_groups:
            whole = (group.title or "").lower() == word
            matches = [a for a in group._group_actions if whole or any(word in s for s in a.option_strings)]
            hidden += [a.option_strings[0] for a in matches if a.help is argparse.SUPPRESS and a.option_strings]
            matches = [a for a in matches if a.help is not argparse.SUPPRESS]
            shown += len(matches)
            _add_section(formatter, group, matches)
        if hidden:
            formatter.add_text(f"Not available in this version: {', '.join(hidden)}")
        if not shown and not hidden:
            titles = [group.title or "" for group in self._folded()]
            near = get_close_matches(self.topic, titles, n=1)
            hint = f" Did you mean --help={near[0]}?" if near else f" Groups: {', '.join(titles)}"
            return f"No option and no group is called {self.topic!r}.{hint}\n"
        return formatter.format_help()

    def _folded(self) -> list[Any]:
        return [group for group in self._action_groups if group.description is FOLDED]

    def _answer_help(self, args: list[str]) -> None:
        for arg in args[: _end(args)]:
            name, equals, topic = arg.partition("=")
            if name == "--help" and equals and not self._has_commands():
                self.topic = "all" if topic in ("", "page") else topic
                if topic == "page":
                    load("pydoc:pager")(self.format_help())
                else:
                    self.print_help()
                self.exit()

    def _has_commands(self) -> bool:
        return any(isinstance(action, argparse._SubParsersAction) for action in self._actions)

    def _known_spelling(self, arg: str) -> str:
        """--max_num_seqs=4 -> --max-num-seqs=4, if this parser has the one and not the other."""
        if not arg.startswith("--"):
            return arg
        name = arg.partition("=")[0].partition(".")[0]
        if name in self._option_string_actions:
            return arg
        for other in (name.replace("_", "-"), "--" + name[2:].replace("-", "_")):
            if other in self._option_string_actions:
                return other + arg[len(name) :]
        return arg

    def action_called(self, key: str) -> argparse.Action | None:
        """By long name (dashes or underscores) or, for a positional, by its name."""
        flag = self.find(self._known_spelling(f"--{key}"))
        positionals = (a for a in self._actions if not a.option_strings and a.dest == key.replace("-", "_"))
        return flag or next(positionals, None)

    def is_negation(self, key: str) -> bool:
        """Of an option that is on or off: --no-NAME."""
        flag = self._known_spelling(f"--{key}")
        return flag.startswith("--no-") and isinstance(self.find(flag), argparse.BooleanOptionalAction)

    def nearest(self, wrong: Iterable[str]) -> str:
        known = list(_flags_of(self))
        hints = []
        for arg in wrong:
            name = arg.partition("=")[0].partition(".")[0].replace("_", "-")
            alike = [flag for flag in known if flag.startswith("--") or not name.startswith("--")]
            if name.startswith("-") and (near := get_close_matches(name, alike, n=1)):
                hints.append(near[0])
        return f" (did you mean {', '.join(hints)}?)" if hints else ""


# What PyYAML raises beside its own errors: `!!int x`, `!!bool x`, `!!timestamp x`, 5,000 digits, 2,000 brackets.
_NOT_OF_ITS_TYPE = (ValueError, KeyError, AttributeError, TypeError, IndexError, RecursionError)
_MOST_VALUES = 100_000  # of a file, each as often as aliases repeat it
FOLDED = "\u200b"  # description that marks a group as folded in help; compared by identity


_YAML_TYPES = ["null", "bool", "int", "float", "binary", "timestamp", "omap", "pairs", "set", "str", "seq", "map"]


def _loader_class() -> Any:
    """YAML's safe one, in which a date is text as any other value without a type of JSON: it may be a name.

    Its table is its own: libraries replace entries of PyYAML's for the whole process (lm-format-enforcer does).
    """
    safe = load("yaml:SafeLoader")
    forms = {f"tag:yaml.org,2002:{name}": getattr(safe, f"construct_yaml_{name}") for name in _YAML_TYPES}
    resolvers = {
        first: [(tag, form) for tag, form in pairs if tag != "tag:yaml.org,2002:timestamp"]
        for first, pairs in safe.yaml_implicit_resolvers.items()
    }
    tables = {"yaml_implicit_resolvers": resolvers, "yaml_constructors": forms | {None: safe.construct_undefined}}
    return type("OptionLoader", (safe,), tables)


def _num_values(node: Any, known: dict[int, int]) -> int:
    """Of a YAML node, each as often as aliases repeat it: few lines may mean more than there is memory for."""
    if id(node) not in known:
        known[id(node)] = 0  # for one that holds itself
        parts = () if isinstance(node.value, str) else node.value
        inner = (one for part in parts for one in (part if isinstance(part, tuple) else (part,)))
        known[id(node)] = 1 + sum(_num_values(one, known) for one in inner)
    return known[id(node)]


class _OptionFile:
    """`--config file.yaml`: its values become defaults for one parse."""

    def __init__(self, parser: FlexibleArgumentParser) -> None:
        self.parser = parser

    def cut(self, args: list[str]) -> tuple[list[str], dict[argparse.Action, Any]]:
        """The arguments without the file, and the values of the file."""
        rest: list[str] = []
        path = None
        i = 0
        while i < len(args):
            name, equals, value = args[i].partition("=")
            if name == "--config" and i < _end(args):
                value = value if equals else (args[i + 1] if i + 1 < len(args) else "")
                if value.endswith(_FILES) or self.parser.find("--config") is None:
                    if path is not None:
                        self.parser.error("--config may be given only once")
                    path = value
                    i += 1 if equals else 2
                    continue
            rest.append(args[i])
            i += 1
        return rest, {} if path is None else dict(self._read(path))

    def _read(self, path: str) -> Iterator[tuple[argparse.Action, Any]]:
        parser = self.parser
        if not path.endswith(_FILES):
            parser.error(f"--config needs a .yaml, .yml or .json file, got {path!r}")
        if not os.path.isfile(path):
            parser.error(f"--config: there is no file {path!r}")
        seen: dict[tuple[argparse.Action, str], Any] = {}
        contents: dict[argparse.Action, dict[str, Any]] = {}  # by what follows a dot
        names: dict[argparse.Action, str] = {}
        for key, value in self._pairs(path):
            name, dot, part = str(key).partition(".")
            action = parser.action_called(name)
            is_known = action is not None and not isinstance(action, argparse._HelpAction)
            if action is None or not is_known or (dot and not (part and action.option_strings)):
                parser.error(f"--config {path}: there is no option {key!r}{self._hint(name)}")
            first = seen.setdefault((action, part), key)
            if part in contents.setdefault(action, {}):
                again = "is given twice" if first == key else f"is the same option as {first!r}"
                parser.error(f"--config {path}: {key!r} {again}; name each option once")
            contents[action][part] = value
            names[action] = names.get(action, name) if part else name
        for action, values in contents.items():
            yield action, self._value(path, names[action], action, values)

    def _hint(self, name: str) -> str:
        """Keys are long names."""
        short = self.parser.find(f"-{name}")
        if short is None or isinstance(short, argparse._HelpAction):
            return self.parser.nearest([f"--{name}"])
        return f" (did you mean {max(short.option_strings, key=len).lstrip('-')}?)"

    def _pairs(self, path: str) -> list[tuple[Any, Any]]:
        """The keys and values of the file, a key that stands there twice among them."""
        error = self.parser.error
        loader = None
        try:
            with open(path, encoding="utf-8") as file:
                loader = _loader_class()(file)
                root = loader.get_single_node()
                if root is not None and _num_values(root, {}) > _MOST_VALUES:
                    error(f"--config {path}: more than {_MOST_VALUES} values, each as often as aliases repeat it")
                content = None if root is None else loader.construct_document(root)
        except OSError as wrong:
            error(f"--config {path}: {wrong.strerror}")
        except (load("yaml:YAMLError"), UnicodeDecodeError) as wrong:
            error(f"--config {path}: not readable as YAML: {wrong}")
        except _NOT_OF_ITS_TYPE as wrong:
            error(f"--config {path}: a value is not of the type that the file says, or nested too deep ({wrong!r})")
        finally:
            if loader is not None:
                loader.dispose()
        if content is None:  # nothing, or only comments
            return []
        if not isinstance(content, dict):
            error(f"--config {path}: expected a mapping of option names to values, got {type(content).__name__}")
        if len(root.value) == len(content):
            return list(content.items())
        names = [str(key.value) for key, _ in root.value]
        twice = next((name for name in names if names.count(name) > 1), names[-1])  # 1 and 1.0 are one key, too
        error(f"--config {path}: {twice!r} is given twice; name each option once")

    def _value(self, path: str, key: str, action: argparse.Action, values: Mapping[str, Any]) -> Any:
        """What the file says of an option, converted as the flag would convert it."""
        try:
            return self._converted(path, key, action, self._joined(action, values))
        except argparse.ArgumentError as wrong:
            self.parser.error(f"--config {path}: {wrong}")
        except (TypeError, ValueError) as wrong:  # bytes, a list that holds itself
            self.parser.error(f"--config {path}: {key} holds what is not JSON ({wrong}); put text in quotes")

    def _converted(self, path: str, key: str, action: argparse.Action, value: Any) -> Any:
        if value is None:
            return action.default
        if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                self.parser.error(f"--config {path}: {key} must be true or false, got {value!r}")
            return value != self.parser.is_negation(key)
        if action.nargs in ("+", "*") or isinstance(action.nargs, int):
            items = value if isinstance(value, list) else [value]
            return [self._one_value(action, item) for item in items]
        return self._one_value(action, value)

    def _joined(self, action: argparse.Action, values: Mapping[str, Any]) -> Any:
        """The value itself, with what keys such as NAME.key add to it."""
        if values.keys() == {""}:
            return values[""]
        dotted = _Dotted(self.parser, {})
        dotted.values[action] = {}
        for part in sorted(values):  # the value itself goes first
            value = values[part]
            if part or value is not None:
                dotted.put(action, part, value if isinstance(value, str) else json.dumps(value))
        return dotted.values[action]

    def _one_value(self, action: argparse.Action, value: Any) -> Any:
        if value is True and action.const is True:  # --hf-token without a value
            return True
        text = value if isinstance(value, str) else json.dumps(value)
        checked = self.parser._get_value(action, text)
        self.parser._check_value(action, checked)
        return checked


class _Dotted:
    """Folds `--flag.key value` into one `--flag {...}` per flag, left to right; a complete value starts over."""

    def __init__(self, parser: FlexibleArgumentParser, from_file: dict[argparse.Action, Any]) -> None:
        self.parser = parser
        self.from_file = from_file
        self.values: dict[argparse.Action, Any] = {}

    def fold(self, args: list[str]) -> list[str]:
        dotted = {a for arg in args[: _end(args)] if (a := self._split(arg)[0]) is not None and self._split(arg)[1]}
        if not dotted:
            return args
        out: list[Any] = []  # an action is the placeholder of its folded value
        i = 0
        while i < len(args):
            action, key, value = self._split(args[i]) if i < _end(args) else (None, "", None)
            i += 1
            if action is None or action not in dotted:
                out.append(args[i - 1])
                continue
            if value is None:
                if i >= len(args):
                    self.parser.error(f"{args[i - 1]} needs a value")
                value = args[i]
                i += 1
            if action not in self.values:
                self.values[action] = self._start(action)
                out.append(action)
            self.put(action, key, value)
        return [text for item in out for text in self._texts(item)]

    def _split(self, arg: str) -> tuple[argparse.Action | None, str, str | None]:
        """'--flag.a.b=1' -> (the flag's action, 'a.b', '1'); (None, …) if it is not a flag of this parser."""
        if not arg.startswith("-"):
            return None, "", None
        name, equals, value = arg.partition("=")
        flag, _, key = name.partition(".")
        return self.parser.find(flag), key, value if equals else None

    def _start(self, action: argparse.Action) -> dict[str, Any]:
        below = self.from_file.get(action)
        return copy.deepcopy(below) if isinstance(below, dict) else {}

    def put(self, action: argparse.Action, key: str, text: str) -> None:
        flag = action.option_strings[0]
        if not key:
            whole = _value(text)
            if not isinstance(whole, dict):
                self.parser.error(f"{flag} {text}: keys such as {flag}.key can only be added to a JSON object")
            self.values[action] = whole
            return
        append = key.endswith("+")
        *above, last = key.removesuffix("+").split(".")
        into = self.values[action]
        for part in above:
            into = into.setdefault(part, {})
            if not isinstance(into, dict):
                self.parser.error(f"{flag}.{key}: {part!r} already holds {into!r}, which has no keys")
        if append:
            items = into.setdefault(last, [])
            if not isinstance(items, list):
                self.parser.error(f"{flag}.{key}: {last!r} already holds {items!r}, which is not a list")
            more = _value(text)
            items.extend(_value(item) for item in text.split(",")) if isinstance(more, str) else items.append(more)
        else:
            into[last] = _value(text)

    def _texts(self, item: Any) -> list[str]:
        if isinstance(item, str):
            return [item]
        return [item.option_strings[0], json.dumps(self.values[item])]


def _value(text: str) -> Any:
    """JSON if it parses, otherwise the text; Python's True, False and None are accepted too."""
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        return json.loads(spelled)
    except ValueError:
        return text


def _end(args: list[str]) -> int:
    """The index where options end: at '--', or at the end."""
    return args.index("--") if "--" in args else len(args)


def _add_section(formatter: Any, group: Any, actions: list[argparse.Action]) -> None:
    formatter.start_section(group.title)
    if group.description is not FOLDED:
        formatter.add_text(group.description)
    formatter.add_arguments(actions)
    formatter.end_section()


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every flag of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags_of(command)
