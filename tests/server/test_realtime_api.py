"""/v1/realtime: OpenAI's client and plain WebSockets to a live server with a tiny Whisper, beside transformers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidMessage, InvalidStatus
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from quire.base import env
from quire.config import SpeechToTextConfig
from quire.media.audio import Audio, resample
from quire.media.speech.clips import cut_into_clips
from quire.schema.errors import ShutdownError
from quire.server import websocket
from quire.server.openai import realtime, speech_desk
from quire.server.openai.realtime_audio import next_clip
from quire.server.websocket import MESSAGE_BYTES, MOST_FRAGMENTS
from tests.server.live import Live, live, live_fake
from tests.server.test_speech_api import wait_until
from tests.tiny_whisper import RATE, SECONDS, TinyWhisper, read_back, speech, wav

LENGTH = 16
SHORT, LONG = read_back(speech(3, 1.3)), read_back(speech(4, 5.2))
COMMIT, FINAL = {"type": "input_audio_buffer.commit"}, {"type": "input_audio_buffer.commit", "final": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyWhisper:
    return TinyWhisper(tmp_path_factory.mktemp("whisper"), LENGTH)


@pytest.fixture(scope="module")
def server(tiny: TinyWhisper) -> Iterator[Live]:
    with live(str(tiny.folder), engine={"dtype": "float32", "max_num_seqs": 8, "served_model_name": "w"}) as running:
        yield running


def pcm(samples: Any) -> str:
    return base64.b64encode((samples * 32768).astype("<i2").tobytes()).decode()


def append(samples: Any) -> dict[str, Any]:
    return {"type": "input_audio_buffer.append", "audio": pcm(samples)}


class Client:
    """vLLM's form."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.created = self.next()

    def send(self, *events: Any) -> None:
        for event in events:
            self.connection.send(json.dumps(event))

    def next(self) -> Any:
        return json.loads(self.connection.recv(timeout=60))

    def until(self, kind: str = "transcription.done") -> list[Any]:
        events = [self.next()]
        while events[-1]["type"] != kind:
            assert events[-1]["type"] != "error", events[-1]
            events.append(self.next())
        return events

    def error(self) -> dict[str, Any]:
        event: dict[str, Any] = self.next()
        assert event["type"] == "error" and set(event) == {"type", "error", "code"}, event
        return event

    def closed(self) -> tuple[int, str]:
        """Code and reason, once all events are read."""
        with pytest.raises(ConnectionClosed) as end:
            for _ in range(100):
                self.next()
        assert end.value.rcvd is not None
        return end.value.rcvd.code, end.value.rcvd.reason


def opened(server: Live, query: str = "", **options: Any) -> ClientConnection:
    return connect(server.url.replace("http", "ws") + "/v1/realtime" + query, **options)


@pytest.fixture
def client(server: Live) -> Iterator[Client]:
    with opened(server) as connection:
        yield Client(connection)
    wait_until(lambda: sessions(server).count == 0)


def sessions(server: Live) -> realtime.Sessions:
    found: Any = server.app.sockets[realtime.PATH]
    return found


def heard(tiny: TinyWhisper, samples: Any, *, rate: int = RATE, language: str | None = None) -> str:
    """Of each clip apart, as transformers hears it, to the end that the model makes or its length."""

    data, texts = (samples * 32768).astype("<i2").tobytes(), []
    while data:
        (clip,) = next_clip(data, rate, SpeechToTextConfig(max_audio_clip_s=SECONDS))
        language = language or tiny.language(clip.samples)
        texts.append(tiny.heard(clip.samples, LENGTH - 4, language=language))
        data = data[round(clip.seconds * rate) * 2 :]
    return "".join(texts).lstrip()


def post(server: Live, samples: Any) -> str:
    files = {"file": ("a.wav", wav(samples), "audio/wav")}
    text: str = httpx.post(server.url + "/v1/audio/transcriptions", files=files, timeout=60).json()["text"]
    return text


# ---- what is heard


def test_the_documented_conversation(client: Client, tiny: TinyWhisper) -> None:
    """Ready, audio in pieces, final; and once more on the same connection."""
    assert client.created["type"] == "session.created" and client.created["id"].startswith("sess-")
    assert isinstance(client.created["created"], int)
    client.send({"type": "session.update", "model": "w"})
    for samples in (SHORT, LONG):
        client.send(COMMIT, *(append(piece) for piece in np.array_split(samples, 7)), FINAL)
        events = client.until()
        deltas = "".join(one["delta"] for one in events[:-1])
        assert deltas == events[-1]["text"] == heard(tiny, samples) != ""
        usage = events[-1]["usage"]
        clips = cut_into_clips(samples, SpeechToTextConfig(max_audio_clip_s=SECONDS))
        frames = [math.ceil(round(100 * clip.seconds, 6)) for clip in clips]  # of what the encoder read
        assert usage["prompt_tokens"] == 4 * len(clips) + sum(frames)
        assert usage["completion_tokens"] >= len(events) - 1
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_audio_that_is_committed_behind(client: Client, tiny: TinyWhisper) -> None:
    """No sign of readiness first: several utterances may wait, and each is a text of its own."""
    client.send(append(SHORT), COMMIT, append(LONG), COMMIT)
    assert [client.until()[-1]["text"] for _ in range(2)] == [heard(tiny, SHORT), heard(tiny, LONG)]


def test_a_clip_is_heard_before_the_utterance_ends(client: Client, server: Live) -> None:
    client.send(COMMIT, append(LONG))
    first = client.until("transcription.delta")[-1]["delta"]
    assert first and server.state.load.count == 1
    client.send(FINAL)
    assert client.until()[-1]["text"].startswith(first)


def test_it_is_what_a_file_says(client: Client, server: Live) -> None:
    samples = (LONG * 32768).round() / 32768
    client.send(COMMIT, append(samples), FINAL)
    assert client.until()[-1]["text"] == post(server, samples * 32768 / 32767)


def test_cleared_audio_is_not_heard(client: Client, tiny: TinyWhisper) -> None:
    client.send(append(LONG), {"type": "input_audio_buffer.clear"}, append(SHORT), COMMIT)
    assert client.until()[-1]["text"] == heard(tiny, SHORT)


def test_openai_s_client(server: Live, tiny: TinyWhisper) -> None:
    """Its transcription sessions, at its rate and at another."""
    api = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    fast = np.repeat(SHORT, 3)[::2]  # 24 kHz
    with api.realtime.connect(model="w") as connection:
        created: Any = connection.recv()
        assert created.type == "session.created" and created.session.type == "transcription"
        assert created.session.audio.input.format.rate == 24000
        for samples, rate, language in ((fast, 24000, "de"), (LONG, 16000, "en")):
            heard_as: Any = {
                "format": {"type": "audio/pcm", "rate": rate}, "turn_detection": None,
                "transcription": {"model": "w", "language": language},
            }  # fmt: skip
            connection.session.update(session={"type": "transcription", "audio": {"input": heard_as}})
            updated: Any = connection.recv()
            assert updated.type == "session.updated"
            assert updated.session.audio.input.transcription.language == language
            connection.input_audio_buffer.append(audio=pcm(samples))
            connection.input_audio_buffer.commit()
            committed, added = connection.recv(), connection.recv()
            assert committed.type == "input_audio_buffer.committed" and added.type == "conversation.item.added"
            deltas, event = [], connection.recv()
            while event.type == "conversation.item.input_audio_transcription.delta":
                assert event.item_id == committed.item_id
                deltas.append(event.delta or "")
                event = connection.recv()
            assert event.type == "conversation.item.input_audio_transcription.completed"
            assert "".join(deltas) == event.transcript == heard(tiny, samples, rate=rate, language=language)
            assert event.usage.type == "duration"
            assert event.usage.seconds == pytest.approx(len(samples) / rate, abs=0.01)
        connection.input_audio_buffer.commit()
        error: Any = connection.recv()
        assert error.type == "error" and error.error.code == "input_audio_buffer_commit_empty"
        assert error.error.type == "invalid_request_error"
        connection.input_audio_buffer.clear()
        assert connection.recv().type == "input_audio_buffer.cleared"


def test_another_rate_is_resampled(tiny: TinyWhisper) -> None:
    fast = np.repeat(SHORT, 3)[::2]

    (clip,) = next_clip((fast * 32768).astype("<i2").tobytes(), 24000, SpeechToTextConfig(max_audio_clip_s=SECONDS))
    samples = (fast * 32768).astype("<i2").astype(np.float32) / 32768
    assert np.array_equal(clip.samples, resample(Audio(samples, 24000), RATE))


# ---- refusals


@pytest.mark.parametrize(
    ("event", "code", "words"),
    [("no json", "invalid_event", "cannot be read"), ("[1]", "invalid_event", "cannot be read"),
     ("{}", "invalid_event", "type"),
     ('{"type":7}', "invalid_event", "cannot be read"), ('{"type":"nonsense"}', "invalid_event", "nonsense"),
     ("[" * 200_000, "invalid_event", "cannot be read"), ('{"type":"x","y":' + "[" * 200_000, "invalid_event", "read"),
     (b"\x00\x01", "invalid_event", "binary"), ('{"type":"input_audio_buffer.append"}', "invalid_event", "missing"),
     ('{"type":"input_audio_buffer.append","audio":"%%%"}', "invalid_event", "base64"),
     ('{"type":"input_audio_buffer.append","audio":"AAAA"}', "invalid_event", "3 bytes"),
     (json.dumps(FINAL), "input_audio_buffer_commit_empty", "no audio"),
     ('{"type":"session.update","model":"nope"}', "model_not_found", "nope")],
    ids=str,
)  # fmt: skip
def test_garbage_is_refused_and_the_session_goes_on(
    client: Client, tiny: TinyWhisper, event: str | bytes, code: str, words: str
) -> None:
    client.connection.send(event)
    error = client.error()
    assert error["code"] == code and words in error["error"], error
    client.send(append(SHORT), FINAL)
    assert client.until()[-1]["text"] == heard(tiny, SHORT)


@pytest.mark.parametrize(
    ("session", "param"),
    [({"type": "realtime"}, "session.type"), ({"include": ["x"]}, "session.include"),
     ({"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}, "session.audio.input.turn_detection"),
     ({"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}, "session.audio.input.noise_reduction"),
     ({"audio": {"input": {"format": {"type": "audio/pcmu"}}}}, "session.audio.input.format"),
     ({"audio": {"input": {"format": {"rate": 7}}}}, "session.audio.input.format"),
     ({"audio": {"input": {"transcription": {"language": "xx"}}}}, "language"),
     ({"audio": {"input": {"transcription": {"model": "nope"}}}}, "model")],
    ids=str,
)  # fmt: skip
def test_what_a_session_cannot_be(server: Live, session: dict[str, Any], param: str) -> None:
    with opened(server, "?intent=transcription") as connection:
        client = Client(connection)
        client.send({"type": "session.update", "event_id": "mine", "session": session})
        event = client.next()
        assert event["type"] == "error" and event["error"]["param"] == param and event["error"]["event_id"] == "mine"


def test_too_many_errors_end_the_session(client: Client) -> None:
    client.send(*[{"type": "nonsense"}] * realtime.MOST_ERRORS)
    code, reason = client.closed()
    assert code == 1008 and str(realtime.MOST_ERRORS) in reason


def test_a_huge_message_ends_the_session(client: Client) -> None:
    client.connection.send("x" * (MESSAGE_BYTES + 1))
    code, reason = client.closed()
    assert code == 1009 and str(MESSAGE_BYTES) in reason


def test_a_message_of_endless_fragments(client: Client) -> None:
    with contextlib.suppress(ConnectionClosedError):  # the server may have closed before the last of them is sent
        client.connection.send("" for _ in range(MOST_FRAGMENTS + 8))
    code, reason = client.closed()
    assert code == 1008 and str(MOST_FRAGMENTS) in reason


def by_hand(server: Live) -> tuple[socket.socket, ClientProtocol]:
    """A session on a bare socket: clients of the library stop sending where these tests go on."""
    protocol = ClientProtocol(parse_uri(server.url.replace("http", "ws") + realtime.PATH))
    raw = socket.create_connection((protocol.uri.host, protocol.uri.port), timeout=60)
    protocol.send_request(protocol.connect())
    raw.sendall(b"".join(protocol.data_to_send()))
    while protocol.state is State.CONNECTING:
        protocol.receive_data(raw.recv(4096))
    return raw, protocol


FRAGMENT = b"\x00\x80" + bytes(4)  # masked, empty, not the last
PING = b"\x89\x80" + bytes(4)


@pytest.mark.parametrize(
    ("first", "told"),
    [(b"\x01\x80" + bytes(4), (1008, f"a message has more than {MOST_FRAGMENTS} fragments")),
     (b"\xf1\x80" + bytes(4), (1002, "reserved bits must be 0"))],
    ids=["fragments", "reserved bits"],
)  # fmt: skip
def test_who_breaks_the_protocol_is_told_why_while_still_sending(
    server: Live, first: bytes, told: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "_LINGER_SECONDS", 120.0)  # however long this client takes
    raw, protocol = by_hand(server)
    with raw:
        raw.sendall(first + FRAGMENT * MOST_FRAGMENTS + PING)
        for _ in range(20):
            raw.sendall(FRAGMENT * 1000)
            time.sleep(0.01)
        while data := raw.recv(4096):
            protocol.receive_data(data)
    assert protocol.close_rcvd is not None
    assert (protocol.close_rcvd.code, protocol.close_rcvd.reason) == told
    wait_until(lambda: sessions(server).count == 0)


def test_who_never_stops_sending_is_cut_off(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_LINGER_SECONDS", 0.2)
    raw, _ = by_hand(server)
    with raw, pytest.raises((ConnectionResetError, BrokenPipeError)):
        raw.sendall(b"\x01\x80" + bytes(4))
        for _ in range(6000):
            raw.sendall(FRAGMENT * 1000)
            time.sleep(0.01)
    wait_until(lambda: sessions(server).count == 0)


def test_audio_without_end_that_nobody_commits(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.MAX_REALTIME_SECONDS, "_value", 4)
    with opened_again(client) as again:
        again.send(*[append(SHORT)] * 4)
        error = again.error()
        assert error["code"] == "input_audio_buffer_full" and "the limit is 4 s" in error["error"]
        again.send(COMMIT)
        assert len(again.until()) > 1


def test_audio_without_end_is_read_as_fast_as_it_is_heard(
    server: Live, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six times what may wait: nothing is refused and nothing lost."""
    monkeypatch.setattr(env.MAX_REALTIME_SECONDS, "_value", 4)
    with opened_again(client) as again:
        again.send(COMMIT, *[append(one) for one in np.array_split(np.concatenate([LONG] * 5), 20)], FINAL)
        assert again.until()[-1]["text"] == heard_by_file(server, np.concatenate([LONG] * 5))


def test_an_utterance_longer_than_any_audio(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.MAX_AUDIO_SECONDS, "_value", 3)
    client.send(append(LONG))
    error = client.error()
    assert error["code"] == "input_audio_buffer_full" and "the limit is 3 s" in error["error"]


def test_hardly_any_audio(client: Client) -> None:
    client.send(append(SHORT[:100]), COMMIT)
    error = client.error()
    assert error["code"] == "input_audio_buffer_commit_empty" and "100 ms" in error["error"]


async def test_a_client_that_reads_nothing_is_gone_and_no_request_was_too_slow() -> None:
    session = object.__new__(realtime.Session)
    session._idle = 0.01
    session._call = SimpleNamespace(send=lambda message: asyncio.Event().wait())
    with pytest.raises(ConnectionError, match=r"the client read nothing for 0\.01 s") as told:
        await session._sent({"type": "websocket.send", "text": "{}"})
    assert not isinstance(told.value, TimeoutError)


def test_an_idle_session_ends(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.REALTIME_IDLE_SECONDS, "_value", 1)
    with opened(server) as connection:
        client = Client(connection)
        assert client.error()["code"] == "session_idle"
        code, reason = client.closed()
        assert code == 1001 and "1 s" in reason


def test_sessions_are_counted(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.MAX_REALTIME_SESSIONS, "_value", 1)
    with opened(server) as connection:
        Client(connection)
        with pytest.raises(InvalidStatus) as refused, opened(server):
            pass
        response = refused.value.response
        assert response.status_code == 503 and response.headers["retry-after"]
        assert "the limit is 1" in json.loads(response.body or b"")["error"]["message"]
    wait_until(lambda: sessions(server).count == 0)
    with opened(server) as connection:
        Client(connection)


def test_a_model_in_the_address_that_is_not_served(server: Live) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(server, "?model=nope"):
        pass
    assert refused.value.response.status_code == 404


def test_a_query_of_very_many_fields(server: Live) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(server, "?" + "&".join(f"a{i}=1" for i in range(40))):
        pass
    assert refused.value.response.status_code == 400 and not sessions(server).count


def test_a_refused_update_changes_no_form(client: Client) -> None:
    """The next one is still the first in OpenAI's form, whose rate is another."""
    wrong = {"audio": {"input": {"transcription": {"language": "xx"}}}}
    client.send({"type": "session.update", "session": wrong})
    assert client.next()["type"] == "error"
    client.send({"type": "session.update", "session": {"audio": {"input": {"transcription": {"language": "en"}}}}})
    assert client.next()["session"]["audio"]["input"]["format"]["rate"] == 24000


@pytest.mark.parametrize("origin", ["https://evil.example", "http://[", ""])
def test_pages_of_others_may_not_connect(server: Live, origin: Any) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(server, additional_headers={"Origin": origin}):
        pass
    assert refused.value.response.status_code == 403
    own: Any = server.url
    with opened(server, origin=own) as connection:
        Client(connection)


def test_a_connection_whose_answer_is_under_way_stays_http(server: Live) -> None:
    """Whom the first answer is for would not be told when the client goes."""
    host, port = server.url.removeprefix("http://").split(":")
    upgrade = (
        "GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nhost: x\r\n\r\n{upgrade}".encode())
        found = b""
        while found.count(b"HTTP/1.1 ") < 2:
            more = connection.recv(65536)
            assert more, found
            found += more
    assert b"HTTP/1.1 426" in found and b"HTTP/1.1 101" not in found


def test_plain_http_and_other_paths(server: Live) -> None:
    answer = httpx.get(server.url + "/v1/realtime")
    assert answer.status_code == 426 and answer.headers["upgrade"] == "websocket"
    with pytest.raises(InvalidStatus) as refused, connect(server.url.replace("http", "ws") + "/v1/models"):
        pass
    assert refused.value.response.status_code == 200  # answered as any other request


def test_a_handshake_with_too_many_headers(server: Live) -> None:
    """More than the WebSocket parser takes, and fewer than HTTP may have."""
    many: Any = {f"x-{number}": "y" for number in range(200)}
    with pytest.raises(InvalidMessage), opened(server, additional_headers=many):
        pass
    with opened(server) as connection:
        Client(connection)


def test_pings_whose_pongs_nobody_reads(server: Live) -> None:
    """The connection is cut off before the pongs fill memory."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = (
            f"GET /v1/realtime HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        raw.sendall(head.encode())
        assert raw.recv(64).startswith(b"HTTP/1.1 101")
        ping = struct.pack("!BB4s", 0x89, 0x80 | 125, b"\0\0\0\0") + b"x" * 125
        with pytest.raises(OSError):
            for _ in range(4000):
                raw.sendall(ping * 100)
    wait_until(lambda: sessions(server).count == 0)


def test_a_model_that_hears_nothing(tmp_path: Path) -> None:
    with live_fake(tmp_path / "m") as text:
        with pytest.raises(InvalidStatus) as refused, opened(text):
            pass
        response = refused.value.response
        assert response.status_code == 400
        error = json.loads(response.body or b"")["error"]
        assert "does not support transcriptions" in error["message"] and error["param"] == "model"


def test_keys_are_asked_for(tiny: TinyWhisper) -> None:
    engine = {"dtype": "float32", "max_num_seqs": 8, "served_model_name": "w"}
    with live(str(tiny.folder), engine=engine, api_key=["secret"]) as guarded:
        with pytest.raises(InvalidStatus) as refused, opened(guarded):
            pass
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body or b"")["error"]["type"] == "AuthenticationError"
        api = openai.OpenAI(base_url=guarded.url + "/v1", api_key="secret")
        with api.realtime.connect(model="w") as connection:
            assert connection.recv().type == "session.created"


# ---- ends


def test_a_client_that_goes_takes_its_request_with_it(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(server) as connection:
        client = Client(connection)
        client.send(append(LONG), COMMIT)
        client.until("transcription.delta")
        connection.socket.close()
    wait_until(lambda: sessions(server).count == 0)
    wait_until(lambda: not server.engine._streams.request_ids())
    assert server.state.load.count == 0


def test_a_request_that_the_engine_ends(server: Live, client: Client, tiny: TinyWhisper) -> None:
    """The utterance fails, and the session hears the next one."""
    client.send(append(LONG), COMMIT)
    client.until("transcription.delta")
    server.loop.call_soon_threadsafe(server.engine.end_all, ShutdownError("it is over"))
    event = client.next()
    while event["type"] == "transcription.delta":
        event = client.next()
    if event["type"] == "error":  # unless all of it was heard by then
        assert "it is over" in event["error"] and event["code"] == "transcription_failed"
    else:
        assert event["type"] == "transcription.done"
    client.send(append(SHORT), FINAL)
    expected = heard(tiny, SHORT)
    while client.next().get("text") != expected:
        pass


def test_a_server_that_ends_closes_its_sessions(tiny: TinyWhisper) -> None:
    engine = {"dtype": "float32", "max_num_seqs": 8, "served_model_name": "w"}
    with contextlib.ExitStack() as after:
        with live(str(tiny.folder), engine=engine) as running:
            client = Client(after.enter_context(opened(running)))
            client.send(append(LONG), COMMIT)
        code, _ = client.closed()
        assert code == 1012


class opened_again:  # noqa: N801
    """Another session, for limits that are read when one begins."""

    def __init__(self, client: Client) -> None:
        host, port = client.connection.remote_address[:2]
        # its pings wait behind audio that is not read yet
        self._connection = connect(f"ws://{host}:{port}/v1/realtime", ping_interval=None)

    def __enter__(self) -> Client:
        return Client(self._connection.__enter__())

    def __exit__(self, *about: Any) -> None:
        self._connection.__exit__(*about)


def heard_by_file(server: Live, samples: Any) -> str:
    return post(server, (samples * 32768).astype("<i2") / 32767)


def test_audio_that_waits_counts_for_all_sessions(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """With files that are being transcribed; what a session held is free when it ends."""
    desk = sessions(server).desk
    assert desk._sample_bytes == 0
    monkeypatch.setattr(speech_desk, "_MOST_SAMPLE_BYTES", 2 * len(LONG) + len(SHORT))
    with opened(server) as first, opened(server) as second:
        one, other = Client(first), Client(second)
        one.send(append(LONG), {"type": "session.update", "model": "w"}, append(SHORT), {"type": "no such event"})
        assert "is being transcribed; the limit is" in one.error()["error"]  # of the second piece
        assert "no such event" in one.error()["error"]
        assert desk._sample_bytes == 2 * len(LONG)
        other.send(append(SHORT))
        assert "is being transcribed; the limit is" in other.error()["error"]
        one.send({"type": "input_audio_buffer.clear"}, {"type": "no such event"})
        one.error()
        assert desk._sample_bytes == 0
        other.send(append(SHORT), {"type": "no such event"})
        other.error()
        assert desk._sample_bytes == 2 * len(SHORT)
    wait_until(lambda: sessions(server).count == 0)
    assert desk._sample_bytes == 0
