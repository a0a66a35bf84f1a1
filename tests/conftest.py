"""What every test may rely on: no network, one thread, blocks audited at every step, no environment left over.

Nothing else: a file of tests passes whichever came before it in the process. `--file-order` tries another order."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("QUIRE_TARGET_DEVICE", "cpu")  # tests/device name their device
os.environ.setdefault("QUIRE_CPU_NUM_THREADS", "1")
os.environ.setdefault("QUIRE_AUDIT", "1")
os.environ.setdefault("QUIRE_CPU_KVCACHE_SPACE", "0.5")
os.environ.setdefault("QUIRE_CPU_PACKED_CACHE", "0")  # nothing of the user's cache is read or written

import pytest

from quire.base import env
from quire.base.log import logger as set_up_logger

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with Ctrl-C ignored


@pytest.fixture(autouse=True)
def _fresh_environment() -> Iterator[None]:
    """A test may set variables with monkeypatch.setenv; the next one reads the environment anew."""
    env.forget_all()
    yield
    env.forget_all()


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (seed := config.getoption("--file-order")) is not None:
        terminalreporter.write_line(f"files ran in the order of --file-order {seed}")


# What takes half a minute or more alone. These go first: a file is one process's, and the other would wait for it.
LONG_FILES = frozenset(
    f"tests/{name}.py"
    for name in """
    engine/test_every_architecture engine/test_batch_invariant_hostile engine/test_structured_outputs
    models/test_parity ops/test_cpu_tiles server/test_hosting_doors
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--file-order")) is not None:
        shuffle_files(items, seed)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
