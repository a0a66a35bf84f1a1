"""Lines about single requests (enable_log_requests, enable_log_outputs): requests and answers.

In: prepared requests and their results. Out: log lines, prompts and answers cut to `longest` characters.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.base.log import logger
from quire.engine.inputs import PreparedRequest
from quire.schema.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.schema.params import RequestOutputKind

log = logger("quire.llm.requests")


class LogRules(NamedTuple):
    outputs: bool = False  # answers too, not only requests
    deltas: bool = True  # and the pieces of those that are streamed
    longest: int | None = None  # characters


class RequestLog:
    def __init__(self, rules: LogRules) -> None:
        self._rules = rules
        self._texts: dict[tuple[str, int], list[str]] = {}  # of answers that come in pieces
        self._streamed: set[str] = set()

    def asked(self, one: PreparedRequest) -> None:
        log.info(
            "Request %s: %d prompt tokens, %s, prompt %r",
            one.request_id, len(one.token_ids), one.pooling or one.params, self._cut(one.text),
        )  # fmt: skip
        if self._rules.outputs and one.params.output_kind is RequestOutputKind.DELTA:
            self._streamed.add(one.request_id)

    def told(self, result: RequestOutput | PoolingRequestOutput[PoolingOutput]) -> None:
        """Results of one request, in order, until it is finished. What a request is pooled to is not written."""
        if not self._rules.outputs or isinstance(result, PoolingRequestOutput):
            return
        streamed = result.request_id in self._streamed
        for answer in result.outputs:
            text = answer.text
            if streamed:
                pieces = self._texts.setdefault((result.request_id, answer.index), [])
                pieces.append(text)
                if self._rules.deltas:
                    log.info("Request %s: answer %d goes on %r", result.request_id, answer.index, self._cut(text))
                text = "".join(pieces)
            if answer.finish_reason is not None:
                log.info(
                    "Request %s: answer %d %r, finish_reason %s",
                    result.request_id, answer.index, self._cut(text), answer.finish_reason,
                )  # fmt: skip
                self._texts.pop((result.request_id, answer.index), None)
        if result.finished:
            self._streamed.discard(result.request_id)

    def dropped(self, request_id: str) -> None:
        """It ended without a last result."""
        log.info("Request %s: ended before it was finished", request_id)
        self._streamed.discard(request_id)
        for key in [key for key in self._texts if key[0] == request_id]:
            del self._texts[key]

    def _cut(self, text: str | None) -> str | None:
        longest = self._rules.longest
        return text if text is None or longest is None else text[:longest]
