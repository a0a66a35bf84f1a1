"""SpeechDesk: what bounds all speech of an API process, whichever route it comes by: models, decoding, samples in work.

In: work to be done with audio. Out: its clips, made in threads of the media workers, for few audio files at once,
because an hour of audio takes hundreds of megabytes. Must not know: forms, sockets, answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from quire.checkpoint.media import hears_speech
from quire.llm.online import LONG_TEXT
from quire.media.speech import speech_model
from quire.media.speech.clips import Clip
from quire.media.speech.model import SpeechModel
from quire.schema.errors import InputError, OverloadedError
from quire.server.served import ServedModel

DECODED_AT_ONCE, _QUEUE = 2, 64  # audio files
_MOST_SAMPLE_BYTES = 1 << 30  # of all audio that is being transcribed


class SpeechDesk:
    """What all calls of the speech routes share: the models' declarations, and how much audio is being worked on.
    Touched by one event loop."""

    def __init__(self) -> None:
        self._models: dict[str, SpeechModel] = {}
        self._sample_bytes = self._num_decoding = 0
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)

    async def model(self, served: ServedModel) -> SpeechModel:
        config = served.config.model_config
        if not hears_speech(config.hf_config) or not served.takes_media:
            raise InputError(f"The model {served.name!r:.100} does not support transcriptions", param="model")
        if (known := self._models.get(served.root)) is None:
            make = partial(speech_model, config.hf_config, config.path, served.tokenizer)
            known = self._models[served.root] = await served.engine.lanes.run(LONG_TEXT, make)
        return known

    async def decoded(self, served: ServedModel, work: Callable[[], list[Clip]]) -> list[Clip]:
        """What `work` makes of audio, in the threads that decode all media, of which a few may be busy with this. A
        thread whose audio nobody waits for any more is busy until it is done."""
        if self._num_decoding >= DECODED_AT_ONCE + _QUEUE:
            raise OverloadedError(f"{self._num_decoding} audio files wait to be decoded, as many as may wait")
        self._num_decoding += 1
        try:
            await self._decoding.acquire()
        except BaseException:
            self._num_decoding -= 1
            raise
        try:
            engine = served.engine
            media = await engine.lanes.run(LONG_TEXT, lambda: engine.front.inputs.media)  # which may be made now
            (future,) = media.workers.submit_all([work])
        except BaseException:
            self._decoded()
            raise
        loop = asyncio.get_running_loop()

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._decoded)

        future.add_done_callback(leave)
        return await asyncio.wrap_future(future)

    def _decoded(self) -> None:
        self._num_decoding -= 1
        self._decoding.release()

    def take(self, num_bytes: int) -> None:
        if self._sample_bytes and self._sample_bytes + num_bytes > _MOST_SAMPLE_BYTES:
            raise OverloadedError(
                f"audio of {self._sample_bytes} bytes is being transcribed; the limit is {_MOST_SAMPLE_BYTES}"
            )
        self._sample_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self._sample_bytes -= num_bytes
