"""grammar/compiler.py and child.py: real child processes over a vocabulary of bytes, and what hostile input does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from quire.base.procs import processor_seconds
from quire.grammar.backend import PACKAGES, GrammarVocabulary
from quire.grammar.compiler import Compiled, CompileLimits, Compiler
from quire.schema.errors import InputError, OverloadedError, QuireError
from quire.schema.grammar import GrammarKind, GrammarSpec

pytest.importorskip("llguidance")
EOS = 256
VOCABULARY = GrammarVocabulary(tokens=[bytes([i]) for i in range(256)] + [b""], size=300, ends=(EOS,))
PATIENCE = 120.0


class Bench:
    def __init__(self, **limits: float) -> None:
        self.news = threading.Event()
        self.compiler = Compiler(lambda: VOCABULARY, CompileLimits(**limits), self.news.set)

    def outcome(self, spec: GrammarSpec) -> Compiled | QuireError:
        self.compiler.submit(spec)
        end = time.monotonic() + PATIENCE
        while (found := self.compiler.fetch(spec)) is None:
            assert time.monotonic() < end, "it never came back"
            self.news.wait(1.0)
            self.news.clear()
        return found


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(seconds=2.0)
    yield made
    made.compiler.close()


def guidance(kind: GrammarKind, text: str, **more: bool) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text, backends=("guidance",), **more)


def xgrammar(kind: GrammarKind, text: str) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text, backends=("xgrammar",))


def allowed(found: Compiled | QuireError, said: str) -> set[str]:
    """What may follow `said`."""
    assert isinstance(found, Compiled), found
    matcher = found.backend.start(found.loaded)
    assert all(matcher.accept(byte) for byte in said.encode())
    rows = np.zeros((1, VOCABULARY.words), np.int32)
    found.backend.fill([matcher], rows, [0])
    bits = np.unpackbits(rows.view(np.uint8), bitorder="little")
    assert not bits[257:300].any(), "ids without a token are never allowed"
    return {chr(i) for i in np.flatnonzero(bits[:256])} | ({"end"} if matcher.can_end() else set())


def test_what_may_follow(bench: Bench) -> None:
    found = bench.outcome(guidance(GrammarKind.CHOICE, json.dumps(["red", "rest"])))
    assert allowed(found, "") == {"r"} and allowed(found, "re") == {"d", "s"} and allowed(found, "red") == {"end"}
    found = bench.outcome(guidance(GrammarKind.REGEX, "[0-9]{1,2}"))
    assert allowed(found, "1") == set("0123456789") | {"end"} and allowed(found, "12") == {"end"}


def test_rollback(bench: Bench) -> None:
    found = bench.outcome(guidance(GrammarKind.REGEX, "abc"))
    assert isinstance(found, Compiled)
    matcher = found.backend.start(found.loaded)
    assert matcher.accept(ord("a")) and matcher.accept(ord("b"))
    matcher.rollback(1)
    assert matcher.accept(ord("b")) and matcher.accept(ord("c")) and matcher.can_end()


def test_whitespace_is_bounded_and_compact_json_has_none(bench: Bench) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]})
    loose = bench.outcome(guidance(GrammarKind.JSON, schema))
    assert " " in allowed(loose, "{" + " " * 19) and " " not in allowed(loose, "{" + " " * 20)
    assert allowed(bench.outcome(guidance(GrammarKind.JSON, schema, compact=True)), "{") == {'"'}


def test_refusals_are_told_and_remembered(bench: Bench) -> None:
    spec = guidance(GrammarKind.LARK, "start: missing")
    refused = bench.outcome(spec)
    assert isinstance(refused, InputError) and "missing" in str(refused)
    assert bench.outcome(spec) is refused


def test_a_compile_that_takes_too_long_is_killed_and_others_go_on(bench: Bench) -> None:
    pytest.importorskip("xgrammar")
    properties = {f"p{i}": {"type": "integer"} for i in range(2000)}
    hostile = xgrammar(GrammarKind.JSON, json.dumps({"type": "object", "properties": properties}))
    began = time.monotonic()
    bench.compiler.submit(hostile)
    assert "end" in allowed(bench.outcome(guidance(GrammarKind.REGEX, "x*")), "")
    refused = bench.outcome(hostile)
    assert isinstance(refused, InputError)
    assert "too complex" in str(refused) or "needs more than" in str(refused), "a fast machine is out of memory first"
    assert time.monotonic() - began < PATIENCE / 2
    assert bench.outcome(guidance(GrammarKind.REGEX, "y*")) is not None


@pytest.mark.parametrize("name", ["xgrammar", "guidance", "outlines", "lm-format-enforcer"])
def test_an_exponential_regex_is_served_or_refused_within_its_limits(bench: Bench, name: str) -> None:
    """As a table of states it has 2^24 of them. Those that make no table serve it."""
    pytest.importorskip(PACKAGES[name][0])
    spec = GrammarSpec(kind=GrammarKind.REGEX, text="[ab]*a[ab]{24}", backends=(name,))
    began = time.monotonic()
    found = bench.outcome(spec)
    assert time.monotonic() - began < PATIENCE / 2
    if isinstance(found, InputError):
        assert "regex constraint" in str(found)
    else:
        assert allowed(found, "ba") == {"a", "b"}
    assert (name in ("outlines", "lm-format-enforcer")) == isinstance(found, InputError)


def test_a_child_that_crashes_costs_one_request(bench: Bench) -> None:
    pytest.importorskip("xgrammar")
    deep = "(" * 200_000 + "a" + ")" * 200_000
    refused = bench.outcome(xgrammar(GrammarKind.EBNF, f"root ::= {deep}"))
    assert isinstance(refused, InputError)
    assert "end" in allowed(bench.outcome(guidance(GrammarKind.REGEX, "z*")), "")


def test_memory_is_limited() -> None:
    pytest.importorskip("xgrammar")
    small = Bench(seconds=60.0, memory_bytes=64 << 20)
    properties = {f"p{i}": {"type": "integer"} for i in range(300)}  # takes nearly a gigabyte
    try:
        refused = small.outcome(xgrammar(GrammarKind.JSON, json.dumps({"type": "object", "properties": properties})))
    finally:
        small.compiler.close()
    assert isinstance(refused, InputError) and "MiB" in str(refused)


def test_a_backend_that_gives_up_is_followed_by_the_next(bench: Bench) -> None:
    pytest.importorskip("xgrammar")
    properties = {f"p{i}": {"type": "integer"} for i in range(1000)}
    text = json.dumps({"type": "object", "properties": properties})
    found = bench.outcome(GrammarSpec(kind=GrammarKind.JSON, text=text, backends=("xgrammar", "guidance")))
    assert isinstance(found, Compiled) and found.name == "guidance"


def test_the_cache_is_bounded() -> None:
    tiny = Bench(cache_bytes=24 << 20)  # of which an eighth is for new ones
    specs = [guidance(GrammarKind.REGEX, letter) for letter in "abcdef"]
    try:
        for spec in specs:
            tiny.outcome(spec)
        assert [tiny.compiler.fetch(spec) is not None for spec in specs] == [False] * 4 + [True] * 2
    finally:
        tiny.compiler.close()


def object_with(num_properties: int) -> str:
    properties = {f"p{i}": {"type": "string"} for i in range(num_properties)}
    return json.dumps({"type": "object", "properties": properties})


def test_a_grammar_is_counted_with_all_that_it_was_read_from() -> None:
    """xgrammar's own count leaves out most of it, so that the cache held many times its limit."""
    pytest.importorskip("xgrammar")
    one = Bench(seconds=60.0)
    try:
        found = one.outcome(xgrammar(GrammarKind.JSON, object_with(60)))
        assert isinstance(found, Compiled) and found.num_bytes > 10_000
        assert found.backend.cost(found.loaded) < found.num_bytes * 1.5 <= one.compiler._cache.num_bytes
    finally:
        one.compiler.close()


_LOADS = """
import sys
from quire.grammar.compiler import Compiled
from quire.schema.grammar import GrammarKind
from tests.plain.grammar.test_compiler import Bench, object_with, xgrammar
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
bench = Bench(seconds=60.0)
bench.outcome(xgrammar(GrammarKind.REGEX, "a"))
before = resident()
found = bench.outcome(xgrammar(GrammarKind.JSON, object_with(150)))
assert isinstance(found, Compiled), found
print(found.num_bytes, resident() - before)
bench.compiler.close()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_reading_a_grammar_took_is_given_back() -> None:
    """Some ten times what is kept; the allocator would hold it for the engine's lifetime."""
    pytest.importorskip("xgrammar")
    done = subprocess.run([sys.executable, "-c", _LOADS], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    size, grown = map(int, done.stdout.split())
    assert size > 2 << 20
    assert grown < 4 * size, f"{grown} bytes for {size}"


def test_compiling_gets_out_of_the_way(bench: Bench) -> None:
    assert isinstance(bench.outcome(guidance(GrammarKind.REGEX, "n")), Compiled)
    processes = [child._process for child in bench.compiler._children if child._process is not None]
    alive = [process for process in processes if process.poll() is None]  # other tests have had some killed
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert alive and {os.getpriority(os.PRIO_PROCESS, process.pid) for process in alive} == {min(19, here + 5)}


def test_a_busy_machine_is_no_fault_of_a_grammar() -> None:
    """The child has no processor for longer than its limit; the limit is on what it has had."""
    one = Bench(seconds=3.0, num_workers=1)
    try:
        assert isinstance(one.outcome(guidance(GrammarKind.REGEX, "a")), Compiled)
        process = one.compiler._children[0]._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        one.compiler.submit(guidance(GrammarKind.REGEX, "b"))
        time.sleep(4.0)
        process.send_signal(signal.SIGCONT)
        assert isinstance(one.outcome(guidance(GrammarKind.REGEX, "b")), Compiled)
    finally:
        one.compiler.close()


def test_a_package_that_does_not_start_is_no_fault_of_the_grammar(bench: Bench) -> None:
    found = bench.outcome(GrammarSpec(kind=GrammarKind.REGEX, text="q", backends=("nobody",)))
    assert isinstance(found, QuireError) and not isinstance(found, InputError) and "nobody" in str(found)


def hostile(number: int) -> GrammarSpec:
    """It takes far longer than any test waits."""
    properties = {f"p{i}": {"type": "integer"} for i in range(1000 + number)}
    return xgrammar(GrammarKind.JSON, json.dumps({"type": "object", "properties": properties}))


def wait_until(test: Callable[[], bool], seconds: float = PATIENCE / 2) -> None:
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def roomy() -> Iterator[Bench]:
    """Its compiles may take longer than all of a test."""
    made = Bench(seconds=10 * PATIENCE, memory_bytes=1 << 36, num_workers=1, most_queued=20)
    yield made
    made.compiler.close()


def test_abandoned_grammars_do_not_hold_the_compiler(roomy: Bench) -> None:
    pytest.importorskip("xgrammar")
    specs = [hostile(i) for i in range(14)]
    for spec in specs:
        roomy.compiler.submit(spec)
    wait_until(lambda: bool(roomy.compiler._children))
    for spec in specs:
        roomy.compiler.drop(spec)
    assert "end" in allowed(roomy.outcome(guidance(GrammarKind.REGEX, "h*")), "")
    assert len(roomy.compiler._jobs) == 0 and all(roomy.compiler.fetch(spec) is None for spec in specs)
    assert roomy.compiler.num_compiled == 1


def test_a_running_grammar_is_killed_when_the_last_who_waited_leaves(roomy: Bench) -> None:
    pytest.importorskip("xgrammar")
    assert isinstance(roomy.outcome(xgrammar(GrammarKind.REGEX, "w")), Compiled)  # the backend is ready
    process = roomy.compiler._children[0]._process
    assert process is not None
    before = processor_seconds(process.pid)
    roomy.compiler.submit(hostile(0))
    wait_until(lambda: processor_seconds(process.pid) > before + 0.1)  # it is at it
    assert process.poll() is None
    roomy.compiler.drop(hostile(0))
    wait_until(lambda: process.poll() is not None and not len(roomy.compiler._jobs))
    assert roomy.compiler.fetch(hostile(0)) is None


def test_an_honest_grammar_overtakes_hostile_ones_that_are_still_waited_for(roomy: Bench) -> None:
    pytest.importorskip("xgrammar")
    roomy.compiler.submit(hostile(0))
    assert "end" in allowed(roomy.outcome(guidance(GrammarKind.REGEX, "h*")), "")
    assert roomy.compiler.fetch(hostile(0)) is None and len(roomy.compiler._jobs) == 1


def test_more_than_the_queue_holds_are_refused(roomy: Bench) -> None:
    with pytest.raises(OverloadedError, match="20 constraints"):
        for i in range(40):
            roomy.compiler.submit(guidance(GrammarKind.REGEX, f"a{{{i}}}"))
