"""Detokenizer: one answer's token ids -> its text, as it grows, cut at stop strings.

In: new ids, a few at a time. Out: text that is final. All text together equals the decoding of prompt and
answer minus that of the prompt, however the ids were split. An incomplete character waits for its remaining bytes;
U+FFFD appears only once it is certain that they do not come. Cost: proportional to the new text, except for `text`.
Must not know: requests, or how text is shown.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from quire.schema.params import ResolvedParams
from quire.text.pieces import REPLACEMENT, Pieces
from quire.text.stops import StopStrings

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

CONTEXT = 6  # prompt tokens included when decodings are compared
WINDOW = 64  # most tokens of such a comparison
PATIENCE = 8  # tokens that may wait for the end of a character if only complete decodings can be compared


class Stream(Protocol):
    """Ids in, text out, one at a time."""

    def add(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """The rest at the end: incomplete characters, as U+FFFD."""
        ...


class Detokenizer:
    """The text of one answer."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: ResolvedParams) -> None:
        self._stream = make_stream(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._stops = StopStrings(params.stop) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._unarmed = params.min_tokens  # remaining tokens during which stop strings are ignored
        self._parts: list[str] = []  # all text
        self._taken = 0  # characters already returned as deltas
        self._untaken: list[str] = []
        self._stopped: str | None = None
        self._flushed = False

    @property
    def text(self) -> str:
        """The complete answer so far, as far as it is final."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def feed(self, new_ids: Sequence[int], *, stop_terminated: bool = False) -> str | None:
        """Continue with these ids. Returns the stop string that ended the text, if one did; later ids are then ignored.

        `stop_terminated`: the last id is a stop token; it is not part of the text unless the caller asked for it.
        """
        if self._stopped is not None:
            return self._stopped
        if stop_terminated and not self._include_stop:
            new_ids = new_ids[:-1]
        add, append, fresh = self._stream.add, self._parts.append, self._untaken.append
        for token_id in new_ids:
            self._unarmed -= 1
            text = add(token_id)
            if text:
                append(text)
                fresh(text)
                if self._stops is not None and self._cut(self._stops, text, armed=self._unarmed < 0):
                    break
        return self._stopped

    def next_delta(self, new_ids: Sequence[int], *, stop_terminated: bool, finished: bool) -> str:
        """`feed` and `take` in one, for a text without stop strings that is only ever streamed: nothing of
        it is stored. Not to be mixed with the other two."""
        if stop_terminated and not self._include_stop:
            new_ids = new_ids[:-1]
        add = self._stream.add
        text = add(new_ids[0]) if len(new_ids) == 1 else "".join(map(add, new_ids))
        if finished and not self._flushed:
            self._flushed = True
            text += self._stream.flush()
        return text

    def take(self, finished: bool, delta: bool) -> str:
        """Text that is safe to show: what is new (delta) or all of it. Until the end, a possible start of a stop string
        is held back."""
        if finished and not self._flushed and self._stopped is None:
            self._flushed = True
            rest = self._stream.flush()
            self._parts.append(rest)
            self._untaken.append(rest)
        num_held = 0
        if self._stops is not None and not (finished or self._include_stop or self._stopped is not None):
            num_held = self._stops.held
        if not delta:
            text = self.text
            return text[: len(text) - num_held] if num_held else text
        shown = "".join(self._untaken)
        self._untaken = []
        if num_held:
            self._untaken.append(shown[len(shown) - num_held :])
            shown = shown[: len(shown) - num_held]
        self._taken += len(shown)
        return shown

    def _cut(self, stops: StopStrings, new: str, *, armed: bool) -> bool:
        match = stops.feed(new, armed=armed)
        if match is None:
            return False
        self._stopped = match.stop
        text = self.text
        end = len(text) - len(new) + match.end
        self._parts = [text[: end if self._include_stop else end - len(match.stop)]]
        self._untaken = [self._parts[0][self._taken :]]
        return True


def make_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Stream:
    """The stream for this tokenizer, positioned at the end of the prompt."""
    skipped = tokenizer.skipped_ids if skip_special_tokens else frozenset()
    if tokenizer.pieces is None:
        return WindowStream(tokenizer, prompt_token_ids, skipped)
    glued: frozenset[int] = frozenset()
    if tokenizer.pieces.joined and not spaces_between_special_tokens:
        glued = frozenset(tokenizer.get_added_vocab().values())
    return ByteStream(tokenizer.pieces, prompt_token_ids, skipped, glued)


class ByteStream:
    """Token by token through bytes: exact at any boundary."""

    def __init__(
        self,
        token_bytes: Pieces,
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int] = frozenset(),
        glued: frozenset[int] = frozenset(),
    ) -> None:
        self._token_bytes, self._skipped, self._glued = token_bytes, skipped, glued
        self._decoder = token_bytes.decoder()
        last = _last_shown(prompt_token_ids, skipped, 4)
        self._first = not last  # nothing shown yet, prompt included
        self._strip = token_bytes.strip if self._first else 0
        self._glue = bool(last) and last[-1] in glued
        for token_id in last:  # an incomplete character at the end of the prompt may be completed
            self._decoder.decode(token_bytes.of(token_id))
        self._borrowed = bool(self._decoder.getstate()[0])

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._first:
            data = self._token_bytes.of_first(token_id)
            self._first = not self._token_bytes.exists(token_id)
        else:
            data = self._token_bytes.of(token_id)
        if self._glued:
            is_glued = token_id in self._glued
            if is_glued and self._glue:
                data = data.removeprefix(b" ")
            self._glue = is_glued
        if not data:
            return ""
        if self._borrowed:
            self._settle(data[:1])
        text = self._decoder.decode(data)
        if self._strip and text:
            text = self._strip_start(text)
        return text

    def flush(self) -> str:
        if self._borrowed:
            return ""
        return self._decoder.decode(b"", final=True)

    def _settle(self, byte: bytes) -> None:
        """The first byte after a prompt that ends inside a character: if it does not continue it, drop it."""
        self._borrowed = False
        strict = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            strict.decode(self._decoder.getstate()[0] + byte)
        except UnicodeDecodeError:
            self._decoder.reset()

    def _strip_start(self, text: str) -> str:
        spaces = len(text) - len(text.lstrip(" "))
        cut = min(spaces, self._strip)
        self._strip = self._strip - cut if spaces == len(text) else 0
        return text[cut:]


class WindowStream:
    """For tokenizers that only decode complete lists: compare the decoding with and without the new tokens, over a
    window that starts at tokens whose text is final."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._ids = _last_shown(prompt_token_ids, skipped, CONTEXT)
        self._read_text = tokenizer.decode(self._ids)
        while self._read_text.startswith(REPLACEMENT) and len(self._ids) > 1:  # it starts inside a character
            self._ids = self._ids[1:]
            self._read_text = tokenizer.decode(self._ids)
        self._num_read = len(self._ids)  # tokens of the window whose text is out

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        half = text.endswith(REPLACEMENT) and len(self._ids) - self._num_read < PATIENCE
        if half or (len(text) <= len(self._read_text) and len(self._ids) < WINDOW):
            return ""
        return self._move(text)

    def flush(self) -> str:
        return self._move(self._tokenizer.decode(self._ids))

    def _move(self, text: str) -> str:
        """Return what is new; the window then starts with the tokens that produced it."""
        new = text[len(self._read_text) :]
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._read_text = self._tokenizer.decode(self._ids)
        return new


def _last_shown(token_ids: Sequence[int], skipped: frozenset[int], count: int) -> list[int]:
    """The last ids that have text, in order."""
    last_ids: list[int] = []
    for token_id in reversed(token_ids):
        if token_id not in skipped:
            last_ids.append(token_id)
            if len(last_ids) == count:
                break
    return last_ids[::-1]
