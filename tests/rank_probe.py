"""What tests ask of a worker by an import path; light, because every worker process imports it."""

from __future__ import annotations

import os
from typing import Any


def pid_of(worker: Any) -> int:
    return os.getpid()


def rank_of(worker: Any) -> int:
    rank: int = worker.rank
    return rank


def weight_bytes(worker: Any) -> int:
    return sum(parameter.nbytes for parameter in worker.get_model().parameters())
