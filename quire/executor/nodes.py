"""Several machines, the backend `mp` with nnodes above 1: the first node's executor starts workers on all of them.

The first node listens at master_addr:master_port until the others have joined. A node proves that it knows the
operators' key (QUIRE_NODE_KEY; base/lifeline.py), says which one it is, and is told which workers to start; the run's
secret, with which these seal what they send to the executor, is hidden on the way. From then on each side knows within
QUIRE_NODE_TIMEOUT_S when the other is gone, and a node says at once how one of its workers ended.

Options are those of the first node. Where the files are, each node says for itself, and they must be of the same model.
Must not know: verbs, or what a worker computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.base import env
from quire.base.folders import remove_folder
from quire.base.lifeline import Lifeline, LostError, address_towards, call, close_at_signals, free_port
from quire.base.log import logger
from quire.base.sockets import private_folder
from quire.config.engine import replace
from quire.config.nodes import address_of, listen, node_key
from quire.executor.members import Departure, Member, WorkerBoot, WorkerProcess, on_this_host
from quire.executor.remote import RemoteExecutor
from quire.schema.errors import ConfigError, EngineDeadError, message_of

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)
_PATIENCE = 5.0  # seconds that a node may take to leave
_NOTICE_SLACK_S = 0.3


class NodeHello(msgspec.Struct, frozen=True, tag="hello"):
    node_rank: int
    nnodes: int


class NodeBoot(msgspec.Struct, frozen=True, tag="boot"):
    workers: list[WorkerBoot]  # without their secret
    names: list[str]
    hidden: bytes  # the secret of all, as Lifeline.hide makes it


class NodeRefused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


class NodeLeave(msgspec.Struct, frozen=True, tag="leave"):
    """The executor is shut down."""


class NodeFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A worker of the node has ended, or none could be started."""

    reason: str
    is_lost: bool  # no worker has said why


_TO = msgspec.msgpack.Decoder(NodeBoot | NodeRefused | NodeLeave)
_FROM = msgspec.msgpack.Decoder(NodeHello | NodeFailed)
_encode = msgspec.msgpack.encode


def _key() -> bytes:
    return node_key("nnodes above 1", "nnodes")


# ---- the first node --------------------------------------------------------------------------------------------


class RemoteNode:
    """Another machine, as the first one sees it: a Member. It may not have joined yet."""

    def __init__(self, node_rank: int, names: Sequence[str], limit: float) -> None:
        self.node_rank, self._names, self._ending = node_rank, names, Departure()
        self.notice, self.notice_s = self._ending.notice, limit + _NOTICE_SLACK_S
        self._lifeline: Lifeline | None = None
        self._left = threading.Event()

    @property
    def alive(self) -> bool:
        return self._ending.reason is None

    @property
    def is_lost(self) -> bool:
        return self._ending.is_lost

    @property
    def has_joined(self) -> bool:
        return self._lifeline is not None

    def why_dead(self) -> str:
        return self._ending.reason or f"node {self.node_rank} is still there"

    def join(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline

    def follow(self, boot: NodeBoot) -> None:
        """Until it is gone."""
        lifeline = self._lifeline
        assert lifeline is not None  # it has joined
        log.info("Node %d has joined from %s: %s", self.node_rank, lifeline.peer, ", ".join(self._names))
        lifeline.send(_encode(boot))
        try:
            while True:
                message = _FROM.decode(lifeline.receive())
                if isinstance(message, NodeFailed):
                    reason = f"node {self.node_rank} ({lifeline.peer}): {message.reason}"
                    self._ending.end(reason, is_lost=message.is_lost)
        except (LostError, msgspec.DecodeError) as lost:
            self._ending.end(
                f"node {self.node_rank} ({lifeline.peer}) with {', '.join(self._names)} is lost: {lost}", is_lost=True
            )
        self._left.set()

    def stop(self, patience: float) -> None:
        lifeline = self._lifeline
        if lifeline is not None:
            lifeline.send(_encode(NodeLeave()))
            self._left.wait(patience)
            lifeline.close()

    def close(self) -> None:
        self.stop(0.0)
        self._ending.close()


class _Nodes:
    """A Launch: workers of this node are processes, those of others are started there."""

    def __init__(self, config: EngineConfig, address: str) -> None:
        parallel = config.parallel_config
        self._nnodes, self._port, self._address = parallel.nnodes, parallel.master_port, address
        self._limit = env.NODE_TIMEOUT_S.get()
        self._key = _key()
        self._lock = threading.Lock()
        self._nodes: list[RemoteNode] = []
        self._boots: Sequence[WorkerBoot] = ()
        self._names: Sequence[str] = ()

    def __call__(self, boots: Sequence[WorkerBoot], names: Sequence[str]) -> list[Member]:
        self._boots, self._names = boots, names
        share = len(boots) // self._nnodes
        self._nodes = [
            RemoteNode(node, names[node * share : (node + 1) * share], self._limit) for node in range(1, self._nnodes)
        ]
        self._listener = listen(
            self._address, self._port, self._key, self._welcome, limit=self._limit, who="node 0",
            params=("master_addr", "master_port"),
        )  # fmt: skip
        log.info("Waiting for %d more nodes at %s:%d", self._nnodes - 1, self._address, self._port)
        return [*on_this_host(boots[:share], names[:share]), *self._nodes]

    def _welcome(self, lifeline: Lifeline) -> None:
        try:
            hello = _FROM.decode(lifeline.receive())
        except (LostError, msgspec.DecodeError) as wrong:
            log.warning("A node left at once: %s", wrong)
            lifeline.close()
            return
        with self._lock:
            reason = self._why_not(hello)
            if reason:
                log.warning("%s was refused: %s", lifeline.peer, reason)
                lifeline.send(_encode(NodeRefused(reason)))
                lifeline.close()
                return
            assert isinstance(hello, NodeHello)
            node = self._nodes[hello.node_rank - 1]
            boot = self._boot_of(hello.node_rank, lifeline)
            node.join(lifeline)
            if all(other.has_joined for other in self._nodes):
                self._listener.close()
        node.follow(boot)

    def _why_not(self, hello: NodeHello | NodeFailed) -> str:
        if not isinstance(hello, NodeHello) or not 0 < hello.node_rank < self._nnodes or hello.nnodes != self._nnodes:
            own = f"node_rank {hello.node_rank} of {hello.nnodes} nodes" if isinstance(hello, NodeHello) else "no node"
            return f"{own}, but the first node was started with nnodes {self._nnodes}"
        if self._nodes[hello.node_rank - 1].has_joined:
            return f"node {hello.node_rank} has joined already; each node has a node_rank of its own"
        return ""

    def _boot_of(self, node_rank: int, lifeline: Lifeline) -> NodeBoot:
        share = len(self._boots) // self._nnodes
        own = slice(node_rank * share, (node_rank + 1) * share)
        secret = self._boots[0].secret
        assert secret is not None  # messages between hosts are sealed
        workers = [msgspec.structs.replace(boot, secret=None) for boot in self._boots[own]]
        return NodeBoot(workers, list(self._names[own]), lifeline.hide(secret))


def across_nodes(config: EngineConfig) -> RemoteExecutor:
    """The executor of the first node."""
    parallel = config.parallel_config
    if parallel.node_rank > 0:
        raise ConfigError(
            f"node_rank is {parallel.node_rank}: the engine is on node 0; run `quire serve --headless` here, with the "
            "same options",
            param="node_rank",
            value=parallel.node_rank,
        )
    address = address_of(parallel.master_addr, "master_addr")
    return RemoteExecutor(
        config,
        num_workers=parallel.world_size,
        stages=parallel.pipeline_parallel_size,
        nodes=parallel.nnodes,
        host=address,
        launch=_Nodes(config, address),
        meeting=f"tcp://{address}:{_free_port(address)}",
    )


def _free_port(address: str) -> int:
    try:
        return free_port(address)
    except OSError:
        raise ConfigError(
            f"master_addr {address} is not an address of this machine, whose node_rank is 0",
            param="master_addr",
            value=address,
        ) from None


# ---- the others ------------------------------------------------------------------------------------------------


def run_node(config: EngineConfig) -> None:
    """A node without an engine, until that ends: returns if it was shut down. EngineDeadError: it did not end well."""
    parallel = config.parallel_config
    address = address_of(parallel.master_addr, "master_addr")
    patience = float(env.ENGINE_START_TIMEOUT_S.get())
    where = f"{parallel.master_addr}:{parallel.master_port}"
    log.info("Node %d of %d: joining %s", parallel.node_rank, parallel.nnodes, where)
    try:
        limit = env.NODE_TIMEOUT_S.get()
        lifeline = call(address, parallel.master_port, _key(), limit=limit, patience=patience)
    except LostError as lost:
        raise EngineDeadError(f"node {parallel.node_rank} could not join {where}: {lost}") from None
    stop = close_at_signals(lifeline)
    try:
        lifeline.send(_encode(NodeHello(parallel.node_rank, parallel.nnodes)))
        boot = _TO.decode(lifeline.receive())
        if isinstance(boot, NodeRefused):
            raise EngineDeadError(f"node {parallel.node_rank} was refused by {where}: {boot.reason}")
        if isinstance(boot, NodeBoot):
            _serve(lifeline, boot, config, address)
    except (LostError, msgspec.DecodeError) as lost:
        if not stop.is_set():
            raise EngineDeadError(f"node 0 ({where}) is lost: {lost}") from None
    finally:
        lifeline.close()


def _serve(lifeline: Lifeline, boot: NodeBoot, config: EngineConfig, leader: str) -> None:
    """Workers live from here to the end."""
    folder, workers = private_folder(), list[WorkerProcess]()
    try:
        try:
            workers = _start_workers(boot, lifeline.hide(boot.hidden), config, leader, folder)
        except Exception as wrong:  # the first node reports it
            lifeline.send(_encode(NodeFailed(message_of(wrong), is_lost=True)))
            raise
        for worker in workers:
            threading.Thread(target=_report, args=(worker, lifeline), name=f"end of {worker.name}", daemon=True).start()
        while not isinstance(_TO.decode(lifeline.receive()), NodeLeave):
            pass
        log.info("The engine was shut down")
        for worker in workers:
            worker.stop(_PATIENCE)
    finally:
        for worker in workers:
            worker.close()
        remove_folder(folder)


def _report(worker: WorkerProcess, lifeline: Lifeline) -> None:
    while not worker.wait(3600.0):
        pass
    if worker.exit_code:  # 0: it was asked to leave
        log.error("%s", worker.why_dead())
        lifeline.send(_encode(NodeFailed(worker.why_dead(), is_lost=worker.is_lost)))


def _start_workers(
    boot: NodeBoot, secret: bytes, config: EngineConfig, leader: str, folder: str
) -> list[WorkerProcess]:
    if not boot.workers:
        return []
    mine = f"tcp://{env.HOST_IP.get() or address_towards(leader)}:*"
    settled = msgspec.Raw(_encode(settle(msgspec.msgpack.decode(boot.workers[0].config, type=type(config)), config)))
    return [
        WorkerProcess(msgspec.structs.replace(worker, secret=secret, folder=folder, mine=mine, config=settled), name)
        for worker, name in zip(boot.workers, boot.names, strict=True)
    ]


def settle(first: EngineConfig, own: EngineConfig) -> EngineConfig:
    """The first node's options, for a node whose files are elsewhere. ConfigError: they are of another model."""
    if first.model_config.hf_config != own.model_config.hf_config:
        raise ConfigError(
            f"node {own.parallel_config.node_rank} has another model than node 0: {own.model_config.path}, there "
            f"{first.model_config.path}",
            param="model",
        )
    if (first.speculative_config is None) != (own.speculative_config is None):
        raise ConfigError(
            f"node {own.parallel_config.node_rank} and node 0 differ in speculative_config", param="speculative_config"
        )
    settled: EngineConfig = replace(
        first,
        **{
            "model_config.path": own.model_config.path,
            "model_config.tokenizer": own.model_config.tokenizer,
            "parallel_config.node_rank": own.parallel_config.node_rank,
        },
    )
    # a draft model has files too
    return replace(settled, speculative_config=own.speculative_config, logging_config=own.logging_config)
