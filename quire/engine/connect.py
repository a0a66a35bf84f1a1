"""Which client a program gets: of an engine in this process, of one in a process of its own, or of several such.

Wires and routers are imported only where they are used. In: a resolved EngineConfig. Out: an EngineClient. Must not
know: what any of them does with requests.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.base import env
from quire.base.log import logger
from quire.config.engine import replace
from quire.config.logs import apply_logging
from quire.engine.client import EngineClient, InProcessClient
from quire.schema.errors import ConfigError

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.process_client import Begun, Mailbox
    from quire.engine.several import MemberClient, SeveralEngines
    from quire.engine.shared_counts import SharedCounts

log = logger(__name__)
_MEETING = "experts"  # a file in the first engine's folder, by which ranks of all engines find each other


def make_client(config: EngineConfig, *, own_process: bool) -> EngineClient:
    """`own_process` is the caller's default; QUIRE_ENABLE_V1_MULTIPROCESSING overrules it."""
    apply_logging(config.logging_config)
    if config.parallel_config.has_several_engines:
        return start_several(config)
    setting = env.ENABLE_V1_MULTIPROCESSING.get()
    own_process = own_process if setting is None else setting
    if config.parallel_config.distributed_executor_backend == "external_launcher":
        return InProcessClient(config)
    if setting is False:
        # Documented for reproducible runs: requested explicitly, an engine in this process seeds this process too.
        log.info("Seeding Python's random with %d, because the engine runs in this process", config.model_config.seed)
        random.seed(config.model_config.seed)
    if not own_process:
        return InProcessClient(config)
    from quire.engine.process_client import ProcessClient  # lazy

    client: EngineClient = ProcessClient(config)
    return client


def start_several(config: EngineConfig, *, begun: Sequence[Begun] = (), shared: bool = False) -> SeveralEngines:
    """The engines that `config` wants started here, in processes of their own, and those that other machines start, or
    Ray. `begun`: some that wait already."""
    from quire.config.engines import config_of_engine  # lazy
    from quire.engine.process_client import ProcessClient, begin_engine  # lazy

    parallel = config.parallel_config
    if env.ENABLE_V1_MULTIPROCESSING.get() is False:
        raise ConfigError(
            f"data_parallel_size is {parallel.data_parallel_size}: several engines need processes of their own "
            "(QUIRE_ENABLE_V1_MULTIPROCESSING=0 forbids them)",
            param="data_parallel_size",
        )
    if parallel.distributed_executor_backend == "ray":  # whose workers may share nodes
        config = replace(config, **{"parallel_config.ray_run": secrets.token_hex(8)})
    waiting = list(begun)
    members: list[MemberClient] = []
    with contextlib.ExitStack() as made:  # undone, unless all of it is
        elsewhere = _of_other_machines(config) if parallel.num_engines_elsewhere else []
        made.callback(_undo, elsewhere)
        for rank in parallel.ranks_here[len(begun) :]:
            waiting.append(begin_engine(shared=shared, name=f"engine {rank}"))
            made.callback(waiting[-1].end)
        made.callback(_undo, members)
        folders = [one.folder for one in waiting] if parallel.experts_span_engines else []
        if folders:
            config = replace(config, **{"parallel_config.experts_meeting": f"file://{folders[0]}/{_MEETING}"})
        for place, one in enumerate(waiting):
            peers = [folder for folder in folders if folder != one.folder]
            members.append(ProcessClient(config_of_engine(config, place), shared=shared, begun=one, peers=peers))
        several = _several(config, [*members, *elsewhere])
        made.pop_all()
    return several


def _undo(members: Sequence[MemberClient]) -> None:
    for member in members:
        member.begin_close("it could not start")
    for member in members:
        member.close()


def _of_other_machines(config: EngineConfig) -> Sequence[MemberClient]:
    if config.parallel_config.data_parallel_backend == "ray":
        from quire.engine.ray_engines import start_on_ray  # lazy

        started: Sequence[MemberClient] = start_on_ray(config)
        return started
    from quire.engine.machines import Machines  # lazy

    members: Sequence[MemberClient] = Machines(config).members
    return members


def attach_several(
    config: EngineConfig, engines: Sequence[Mailbox], *, client: int, row: int, num_rows: int, counts_folder: str
) -> SeveralEngines:
    """As one of several clients of engines that another process started, and ends. `row`: this one's place in what
    they count together."""
    from quire.engine.process_client import AttachedClient  # lazy
    from quire.engine.shared_counts import SharedCounts  # lazy

    counts = SharedCounts(counts_folder, num_engines=len(engines), num_rows=num_rows, row=row)
    return _several(config, [AttachedClient(one, client) for one in engines], counts)


def _several(
    config: EngineConfig, members: Sequence[MemberClient], counts: SharedCounts | None = None
) -> SeveralEngines:
    from quire.engine.several import SeveralEngines  # lazy
    from quire.sched.router import ROUTERS  # lazy

    parallel, joins_media = config.parallel_config, config.model_config.facts.joins_media
    router = ROUTERS[parallel.data_parallel_routing](len(members), counts, joins_media=joins_media)
    several: SeveralEngines = SeveralEngines(
        members, parallel.engine_ranks, router, started_here=counts is None, together=parallel.experts_span_engines
    )
    return several
