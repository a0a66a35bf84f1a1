"""The client of no engine: for a server that makes token ids of requests and leaves computing to others.

In: a configuration. Out: what a front must know of a model before it reads prompts, from the files alone; whatever
would run is refused by name. Must not know: HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

from quire.engine.pulse import Pulse
from quire.schema.errors import CheckpointError, EngineDeadError, NotBuiltError
from quire.schema.messages import EngineReady, EngineRequest, Outputs

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.client import Sink


class AbsentEngine:
    """An EngineClient that is always ready and never runs anything."""

    def __init__(self, config: EngineConfig) -> None:
        self.dead: EngineDeadError | None = None
        self.pulse = Pulse()
        self._config = config

    def wait_ready(self) -> EngineReady:
        model = self._config.model_config
        if model.facts.vocab_size < 1:
            raise CheckpointError(f"the configuration of {model.model!r} names no vocab_size")
        return EngineReady(
            num_blocks=0,
            max_model_len=model.max_model_len,
            vocab_size=model.facts.vocab_size,
            block_size=self._config.cache_config.block_size or 0,
        )

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        _refuse("generating")

    def abort(self, request_ids: Iterable[str]) -> None:
        """Nothing runs."""

    def receive(self) -> Outputs:
        _refuse("generating")

    def stream(self, sink: Sink) -> None:
        """Nothing comes."""

    def call(self, verb: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        _refuse(verb)

    def begin_call(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        _refuse(verb)

    def show_stacks(self) -> None:
        """There are none."""

    def close(self) -> None:
        self.dead = self.dead or EngineDeadError("it was shut down")


def _refuse(what: str) -> NoReturn:
    raise NotBuiltError(f"{what}: there is no engine here, requests are only rendered")
