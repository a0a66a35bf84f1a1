"""Children in the background, what they have had of the processor, and memory that goes back to the system."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time

import pytest

from quire.base.procs import background_command, processor_seconds
from quire.server.state import BodyBudget
from quire.text import template_child

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, or asks glibc")


def show_priority() -> None:
    print(os.getpriority(os.PRIO_PROCESS, 0))


def test_a_background_child_comes_after_everyone_else() -> None:
    command = background_command("tests.plain.base.test_background:show_priority")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


def test_templates_of_requests_are_rendered_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 0, b'{"sizes": [4]}\ntext')

    monkeypatch.setattr(template_child.subprocess, "run", run)
    job = template_child.ChatJob("{{ 1 }}", (), {})
    assert template_child.render_apart(job) == "text"
    assert seen == [background_command("quire.text.template_child:main")]


@LINUX
def test_time_asleep_is_not_the_processors() -> None:
    pid = os.getpid()
    before, began = processor_seconds(pid), time.process_time()
    time.sleep(0.5)
    assert processor_seconds(pid) - before < 0.4
    while time.process_time() - began < 0.3:
        pass
    assert 0.2 < processor_seconds(pid) - before <= time.process_time() - began + 0.2
    assert processor_seconds(0) == 0.0


_TRIM = """
from quire.base import allocator
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
kept, free = [], []
for _ in range(4_000):
    free.append(bytes(20_000))
    kept.append(bytes(600))  # so that what is free is not at the end
del free
held = resident() - before
allocator.trim()
print([held, resident() - before])
"""


@LINUX
def test_what_is_free_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", _TRIM], capture_output=True, text=True, check=True, timeout=300)
    held, after = ast.literal_eval(done.stdout)
    assert held > 60_000_000 > 40_000_000 > after


def test_bodies_ask_for_it_once_for_so_many_bytes() -> None:
    budget = BodyBudget(1 << 30)
    asked = 0
    for _ in range(100):
        budget.take(1 << 22)
        budget.give(1 << 22)
        asked += budget.wants_trim()
    assert asked == 100 * (1 << 22) // BodyBudget.TRIM_EACH
    assert not budget.wants_trim()
