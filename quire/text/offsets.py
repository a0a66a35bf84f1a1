"""Where tokens stand in the text they were made from.

In: a text, its token ids, and what each token's bytes are. Out: (first, past the last) character of each token.
Must not know: how a tokenizer cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


def token_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]] | None:
    """A special token that the tokenizer added takes no room. A character that is cut belongs to every token that has
    a part of it. None: the tokens do not say the text word for word, as where a tokenizer changes it first."""
    data = text.encode("utf-8", "surrogatepass")
    places: list[tuple[int, int]] = []
    at = 0
    for token_id in token_ids:
        said = tokenizer.token_bytes(token_id)
        if not data.startswith(said, at):
            if token_id in tokenizer.skipped_ids:
                said = b""
            elif said.startswith(b" ") and data.startswith(said[1:], at):  # a blank that was put before a word
                said = said[1:]
            else:
                return None
        places.append((at, at + len(said)))
        at += len(said)
    if at != len(data):
        return None
    before = [0]  # characters that begin before each byte
    for byte in data:
        before.append(before[-1] + (byte & 0xC0 != 0x80))
    # a byte within a character belongs to the character that began before it
    firsts = [before[start] - (start < len(data) and data[start] & 0xC0 == 0x80) for start, _ in places]
    return [(first, before[end] if end > start else first) for first, (start, end) in zip(firsts, places, strict=True)]
