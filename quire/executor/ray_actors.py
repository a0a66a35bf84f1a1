"""The backend `ray`: every worker is an actor of a Ray cluster, in a bundle of a placement group (ray_cluster.py).

Ray places the workers, starts them and tells when one is gone; calls and answers go over the executor's own wire,
sealed with a secret that an actor gets as an argument (whoever may talk to a Ray cluster may run anything in it). Must
not know: verbs, or what a worker computes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire.base import env, registry
from quire.base.lifeline import free_port
from quire.base.log import logger
from quire.config.engine import replace
from quire.executor.base import WORKER
from quire.executor.members import SAID, Departure, WorkerBoot
from quire.executor.ray_cluster import RayActor, RayCluster, share_of, words_of
from quire.executor.remote import RemoteExecutor

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)
_NOTICE_S = 2.0  # how much later than its peers' complaints Ray may tell of a death
_WAIT_S = 1.0
BUILD = "quire.executor.ray_actors:build_where_files_are"


def on_ray(config: EngineConfig) -> RemoteExecutor:
    """The backend."""
    actors = RayActors(RayCluster("distributed_executor_backend='ray'"), config)
    parallel = config.parallel_config
    try:
        return RemoteExecutor(
            config,
            num_workers=parallel.world_size,
            stages=parallel.pipeline_parallel_size,
            host=actors.address,
            worker=BUILD,
            launch=actors,
            meeting=actors.meeting,
        )
    except BaseException:
        actors.close()
        raise


def build_where_files_are(config: EngineConfig, *, rank: int, num_workers: int, meeting: str) -> Any:
    """A worker of a node that may have its own copy of the model."""
    from quire.config.relocate import find_files_here  # lazy

    config = find_files_here(config, f"worker {rank}, on the Ray node {socket.gethostname()}")
    return registry.load(WORKER)(config, rank=rank, num_workers=num_workers, meeting=meeting)


class RayWorker(RayActor):
    def free_port(self, address: str) -> int:
        return free_port(address)

    def run(self, boot: bytes, address: str, variables: dict[str, str]) -> int:
        env.adopt(variables)
        from quire.executor.remote import serve_worker  # lazy

        place = msgspec.msgpack.decode(boot, type=WorkerBoot)
        status: int = serve_worker(msgspec.structs.replace(place, mine=f"tcp://{address}:*"))
        return status


class RayMember:
    """One actor: a Member."""

    notice_s = _NOTICE_S

    def __init__(self, actors: RayActors, name: str, actor: Any, running: Any) -> None:
        self._actors, self._name, self._actor, self._ending = actors, name, actor, Departure()
        self.notice = self._ending.notice
        self._watch = threading.Thread(target=self._follow, args=(running,), name=f"watch {name}", daemon=True)
        self._watch.start()

    @property
    def alive(self) -> bool:
        return self._ending.reason is None

    @property
    def is_lost(self) -> bool:
        return self._ending.is_lost

    def why_dead(self) -> str:
        return self._ending.reason or f"{self._name} is still running"

    def stop(self, patience: float) -> None:
        self._watch.join(patience)
        self._actors.cluster.kill(self._actor)

    def close(self) -> None:
        self.stop(0.0)
        self._watch.join(_WAIT_S)
        self._ending.close()
        self._actors.leave()

    def _follow(self, running: Any) -> None:
        """Until it ends. Ray raises what became of it."""
        try:
            status = self._actors.cluster.ray.get(running)
        except Exception as gone:  # noqa: BLE001  # whatever Ray calls it, the actor is gone
            self._ending.end(f"{self._name} is gone, says Ray: {words_of(gone)}", is_lost=True)
        else:
            self._ending.end(f"{self._name} has left", is_lost=status not in (0, SAID))


class RayActors:
    """A Launch."""

    def __init__(self, cluster: RayCluster, config: EngineConfig) -> None:
        self.cluster = cluster
        self._config, size = config, config.parallel_config.world_size
        self._left = 0
        try:
            needs = {"GPU" if config.device_config.device == "cuda" else "CPU": 1.0}
            self._actors = cluster.make(RayWorker, needs, size, what="workers")
            self._places = cluster.places(self._actors)
            self._sort()
            first = self._places[0].address
            port = cluster.get(self._actors[0].free_port.remote(first))
        except BaseException:
            self.close()
            raise
        self.address, self.meeting = cluster.here.address, f"tcp://{first}:{port}"
        nodes = {place.node for place in self._places}
        where = ", ".join(place.address for place in self._places)
        log.info("%d Ray workers on %d nodes: %s", size, len(nodes), where)

    def _sort(self) -> None:
        """Ranks of one node follow each other, those of this program's node first."""
        here = self.cluster.here.node
        order = sorted(range(len(self._places)), key=lambda i: (self._places[i].node != here, self._places[i], i))
        self._actors = [self._actors[i] for i in order]
        self._places = [self._places[i] for i in order]

    def __call__(self, boots: Sequence[WorkerBoot], names: Sequence[str]) -> list[RayMember]:
        variables = env.settings()
        return [self._start(boot, name, variables) for boot, name in zip(boots, names, strict=True)]

    def _start(self, boot: WorkerBoot, name: str, variables: dict[str, str]) -> RayMember:
        node, address = self._places[boot.rank]
        actor = self._actors[boot.rank]
        share = share_of(self._places, boot.rank, self._config.device_config.device)
        changes = {"parallel_config.nnodes": len(self._places), **share}
        config = msgspec.Raw(msgspec.msgpack.encode(replace(self._config, **changes)))
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(boot, config=config))
        where = f"{name} on Ray node {node[:8]} ({address})"
        return RayMember(self, where, actor, actor.run.remote(encoded, address, variables))

    def leave(self) -> None:
        """Called by every member; the last one closes."""
        self._left += 1
        if self._left == len(self._actors):
            self.close()

    def close(self) -> None:
        self.cluster.close()
