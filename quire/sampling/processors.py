"""Custom logits processors: the public classes, how they are named and loaded, and how they learn of the batch.

A processor sees the worker's whole persistent batch: row i of the logits is request i of the batch it was told of by
`update_state`. The set is fixed at start: those named in the configuration, then every class of the entry-point groups.
No torch is imported here, so the control side can reach `load_classes` and `check_params` (by registry path) to refuse
bad parameters before a request is queued.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quire.base.log import logger
from quire.base.registry import entry_points
from quire.config.local import describe, object_of
from quire.schema.errors import ConfigError, InputError
from quire.schema.params import ResolvedParams, SamplingParams

if TYPE_CHECKING:
    import torch

    from quire.config import EngineConfig

ENTRY_POINT_GROUPS = ("quire.logits_processors", "vllm.logits_processors")
State = TypeVar("State")
RequestLogitsProcessor = (
    Callable[[list[int], "torch.Tensor"], "torch.Tensor"]
    | Callable[[list[int], list[int], "torch.Tensor"], "torch.Tensor"]
)
_log = logger(__name__)


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = enum.auto()  # src goes to dst, and src is empty afterwards
    SWAP = enum.auto()


RemovedRequest = int
AddedRequest = tuple[int, ResolvedParams, list[int] | None, list[int]]
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch changed since the last step. To be followed in this order: removed, added, moved.

    `added`: (index, params, prompt ids, output ids). The last is the live list: it grows by every sampled token before
    the next `apply`. An index counts before any move; adding to an occupied one replaces its request. Moves are in
    order. `batch_size` is the number of requests once all of it is done.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Derive from this to change logits before a token is chosen."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError when these parameters (mostly `extra_args`) do not suit this processor."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_requests, vocab] -> the same shape, changed in place or not.

        A request in the middle of its prompt has a row of zeros, and what is written there is dropped. So has a greedy
        request, where an argmax-invariant processor runs for its neighbours.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True: the best token stays the best, so the processor is skipped where every request is greedy."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called at every step before `apply`; None when no request came, went or moved."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs one callable per request. A callable that raises loses its own request only."""

    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.failures: dict[int, str] = {}  # batch index -> what its callable raised; read and emptied by the sampler

    @abstractmethod
    def new_req_logits_processor(self, params: ResolvedParams) -> RequestLogitsProcessor | None:
        """The callable for one request, or None when it does not use this processor.

        It takes (output ids, logits row) or (prompt ids, output ids, logits row) and returns a logits row.
        """

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bind)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, process in self.req_info.items():
            row = logits[index]
            try:
                changed = process(row)
            except Exception as wrong:  # noqa: BLE001  # a user's code at its boundary
                _log.exception("%s: the callable of batch index %d failed", type(self).__name__, index)
                self.failures[index] = f"{type(self).__name__} raised {type(wrong).__name__}: {wrong}"
                continue
            if changed is not row:
                logits[index] = changed
        return logits

    def _bind(
        self, params: ResolvedParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        try:
            process: Any = self.new_req_logits_processor(params)
        except Exception as wrong:  # noqa: BLE001  # a user's code at its boundary; told where a row can be blamed
            return partial(_raise, wrong)
        if process is None:
            return None
        takes_prompt = len(inspect.signature(process).parameters) == 3
        return partial(process, prompt_ids, output_ids) if takes_prompt else partial(process, output_ids)


def _raise(wrong: Exception, logits: torch.Tensor) -> torch.Tensor:
    raise wrong


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[ResolvedParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep a dict from batch index to some state in step with the batch; True when the dict changed.

    `new_state(params, prompt ids, output ids)` makes the state of an added request, or None for no entry.
    """
    if batch_update is None:
        return False
    changed = False
    for index in batch_update.removed:
        changed |= req_entries.pop(index, None) is not None
    for index, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        changed |= req_entries.pop(index, None) is not None or state is not None
        if state is not None:
            req_entries[index] = state
    for source, target, direction in batch_update.moved:
        moving, resting = req_entries.pop(source, None), req_entries.pop(target, None)
        changed |= moving is not None or resting is not None
        if moving is not None:
            req_entries[target] = moving
        if resting is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = resting
    return changed


# --- loading


def load_classes(names: Iterable[str | type]) -> list[type[LogitsProcessor]]:
    """The classes named ("module:Class", "module.Class" or the class itself), then those of the entry points."""
    classes = [_load_one(name) for name in names]
    for group in ENTRY_POINT_GROUPS:
        for entry in entry_points(group=group):
            classes.append(_check_class(entry.load(), f"entry point {entry.name!r} of {group}"))
    return list(dict.fromkeys(classes))


def check_params(classes: Iterable[type[LogitsProcessor]], params: SamplingParams) -> None:
    """Let every processor look at a request's parameters; InputError with its words when one refuses."""
    for processor in classes:
        try:
            processor.validate_params(params)
        except InputError:
            raise
        except ValueError as wrong:
            raise InputError(f"{processor.__name__} refuses these parameters: {wrong}", param="extra_args") from wrong


def _load_one(named: str | type) -> type[LogitsProcessor]:
    if not isinstance(named, str):
        return _check_class(named, repr(named))
    try:
        loaded = object_of(named)
    except ImportError as wrong:
        raise ConfigError(
            f"logits processor {describe(named)!r} cannot be loaded: {wrong}", param="logits_processors", value=named
        ) from wrong
    return _check_class(loaded, describe(named))


def _check_class(candidate: object, name: str) -> type[LogitsProcessor]:
    if isinstance(candidate, type) and issubclass(candidate, LogitsProcessor):
        return candidate
    raise ConfigError(
        f"logits processor {name} is not a subclass of LogitsProcessor (found {candidate!r})", param="logits_processors"
    )
