"""The backend `ray`: every worker is an actor of a Ray cluster, in a bundle of a placement group.

Ray places the workers, starts them and tells when one is gone; calls and answers go over the executor's own wire,
sealed with a secret that an actor gets as an argument (whoever may talk to a Ray cluster may run anything in it). The
cluster is the one that this program is connected to, else the one that RAY_ADDRESS or `ray start` has made, else one
that is started here and ends with the executor. A placement group that the program runs in is used. Must not know:
verbs, or what a worker computes.
"""

from __future__ import annotations

import contextlib
import importlib
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
from quire.executor.remote import RemoteExecutor
from quire.schema.errors import EngineDeadError, MissingExtraError

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)
_NOTICE_S = 2.0  # how much later than its peers' complaints Ray may tell of a death
_WAIT_S = 1.0
_ANSWER_S = 60.0
BUILD = "quire.executor.ray_actors:build_where_files_are"


def on_ray(config: EngineConfig) -> RemoteExecutor:
    """The backend."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise MissingExtraError("distributed_executor_backend='ray'", "ray", "ray") from None
    actors = RayActors(ray, config)
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


class RayWorker:
    """What runs in an actor's process."""

    def place(self) -> tuple[str, str]:
        """Which node this is, and its address."""
        ray: Any = importlib.import_module("ray")
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

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
        self._actors.kill(self._actor)

    def close(self) -> None:
        self.stop(0.0)
        self._watch.join(_WAIT_S)
        self._ending.close()
        self._actors.leave()

    def _follow(self, running: Any) -> None:
        """Until it ends. Ray raises what became of it."""
        try:
            status = self._actors.ray.get(running)
        except Exception as gone:  # noqa: BLE001  # whatever Ray calls it, the actor is gone
            lines = [line.strip() for line in str(gone).splitlines() if line.strip()]
            self._ending.end(f"{self._name} is gone, says Ray: {' '.join(lines)[:600]}", is_lost=True)
        else:
            self._ending.end(f"{self._name} has left", is_lost=status not in (0, SAID))


class RayActors:
    """A Launch."""

    def __init__(self, ray: Any, config: EngineConfig) -> None:
        self.ray = ray
        self._config, size = config, config.parallel_config.world_size
        self._is_ours = self._connect()
        self._group: Any = None
        self._left = 0
        try:
            self._actors = self._make(size)
            self._places: list[tuple[str, str]] = self._get([actor.place.remote() for actor in self._actors])
            self._sort()
            self.address: str = ray.util.get_node_ip_address()
            first = self._places[0][1]
            port = self._get(self._actors[0].free_port.remote(first))
        except BaseException:
            self.close()
            raise
        self.meeting = f"tcp://{first}:{port}"
        nodes = list(dict.fromkeys(node for node, _ in self._places))
        log.info("%d Ray workers on %d nodes: %s", size, len(nodes), ", ".join(address for _, address in self._places))

    def _connect(self) -> bool:
        """Whether the connection, and with it maybe a cluster, is made here."""
        if self.ray.is_initialized():
            return False
        quiet = {"log_to_driver": True, "include_dashboard": False}
        try:
            self.ray.init(address="auto", log_to_driver=True)
        except ConnectionError:
            log.info("No Ray cluster was found: one is started here")
            self.ray.init(**quiet)
        return True

    def _make(self, size: int) -> list[Any]:
        """Actors, each in a bundle."""
        is_gpu = self._config.device_config.device == "cuda"
        group = self.ray.util.get_current_placement_group()
        if group is None:
            bundle = {"GPU": 1.0} if is_gpu else {"CPU": 1.0}
            group = self._group = self.ray.util.placement_group([bundle] * size, strategy="PACK")
            if not group.wait(env.ENGINE_START_TIMEOUT_S.get()):
                raise EngineDeadError(
                    f"Ray has no room for {size} workers of {bundle} each; it has {self.ray.available_resources()}"
                )
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        actor = self.ray.remote(RayWorker)
        options = {"num_gpus": 1} if is_gpu else {"num_cpus": 1}
        if len(group.bundle_specs) < size:
            raise EngineDeadError(f"the placement group has {len(group.bundle_specs)} bundles for {size} workers")
        return [
            actor.options(
                **options,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
                ),
            ).remote()
            for index in range(size)
        ]

    def _sort(self) -> None:
        """Ranks of one node follow each other, those of this program's node first."""
        here = self.ray.get_runtime_context().get_node_id()
        order = sorted(range(len(self._places)), key=lambda i: (self._places[i][0] != here, self._places[i], i))
        self._actors = [self._actors[i] for i in order]
        self._places = [self._places[i] for i in order]

    def _get(self, references: Any) -> Any:
        return self.ray.get(references, timeout=max(_ANSWER_S, env.ENGINE_START_TIMEOUT_S.get()))

    def __call__(self, boots: Sequence[WorkerBoot], names: Sequence[str]) -> list[RayMember]:
        variables = env.settings()
        return [self._start(boot, name, variables) for boot, name in zip(boots, names, strict=True)]

    def _start(self, boot: WorkerBoot, name: str, variables: dict[str, str]) -> RayMember:
        node, address = self._places[boot.rank]
        actor = self._actors[boot.rank]
        config = msgspec.Raw(msgspec.msgpack.encode(replace(self._config, **self._share(boot.rank))))
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(boot, config=config))
        where = f"{name} on Ray node {node[:8]} ({address})"
        return RayMember(self, where, actor, actor.run.remote(encoded, address, variables))

    def _share(self, rank: int) -> dict[str, int]:
        """Which part of its node a worker has. Ray shows it one GPU; processors are divided among a node's workers."""
        if self._config.device_config.device == "cuda":
            place, count = 0, 1
        else:
            node = self._places[rank][0]
            here = [other for other, (name, _) in enumerate(self._places) if name == node]
            place, count = here.index(rank), len(here)
        share = {"nnodes": len(self._places), "data_parallel_rank_local": place, "num_engines_here": count}
        return {f"parallel_config.{name}": value for name, value in share.items()}

    def kill(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # it may be gone, and Ray with it
            self.ray.kill(actor)

    def leave(self) -> None:
        """Called by every member; the last one closes."""
        self._left += 1
        if self._left == len(self._actors):
            self.close()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self._group is not None:
                self.ray.util.remove_placement_group(self._group)
        self._group = None
        if self._is_ours:
            self._is_ours = False
            self.ray.shutdown()
