"""Which tests the processor's time goes to: `pytest --processor-time FILE` writes a line per test, its seconds of user
and system time and its name, and prints sums per directory and the dearest files at the end.

Counted are the test process, the processes that it waited for, and those that still run, with what they waited for: the
time of a server or an engine that a file keeps counts for the tests during which it worked. Fixtures count for the test
that asks for them first, imports of the collection for the file "collection"."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm_python import Elsewhere

TICKS = os.sysconf("SC_CLK_TCK")
DEAREST = 40


def processor_seconds() -> float:
    """Of this process and of all that came from it."""
    own, waited_for = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    past = own.ru_utime + own.ru_stime + waited_for.ru_utime + waited_for.ru_stime
    past += Elsewhere.seconds
    return past + sum(map(_with_descendants, [*_children("self"), *Elsewhere.running]))


def _children(process: int | str) -> list[int]:
    try:
        tasks = [f"/proc/{process}/task/{task}/children" for task in os.listdir(f"/proc/{process}/task")]
        return [int(child) for task in tasks for child in Path(task).read_text().split()]
    except OSError:  # ended meanwhile, or no such folder on this system
        return []


def _with_descendants(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    ticks = sum(map(int, fields[11:15]))  # user and system, its own and those of processes that it waited for
    return ticks / TICKS + sum(map(_with_descendants, _children(process)))


class ProcessorTime:
    """The plug-in: one line per test, appended, so that the processes of a run share the file."""

    def __init__(self, file: str, *, writes: bool, reports: bool) -> None:
        self.file = Path(file)
        self.writes, self.reports = writes, reports
        self.last = 0.0

    def pytest_sessionstart(self) -> None:
        if self.reports:
            self.file.write_text("")

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_xdist_setupnodes(self) -> None:
        with open(self.file, "a") as file:
            file.write(f"{processor_seconds():.3f} interpreters that the processes are forks of\n")

    def pytest_collection_finish(self) -> None:
        self._line("collection")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        self._line(item.nodeid)
        return result

    def _line(self, name: str) -> None:
        if self.writes:
            # Less than before where a process was missed: the list of children is no snapshot. The next look finds it.
            now = max(processor_seconds(), self.last)
            with open(self.file, "a") as file:
                file.write(f"{now - self.last:.3f} {name}\n")
            self.last = now

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.reports:
            return
        files: Counter[str] = Counter()
        folders: Counter[str] = Counter()
        for line in self.file.read_text().splitlines():
            seconds, _, test = line.partition(" ")
            name = test.partition("::")[0]
            files[name] += float(seconds)  # type: ignore[assignment]
            folders["/".join(name.split("/")[:2])] += float(seconds)  # type: ignore[assignment]
        terminalreporter.section("processor seconds")
        for title, sums in (("", folders.most_common()), ("", files.most_common(DEAREST))):
            terminalreporter.write_line(title)
            for name, total in sums:
                terminalreporter.write_line(f"{total:9.1f} {name}")
        terminalreporter.write_line(f"\n{sum(files.values()):9.1f} in all")
