"""Sends to other stages are kept until they are over, and no longer."""

from __future__ import annotations

from typing import Any

import pytest

from quire.worker import talk


class Send:
    def __init__(self) -> None:
        self.waits = 0

    def is_completed(self) -> bool:
        return self.waits > 0  # as gloo's

    def wait(self) -> None:
        self.waits += 1


def test_old_messages_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sends: list[Send] = []

    def isend(message: Any, rank: int, group: Any) -> Send:
        sends.append(Send())
        return sends[-1]

    monkeypatch.setattr(talk.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(talk.distributed, "isend", isend)
    rank = talk.RankTalk(None, range(4), share=2)
    for number in range(1, 201):
        rank.tell(b"x" * number)
    assert len(sends) == 200 * 2 * 2
    assert len(rank._under_way) == talk._MOST_UNDER_WAY
    kept = 4 * talk._MOST_UNDER_WAY
    assert all(send.waits == 1 for send in sends[:-kept]) and not any(send.waits for send in sends[-kept:])
