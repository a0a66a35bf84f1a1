"""The ranks of an engine: this worker joins the process group of all of them, and gets its share of the model.

In: which rank of how many, in how many pipeline stages, and the URL at which they meet. Out: a ShardGroup whose sums go
through torch.distributed, and the link to neighbouring stages: NCCL between GPUs, gloo between CPU processes and
between ranks that share a GPU, which NCCL refuses. Ranks on CPUs that meet in a file are processes of one machine that
its engine has started: they sum through memory that they share (shared_sum.py). World size 1 joins nothing, unless it
is asked to. Must not know: models, or how processes were started.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore

from quire.base import env
from quire.base.lifeline import address_towards, interface_of
from quire.base.log import logger
from quire.quant.shard import ShardGroup, as_it_is
from quire.schema.errors import ConfigError
from quire.worker.pipe import Link, Sent
from quire.worker.spread import EngineSpread
from quire.worker.talk import RankTalk

_log = logger(__name__)
LAUNCHED = "env://"  # in place of a meeting: as the variables of a launcher say


class Joined(NamedTuple):
    group: ShardGroup
    link: Link | None  # None: one stage
    talk: RankTalk | None = None  # only where each rank has an engine of its own
    broadcast: Callable[[Tensor, int], None] | None = None  # of one of the ranks that share experts, to all of them


def join(rank: int, size: int, meeting: str, device: torch.device, stages: int = 1) -> Joined:
    """Returns once all ranks are there. The ranks of a stage follow each other."""
    backend = _backend(device)
    if meeting == LAUNCHED:
        return _join_launched(rank, size, backend, device, stages)
    _choose_interface(meeting)
    limit = timedelta(seconds=env.ENGINE_START_TIMEOUT_S.get())
    distributed.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=size, timeout=limit,
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    share = size // stages
    stage, own = divmod(rank, share)
    through_peers = _peer_sum(rank, size, device, stages=stages, is_here=meeting.startswith("file:"))
    if stages == 1:
        _log.info("Rank %d of %d (%s)", rank, size, backend)
        reduce = through_peers or _sums_of(None, rank, size, meeting, device)
        group = ShardGroup(rank, size, reduce, captures=backend == "nccl")
        return Joined(group, None, broadcast=_broadcast_over(None))
    _log.info("Rank %d of %d in pipeline stage %d of %d (%s)", own, share, stage, stages, backend)
    reduce = as_it_is
    broadcast = None
    if share > 1:  # every rank makes the groups of all stages
        groups = [distributed.new_group(range(s * share, (s + 1) * share), timeout=limit) for s in range(stages)]
        reduce = _sums_of(groups[stage], own, share, meeting, device)
        broadcast = _broadcast_over(groups[stage], stage * share)
    link = _link(rank - share, rank + share, backend, device)
    return Joined(ShardGroup(own, share, reduce, stage, stages), link, broadcast=broadcast)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" and not env.SHARE_GPUS.get() else "gloo"


def _peer_sum(
    rank: int, size: int, device: torch.device, *, stages: int = 1, is_here: bool = True
) -> Callable[[Tensor], Tensor] | None:
    """None: sums go through the process group. `is_here`: all ranks are processes of this machine."""
    if not env.PEER_SUMS.get():
        return None
    reasons = {
        f"it is for GPUs, not for ranks on {device.type}": device.type != "cuda",
        "ranks that share a GPU (QUIRE_SHARE_GPUS) sum over gloo": _backend(device) != "nccl",
        "it is not built for pipeline stages": stages > 1,
        "not all ranks are processes of one machine that the engine has started": not is_here,
    }
    if why := next((reason for reason, applies in reasons.items() if applies), ""):
        _say_no_peer_sums(rank, why)
        return None
    from quire.worker.peer_sum import PeerSum  # lazy

    made: Callable[[Tensor], Tensor] = PeerSum(rank, size, device)
    return made


def _say_no_peer_sums(rank: int, why: str) -> None:
    """Once, of all ranks."""
    if env.PEER_SUMS.get() and rank == 0:
        _log.warning("QUIRE_PEER_SUMS has no effect: %s", why)


def join_alone(device: torch.device) -> Joined:
    """A process group of one rank, whose sums are made wherever those of several would be."""
    backend = _backend(device)
    env.keep_on_this_host()
    distributed.init_process_group(
        backend, store=HashStore(), rank=0, world_size=1, device_id=device if backend == "nccl" else None
    )
    _log.info("Rank 0 of 1 (%s): QUIRE_JOIN_ALONE is set", backend)
    reduce, captures = _peer_sum(0, 1, device) or _sum_over(None), backend == "nccl"
    return Joined(ShardGroup(reduce=reduce, sums_alone=True, captures=captures), None, broadcast=_broadcast_over(None))


def join_engines(
    rank: int, size: int, engine: int, engines: int, meeting: str, device: torch.device, stages: int = 1
) -> Joined:
    """Among the ranks of several engines, which have experts together: those of the same pipeline stage, if there are
    several. Returns once all are there."""
    backend = _backend(device)
    _choose_interface(meeting)
    limit = timedelta(seconds=env.ENGINE_START_TIMEOUT_S.get())
    distributed.init_process_group(
        backend, init_method=meeting, rank=engine * size + rank, world_size=size * engines, timeout=limit,
        device_id=device if backend == "nccl" else None,
    )  # fmt: skip
    reduce: Callable[[Tensor], Tensor] = as_it_is
    share, world = size // stages, engine * size + rank
    _say_no_peer_sums(world, "it is not built for engines that have experts together")
    if share > 1:  # every rank makes the groups of all
        firsts = range(0, size * engines, share)
        own_group = [distributed.new_group(range(f, f + share), timeout=limit) for f in firsts][world // share]
        reduce = _sums_of(own_group, world % share, share, meeting, device)
    peers = [range(r, size * engines, size) for r in range(size)]
    across = [distributed.new_group(ranks, timeout=limit) for ranks in peers]
    talks = across if backend == "gloo" else [distributed.new_group(r, timeout=limit, backend="gloo") for r in peers]
    _log.info("Rank %d of %d in engine %d of %d (%s)", rank, size, engine, engines, backend)
    stage, own = divmod(rank, share)
    spread = EngineSpread(engine, engines, own, share, across[rank], talks[rank])
    group = ShardGroup(own, share, reduce, stage, stages, spread=spread)
    if stages > 1:
        return Joined(group, _link(world - share, world + share, backend, device))
    return Joined(group, None, broadcast=_broadcast_over(None))


def _join_launched(rank: int, size: int, backend: str, device: torch.device, stages: int) -> Joined:
    """Among programs that a launcher has started, which may be ranks of several engines, one after another. A process
    group that the program has made already is used."""
    limit = timedelta(seconds=env.ENGINE_START_TIMEOUT_S.get())
    if not distributed.is_initialized():
        if env.LOCAL_WORLD_SIZE.get() in (None, env.WORLD_SIZE.get()):
            env.keep_on_this_host()
        distributed.init_process_group(backend, init_method=LAUNCHED, timeout=limit)
    total, world, share = distributed.get_world_size(), distributed.get_rank(), size // stages

    def groups_of(count: int, kind: str) -> Any:
        """Every rank makes the groups of all, so many ranks in each; that of this one."""
        firsts = range(0, total, count)
        return [distributed.new_group(range(f, f + count), timeout=limit, backend=kind) for f in firsts][world // count]

    own, talk = groups_of(size, backend), groups_of(size, "gloo")
    within = own if stages == 1 else groups_of(share, backend)
    stage, at = divmod(rank, share)
    _log.info("Rank %d of %d in pipeline stage %d of %d, launched from outside (%s)", at, share, stage, stages, backend)
    _say_no_peer_sums(world, "it is not built for ranks that a launcher has started")
    reduce = _sums_of(within, at, share, LAUNCHED, device) if share > 1 else as_it_is
    group = ShardGroup(at, share, reduce, stage, stages, captures=backend == "nccl")
    link = None if stages == 1 else _link(world - share, world + share, backend, device, own)
    first = world - rank
    return Joined(group, link, RankTalk(talk, range(first, first + size), share))


def _choose_interface(meeting: str) -> None:
    """Ranks of one host meet in a file, those of several at an address of the first."""
    url = urlsplit(meeting)
    if url.scheme != "tcp" or not url.hostname:
        env.keep_on_this_host()
        return
    name = interface_of(env.HOST_IP.get() or address_towards(url.hostname))
    if name is not None:
        env.use_interface(name)


class _ProcessLink:
    """To the ranks of the same number in the neighbouring stages."""

    def __init__(self, before: int, after: int, group: Any) -> None:
        self._before, self._after, self._group = before, after, group

    def receive(self, into: Tensor) -> None:
        distributed.recv(into.view(torch.uint8), self._before, group=self._group)

    def send(self, x: Tensor) -> Sent:
        sent = distributed.isend(x.view(torch.uint8), self._after, group=self._group)
        assert sent is not None  # this rank is in the group
        return sent


class _HostLink(_ProcessLink):
    """Through the host's memory, the only one that gloo sends from."""

    def receive(self, into: Tensor) -> None:
        arrived = torch.empty(into.shape, dtype=into.dtype)
        super().receive(arrived)
        into.copy_(arrived)

    def send(self, x: Tensor) -> Sent:
        host = x.cpu()
        return _SentFromHost(host, super().send(host))


class _SentFromHost:
    """Keeps what is sent until it has arrived."""

    def __init__(self, x: Tensor, sent: Sent) -> None:
        self._x, self._sent = x, sent

    def wait(self) -> object:
        return self._sent.wait()


def _link(before: int, after: int, backend: str, device: torch.device, group: Any = None) -> Link:
    through_host = backend == "gloo" and device.type == "cuda"
    return _HostLink(before, after, group) if through_host else _ProcessLink(before, after, group)


def leave() -> None:
    """Connections are closed; the peers may be gone already."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _sums_of(group: Any, rank: int, ranks: int, meeting: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Of the ranks of a group, which all come here at the same time."""
    over_group = _sum_over(group)
    if device.type != "cpu":
        return over_group
    if urlsplit(meeting).scheme != "file":
        if rank == 0:
            _log.info("Sums of ranks go through gloo: not all are processes of one machine that the engine has started")
        return over_group
    from quire.worker.shared_sum import share_sums  # lazy

    return share_sums(rank, ranks, group, over_group) or over_group


def _sum_over(group: Any) -> Callable[[Tensor], Tensor]:
    def sum_(x: Tensor) -> Tensor:
        """In place. The result has the same bits on every rank: each entry is added up once, and then sent to all."""
        distributed.all_reduce(x, group=group)
        return x

    return sum_


def _broadcast_over(group: Any, first: int = 0) -> Callable[[Tensor, int], None]:
    """`first`: the rank of the group's first among all."""

    def broadcast(x: Tensor, source: int) -> None:
        distributed.broadcast(x, first + source, group=group)

    return broadcast


def gpu_of(rank: int, size: int, kv_bytes: int | None = None) -> int:
    """The index of a rank's GPU among those that are visible. `kv_bytes`: of its cache, as configured. ConfigError:
    there are fewer than ranks; or they may share, and nothing tells how much each may take."""
    count = torch.cuda.device_count()
    if rank < count and (size <= count or not env.SHARE_GPUS.get()):
        return rank
    if not env.SHARE_GPUS.get():
        raise ConfigError(
            f"worker {rank} of {size} has no GPU: {count} are visible (CUDA_VISIBLE_DEVICES, nvidia-smi), and "
            "tensor_parallel_size x pipeline_parallel_size x data_parallel_size are needed",
            param="tensor_parallel_size",
            value=size,
        )
    if kv_bytes is None:  # what is free cannot be measured while other ranks load
        raise ConfigError(
            f"QUIRE_SHARE_GPUS: {size} workers share {count} GPUs; give kv_cache_memory_bytes, the KV cache of each",
            param="kv_cache_memory_bytes",
        )
    return rank % count
