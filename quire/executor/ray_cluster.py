"""A connection to a Ray cluster, and actors in it, each in a bundle of a placement group.

The cluster is the one that this program is connected to, else the one that RAY_ADDRESS or `ray start` has made, else
one that is started here and ends with the connection. A placement group that the program runs in is used. In: what each
actor needs. Out: the actors, and where they are. Must not know: what they do.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.base import env
from quire.base.log import logger
from quire.schema.errors import EngineDeadError, MissingExtraError

log = logger(__name__)
_ANSWER_S = 60.0
_LONGEST_WORDS = 600
_NODE = 0.001  # of a node's own resource: whoever asks for it is placed there


class NodePlace(NamedTuple):
    node: str  # its id
    address: str


class RayActor:
    """What runs in an actor's process; others add what it does there."""

    def place(self) -> tuple[str, str]:
        """Which node this is, and its address."""
        ray: Any = importlib.import_module("ray")
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


class RayCluster:
    def __init__(self, option: str) -> None:
        """`option`: what wants Ray, for the error that it is not installed."""
        try:
            self.ray: Any = importlib.import_module("ray")
        except ImportError:
            raise MissingExtraError(option, "ray", "ray") from None
        self._group: Any = None
        self._is_ours = self._connect()
        context = self.ray.get_runtime_context()
        self.here = NodePlace(context.get_node_id(), self.ray.util.get_node_ip_address())
        self.gcs: str = context.gcs_address

    def _connect(self) -> bool:
        """Whether the connection, and with it maybe a cluster, is made here."""
        if self.ray.is_initialized():
            return False
        with _same_signals():
            try:
                self.ray.init(address="auto", log_to_driver=True)
            except ConnectionError:
                log.info("No Ray cluster was found: one is started here")
                self.ray.init(log_to_driver=True, include_dashboard=False)
        return True

    def make(self, actor: type, needs: Mapping[str, float], size: int, *, what: str, near: int = 0) -> list[Any]:
        """So many of them, each with what one `needs` of "CPU" or "GPU"; nothing: each anywhere. `near`: how many have
        to be on this program's node. `what` they are called."""
        # "num_cpus" is 1 unless it is given, which a bundle of GPUs alone has no room for
        options = {"num_cpus": 0} | {f"num_{name.lower()}s": amount for name, amount in needs.items()}
        remote = self.ray.remote(actor)
        if not needs:
            here = {f"node:{self.here.address}": _NODE}
            return [remote.options(**options, resources=here if i < near else {}).remote() for i in range(size)]
        group = self._find_group(needs, size, what, near)
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        return [
            remote.options(
                **options,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
                ),
            ).remote()
            for index in range(size)
        ]

    def _find_group(self, needs: Mapping[str, float], size: int, what: str, near: int) -> Any:
        group = self.ray.util.get_current_placement_group()
        if group is not None:
            if len(group.bundle_specs) < size:
                raise EngineDeadError(f"the placement group has {len(group.bundle_specs)} bundles for {size} {what}")
            return group
        here = {f"node:{self.here.address}": _NODE}
        bundles = [{**needs, **(here if index < near else {})} for index in range(size)]
        group = self._group = self.ray.util.placement_group(bundles, strategy="PACK")
        if not group.wait(env.ENGINE_START_TIMEOUT_S.get()):
            where = f", {near} of them on {self.here.address}" if near else ""
            raise EngineDeadError(
                f"Ray has no room for {size} {what} of {dict(needs)} each{where}; it has "
                f"{self.ray.available_resources()}"
            )
        return group

    def places(self, actors: Sequence[Any]) -> list[NodePlace]:
        return [NodePlace(*place) for place in self.get([actor.place.remote() for actor in actors])]

    def get(self, references: Any) -> Any:
        return self.ray.get(references, timeout=max(_ANSWER_S, env.ENGINE_START_TIMEOUT_S.get()))

    def kill(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # it may be gone, and Ray with it
            self.ray.kill(actor)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self._group is not None:
                self.ray.util.remove_placement_group(self._group)
        self._group = None
        if self._is_ours:
            self._is_ours = False
            self.ray.shutdown()


def share_of(places: Sequence[NodePlace], number: int, device: str) -> dict[str, int]:
    """Which part of its node one of them has, as ParallelConfig says it. Ray shows each its own GPUs; processors are
    divided among those of a node."""
    place, count = 0, 1
    if device != "cuda":
        here = [other for other, one in enumerate(places) if one.node == places[number].node]
        place, count = here.index(number), len(here)
    return {"parallel_config.data_parallel_rank_local": place, "parallel_config.num_engines_here": count}


def words_of(gone: Exception) -> str:
    """What Ray raises of an actor that is gone, on one line."""
    return " ".join(line.strip() for line in str(gone).splitlines() if line.strip())[:_LONGEST_WORDS]


@contextlib.contextmanager
def _same_signals() -> Iterator[None]:
    """Ray installs a handler of its own in a program that connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
