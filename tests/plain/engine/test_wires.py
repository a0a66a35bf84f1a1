"""base/codec.py, sockets.py, procs.py and net.py: frames arrive whole, and every death is noticed and explained."""

from __future__ import annotations

import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from quire.base import env
from quire.base.codec import Buffer, Codec, CodecError
from quire.base.folders import remove_folder
from quire.base.net import free_port, host_ip, join_host_port
from quire.base.procs import Child
from quire.base.sockets import PeerGoneError, Wire, private_folder
from quire.base.turns import HeldSignals
from quire.schema.grammar import GrammarKind, GrammarSpec
from quire.schema.messages import (
    Abort,
    ControlCall,
    EngineOutput,
    EngineRequest,
    FinishReason,
    FromEngine,
    Outputs,
    Stop,
    ToEngine,
)
from quire.schema.params import ResolvedParams
from quire.schema.step import LogprobRows

TO, FROM = Codec(ToEngine), Codec(FromEngine)

REQUEST = EngineRequest(
    request_id="a",
    prompt_token_ids=tuple(range(100_000)),
    params=ResolvedParams(
        n=2,
        stop=("x",),
        stop_token_ids=(1, 2),
        seed=(1 << 63) - 1,
        logit_bias={3: -5.0},
        extra_args={"deep": [1, {"b": None}]},
        grammar=GrammarSpec(kind=GrammarKind.CHOICE, text='["a"]', backends=("guidance",)),
    ),
    seed=(1 << 63) - 1,
    max_tokens=5,
    cache_salt="s",
)


@pytest.mark.parametrize(
    "message",
    [
        REQUEST,
        Abort(request_ids=("a", "b")),
        Stop(),
        ControlCall(call_id=7, verb="v", args=[1, b"x"], kwargs={"k": 1.5}),
    ],
    ids=lambda m: type(m).__name__,
)
def test_messages_to_an_engine_survive(message):
    assert TO.decode(TO.encode(message)) == message


def test_outputs_survive():
    rows = LogprobRows([[1, 2]], [[-0.5, -1.0]], [1])
    outputs = Outputs(
        outputs=[
            EngineOutput(
                request_id="a", new_token_ids=[1], finish_reason=FinishReason.STOP, stop_reason=3, logprobs=rows
            )
        ]
    )
    assert FROM.decode(FROM.encode(outputs)) == outputs


def test_large_buffers_travel_beside_the_message():
    big, small = os.urandom(50_000), b"small"
    frames = TO.encode(ControlCall(call_id=1, verb="v", args=[Buffer(big), {"x": Buffer(small)}, Buffer(big)]))
    assert len(frames) == 3 and len(frames[0]) < 1000
    args = TO.decode(frames).args
    assert [bytes(args[0].data), bytes(args[1]["x"].data), bytes(args[2].data)] == [big, small, big]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x00"],
        [b"\xc1" * 40],
        [TO.encode(REQUEST)[0][:50]],
        [msgspec.msgpack.encode({"type": "nothing"})],
        [msgspec.msgpack.encode({"type": "abort", "request_ids": 5})],
        TO.encode(ControlCall(call_id=1, verb="v", args=[Buffer(bytes(9000))]))[:1],  # names a frame that is not there
    ],
    ids=lambda f: repr(f)[:20],
)
def test_what_cannot_be_read_is_an_error(frames):
    with pytest.raises(CodecError):
        TO.decode(frames)


def test_what_cannot_be_sent_is_an_error_that_names_the_type():
    with pytest.raises(CodecError, match=r"socket\.socket"):
        TO.encode(ControlCall(call_id=1, verb="v", args=[socket.socket()]))
    with pytest.raises(CodecError):
        TO.encode(ControlCall(call_id=1, verb="v", args=[1 << 70]))


def test_limits():
    small = Codec(ToEngine, max_bytes=100)
    with pytest.raises(CodecError, match="100"):
        small.encode(REQUEST)
    with pytest.raises(CodecError, match="100"):
        small.decode(TO.encode(REQUEST))


# ---- the wire


@pytest.fixture
def wires():
    folder = private_folder()
    ends = (Wire(folder, mine="a", theirs="b"), Wire(folder, mine="b", theirs="a"))
    yield ends
    for end in ends:
        end.close()
    ends[0].remove_folder()
    assert not os.path.exists(folder)


def test_frames_arrive_in_order_and_only_for_us(wires):
    a, b = wires
    for i in range(200):
        a.send([b"%d" % i, bytes(i)])
    got = [b.receive(5.0) for _ in range(200)]
    assert [(bytes(f[0]), len(f[1])) for f in got] == [(b"%d" % i, i) for i in range(200)]
    assert b.receive(0.01) is None
    assert stat.S_IMODE(os.stat(a.folder).st_mode) == 0o700


def test_a_send_before_the_peer_exists_is_kept():
    folder = private_folder()
    a = Wire(folder, mine="a", theirs="b")
    a.send([b"early"])
    b = Wire(folder, mine="b", theirs="a")
    assert bytes(b.receive(5.0)[0]) == b"early"
    a.close()
    b.close()
    b.remove_folder()


def test_a_death_notice_ends_a_receive_after_the_last_words(wires):
    a, b = wires
    notice, closing = os.pipe()
    a.send([b"last words"])
    os.close(closing)
    assert bytes(b.receive(5.0, notice=notice)[0]) == b"last words"
    with pytest.raises(PeerGoneError):
        b.receive(5.0, notice=notice)
    os.close(notice)


def test_closing_ends_while_another_thread_takes_a_message(wires, monkeypatch):
    """That thread has its message already, and may never ask for another."""
    a, b = wires
    inbox, waits = b._inbox, threading.Event()
    receive, context = inbox._receive, inbox._context

    def end_context():
        waits.set()
        context.term()

    closing = threading.Thread(target=b.close, daemon=True)

    def receive_slowly(*args):
        frames = receive(*args)
        closing.start()
        assert waits.wait(60)
        return frames

    monkeypatch.setattr(inbox, "_receive", receive_slowly)
    monkeypatch.setattr(inbox, "_context", SimpleNamespace(term=end_context))
    a.send([b"x"])
    assert bytes(b.receive(60.0)[0]) == b"x"
    closing.join(60)
    assert not closing.is_alive()
    with pytest.raises(PeerGoneError):
        b.receive(1.0)


def test_closing_ends_a_receive_in_another_thread(wires):
    a, _ = wires
    ended = threading.Event()

    def receive():
        with pytest.raises(PeerGoneError):
            a.receive(300.0)
        ended.set()

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    a.close()
    assert ended.wait(60.0)
    with pytest.raises(PeerGoneError):
        a.send([b"x"])


def test_connections_over_tcp_are_asked_whether_they_live(wires):
    wire = Wire("", mine="tcp://127.0.0.1:*", theirs="tcp://127.0.0.1:9", secret=bytes(32))
    for socket_ in (wire._outbox, wire._inbox._socket):
        asked, silent, ttl = map(socket_.getsockopt, (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL))
        assert 0 < 2 * asked < silent == ttl and silent > 3000 * env.NODE_TIMEOUT_S.get()
    wire.close()
    assert wires[0]._outbox.getsockopt(zmq.HEARTBEAT_IVL) == 0  # nothing breaks between processes of one machine


# ---- children


def child(code: str) -> Child:
    return Child("builtins:exec", code.encode(), name="a child")


def test_a_child_gets_its_boot_bytes_and_its_parents_path(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("import sys\ndef main(boot):\n    sys.exit(len(boot) % 251)\n")
    monkeypatch.syspath_prepend(tmp_path)
    started = Child("only_here:main", bytes(1_000_003), name="a child")
    assert started.wait(60.0)
    assert f"left with exit code {1_000_003 % 251}" in started.why_dead()
    started.stop(0.0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("raise ValueError('no')", "exit code 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_how_a_child_died_is_said(code, words, capfd):
    started = child(code)
    assert os.read(started.notice, 1) == b""  # the notice turns readable
    assert words in started.why_dead() and str(started.pid) in started.why_dead()
    assert not started.alive
    started.stop(0.0)


def test_a_child_that_will_not_leave_is_made_to(monkeypatch):
    monkeypatch.setenv("QUIRE_WORKER_TIMEOUT_S", "0")  # nobody else does
    env.forget_all()
    started = child("import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)")
    _wait_until(lambda: _state(started.pid) == "T")
    began = time.monotonic()
    started.stop(0.1)
    assert "SIGKILL" in started.why_dead() and time.monotonic() - began < 60


def test_a_child_that_is_stopped_is_killed_and_its_parent_told_why():
    told = queue.SimpleQueue()
    started = Child("builtins:exec", b"import time; time.sleep(600)", name="a child", before_kill=told.put)
    os.kill(started.pid, signal.SIGSTOP)
    why = f"a child (process {started.pid}) has been stopped by a signal for 1.0 s, and was killed"
    assert told.get(timeout=60).startswith(why)
    assert os.read(started.notice, 1) == b""
    assert started.why_dead().startswith(why) and started.exit_code == -signal.SIGKILL and not started.alive
    started.close()
    assert not os.path.exists(f"/proc/{started.pid}")


def test_a_child_that_cannot_be_watched_lives_until_it_ends(monkeypatch):
    wrong = queue.SimpleQueue()

    def fail(watch, limit):
        raise RuntimeError("this system is unlike others")

    monkeypatch.setattr("quire.base.procs.ProcessWatch.await_standstill", fail)
    monkeypatch.setattr(threading, "excepthook", lambda about: wrong.put(str(about.exc_value)))
    started = child("import time; time.sleep(600)")
    assert not started.wait(0.3) and started.alive
    started.signal(signal.SIGKILL)
    assert started.wait(60.0) and os.read(started.notice, 1) == b""
    assert wrong.get(timeout=60) == "this system is unlike others"
    started.close()


def test_a_child_that_is_stopped_again_and_again_goes_on():
    """For longer than the limit in all, and never for so long at once."""
    code = "import os, time; began = time.monotonic()\nwhile time.monotonic() < began + 2.5: pass\nos._exit(7)"
    started = child(code)
    for _ in range(8):
        os.kill(started.pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(started.pid, signal.SIGCONT)
        time.sleep(0.02)
    assert started.wait(60.0) and "exit code 7" in started.why_dead()
    started.close()


def test_a_child_that_cannot_be_killed_counts_as_dead(monkeypatch):
    """As one that a driver holds inside of the kernel."""
    monkeypatch.setattr("quire.base.procs.ProcessWatch.kill", lambda watch: None)
    started = child("import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); os._exit(3)")
    assert started.wait(60.0) and "has been stopped by a signal" in started.why_dead()
    assert started.exit_code == -signal.SIGKILL and _state(started.pid) == "T"
    os.kill(started.pid, signal.SIGCONT)
    started.close()
    assert "left with exit code 3" in started.why_dead()  # what is known by now


def test_ctrl_c_is_the_parents(tmp_path):
    began, hit = tmp_path / "began", tmp_path / "hit"
    started = child(
        f"import os, time; open({str(began)!r}, 'w').close()\n"
        f"while not os.path.exists({str(hit)!r}): time.sleep(0.01)\n"
        "time.sleep(0.2); os._exit(9)"
    )
    _wait_until(began.exists)
    os.kill(started.pid, signal.SIGINT)
    hit.touch()
    assert started.wait(60.0)
    assert "exit code 9" in started.why_dead()
    started.stop(0.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_the_parents_from_the_first_moment(number):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    started = Child("builtins:exec", None, name="a child")
    os.kill(started.pid, number)  # long before its interpreter is ready
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    started.send_boot(b"import os, signal; os._exit(9 + len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))")
    assert started.wait(60.0)
    assert "exit code 9" in started.why_dead()
    started.stop(0.0)


def test_an_interrupt_while_signals_are_blocked_leaves_none_blocked(monkeypatch):
    """One that came just before is raised by the call that blocks the next."""
    block, before = signal.pthread_sigmask, signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def interrupted(how, numbers):
        found = block(how, numbers)
        if how == signal.SIG_BLOCK and numbers:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Child("builtins:exec", None, name="a child")
    monkeypatch.undo()
    found = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert found == before


def test_a_child_of_a_process_with_closed_streams():
    """Whose numbers nothing else gets: what native code prints must not go into a socket."""
    code = (
        "from quire.base.procs import Child\n"
        "child = Child('builtins:exec', b'import os, sys; os._exit(7 if sys.stderr.fileno() == 2 else 8)', name='c')\n"
        "child.wait(60.0)\n"
        "raise SystemExit(child.exit_code)\n"
    )
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(shell, timeout=300).returncode == 7


def test_a_child_leaves_when_its_parent_is_killed(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        "from quire.base.procs import Child\n"
        "import time\n"
        "started = Child('builtins:exec', b'import time; time.sleep(600)', name='c')\n"
        "print(started.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert os.path.exists(f"/proc/{pid}")
    parent.kill()
    parent.wait()
    _wait_until(lambda: _state(pid) in ("Z", ""))


def _state(pid: int) -> str:
    """The letter that the system has for what a process does; nothing: it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _wait_until(test) -> None:
    deadline = time.monotonic() + 60
    while not test():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_an_interrupt_waits_for_the_end_of_a_block():
    done = []
    with pytest.raises(KeyboardInterrupt), HeldSignals():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append(1)
    assert done == [1]
    with pytest.raises(KeyboardInterrupt), HeldSignals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append(2)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_a_program_wait_for_the_end_of_a_block_too():
    came = []

    def handle(number, frame):
        came.append((number, frame.f_code.co_name))
        raise TimeoutError(str(number))

    numbers = (signal.SIGALRM, signal.SIGUSR1)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        with pytest.raises(TimeoutError), HeldSignals():
            _raise_all(numbers)
            assert not came
        assert came == [(number, "_raise_all") for number in numbers]
        assert all(signal.getsignal(number) is handle for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_all(numbers) -> None:
    for number in numbers:
        signal.raise_signal(number)


# ---- the host


def test_free_port_can_be_bound_and_counts_up():
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        taken.listen()
        first = taken.getsockname()[1]
        assert free_port(first) > first


def test_host_ip(monkeypatch):
    assert host_ip()
    monkeypatch.setenv("QUIRE_HOST_IP", "203.0.113.9")
    env.forget_all()
    assert host_ip() == "203.0.113.9"
    assert join_host_port("::1", 80) == "[::1]:80" and join_host_port("h", 80) == "h:80"


def test_annotations_are_read_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines that answered at once were two threads that met a struct first: msgspec ended the process."""

    class Word(msgspec.Struct):
        text: str

    inside, most = 0, 0
    plain = msgspec.msgpack.Decoder

    def slow(kind: object) -> object:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        inside -= 1
        return plain(kind)

    monkeypatch.setattr(msgspec.msgpack, "Decoder", slow)
    codecs = [Codec[Word](Word) for _ in range(4)]
    frames = codecs[0].encode(Word("x"))
    threads = [threading.Thread(target=codec.decode, args=(frames,)) for codec in codecs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == 1 and codecs[0].decode(frames) == Word("x")


@pytest.mark.parametrize("theirs", ["udp://nowhere:1", "tcp://nowhere", "tcp://127.0.0.1:notaport"])
def test_a_wire_to_nowhere_leaves_no_mailbox_open(theirs):
    """The other address is looked at once this end's mailbox is there, which another wire can then have."""
    folder = private_folder()
    for _ in range(2):
        with pytest.raises((ValueError, zmq.ZMQError)):
            Wire(folder, mine="here", theirs=theirs, secret=b"0" * 32)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((ValueError, zmq.ZMQError)):
        Wire(folder, mine="here", theirs=theirs, secret=b"0" * 32)
    assert len(os.listdir("/proc/self/fd")) <= before
    remove_folder(folder)
