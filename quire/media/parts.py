"""Parts of chat messages that are media: taken out, with what stands for them left in their place.

In: messages as clients send them, in OpenAI's form (other dialects are converted to it). Out: the same messages with
parts that a chat template can read (text/chat.py), and the items in the order of the prompt, unread: nothing is
fetched or decoded here. Must not know: templates, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.media.embeds import EmbedsPart
from quire.media.families.base import Family
from quire.media.inputs import MediaRef
from quire.media.sources import read_base64
from quire.schema.errors import InputError, NotBuiltError

Message = Mapping[str, Any]
WRITTEN = "written"  # as in text/chat.py
_URLS = {"image_url": "image", "input_image": "image", "video_url": "video", "audio_url": "audio"}
_EMBEDS = {"image_embeds": "image", "audio_embeds": "audio", "video_embeds": "video"}
_OBJECTS = {"image_pil": "image", "image": "image", "audio": "audio", "video": "video"}
_FILES = ("file", "input_file")
KINDS = (*_URLS, *_EMBEDS, *_OBJECTS, "input_audio", *_FILES)
_MOST_ITEMS = 4096


@dataclass
class CollectedMedia:
    """Messages without media, and the media."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    items: dict[str, list[Any]] = field(default_factory=dict)
    uuids: dict[str, list[str | None]] = field(default_factory=dict)

    def given_uuids(self) -> dict[str, list[str | None]] | None:
        return self.uuids if any(one is not None for several in self.uuids.values() for one in several) else None


def has_media(messages: Any) -> bool:
    """Whether a part looks like media; what is wrong with messages is said elsewhere."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, (str, bytes)) and any(map(_kind, content)):
            return True
    return False


def collect(messages: Sequence[Message], family: Family, *, is_local: bool) -> CollectedMedia:
    """`is_local`: the caller is this program, so parts may be objects: PIL images, arrays."""
    collected = CollectedMedia()
    for number, message in enumerate(messages):
        content = message.get("content")
        clean = dict(message)
        if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
            clean["content"] = [_replaced(part, f"messages[{number}]", collected, family, is_local) for part in content]
        collected.messages.append(clean)
    return collected


def _kind(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind is None and "text" not in part:
        kind = next((name for name in KINDS if name in part), None)
    return kind if kind in KINDS else None


def _replaced(part: Any, where: str, collected: CollectedMedia, family: Family, is_local: bool) -> Any:
    kind = _kind(part)
    if kind is None:
        return part
    modality, value = _read(part, kind, where, is_local)
    if modality not in family.placeholders:
        raise family.refuse(modality)
    uuid = part.get("uuid")
    if value is None and uuid is None:
        raise InputError(f"{where} has a part of type {kind!r} without data and without a uuid", param="messages")
    items = collected.items.setdefault(modality, [])
    if len(items) >= _MOST_ITEMS:
        raise InputError(f"messages have more than {_MOST_ITEMS} items of type {modality}", param="messages")
    items.append(value)
    collected.uuids.setdefault(modality, []).append(uuid)
    return {"type": modality, WRITTEN: family.written(modality, len(items))}


def _read(part: Mapping[str, Any], kind: str, where: str, is_local: bool) -> tuple[str, Any]:
    """(modality, what is to be loaded; None: a uuid names it)."""
    value = part.get(kind)
    if kind in _URLS:
        return _URLS[kind], _url(value if kind in part else part.get("image_url"), kind, where)
    if kind == "input_audio":
        return "audio", _input_audio(value, where)
    if kind in _EMBEDS:
        return _EMBEDS[kind], _embeds(value, kind, where, is_local)
    if kind in _FILES:
        return "image", _file(part if kind == "input_file" else value, where)
    if value is None and isinstance(part.get("url"), str):
        value = part["url"]
    if isinstance(value, str) or (value is None and "uuid" in part):
        return _OBJECTS[kind], _url(value, kind, where)
    if not is_local or value is None:
        raise InputError(f"{where} has a part of type {kind!r} without a URL", param="messages")
    return _OBJECTS[kind], value


def _url(value: Any, kind: str, where: str) -> MediaRef | None:
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise InputError(f"{where} has a {kind!r} part whose URL is {value!r:.60}, not a string", param="messages")
    return MediaRef(url=value)


def _input_audio(value: Any, where: str) -> MediaRef | None:
    if value is None:
        return None
    data = value.get("data") if isinstance(value, Mapping) else None
    if data is None or data == "":
        return None
    if not isinstance(data, str):
        raise InputError(f"{where} has an 'input_audio' part whose data is not a string of base64", param="messages")
    return MediaRef(data=read_base64(data))


def _embeds(value: Any, kind: str, where: str, is_local: bool) -> Any:
    if value is None or isinstance(value, EmbedsPart):
        return value
    if is_local and isinstance(value, Mapping):
        return EmbedsPart(value)
    if is_local and (hasattr(value, "shape") or isinstance(value, list)):
        return EmbedsPart({kind: value})
    raise InputError(f"{where} has a part of type {kind!r} whose data cannot be read: {value!r:.60}", param="messages")


def _file(value: Any, where: str) -> MediaRef:
    """A file that is an image, as a data URL or a URL."""
    known = value if isinstance(value, Mapping) else {}
    if known.get("file_id"):
        raise NotBuiltError(
            f"{where}: a file_id cannot be read in this version of Quire; send file_data", param="messages"
        )
    data = known.get("file_data") or known.get("file_url")
    if not isinstance(data, str):
        raise InputError(f"{where} has a file without file_data", param="messages")
    if data.startswith("data:") and not data.startswith("data:image/"):
        raise NotBuiltError(f"{where} has a file that is not an image: {data[:60]!r}", param="messages")
    return MediaRef(url=data)
