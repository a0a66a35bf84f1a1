"""data_parallel_backend='ray': every engine of a server is in an actor of a Ray cluster, on whichever node has room.

An actor runs what `quire serve --headless` runs on a machine of its own, for one engine (machines.py): it joins the
server, by a key of this run that it gets as an argument (whoever may talk to a Ray cluster may run anything in it). So
requests, answers, what is compared and how a loss is noticed are the same; Ray only finds the nodes, starts the actors,
and says why one could not start. An engine has the processors or GPUs of all its ranks in one bundle, and starts them
itself; with distributed_executor_backend='ray' it has none, and Ray places its workers. Must not know: requests.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire.base import env
from quire.base.log import logger
from quire.base.seal import new_secret
from quire.config.engine import replace
from quire.engine.machines import Machines, Meeting, RemoteEngine, run_engines
from quire.engine.process_client import for_children
from quire.executor.ray_cluster import NodePlace, RayActor, RayCluster, share_of, words_of
from quire.schema.errors import EngineDeadError, QuireError

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)
_WAIT_S = 1.0
_ADDRESS = "RAY_ADDRESS"  # by which an engine that places workers finds the cluster


class ActorBoot(msgspec.Struct, frozen=True):
    """What an actor is started with."""

    config: msgspec.Raw
    where: str  # in words
    address: str
    port: int
    key: bytes


class RayEngine(RayActor):
    def run(self, encoded: bytes, variables: dict[str, str]) -> str:
        """Until the server ends. Why the engine ended before that; "": it did not."""
        env.adopt(variables)
        from quire.config import EngineConfig  # lazy
        from quire.config.relocate import find_files_here  # lazy

        boot = msgspec.msgpack.decode(encoded, type=ActorBoot)
        config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
        try:
            run_engines(find_files_here(config, boot.where), meeting=Meeting(boot.address, boot.port, boot.key))
        except QuireError as ended:
            return str(ended)
        return ""


def start_on_ray(config: EngineConfig) -> Sequence[RemoteEngine]:
    """Their clients, in the order of their ranks."""
    try:
        engines = RayEngines(RayCluster("data_parallel_backend='ray'"), config)
    except QuireError:
        raise
    except Exception as wrong:  # whatever Ray calls it
        raise EngineDeadError(f"data_parallel_backend='ray': {type(wrong).__name__}: {words_of(wrong)}") from wrong
    try:
        machines = Machines(config, Meeting(engines.address, 0, engines.key), engines.close)
    except BaseException:
        engines.close()
        raise
    try:
        engines.start(machines)
    except BaseException:
        machines.leave("it could not start")
        for member in machines.members:
            member.close()
        raise
    return machines.members


class RayEngines:
    """The actors."""

    def __init__(self, cluster: RayCluster, config: EngineConfig) -> None:
        self.key, self.address = new_secret(), cluster.here.address
        self._cluster, self._config = cluster, config
        self._actors: list[Any] = []
        self._watches: list[threading.Thread] = []
        parallel = config.parallel_config
        size, near = len(parallel.engine_ranks), parallel.num_engines_near
        try:
            self._actors = cluster.make(RayEngine, _needs(config), size, what="engines", near=near)
            self._places: list[NodePlace] = cluster.places(self._actors)
        except BaseException:
            self.close()
            raise
        nodes = {place.node for place in self._places}
        where = ", ".join(place.address for place in self._places)
        log.info("%d engines on %d Ray nodes: %s", size, len(nodes), where)

    def start(self, machines: Machines) -> None:
        variables = {**env.settings(), _ADDRESS: self._cluster.gcs}
        for number, rank in enumerate(self._config.parallel_config.engine_ranks):
            place = self._places[number]
            where = f"engine {rank}, on Ray node {place.node[:8]} ({place.address})"
            boot = ActorBoot(self._encoded(number, rank), where, self.address, machines.port, self.key)
            running = self._actors[number].run.remote(msgspec.msgpack.encode(boot), variables)
            watch = threading.Thread(
                target=self._follow, args=(machines, rank, where, running), name=f"watch {where}", daemon=True
            )
            self._watches.append(watch)
            watch.start()

    def _encoded(self, number: int, rank: int) -> msgspec.Raw:
        """The configuration of a machine that has this engine alone."""
        place = {
            "is_headless": True, "data_parallel_rank": rank, "data_parallel_size_local": 1, "num_engines_elsewhere": 0,
        }  # fmt: skip
        changes = {f"parallel_config.{name}": value for name, value in place.items()}
        changes |= share_of(self._places, number, self._config.device_config.device)
        return msgspec.Raw(msgspec.msgpack.encode(for_children(replace(self._config, **changes))))

    def _follow(self, machines: Machines, rank: int, where: str, running: Any) -> None:
        """Until the actor ends. Most ends the server hears of by itself; what kept one from joining, Ray knows."""
        try:
            reason = self._cluster.ray.get(running) or "it was stopped"
        except Exception as gone:  # noqa: BLE001  # whatever Ray calls it, the actor is gone
            reason = f"its actor is gone, says Ray: {words_of(gone)}"
        machines.end(rank, f"{where}: {reason}")

    def close(self) -> None:
        """Called by every client: a second time nothing is killed, since Ray would be started for that."""
        actors, self._actors = self._actors, []
        for actor in actors:
            self._cluster.kill(actor)
        for watch in self._watches:
            watch.join(_WAIT_S)
        self._cluster.close()


def _needs(config: EngineConfig) -> dict[str, float]:
    """Of an engine with all its ranks, which are on one node; nothing, if Ray places them."""
    parallel = config.parallel_config
    if parallel.distributed_executor_backend == "ray":
        return {}
    return {"GPU" if config.device_config.device == "cuda" else "CPU": float(parallel.world_size)}
