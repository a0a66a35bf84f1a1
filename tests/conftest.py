"""What every test may rely on: no network, one thread, blocks audited at every step, no environment left over, loggers
as they are set up at first, and random numbers that depend on its file alone.

Nothing else: a file of tests passes whichever came before it in the process (`--file-order` tries another order), and a
test whichever came before it in its file (`--test-order`). A file that changes the process for others fails:
tests/left_behind.py."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import shlex
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the first engine of a process would set it
os.environ.setdefault("QUIRE_TARGET_DEVICE", "cpu")  # tests/device name their device
os.environ.setdefault("QUIRE_CPU_NUM_THREADS", "1")
os.environ.setdefault("QUIRE_AUDIT", "1")
os.environ.setdefault("QUIRE_CPU_KVCACHE_SPACE", "0.5")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Of the user's cache only kernels for GPUs are read or written. What the embedded model is packed to is kept for
    # the processes of this run, many of which load it.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.expanduser("~/.cache/quire/triton"))
    _cache = tempfile.TemporaryDirectory(prefix="quire-tests-")  # removed when this process ends
    os.environ["QUIRE_CACHE_ROOT"] = _cache.name
# An HTTP client reads every certificate that the machine trusts when it is made, for 50 ms, and tests make thousands of
# clients: they trust none but those that a test names. The folder holds no certificate.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

import _pytest.logging
import pytest

from quire.base import env
from quire.base.log import logger as set_up_logger
from tests.left_behind import LeftBehind, private_containers
from tests.processor_time import ProcessorTime
from tests.warm_python import FILE, SHARED, TESTED, WarmPython

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with Ctrl-C ignored


# Modules that remember what they have logged, to log it once.
ONCE = ("quire.base.log", "quire.grammar.choose", "quire.server.openai.limits")


@pytest.fixture(autouse=True)
def _fresh_environment() -> Iterator[None]:
    """A test may set variables with monkeypatch.setenv; the next one reads the environment anew."""
    env.forget_all()
    yield
    env.forget_all()


@functools.lru_cache(maxsize=1)
def _our_loggers(count: int) -> list[logging.Logger]:
    """Of the `count` that there are. Hundreds are others', and looking through them takes longer than many a test."""
    return [logging.getLogger(name) for name in [*logging.root.manager.loggerDict] if name.partition(".")[0] == "quire"]


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """What a test does to our loggers, by `quire chat` or a configuration of logging, is undone; what is logged once
    per process is logged once per test."""
    set_up_logger("quire")
    ours = _our_loggers(len(logging.root.manager.loggerDict))
    before = [(log, log.level, log.propagate, log.disabled, log.handlers[:]) for log in ours]
    formatters = [(handler, handler.formatter) for handler in logging.getLogger("quire").handlers]
    once = [one for name in ONCE if name in sys.modules for one in private_containers(sys.modules[name]).values()]
    for each in once:
        each.clear()
    yield
    for log, level, log.propagate, log.disabled, log.handlers[:] in before:
        if log.level != level:
            log.setLevel(level)
    for handler, formatter in formatters:
        handler.setFormatter(formatter)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Torch, transformers and the tests themselves are millions of objects that stay: a collection that looks through
    them takes half a second, and a run would make hundreds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(5000)  # seven times the usual: with few objects left to look at, all are looked at too often


@pytest.fixture(scope="module")
def frozen_afterwards() -> Iterator[None]:
    """For a file that thaws everything. Not looked for after each: to count what is frozen is to visit it all."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Runs programs that import torch, which it has imported."""
    made = WarmPython(os.environ.get(SHARED))
    yield made
    made.close()


@pytest.fixture(scope="module")
def warm_children(warm_python: WarmPython) -> Iterator[None]:
    """For a file of engines with processes of their own, for which it does not matter how a process starts."""
    with warm_python.runs_children():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: what draws numbers without a seed of its own draws the same in every order of tests."""
    seed = zlib.crc32(item.nodeid.partition("::")[0].encode())
    random.seed(seed)
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed notes a stack for each kind of device, for 1 ms
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """pytest's own, which hears every logger of ours whatever an earlier test of the process did to them."""
    set_up_logger("quire")
    for name in [*(name for name in logging.root.manager.loggerDict if name.startswith("quire.")), "quire"]:
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        caplog.set_level(logging.INFO if name == "quire" else logging.NOTSET, name)
    return caplog


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--file-order", type=int, metavar="SEED", help="run the files in the random order of this seed")
    parser.addoption("--test-order", type=int, metavar="SEED", help="run the tests of each file in a random order")
    parser.addoption("--long", action="store_true", help="every combination, not one of each kind: tests/products.py")
    parser.addoption("--processor-time", metavar="FILE", help="write the processor time of each test, and print sums")
    parser.addoption(
        "--every-architecture", action="store_true", help="tests of ranks take every declared architecture"
    )


class CatchesOurs(_pytest.logging.catching_logs):  # type: ignore[type-arg]
    """What pytest adds its handlers with, six times a test: to the root and to our loggers that do not propagate. Its
    own looks through hundreds of others' loggers, and adds to dozens of torch's, for 1 to 2 ms a test."""

    __slots__ = ()

    def __enter__(self) -> logging.Handler:
        ours = [log for log in _our_loggers(len(logging.root.manager.loggerDict)) if not log.propagate]
        self.attached_loggers += [logging.root, *ours]
        for log in self.attached_loggers:
            log.addHandler(self.handler)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = logging.root.level
            logging.root.setLevel(min(self.orig_level, self.level))
        return self.handler


def pytest_configure(config: pytest.Config) -> None:
    _pytest.logging.catching_logs = CatchesOurs  # type: ignore[misc]
    config.pluginmanager.register(LeftBehind())
    if file := config.getoption("--processor-time"):
        among, started = hasattr(config, "workerinput"), config.getoption("numprocesses", None)
        config.pluginmanager.register(ProcessorTime(file, writes=among or not started, reports=not among))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """The processes of a run are forks of one interpreter, which has imported what they would. Not where lines are
    counted: that begins where an interpreter does."""
    if "coverage" in sys.modules or os.environ.get("FORKED_TESTS") != "1":  # one fork of a run ended without a word
        return
    first = WarmPython()
    config.add_cleanup(first.close)
    second = WarmPython(first.address, TESTED)
    config.add_cleanup(second.close)
    os.environ[SHARED] = first.address
    for spec in specs:
        spec.python = shlex.join([sys.executable, FILE, second.address])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (seed := config.getoption("--file-order")) is not None:
        terminalreporter.write_line(f"files ran in the order of --file-order {seed}")


# What takes some twenty seconds or more alone. These go first: a file is one process's, and another would wait for it.
LONG_FILES = frozenset(
    f"tests/{name}.py"
    for name in """
    engine/test_every_architecture engine/test_same_as_transformers engine/test_structured_outputs
    engine/test_batch_invariant_hostile engine/test_batch_invariant_cpu engine/test_docs_examples
    engine/test_lora engine/test_lora_models engine/test_lora_many engine/test_lora_peft engine/test_lora_ranks
    engine/test_quantized_formats models/test_adapter_ranks
    engine/test_quantized_experts engine/test_hostile_files engine/test_engine_live engine/test_engines_live
    engine/test_kv_cache_fp8 engine/test_hybrid_engine engine/test_ranks_drafts engine/test_draft_heads
    engine/test_expert_engines engine/test_stages_engine engine/test_encoder_decoders engine/test_media_models
    engine/test_quantized_files engine/test_launched server/test_fuzz_openapi server/test_engines_server
    worker/test_dry_run models/test_parity ops/test_cpu_tiles
    compat/test_programs compat/test_media_programs server/test_hosting_doors server/test_hosting_life
    server/test_examples server/test_recipes server/test_structured_api server/test_loop_time server/test_anthropic_api
    server/test_clients_real server/test_nodes_server server/test_metrics_processes
    plain/text/test_parse_tools plain/grammar/test_compiler plain/grammar/test_loop plain/executor/test_remote
    plain/engine/test_client plain/sched/test_fuzz
    """.split()  # noqa: SIM905
)


def shuffle_files(items: list[pytest.Item], seed: int) -> None:
    """Files in another order, long ones first, the tests of each as they were. Every process of a run comes to the same
    order."""
    names = sorted({item.nodeid.partition("::")[0] for item in items})
    random.Random(seed).shuffle(names)
    names.sort(key=lambda name: name not in LONG_FILES)
    place = {name: number for number, name in enumerate(names)}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


def shuffle_tests(items: list[pytest.Item], seed: int) -> None:
    """The tests of each file in another order, the files as they were."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for name, tests in files.items():
        random.Random(f"{seed} {name}").shuffle(tests)
    items[:] = [item for tests in files.values() for item in tests]


def leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        left_out = set(map(id, long))
        items[:] = [item for item in items if id(item) not in left_out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        leave_out_long(config, items)
    if (seed := config.getoption("--test-order")) is not None:
        shuffle_tests(items, seed)
    if (seed := config.getoption("--file-order")) is not None:
        shuffle_files(items, seed)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
