"""Log probabilities in the two forms of the API, and those of a prompt.

In: positions as llm results have them (token id -> Logprob, the chosen token first). Out: plain dicts, ready to be
encoded. A probability of zero is written as -9999, because JSON has no infinity. Must not know: requests, answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.schema.outputs import Logprob, LogprobsOnePosition
from quire.text.tokenizer import Tokenizer

_LEAST = -9999.0


class TokenNames:
    """How tokens are written: as their text, or as token_id:NUMBER."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def name(self, token_id: int, entry: Logprob | None = None) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id, entry)

    def text(self, token_id: int, entry: Logprob | None = None) -> str:
        """What the token says, however it is named; without a tokenizer its name."""
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer is not None and token_id in self._tokenizer.skipped_ids

    def data(self, token_id: int) -> list[int] | None:
        """The token's own bytes, which need not be whole characters."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


def finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    positions: Sequence[LogprobsOnePosition | None],
    offset: int,
    *,
    echo: str = "",
    num_echoed: int = 0,
    skips_special: bool = True,
) -> tuple[dict[str, Any], int]:
    """The four lists of /v1/completions, and where the next piece's text begins. The first `num_echoed` tokens are
    those of the text `echo`. A special token that is not in the text takes no room in it."""
    offsets: list[int] = []
    chosen: list[float | None] = []
    tokens: list[str] = []
    top: list[dict[str, float] | None] = []
    for place, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
        entry = None if position is None else position[token_id]
        text = names.text(token_id, entry)
        offsets.append(offset)
        tokens.append(names.name(token_id, entry))
        silent = names.is_special(token_id) and (
            not echo.startswith(text, offset) if place < num_echoed else skips_special
        )
        offset += 0 if silent else len(text)
        chosen.append(None if entry is None else finite(entry.logprob))
        top.append(None if position is None else {names.name(i, e): finite(e.logprob) for i, e in position.items()})
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": top}, offset


def chat_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    positions: Iterable[LogprobsOnePosition | None],
    most: int,
    named: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The `content` list of /v1/chat/completions: per position the `most` likeliest; or, where ids were asked for by
    name (`named`), the token itself and those."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        assert position is not None  # only a prompt has a position without
        if named:
            shown = list(dict.fromkeys((token_id, *named)))
        else:
            ranked = sorted((e.rank, i) for i, e in position.items() if e.rank is not None)
            shown = [i for rank, i in ranked if most == -1 or rank <= most][: None if most == -1 else most]
        entry = _entry(names, token_id, position[token_id])
        entry["top_logprobs"] = [_entry(names, i, position[i]) for i in shown]
        content.append(entry)
    return {"content": content}


def prompt_logprobs(positions: Sequence[LogprobsOnePosition | None] | None) -> list[Any] | None:
    """Per prompt token: token id -> logprob, rank and text; null for the first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(i): {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for i, e in position.items()
        }
        for position in positions
    ]


def _entry(names: TokenNames, token_id: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token": names.name(token_id, entry),
        "logprob": finite(entry.logprob),
        "bytes": names.data(token_id),
    }
