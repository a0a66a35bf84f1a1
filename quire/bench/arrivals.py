"""When each request is sent: at once, evenly, in bursts, or ever faster.

In: how many requests, the asked rate. Out: seconds after the start, rising. Gaps are drawn from a gamma distribution
whose shape is the burstiness: 1 is a Poisson process, less is burstier, more is steadier. The drawn gaps of a constant
rate are stretched so that the last request comes when the rate says it should.
Must not know: what is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from quire.schema.errors import InputError

STRATEGIES = ("linear", "exponential")


@dataclass(frozen=True)
class ArrivalProcess:
    rate: float = math.inf  # requests a second
    burstiness: float = 1.0
    ramp: str | None = None  # one of STRATEGIES
    ramp_start: float = 0.0
    ramp_end: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise InputError(f"--request-rate must be above 0 (or inf), got {self.rate}", param="request_rate")
        if not self.burstiness > 0:
            raise InputError(f"--burstiness must be above 0, got {self.burstiness}", param="burstiness")
        if self.ramp is None:
            return
        if self.ramp not in STRATEGIES:
            raise InputError(f"--ramp-up-strategy must be one of {', '.join(STRATEGIES)}, got {self.ramp!r}")
        if self.rate != math.inf:
            raise InputError("--ramp-up-strategy takes its own rates: leave --request-rate out", param="request_rate")
        if not 0 <= self.ramp_start < self.ramp_end < math.inf:
            raise InputError(
                f"--ramp-up-start-rps must be less than --ramp-up-end-rps and at least 0, got {self.ramp_start} and "
                f"{self.ramp_end}"
            )
        if self.ramp == "exponential" and self.ramp_start == 0:
            raise InputError("--ramp-up-start-rps must be above 0 for an exponential ramp", param="ramp_up_start_rps")

    def rate_at(self, progress: float) -> float:
        """Requests a second after this share of all requests."""
        if self.ramp == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * progress
        if self.ramp == "exponential":
            return float(self.ramp_start * (self.ramp_end / self.ramp_start) ** progress)
        return self.rate


def arrival_times(count: int, pace: ArrivalProcess, random: Random) -> list[float]:
    if pace.ramp is None and pace.rate == math.inf:
        return [0.0] * count
    times: list[float] = []
    total = 0.0
    for index in range(count):
        # a linear ramp from 0 would wait for ever for its first request
        rate = max(pace.rate_at(index / max(1, count - 1)), 1e-1 if pace.ramp else 0.0)
        total += _gap(rate, pace.burstiness, random)
        times.append(total)
    if pace.ramp is None and total > 0:
        stretch = count / pace.rate / total
        times = [time * stretch for time in times]
    return times


def _gap(rate: float, burstiness: float, random: Random) -> float:
    if burstiness == math.inf:
        return 1.0 / rate
    return random.gammavariate(burstiness, 1.0 / (rate * burstiness))
