"""What one token adds to the text, in bytes, for decoders that depend only on the token and whether it is first.

In: the `decoder` part of a tokenizer.json and a function that looks a token up. Out: Pieces, or None if the
decoder depends on more than one token (text/detokenize.py then compares complete decodings instead).
Must not know: where the tokenizer came from, or what the text is for.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from typing import Any

REPLACEMENT = "�"
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")
# the word-piece clean-up of the `tokenizers` library, in its order
_CLEAN_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level vocabularies -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


ALPHABET = byte_alphabet()


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("quire-each-byte", _each_byte)


class Pieces:
    """Bytes of each token. `strip` is how many spaces the text as a whole loses at its very start."""

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        piece: Callable[[str], bytes],
        first: Callable[[str], bytes] | None = None,
        *,
        strip: int = 0,
        joined: bool = False,
        errors: str = "replace",
    ) -> None:
        self.strip = strip
        self.joined = joined  # tokens are words: a space comes before each one that does not continue a word
        self.errors = errors  # how invalid bytes become U+FFFD: one per broken character, or one per byte
        self._token_of, self._piece, self._first = token_of, piece, first or piece
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes of a token that is not the first; an id outside the vocabulary adds nothing."""
        data = self._known.get(token_id)
        if data is None:
            token = self._token_of(token_id)
            data = self._known[token_id] = b"" if token is None else self._piece(token)
        return data

    def of_first(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        return b"" if token is None else self._first(token)

    def exists(self, token_id: int) -> bool:
        return self._token_of(token_id) is not None

    def decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(self.errors)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The whole text at once."""
        parts: list[bytes] = []
        for token_id in token_ids:
            if parts:
                parts.append(self.of(token_id))
            elif self.exists(token_id):
                parts.append(self.of_first(token_id))
        text = b"".join(parts).decode("utf-8", self.errors)
        lead = len(text) - len(text.lstrip(" "))
        return text[min(lead, self.strip) :]


def make_pieces(decoder: dict[str, Any] | None, token_of: Callable[[int], str | None]) -> Pieces | None:
    """Read a tokenizer.json `decoder`. None: it cannot be applied token by token."""
    if decoder is None:
        return Pieces(token_of, lambda t: b" " + t.encode(), str.encode, joined=True)
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Pieces(token_of, _byte_level)
    if kinds == ["WordPiece"]:
        return _word_pieces(steps[0], token_of)
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0], token_of)
    return _chain(steps, token_of)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _byte_level(token: str) -> bytes:
    try:
        return bytes([ALPHABET[char] for char in token])
    except KeyError:  # an added token that is written plainly
        return token.encode()


def _word_pieces(step: dict[str, Any], token_of: Callable[[int], str | None]) -> Pieces:
    prefix, clean = step["prefix"], step["cleanup"]

    def first(token: str) -> bytes:
        for old, new in _CLEAN_UP if clean else ():
            token = token.replace(old, new)
        return token.encode()

    def piece(token: str) -> bytes:
        return first(token[len(prefix) :] if token.startswith(prefix) else f" {token}")

    return Pieces(token_of, piece, first, joined=True)


def _metaspace(step: dict[str, Any], token_of: Callable[[int], str | None]) -> Pieces:
    mark = step["replacement"]
    scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")

    def piece(token: str) -> bytes:
        return token.replace(mark, " ").encode()

    def first(token: str) -> bytes:
        return piece(token) if scheme == "never" else token.replace(mark, "").encode()

    return Pieces(token_of, piece, first)


def _chain(steps: list[dict[str, Any]], token_of: Callable[[int], str | None]) -> Pieces | None:
    """Replacements, byte tokens, joining, and spaces stripped from the joined text: the sentencepiece family."""
    swaps: list[tuple[str, str]] = []
    fallback = fused = False
    strip = 0
    for step in steps:
        kind = step["type"]
        if strip:
            return None
        if kind == "Replace" and "String" in step["pattern"]:
            if fused and len(step["pattern"]["String"]) != 1:
                return None  # could match across tokens
            swaps.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0:
            strip = step["start"]
        else:
            return None

    def piece(token: str) -> bytes:
        if fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in swaps:
            token = token.replace(old, new)
        return token.encode()

    return Pieces(token_of, piece, strip=strip, errors="quire-each-byte" if fallback else "replace")
