"""executor/remote.py: several workers in processes of their own, addressed by rank over streams and over sealed TCP."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
import zmq

from quire.base import env
from quire.base.curve import Curve
from quire.base.machine import Gpu
from quire.base.seal import Seal, SealError, new_secret
from quire.base.sockets import Hub, Wire
from quire.executor.alike import difference, remarks, statement
from quire.executor.base import Executor, WorkerProtocol, least_by_stage, one_model
from quire.executor.members import Launch, WorkerBoot, WorkerProcess, on_this_host
from quire.executor.remote import RemoteExecutor, types_of
from quire.schema.errors import CheckpointError, EngineDeadError, InputError
from quire.schema.kv import KVGroup, KVKind, KVLayout, KVSpec, ModelInfo
from quire.schema.media import ArrayData, MediaItem
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, Mask, NewRow, StepPlan, StepResult

ROOT = Path(__file__).parents[3]
SPEC = KVSpec(layer="l0", kind=KVKind.FULL, block_size=4, num_kv_heads=1, head_size=8)
LAYOUT = KVLayout(
    num_blocks=7,
    page_bytes=64,
    groups=(KVGroup(kind=KVKind.FULL, block_size=4, window=0, layers=("l0",)),),
    slots=(("l0",),),
    specs=(SPEC,),
)
ROW = NewRow(
    request_id="a", epoch=0, token_ids=(5, 6, 7), num_prompt_tokens=3, params=ResolvedParams(temperature=0.5), seed=1
)
PLAN = StepPlan(step=4, grants=(Grant("a", 0, 3, True, 0, ((1,),)),), joined=(ROW,), total_tokens=3)


class Settings(msgspec.Struct):
    fails: str = ""  # the verb in which rank 1 fails
    hangs: str = ""  # the verb in which rank 0 waits for ever, as for a peer that failed
    complains: float = 0.0  # seconds after which rank 0 fails in a step, as one whose peer is gone
    naps: float = 0.0  # seconds that a result takes


class _Late:
    def __init__(self, result: StepResult, seconds: float) -> None:
        self._result, self._seconds = result, seconds

    def result(self) -> StepResult:
        time.sleep(self._seconds)
        return self._result


class RankWorker:
    """Says what it was asked, and by which rank."""

    model_runner: Any = None

    def __init__(self, config: Settings, *, rank: int, num_workers: int, meeting: str) -> None:
        self.config, self.rank, self.num_workers, self.meeting = config, rank, num_workers, meeting
        self.layout: KVLayout | None = None
        self.plans: list[StepPlan] = []
        self.masks: list[Mask | None] = []
        self.media = 0
        self._trip("build")

    def _trip(self, verb: str) -> None:
        if self.config.hangs == verb and self.rank == 0:
            time.sleep(3600)
        if self.config.fails == verb and self.rank == 1:
            raise CheckpointError(f"{verb} went wrong")

    def load(self) -> ModelInfo:
        self._trip("load")
        return ModelInfo(specs=(SPEC,), vocab_size=9, max_positions=64, num_parameters=10, weight_bytes=100)

    def measure_media(self, items: tuple[MediaItem, ...]) -> None:
        self.media = sum(len(array.data) for item in items for array in item.arrays.values())

    def free_bytes(self) -> int:
        return 1000 - self.rank - self.media

    def init_kv(self, layout: KVLayout) -> None:
        self.layout = layout

    def warm_up(self) -> None:
        pass

    def prepare_idle(self) -> bool:
        return False

    def forward(self, plan: StepPlan) -> None:
        self._trip("forward")
        if self.config.complains and self.rank == 0:
            time.sleep(self.config.complains)
            raise RuntimeError("Connection closed by peer")
        self.plans.append(plan)

    def sample(self, step: int, mask: Mask | None) -> _Late:
        self._trip("sample")
        self.masks.append(mask)
        return _Late(StepResult(step=step, sampled=[[self.rank + 40]]), self.config.naps)

    def shutdown(self) -> None:
        pass

    def said(self) -> list[Any]:
        return [self.rank, self.num_workers, self.layout == LAYOUT, len(self.plans), os.getpid()]

    def seen(self) -> bool:
        mask = self.masks[-1]
        return self.plans[-1] == PLAN and mask is not None and mask.rows == bytes(8)

    def add(self, a: int, b: int = 1) -> int:
        return a + b + self.rank

    def foreign(self) -> object:
        return object()

    def hold(self, rank: int, seconds: float) -> None:
        """The interpreter, on this rank."""
        if self.rank == rank:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def num_frozen(self) -> int:
        return gc.get_freeze_count()


def start(
    num_workers: int = 3, host: str | None = None, launch: Launch = on_this_host, **settings: Any
) -> RemoteExecutor:
    return RemoteExecutor(
        Settings(**settings),  # type: ignore[arg-type]
        num_workers=num_workers,
        host=host,
        launch=launch,
        worker=f"{__name__}:RankWorker",
        config_type=f"{__name__}:Settings",
    )


@pytest.fixture(params=[None, "127.0.0.1"], ids=["streams", "tcp"])
def executor(request: pytest.FixtureRequest) -> Iterator[RemoteExecutor]:
    made = start(host=request.param)
    yield made
    made.shutdown()


def test_every_rank_answers_for_itself(executor: RemoteExecutor) -> None:
    infos = executor.ask(WorkerProtocol.load)
    assert one_model(infos).weight_bytes == 300 and one_model(infos).num_parameters == 30
    assert executor.ask(WorkerProtocol.free_bytes) == [1000, 999, 998]
    arrays = {"pixels": ArrayData((100,), "uint8", bytes(100))}
    item = MediaItem(modality="image", key="largest", offset=0, length=4, arrays=arrays)
    assert executor.ask(WorkerProtocol.measure_media, (item, item)) == [None, None, None]
    assert executor.ask(WorkerProtocol.free_bytes) == [800, 799, 798]
    assert executor.ask(WorkerProtocol.init_kv, LAYOUT) == [None, None, None]
    assert executor.ask(WorkerProtocol.warm_up) == [None, None, None]
    assert min(executor.call("num_frozen", [], {}, 30.0)) > 10_000  # what a collection in a step need not look at
    executor.forward(PLAN)
    pending = executor.sample(4, Mask(index=(0,), rows=bytes(8), words=2))
    assert pending.result() == StepResult(step=4, sampled=[[40]])  # the first rank's
    said = executor.call("said", [], {}, 30.0)
    assert [one[:4] for one in said] == [[rank, 3, True, 1] for rank in range(3)]
    assert len({one[4] for one in said} | {os.getpid()}) == 4  # four processes
    assert executor.call("seen", [], {}, 30.0) == [True, True, True]
    assert executor.call("add", [1], {"b": 5}, 30.0) == [6, 7, 8]


def test_what_cannot_cross_is_refused_and_the_workers_go_on(executor: RemoteExecutor) -> None:
    with pytest.raises(InputError, match="cannot cross"):
        executor.call("add", [object()], {}, None)
    with pytest.raises(InputError, match="cannot cross"):
        executor.call("foreign", [], {}, 30.0)
    with pytest.raises(InputError, match="import path"):
        executor.call_function(lambda worker: None, [], {}, None)
    with pytest.raises(AttributeError, match="'missing'"):
        executor.call("missing", [], {}, 30.0)
    assert executor.call("add", [1], {}, 30.0) == [2, 3, 4]


def test_the_next_step_starts_while_a_result_is_awaited() -> None:
    executor = start(1, naps=0.5)
    try:
        executor.forward(PLAN)
        first = executor.sample(4, None)
        executor.forward(PLAN)
        assert executor.call("said", [], {}, 30.0)[0][3] == 2  # while the first sleeps
        second = executor.sample(4, None)
        assert first.result().sampled == second.result().sampled == [[40]]
    finally:
        executor.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_machines_that_would_not_compute_the_same_do_not_start(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them the variable is set for: each machine has an environment of its own."""

    def launch(boots: Sequence[WorkerBoot], names: Sequence[str]) -> list[WorkerProcess]:
        started = []
        for boot, name in zip(boots, names, strict=True):
            with monkeypatch.context() as there:
                if boot.rank == rank:
                    there.setenv("QUIRE_BATCH_INVARIANT", "1")
                started.append(WorkerProcess(boot, name))
        return started

    executor = start(2, host="127.0.0.1", launch=launch)
    try:
        values = ("'True'", "'False'") if rank else ("'False'", "'True'")
        with pytest.raises(
            EngineDeadError, match=f"worker 1 has QUIRE_BATCH_INVARIANT {values[0]} and worker 0 {values[1]}"
        ):
            executor.ask(WorkerProtocol.load)
    finally:
        executor.shutdown()


def test_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = statement()
    assert difference([own, dict(own)], "worker {}".format) == ""
    assert {"quire", "torch", "triton", "QUIRE_PP_LAYER_PARTITION", "QUIRE_SHARE_GPUS"} < own.keys()
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "perhaps")
    env.BATCH_INVARIANT.forget()
    assert "perhaps" in statement()["QUIRE_BATCH_INVARIANT"]  # whoever reads it says what is wrong with it
    env.BATCH_INVARIANT.forget()
    told = difference([own, own, own | {"torch": "1.0"}], "worker {}".format)
    assert told.startswith(f"worker 2 has torch '1.0' and worker 0 {own['torch']!r}")


def test_ranks_may_compute_with_other_devices_and_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    own = statement() | {"GPU": "NVIDIA H200"}
    other = own | {"GPU": "NVIDIA L4", "CPU instructions": "avx2", "QUIRE_CPU_KERNELS": "avx2"}
    assert difference([own, other], "worker {}".format) == "" and remarks([own, own], "worker {}".format) == []
    gpu, instructions, kernels = remarks([own, own, other], "worker {}".format)
    assert gpu.startswith("worker 2 has GPU 'NVIDIA L4' and worker 0 'NVIDIA H200': on GPUs a step takes as long")
    assert instructions.startswith("worker 2 has CPU instructions 'avx2' and worker 0 ")
    assert "': on CPUs a step takes as long" in instructions and "': on CPUs a step takes as long" in kernels
    assert kernels.startswith("worker 2 has QUIRE_CPU_KERNELS 'avx2' and worker 0 ")
    assert remarks([{}, {}], "worker {}".format) == []  # of one machine: they say nothing of themselves


@pytest.mark.parametrize(
    ("gpu", "said"), [(None, "none"), (Gpu("", 0), "unknown"), (Gpu("NVIDIA H200", 1 << 37), "NVIDIA H200")]
)
def test_what_a_rank_says_of_its_machine(gpu: Gpu | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executor.alike.find_gpu", lambda: gpu)
    monkeypatch.setattr("quire.executor.alike.cpu_flags", lambda: frozenset({"fma", "avx2", "fpu"}))
    monkeypatch.setattr(env.CPU_KERNELS, "_value", "avx2")
    own = statement()
    assert (own["GPU"], own["CPU instructions"], own["QUIRE_CPU_KERNELS"]) == (said, "avx2 fma", "avx2")


def test_ranks_with_other_kernels_start_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(boots: Sequence[WorkerBoot], names: Sequence[str]) -> list[WorkerProcess]:
        started = []
        for boot, name in zip(boots, names, strict=True):
            with monkeypatch.context() as there:
                there.setenv("QUIRE_CPU_KERNELS", ("auto", "off")[boot.rank])
                started.append(WorkerProcess(boot, name))
        return started

    executor = start(2, host="127.0.0.1", launch=launch)
    try:
        assert executor.call("add", [1], {}, 30.0) == [2, 3]
    finally:
        executor.shutdown()
    told = [line for line in caplog.messages if "QUIRE_CPU_KERNELS" in line]
    assert len(told) == 1 and told[0].startswith("worker 1 has QUIRE_CPU_KERNELS 'off' and worker 0 'auto'")


def test_an_answer_that_cannot_be_taken_ends_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads answers any more: whoever waits for one hears of it."""
    executor = start(1)
    try:
        executor.ask(WorkerProtocol.load)

        def take(message: Any) -> None:
            raise LookupError("no such thing")

        monkeypatch.setattr(executor, "_take", take)
        with pytest.raises(EngineDeadError, match=r"answers cannot be read any more: LookupError\('no such thing'\)"):
            executor.ask(WorkerProtocol.free_bytes)
    finally:
        executor.shutdown()


@pytest.mark.parametrize("verb", ["forward", "sample"])
def test_a_failure_nobody_waits_for_ends_the_executor(verb: str) -> None:
    executor = start(2, fails=verb)
    try:
        executor.ask(WorkerProtocol.load)
        executor.forward(PLAN)
        with pytest.raises(EngineDeadError, match=f"worker 1 failed: {verb} went wrong"):
            for _ in range(600):  # rank 0 answers, so the news may come with a later step
                executor.sample(4, None).result()
                time.sleep(0.05)
    finally:
        executor.shutdown()


def test_an_error_in_one_rank_is_raised_as_what_it_was() -> None:
    executor = start(2, fails="load")
    try:
        with pytest.raises(CheckpointError, match="load went wrong"):
            executor.ask(WorkerProtocol.load)
        assert executor.ask(WorkerProtocol.free_bytes) == [1000, 999]
    finally:
        executor.shutdown()


def test_a_worker_that_cannot_be_built_says_why() -> None:
    executor = start(2, fails="build")
    try:
        with pytest.raises(EngineDeadError, match=r"build went wrong|exit code 1"):
            executor.ask(WorkerProtocol.load)
            executor.ask(WorkerProtocol.free_bytes)
    finally:
        executor.shutdown()


def test_a_killed_worker_fails_whatever_waits() -> None:
    executor = start(2, naps=60.0)
    try:
        executor.forward(PLAN)
        pending = executor.sample(4, None)
        os.kill(executor.call("said", [], {}, 30.0)[1][4], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker 1 .* SIGKILL"):
            pending.result()
    finally:
        executor.shutdown()


def test_a_rank_that_fails_is_heard_although_another_hangs() -> None:
    executor = start(2, fails="load", hangs="load")
    try:
        with pytest.raises(CheckpointError, match="load went wrong"):
            executor.ask(WorkerProtocol.load)
    finally:
        executor.shutdown()


@pytest.mark.parametrize("verb", ["build", "load"])
def test_a_rank_that_hangs_at_start_is_named(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = start(2, hangs=verb)
    try:
        for joined in executor._joined:
            joined.result(60)
        monkeypatch.setenv("QUIRE_ENGINE_START_TIMEOUT_S", "1")
        env.forget_all()
        with pytest.raises(EngineDeadError, match="no answer to 'load' within 1 s from worker 0"):
            executor.ask(WorkerProtocol.load)
    finally:
        executor.shutdown()


def test_the_dead_rank_is_named_and_not_the_one_that_complains_of_it() -> None:
    executor = start(2, complains=0.2)
    try:
        victim = executor.call("said", [], {}, 30.0)[1][4]
        executor.forward(PLAN)
        pending = executor.sample(4, None)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"worker 1 \(process {victim}\) was killed by SIGKILL"):
            pending.result()
    finally:
        executor.shutdown()


def test_a_death_is_told_while_nobody_asks(executor: RemoteExecutor) -> None:
    """Within 2 s: silence alone would take QUIRE_WORKER_TIMEOUT_S, 10 s."""
    heard = queue.SimpleQueue[EngineDeadError]()
    try:
        executor.when_dead(heard.put)
        victim = executor.call("said", [], {}, 30.0)[1][4]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        assert "worker 1" in heard.get(timeout=60).reason
        assert time.monotonic() - killed < 2.0
        executor.when_dead(heard.put)  # at once, since it is known
        assert "worker 1" in heard.get(timeout=60).reason
    finally:
        executor.shutdown()


def test_a_worker_without_a_sign_of_life_is_taken_to_hang_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process runs, and one of its threads never lets go of the interpreter."""
    monkeypatch.setenv("QUIRE_WORKER_TIMEOUT_S", "3")
    env.forget_all()
    executor, heard = start(2), queue.SimpleQueue[EngineDeadError]()
    try:
        executor.when_dead(heard.put)
        pids = [said[4] for said in executor.call("said", [], {}, 30.0)]
        executor.call("hold", [1, 3.5], {}, 60.0)
        assert heard.empty()  # a start may be busy for as long as it likes
        executor.ask(WorkerProtocol.warm_up)
        time.sleep(3.5)
        assert heard.empty()  # idle is not hanging
        with pytest.raises(EngineDeadError):
            executor.call("hold", [1, 600.0], {}, 60.0)
        why = "no sign of life within 3 s .QUIRE_WORKER_TIMEOUT_S. from worker 1: the process hangs or is stopped"
        assert re.search(why, heard.get(timeout=60).reason)
        with pytest.raises(EngineDeadError, match=why):
            executor.forward(PLAN)
    finally:
        executor.shutdown()
    assert not os.path.exists(f"/proc/{pids[1]}")


@pytest.mark.parametrize("is_starting", [True, False], ids=["starting", "started"])
def test_a_stopped_worker_is_named(executor: RemoteExecutor, is_starting: bool) -> None:
    heard = queue.SimpleQueue[EngineDeadError]()
    executor.when_dead(heard.put)
    pids = [said[4] for said in executor.call("said", [], {}, 30.0)]
    if not is_starting:
        executor.ask(WorkerProtocol.warm_up)
    os.kill(pids[1], signal.SIGSTOP)
    why = rf"^worker 1 .process {pids[1]}. has been stopped by a signal for 1.0 s, and was killed"
    assert re.search(why, heard.get(timeout=60).reason)
    with pytest.raises(EngineDeadError, match=f"worker 1 .process {pids[1]}"):
        executor.ask(WorkerProtocol.load)
    executor.shutdown()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_nobody_is_watched_if_so_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_WORKER_TIMEOUT_S", "0")
    env.forget_all()
    executor, heard = start(2), queue.SimpleQueue[EngineDeadError]()
    try:
        executor.when_dead(heard.put)
        executor.ask(WorkerProtocol.warm_up)
        pid = executor.call("said", [], {}, 30.0)[1][4]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(pid, signal.SIGCONT)
        assert heard.empty() and executor.call("add", [1], {}, 60.0) == [2, 3]
    finally:
        executor.shutdown()


@pytest.mark.parametrize(
    ("settings", "verb", "place"), [({"hangs": "forward"}, "forward", "_trip"), ({"naps": 600.0}, "result", "result")]
)
def test_a_step_that_does_not_end_is_noticed_although_the_process_lives(
    settings: dict[str, Any], verb: str, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "2")
    env.forget_all()
    executor, heard = start(2, **settings), queue.SimpleQueue[EngineDeadError]()
    try:
        executor.when_dead(heard.put)
        executor.call("said", [], {}, 60.0)
        time.sleep(3.0)
        assert heard.empty()  # whoever has no step is not late
        executor.forward(PLAN)
        pending = executor.sample(4, None)
        limit = r"a step did not end within 2 s \(QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS\): "
        rank = rf"worker 0 has been in '{verb}' for [\d.]+ s, at {place} \(test_remote.py:\d+\); worker 1 "
        idle = "waits for the next call; the workers' logs have their stacks"
        why = limit + rank + (idle if verb == "forward" else f"has been in '{verb}' for")
        assert re.search(why, said := heard.get(timeout=60).reason), said
        with pytest.raises(EngineDeadError, match=why):
            pending.result()
    finally:
        executor.shutdown()
    assert re.search(rf"A step has been in '{verb}' for (.*\n)+.*in {place}\n", capfd.readouterr().err)


def test_kill_9_of_the_parent_ends_every_worker() -> None:
    code = (
        f"import {__name__} as t, sys, time; executor = t.start(2)\n"
        "print(*[said[4] for said in executor.call('said', [], {}, 60.0)], flush=True); time.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
    finally:
        parent.kill()
        parent.wait()
    for _ in range(600):
        if not any(os.path.exists(f"/proc/{pid}") for pid in workers):
            break
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_types_are_read_from_the_one_declaration() -> None:
    for name, verb in vars(WorkerProtocol).items():
        if not name.startswith("_") and callable(verb):
            assert types_of(name).args == tuple[tuple(v for k, v in get_type_hints(verb).items() if k != "return")]
    assert types_of("sample").answer is StepResult
    for name in ("__init__", "model_runner", "_private", "nothing"):
        with pytest.raises(LookupError, match="no verb"):
            types_of(name)
    again = {"load", "free_bytes", "init_kv", "warm_up"} & {*vars(RemoteExecutor), *vars(Executor)}
    assert not again, f"declared a second time: {again}"


def test_ranks_must_hold_the_same_layers() -> None:
    info = ModelInfo(specs=(SPEC,), vocab_size=9, max_positions=64, num_parameters=1, weight_bytes=1)
    with pytest.raises(RuntimeError, match="rank 1 keeps other KV"):
        one_model([info, msgspec.structs.replace(info, specs=())])
    with pytest.raises(RuntimeError, match="rank 1 loaded a model of 8 tokens"):
        one_model([info, msgspec.structs.replace(info, vocab_size=8)])


def test_ranks_of_two_stages_are_one_model() -> None:
    info = ModelInfo(specs=(SPEC,), vocab_size=9, max_positions=64, num_parameters=1, weight_bytes=1)
    other = msgspec.structs.replace(info, specs=(msgspec.structs.replace(SPEC, layer="other"),), stage=1)
    infos = [info, info, other, other]
    assert one_model(infos).stages == ((SPEC.layer,), ("other",))
    assert one_model(infos).specs == (*info.specs, *other.specs)
    assert least_by_stage(infos, [4, 3, 9, 8]) == [3, 8] and least_by_stage([info, info], [4, 3]) == [3]


def test_the_last_stage_answers_for_a_step_and_workers_are_named_by_stage() -> None:
    executor = RemoteExecutor(
        Settings(), num_workers=4, stages=2, worker=f"{__name__}:RankWorker", config_type=f"{__name__}:Settings"
    )  # type: ignore[arg-type]
    try:
        executor.forward(PLAN)
        result = executor.sample(4, Mask(index=(0,), rows=bytes(8), words=2)).result()
        assert result.sampled == [[42]]  # of rank 2
        pids = executor.call("said", [], {}, 30.0)
        os.kill(pids[3][4], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker 3, pipeline stage 1 \(process \d+\) was killed"):
            for _ in range(600):
                executor.call("said", [], {}, 30.0)
                time.sleep(0.1)
    finally:
        executor.shutdown()


# ---- the seal


def test_a_seal_opens_once_in_order_for_its_channel_and_secret() -> None:
    secret = new_secret()
    mine, theirs = Seal(secret), Seal(secret)
    first, second = mine.close(b"from 0", [b"a", b"bc"]), mine.close(b"from 0", [b"d"])
    with pytest.raises(SealError, match="another secret"):
        Seal(new_secret()).open(b"from 0", first)
    for channel in (b"from 1", b"to 0"):
        with pytest.raises(SealError, match="another secret, or was changed"):
            theirs.open(channel, first)
    for changed in ([b"ab", b"c", first[-1]], [b"a", b"bd", first[-1]], [b"a", first[-1]]):
        with pytest.raises(SealError, match="changed on its way"):
            theirs.open(b"from 0", changed)
    with pytest.raises(SealError, match="message 1 came where message 0 was due"):
        theirs.open(b"from 0", second)
    for bare in ([], [b"a"], [b"a", b"x" * 40]):
        with pytest.raises(SealError):
            theirs.open(b"from 0", bare)
    assert theirs.open(b"from 0", first) == [b"a", b"bc"]
    with pytest.raises(SealError, match="message 0 came where message 1 was due"):
        theirs.open(b"from 0", first)
    assert theirs.open(b"from 0", second) == [b"d"]


def test_what_has_no_seal_is_dropped() -> None:
    """Of a peer that may connect: a message of another run, a forged one, one that was seen before."""
    secret = new_secret()
    hub = Hub("", mine="tcp://127.0.0.1:*", secret=secret)
    wire = Wire("", mine="tcp://127.0.0.1:*", theirs=hub.address, sender=b"0", secret=secret)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    other = context.socket(zmq.PUSH)
    Curve(secret).use(other)
    other.connect(hub.address)
    true = Seal(secret).close(b"from 0", [b"mine"])
    for frames in ([b"0"], [b"0", b"forged"], [b"0", *Seal(new_secret()).close(b"from 0", [b"forged"])]):
        other.send_multipart(frames)
    other.send_multipart([b"0", *true])
    assert hub.receive() == (b"0", [b"mine"])  # what was sealed with the secret, and nothing before it
    other.send_multipart([b"0", *true])  # replayed
    later = threading.Timer(0.3, lambda: (wire.send([b"lost: number 0 again"]), wire.send([b"second"])))
    later.start()
    assert hub.receive() == (b"0", [b"second"])
    later.join()
    hub.open("0", wire.address)
    hub.send("0", [b"back"])
    assert wire.receive(30.0) == [b"back"]
    other.close(linger=0)
    wire.close()
    hub.close()
    context.term()


def test_tcp_without_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="can be reached from outside"):
        Hub("", mine="tcp://127.0.0.1:*")
    with pytest.raises(ValueError, match="neither a name nor tcp"):
        Hub("", mine="udp://127.0.0.1:*", secret=new_secret())
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with pytest.raises(OSError, match="need ZeroMQ with CURVE, and this pyzmq was built without"):
        Hub("", mine="tcp://127.0.0.1:*", secret=new_secret())


# ---- strangers

_OUTCOMES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_ENDLESS = b"\x06" + (1 << 30).to_bytes(8, "big")  # a command of a gigabyte, as its first bytes say


def no_keys(caller: zmq.Socket[bytes], secret: bytes) -> None:
    """As somebody who speaks ZeroMQ and knows nothing."""


def another_run(caller: zmq.Socket[bytes], secret: bytes) -> None:
    Curve(new_secret()).use(caller)


def own_keys(caller: zmq.Socket[bytes], secret: bytes) -> None:
    """Somebody who has come to know the mailbox's public key, and no more."""
    Curve(secret).use(caller)
    caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()


def the_run(caller: zmq.Socket[bytes], secret: bytes) -> None:
    Curve(secret).use(caller)


@pytest.mark.parametrize("introduce", [no_keys, another_run, own_keys, the_run])
def test_who_may_connect(introduce: Any, caplog: pytest.LogCaptureFixture) -> None:
    secret = new_secret()
    hub = Hub("", mine="tcp://127.0.0.2:*", secret=secret)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    caller = context.socket(zmq.PUSH)
    introduce(caller, secret)
    caller.monitor("inproc://news", _OUTCOMES | zmq.EVENT_DISCONNECTED)
    news = context.socket(zmq.PAIR)
    news.connect("inproc://news")
    caller.connect(hub.address)
    sealed = [b"0", *Seal(secret).close(b"from 0", [b"in"])]
    caller.send_multipart(sealed)  # even this is not heard
    assert news.poll(60_000)
    event = int.from_bytes(news.recv_multipart()[0][:2], "little")
    if introduce is the_run:
        assert event == zmq.EVENT_HANDSHAKE_SUCCEEDED and hub.receive() == (b"0", [b"in"])
    else:
        assert event in (
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_DISCONNECTED
        )  # fmt: skip
        assert hub.receive(timeout=0.2) is None
        for _ in range(600):
            if "connections were refused so far: they do not know this run's secret" in caplog.text:
                break
            time.sleep(0.1)
        assert "connections were refused so far" in caplog.text
    for one in (caller, news):
        one.close(linger=0)
    context.term()
    hub.close()


def test_a_thousand_strangers() -> None:
    """Each announces a gigabyte and sends some of it; the workers go on, and little memory is taken."""
    executor = start(2, host="127.0.0.2")
    strangers: list[socket.socket] = []
    try:
        pids = [said[4] for said in executor.call("said", [], {}, 60.0)]
        ways = executor._hub._outboxes.values()
        addresses = [executor._hub.address, *(way.getsockopt_string(zmq.LAST_ENDPOINT) for way in ways)]
        before = [resident(pid) for pid in (os.getpid(), *pids)]
        for number in range(1000):
            host, port = addresses[number % len(addresses)].removeprefix("tcp://").split(":")
            made = socket.create_connection((host, int(port)), timeout=60)
            strangers.append(made)
            with contextlib.suppress(OSError):
                made.sendall((_GREETING + _ENDLESS if number % 3 else b"GET / HTTP/1.1\r\n") + bytes(4096))
        assert executor.call("add", [1], {}, 60.0) == [2, 3]
        executor.forward(PLAN)
        assert executor.sample(4, None).result().sampled == [[40]]
        after = [resident(pid) for pid in (os.getpid(), *pids)]
        assert all(late - early < 256 << 20 for late, early in zip(after, before, strict=True))
        for made in strangers:  # all are sent away, one after another
            made.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while made.recv(4096):
                    pass
        assert executor.call("add", [1], {}, 60.0) == [2, 3]
    finally:
        for made in strangers:
            made.close()
        executor.shutdown()


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
