"""The small files beside a tokenizer: its config, its named special tokens, its chat templates.

Comes in: a folder. Goes out: Sidecar, plain data. Must not know: the tokenizer itself.
Order of belief: tokenizer_config.json, then special_tokens_map.json for what it leaves out; a chat template in a file
of its own wins over the one inside tokenizer_config.json; where there is none, a known one of the model's architecture.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from quire.schema.errors import CheckpointError

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Added:
    """One added token as the files describe it."""

    content: str
    special: bool = True
    token_id: int | None = None
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Sidecar:
    special: dict[str, str] = field(default_factory=dict)
    extra_special: tuple[str, ...] = ()
    added: tuple[Added, ...] = ()
    chat_template: str | dict[str, str] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def max_length(self) -> int | None:
        value = self.config.get("model_max_length")
        return int(value) if isinstance(value, (int, float)) and 0 < value < 1e18 else None

    @property
    def tokenizer_class(self) -> str:
        return str(self.config.get("tokenizer_class") or "").removesuffix("Fast")


def read_sidecar(folder: str) -> Sidecar:
    try:
        return _read_sidecar(folder)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as wrong:  # parts of another kind than they should be
        raise CheckpointError(
            f"{folder}: its tokenizer's files cannot be read ({type(wrong).__name__}: {wrong})"
        ) from None


def _read_sidecar(folder: str) -> Sidecar:
    config = read_json(folder, "tokenizer_config.json")
    named = {**read_json(folder, "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    special = {name: text for name in NAMES if (text := _text(named.get(name))) is not None}
    extra: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entry = named.get(key)
        if isinstance(entry, dict):  # named extras, such as image_token: templates may ask for them by name
            special.update({name: text for name, value in entry.items() if (text := _text(value)) is not None})
        elif isinstance(entry, list):
            extra += [text for value in entry if (text := _text(value)) is not None]
    return Sidecar(special, tuple(extra), tuple(_added(folder, config)), read_templates(folder, config), config)


def read_templates(folder: str, config: dict[str, Any]) -> str | dict[str, str] | None:
    """One template, several by name (with 'default' among them), or none."""
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in value}
    elif isinstance(value, dict):
        templates = {str(name): str(text) for name, text in value.items()}
    inside = read_json(folder, "chat_template.json").get("chat_template")
    if isinstance(inside, str):
        templates["default"] = inside
    main = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(main):
        templates["default"] = read_text(main)
    more = os.path.join(folder, "additional_chat_templates")
    if os.path.isdir(more):
        for name in sorted(os.listdir(more)):
            if name.endswith(".jinja"):
                templates[name.removesuffix(".jinja")] = read_text(os.path.join(more, name))
    if not templates:
        from quire.text.known_templates import known_template  # lazy

        return known_template(read_json(folder, "config.json").get("architectures"))
    return templates["default"] if list(templates) == ["default"] else templates


def read_json(folder: str, name: str) -> dict[str, Any]:
    """A JSON object of a folder; {} if the file is not there."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as wrong:
        raise CheckpointError(f"{path}: not valid JSON ({wrong})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as wrong:
        raise CheckpointError(f"{path}: not UTF-8 text ({wrong})") from None


def _text(value: Any) -> str | None:
    """A token is written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return _spelled(value) if isinstance(value, str) else None


def _spelled(token: Any) -> str:
    """JSON can name halves of characters, which no text has."""
    if not isinstance(token, str) or (not token.isascii() and any("\ud800" <= c <= "\udfff" for c in token)):
        raise CheckpointError(f"a special or added token is {token!r}; expected a text")
    return token


def _id(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 31:
        raise CheckpointError(f"an added token has the id {value!r}; expected a number from 0 to {(1 << 31) - 1}")
    return number


def _added(folder: str, config: dict[str, Any]) -> list[Added]:
    tokens = {}
    for token, token_id in read_json(folder, "added_tokens.json").items():
        tokens[token] = Added(_spelled(token), special=False, token_id=_id(token_id))
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(entry.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word")}
        normalized = bool(entry.get("normalized", not flags["special"]))
        content = _spelled(entry["content"])
        tokens[content] = Added(content, token_id=_id(token_id), normalized=normalized, **flags)
    return sorted(tokens.values(), key=lambda added: added.token_id or 0)
