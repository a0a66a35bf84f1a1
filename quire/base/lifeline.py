"""Lifeline: one TCP connection between two programs of different hosts that know the same key, and soon know when the
other is gone.

Whoever connects proves first that it knows the key, then the other does; nobody without it learns more than a random
number, and the key itself never travels:

    to the caller    MAGIC, a (32 random bytes)
    from the caller  b (32 random bytes), HMAC(key, "caller", a, b)
    to the caller    HMAC(key, "listener", a, b)

From then on every message is sealed (base/seal.py) with HMAC(key, "session", a, b), so nothing of another session can
be repeated. Both sides send an empty message several times per second and per `limit`: a side that hears nothing for
so long, or whose connection ends, has lost the other. A thread sends them, which one long call of an extension that
keeps the interpreter's lock holds up: `limit` has to be longer than such calls. Must not know: what is said.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import secrets
import signal
import socket
import struct
import threading
from collections.abc import Callable
from hashlib import sha256

from quire.base.clock import now
from quire.base.log import logger
from quire.base.seal import Seal, SealError

log = logger(__name__)

_MAGIC = b"quire-1\n"
_RANDOM_BYTES = 32
_PROOF_BYTES = sha256().digest_size
_LENGTH = struct.Struct("<I")
_SEAL_BYTES = 8 + sha256().digest_size
_MOST_BYTES = 64 << 20  # of a message
_HANDSHAKE_S = 5.0
_HANDSHAKES = 32  # at once; further callers are turned away
_BEATS = 5  # per limit, at least
_BEAT_S = 0.3  # at most: the other side may have a shorter limit
_PAUSE_S = 0.2  # between two attempts to connect
_SIOCGIFADDR = 0x8915
MIN_KEY_BYTES = 16


class LostError(ConnectionError):
    """The other side is gone, or is not who it should be."""


class Lifeline:
    """One end. `send` may be called by any thread, `receive` by one."""

    def __init__(self, connection: socket.socket, session: bytes, *, is_caller: bool, limit: float) -> None:
        self.limit, self.peer = limit, str(connection.getpeername()[0])
        self._connection, self._session, self._seal = connection, session, Seal(session)
        self._mine, self._theirs = (b"caller", b"listener") if is_caller else (b"listener", b"caller")
        self._sending, self._closed = threading.Lock(), threading.Event()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(limit)
        threading.Thread(target=self._beat, name="lifeline", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Does nothing once the other side is gone: whoever receives is told so."""
        if len(message) > _MOST_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long; at most {_MOST_BYTES} may be sent")
        with self._sending, contextlib.suppress(OSError):
            frames = self._seal.close(self._mine, [message])
            self._connection.sendall(_LENGTH.pack(len(message)) + b"".join(frames))

    def receive(self) -> bytes:
        """The next message. LostError: there will be none."""
        while True:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > _MOST_BYTES:
                raise LostError(f"a message of {length} bytes was announced; at most {_MOST_BYTES} are read")
            body = self._read(length + _SEAL_BYTES)
            try:
                (message,) = self._seal.open(self._theirs, [body[:length], body[length:]])
            except SealError as wrong:
                raise LostError(str(wrong)) from None
            if message:
                return bytes(message)

    def hide(self, secret: bytes) -> bytes:
        """32 bytes so that only the other end can read them; the same again shows them. Once per session."""
        pad = _proof(self._session, b"pad")
        if len(secret) != len(pad):
            raise ValueError(f"a secret of {len(secret)} bytes; {len(pad)} are hidden")
        return bytes(a ^ b for a, b in zip(secret, pad, strict=True))

    def close(self) -> None:
        """A receive under way ends with LostError."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int) -> bytes:
        return _read(self._connection, count, self.limit)

    def _beat(self) -> None:
        while not self._closed.wait(min(_BEAT_S, self.limit / _BEATS)):
            self.send(b"")


def call(address: str, port: int, key: bytes, *, limit: float, patience: float) -> Lifeline:
    """Connect to a listener, which may come later. LostError: it did not, or does not know the key."""
    deadline = now() + patience
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=_HANDSHAKE_S)
            return _greet_listener(connection, key, limit)
        except LostError:
            raise
        except OSError as wrong:
            if now() >= deadline:
                raise LostError(f"{address}:{port} did not answer within {patience:g} s: {wrong}") from None
        threading.Event().wait(_PAUSE_S)


def _greet_listener(connection: socket.socket, key: bytes, limit: float) -> Lifeline:
    try:
        try:
            hello = _read(connection, len(_MAGIC) + _RANDOM_BYTES, _HANDSHAKE_S)
        except LostError as lost:  # turned away before anything was proved, by a listener with too many callers
            raise ConnectionResetError(str(lost)) from None
        if not hello.startswith(_MAGIC):
            raise LostError("something else than Quire listens there")
        both = hello[len(_MAGIC) :] + secrets.token_bytes(_RANDOM_BYTES)
        connection.sendall(both[_RANDOM_BYTES:] + _proof(key, b"caller", both))
        try:
            proof = _read(connection, _PROOF_BYTES, _HANDSHAKE_S)
        except LostError:
            raise LostError("the connection was refused: the other side has another key") from None
        if not hmac.compare_digest(proof, _proof(key, b"listener", both)):
            raise LostError("the other side does not know the key")
        return Lifeline(connection, _proof(key, b"session", both), is_caller=True, limit=limit)
    except BaseException:
        connection.close()
        raise


def close_at_signals(lifeline: Lifeline, last_word: bytes = b"") -> threading.Event:
    """SIGINT and SIGTERM end the connection, after this word; the event says that they did."""
    stop = threading.Event()

    def hang_up() -> None:
        lifeline.send(last_word)
        lifeline.close()

    def leave(number: int, frame: object) -> None:
        if not stop.is_set():
            stop.set()  # the thread that was interrupted may be the one that sends, so another must
            threading.Thread(target=hang_up, name="hang up", daemon=True).start()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, leave)
    return stop


class Listener:
    """Takes callers that know the key; each is passed on in a thread of its own."""

    def __init__(
        self, address: str, port: int, key: bytes, welcome: Callable[[Lifeline], None], *, limit: float
    ) -> None:
        self._key, self._welcome, self._limit = key, welcome, limit
        self._socket = socket.create_server((address, port))
        self.port: int = self._socket.getsockname()[1]
        self._places = threading.BoundedSemaphore(_HANDSHAKES)
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Nobody else is let in; those who are stay."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="handshake", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            lifeline = self._greet_caller(connection)
        except (OSError, ValueError) as wrong:
            log.warning("A connection was refused: %s", wrong)
            connection.close()
            return
        finally:
            self._places.release()
        self._welcome(lifeline)

    def _greet_caller(self, connection: socket.socket) -> Lifeline:
        peer = connection.getpeername()[0]
        try:
            connection.settimeout(_HANDSHAKE_S)
            mine = secrets.token_bytes(_RANDOM_BYTES)
            connection.sendall(_MAGIC + mine)
            reply = _read(connection, _RANDOM_BYTES + _PROOF_BYTES, _HANDSHAKE_S)
        except OSError as wrong:
            raise LostError(f"{peer} did not show that it knows the key: {wrong}") from None
        both = mine + reply[:_RANDOM_BYTES]
        if not hmac.compare_digest(reply[_RANDOM_BYTES:], _proof(self._key, b"caller", both)):
            raise LostError(f"{peer} does not know the key")
        connection.sendall(_proof(self._key, b"listener", both))
        return Lifeline(connection, _proof(self._key, b"session", both), is_caller=False, limit=self._limit)


def _proof(key: bytes, *parts: bytes) -> bytes:
    """Labels have different lengths or letters, and what follows them has one length."""
    return hmac.new(key, b"".join(parts), sha256).digest()


def _read(connection: socket.socket, count: int, limit: float) -> bytes:
    """Exactly so many bytes, with at most `limit` seconds between two pieces, and for all of a handshake."""
    pieces: list[bytes] = []
    deadline = now() + max(limit, _HANDSHAKE_S)
    while count:
        try:
            piece = connection.recv(min(count, 1 << 20))
        except TimeoutError:
            raise LostError(f"nothing was heard for {limit:g} s") from None
        except OSError as wrong:
            raise LostError(f"the connection broke: {wrong}") from None
        if not piece:
            raise LostError("the connection was closed")
        pieces.append(piece)
        count -= len(piece)
        if count and now() > deadline:
            raise LostError("a message took too long")
    return b"".join(pieces)


# ---- addresses -------------------------------------------------------------------------------------------------


def resolve_address(host: str) -> str:
    """The IPv4 address of a host's name. OSError: there is none."""
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def address_towards(address: str) -> str:
    """The address of this host that others reach it by on the way to and from that one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def free_port(address: str) -> int:
    """A port that nobody listens on at this moment."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this IPv4 address; None: none has it as its first."""
    if ipaddress.ip_address(address).is_loopback:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None
