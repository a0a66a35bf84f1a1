"""Clips as requests of the engine: how a speech model is asked to hear one, and which language is spoken in it.

In: a call, its speech model and a clip. Out: flows of results. Must not know: where audio comes from, how answers are
written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from quire.media.speech.clips import Clip
from quire.media.speech.model import SpeechModel, SpeechTask
from quire.schema.errors import InputError, OverloadedError
from quire.schema.params import SamplingParams
from quire.schema.prompt import Prompt
from quire.server.flow import Results
from quire.server.openai.params import most_tokens, prepare_requests, sampling_params
from quire.server.openai.protocol import GenerateRequest
from quire.server.route import HttpCall


class SpeechCall(NamedTuple):
    """Whose clips are heard, and how."""

    call: HttpCall
    plain: GenerateRequest  # the same as any request that generates
    model: SpeechModel
    most: int | None = None  # tokens of the text of one clip
    source: str = "file"  # the field that audio came in, for refusals

    def params(self, task: SpeechTask, **further: Any) -> SamplingParams:
        most = most_tokens(self.call.model, self.most, None, name="max_completion_tokens")
        return sampling_params(
            self.plain, self.call.model, max_tokens=most, **self.model.decoding(task).as_params(), **further
        )

    async def prompt(self, task: SpeechTask) -> Prompt:
        return await self.call.model.engine.read(len(task.prompt), self.model.prompt, task)

    async def open(self, public_id: str, prompt: Prompt, params: SamplingParams, clip: Clip) -> tuple[str, Results]:
        """The id of the engine's request, and its flow."""
        media = {"audio": (clip.samples, int(self.model.config.sample_rate))}
        try:
            (prepared,) = await prepare_requests(
                self.call, self.plain, public_id, [msgspec.structs.replace(prompt, media=media)], params,
                add_special_tokens=False, most=self.most,
            )  # fmt: skip
        except InputError as wrong:
            if wrong.param != "multi_modal_data":
                raise
            raise type(wrong)(str(wrong), param=self.source) from wrong
        return prepared.request_id, self.call.model.engine.open([prepared])

    async def language(self, public_id: str, clip: Clip) -> str | None:
        """That is spoken, as the model hears it; None where it needs none."""
        detection = self.model.detection()
        if detection is None:
            return self.model.default_language
        params = SamplingParams(
            max_tokens=1, temperature=0.0, allowed_token_ids=sorted(detection.languages), detokenize=False,
            skip_clone=True,
        )  # fmt: skip
        _, flow = await self.open(f"{public_id}-language", detection.prompt, params, clip)
        with flow:
            results = []
            while not flow.finished:
                results += await flow.next()
        token_ids = results[-1].outputs[0].token_ids
        if not token_ids:
            raise OverloadedError("the request was aborted while its language was being detected; send it again")
        return detection.languages[token_ids[0]]
