"""Schedulers are not audited after every step here, which takes longer than all else: test_replica.py does it once."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.sched.scheduler.env.AUDIT.get", lambda: False)
