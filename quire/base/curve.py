"""Curve: nobody but the processes of one run gets a connection to its mailboxes on TCP.

In: the run's secret, from which two pairs of keys for ZeroMQ's CURVE are made: that of a mailbox and that of whoever
drops frames into one. Neither key ever travels: without the mailbox's public key no handshake can be begun, and a
sender with another key than the run's is turned away by a thread that answers for the mailbox (ZAP). Until a handshake
is over nothing is queued, and one that is not over within a few seconds ends. What is said is encrypted. Must not know:
what the frames mean, or how the secret got here.
"""

from __future__ import annotations

import contextlib
import hmac
import resource
import threading
from hashlib import sha256
from typing import NamedTuple

import zmq
from zmq.utils import z85

from quire.base.log import logger

log = logger(__name__)

_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks, within a context
_VERSION = b"1.0"
_HANDSHAKE_MS = 5000
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_OPEN_FILES = 8192  # connections of strangers are files too, until their handshake has failed


class _Pair(NamedTuple):
    public: bytes
    private: bytes


def _pair(secret: bytes, label: bytes) -> _Pair:
    private = z85.encode(hmac.new(secret, b"curve " + label, sha256).digest())
    return _Pair(zmq.curve_public(private), private)


class Curve:
    def __init__(self, secret: bytes) -> None:
        """OSError: ZeroMQ was built without it."""
        if not zmq.has("curve"):
            raise OSError(
                "mailboxes on TCP need ZeroMQ with CURVE, and this pyzmq was built without libsodium: install the "
                "wheel of PyPI (pip install --force-reinstall --only-binary :all: pyzmq)"
            )
        self._mailbox, self._sender = _pair(secret, b"mailbox"), _pair(secret, b"sender")

    def use(self, outbox: zmq.Socket[bytes]) -> None:
        """Before it is connected."""
        outbox.curve_serverkey = self._mailbox.public
        outbox.curve_publickey, outbox.curve_secretkey = self._sender

    def guard(self, context: zmq.Context[zmq.Socket[bytes]], mailbox: zmq.Socket[bytes]) -> None:
        """Before it is bound; the only one of its context, with which the guard ends."""
        _allow_files()
        mailbox.curve_server = True
        mailbox.curve_secretkey = self._mailbox.private
        mailbox.zap_domain = b"quire"
        mailbox.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        door = context.socket(zmq.REP)
        door.bind(_ZAP)
        news = context.socket(zmq.PAIR)
        mailbox.monitor(name := "inproc://refusals", _REFUSALS)
        news.connect(name)
        guard = _Guard(door, news, z85.decode(self._sender.public))
        threading.Thread(target=guard.run, name="mailbox guard", daemon=True).start()


class _Guard:
    """Answers whether a sender may come in, and counts who may not."""

    def __init__(self, door: zmq.Socket[bytes], news: zmq.Socket[bytes], known: bytes) -> None:
        self._door, self._news, self._known = door, news, known
        self._refused = 0

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._door, self._news):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    frames = socket.recv_multipart()
                    if socket is self._door:
                        self._door.send_multipart(_answer(frames, self._known))
                    elif int.from_bytes(frames[0][:2], "little") & _REFUSALS:
                        self._count()
        except zmq.ContextTerminated:
            pass
        finally:
            self._door.close(linger=0)
            self._news.close(linger=0)

    def _count(self) -> None:
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # 1, 2, 4, 8 ...
            log.warning("%d connections were refused so far: they do not know this run's secret", self._refused)


def _answer(frames: list[bytes], known: bytes) -> list[bytes]:
    """Of ZAP. `frames`: version, request, domain, address, identity, mechanism, and the sender's public key."""
    is_known = len(frames) == 7 and frames[5] == b"CURVE" and hmac.compare_digest(frames[6], known)
    code, text = (b"200", b"OK") if is_known else (b"400", b"unknown")
    request = frames[1] if len(frames) > 1 else b""
    return [_VERSION, request, code, text, b"", b""]


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
