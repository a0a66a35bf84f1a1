"""Charge: a step's time is the time of every request in it. Only kept when --collect-detailed-traces asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.base.clock import now
from quire.schema.step import StepPlan

if TYPE_CHECKING:
    from quire.sched.request import Request


class Charge:
    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._began: dict[int, float] = {}

    def began(self, plan: StepPlan) -> None:
        self._began[plan.step] = now()

    def ended(self, plan: StepPlan, forward_seconds: float) -> None:
        """Before the step is committed: a request that ends with it is still known."""
        execute = now() - self._began.pop(plan.step)
        for grant in plan.grants:
            if (request := self._requests.get(grant.request_id)) is not None:
                request.times.forward += forward_seconds
                request.times.execute += execute
