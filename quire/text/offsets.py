"""The character offsets of tokens in their text.

In: a text, its token ids, and each token's bytes. Out: (start, end) characters of each token.
Must not know: how a tokenizer splits text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


def token_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]] | None:
    """A special token that the tokenizer added is empty. A character that is split belongs to every token that has
    a part of it. None: the tokens do not reproduce the text exactly, because the tokenizer normalizes it first."""
    data = text.encode("utf-8", "surrogatepass")
    spans: list[tuple[int, int]] = []
    at = 0
    for token_id in token_ids:
        token_text = tokenizer.token_bytes(token_id)
        if not data.startswith(token_text, at):
            if token_id in tokenizer.skipped_ids:
                token_text = b""
            elif token_text.startswith(b" ") and data.startswith(
                token_text[1:], at
            ):  # a blank that was put before a word
                token_text = token_text[1:]
            else:
                return None
        spans.append((at, at + len(token_text)))
        at += len(token_text)
    if at != len(data):
        return None
    before = [0]  # characters that begin before each byte
    for byte in data:
        before.append(before[-1] + (byte & 0xC0 != 0x80))
    # a byte within a character belongs to the character that began before it
    firsts = [before[start] - (start < len(data) and data[start] & 0xC0 == 0x80) for start, _ in spans]
    return [(first, before[end] if end > start else first) for first, (start, end) in zip(firsts, spans, strict=True)]
