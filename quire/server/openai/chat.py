"""POST /v1/chat/completions: messages in, the next message out.

In: a ChatRequest. Out: one JSON answer, or its chunks: the role first, then content, at last the reason it ended. All
text goes through an OutputParser (text/parse); what it makes of the text is what is shown, in both forms.
Must not know: engines, sockets, how a parser finds what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.schema.errors import InputError
from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.server.openai.chat_delta import wire_delta, wire_message
from quire.server.openai.chat_open import OpenedChat, open_chat, prepare_chat
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.envelope import Envelope, encode
from quire.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.server.route import HttpCall
from quire.server.stream import fold, rendered, send_events
from quire.text.parse.base import Delta, OutputParser
from quire.text.parse.base import fold as fold_deltas

_PLAIN_END = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


async def create_chat_completion(call: HttpCall, request: ChatRequest) -> None:
    """Answer a conversation.

    Streams with `stream: true`.
    """
    prepared = await prepare_chat(call, request)
    public_id = f"chatcmpl-{call.request_id(request.request_id)}"
    opened = await open_chat(call, prepared, public_id)
    with opened.opened.flow as flow:
        answer = ChatAnswer(opened, public_id)
        if request.stream:
            await send_events(call, flow, answer)
        else:
            results = await fold(call, flow)
            await call.reply(await rendered(call, results.values(), answer.whole, results))


class _ChatChoiceStream:
    """One growing answer."""

    __slots__ = ("begun", "called", "head", "index", "lost", "num_tokens", "parser", "start")

    def __init__(self, index: int, head: bytes, parser: OutputParser) -> None:
        self.index = index
        self.start = head + b'{"index":%d,"delta":' % index
        self.head = self.start + b'{"content":'
        self.begun = self.called = self.lost = False  # called: there was a tool call; lost: and it broke off
        self.num_tokens = 0
        self.parser = parser


class ChatAnswer:
    """One call's results as OpenAI's chat completions."""

    def __init__(self, chat: OpenedChat, public_id: str) -> None:
        self._request = request = chat.prepared.request
        self._role = chat.role
        self._forced = bool(chat.prepared.tools.forced)  # one function was named: its call is the answer
        self._prepared = chat.opened.requests[0]
        self._chat = chat
        self._public_id, self._opened = public_id, chat.opened
        self._envelope = Envelope(chat.options, chat.model, request, chat.opened, public_id, "chat.completion.chunk")
        as_ids = request.return_tokens_as_token_ids
        as_ids = chat.options.return_tokens_as_token_ids if as_ids is None else as_ids
        self._names = TokenNames(chat.model.engine.tokenizer, as_ids=as_ids)
        self._choices = [_ChatChoiceStream(i, self._envelope.head, chat.new_parser()) for i in range(request.n or 1)]
        self._echo = self._last_message() if request.echo else ""
        self._with_logprobs = bool(request.logprobs or request.logprob_token_ids)
        self._is_plain = not self._with_logprobs and not request.return_token_ids and not self._envelope.continuous

    # ---- streamed ----------------------------------------------------------------------------------------------

    def chunk(self, results: list[RequestOutput]) -> bytes:
        parts: list[bytes] = []
        for result in results:
            if result.finished:
                self._envelope.note_cached(result.request_id, result.num_cached_tokens)
            for output in result.outputs:
                choice = self._choices[output.index]
                if not choice.begun:
                    choice.begun = True
                    parts.append(self._opening(choice))
                parts.append(self._event(choice, output))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> bytes:
        if not self._envelope.include_usage:
            return b""
        return self._envelope.usage_chunk(sum(choice.num_tokens for choice in self._choices))

    def _opening(self, choice: _ChatChoiceStream) -> bytes:
        """The role, and with echo the last message."""
        request = self._request
        fields = {
            "index": choice.index,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        told = {
            "prompt_token_ids": self._prepared.token_ids if request.return_token_ids else None,
            "prompt_text": self._prepared.text if request.return_prompt_text else None,
        }
        event = self._envelope.head + encode(fields) + b"]" + self._usage(choice) + b"," + encode(told)[1:] + b"\n\n"
        if self._echo:
            event += choice.head + encode(self._echo) + _PLAIN_END
        return event

    def _event(self, choice: _ChatChoiceStream, output: CompletionOutput) -> bytes:
        choice.num_tokens += len(output.token_ids)
        ended = output.finish_reason is not None
        deltas = _shown(choice, choice.parser.feed(output.text, output.token_ids, final=ended))
        if self._is_plain and not ended:
            return b"".join([_plain(choice, delta) for delta in deltas])
        if not deltas and not ended and not output.token_ids:
            return b""
        # an end stands with content or with nothing: clients do not look for calls beside it
        alone = not deltas or (ended and not deltas[-1].content)
        events = [_plain(choice, delta) for delta in (deltas if alone else deltas[:-1])]
        fields: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": ""} if alone else _wire(choice, deltas[-1]),
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(choice, output),
        }
        if ended:
            fields["stop_reason"] = output.stop_reason
        fields["token_ids"] = output.token_ids if self._request.return_token_ids else None
        events.append(self._envelope.head + encode(fields) + b"]" + self._usage(choice) + b"}\n\n")
        return b"".join(events)

    def _usage(self, choice: _ChatChoiceStream) -> bytes:
        if not self._envelope.continuous:
            return b""
        usage = self._envelope.usage(choice.num_tokens)
        usage["completion_tokens_details"] = None
        return b',"usage":' + encode(usage)

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, results: dict[str, RequestOutput]) -> bytes:
        request = self._request
        envelope = Envelope(
            self._chat.options, self._chat.model, request, self._opened, self._public_id, "chat.completion"
        )
        result = results[self._prepared.request_id]
        envelope.note_cached(result.request_id, result.num_cached_tokens)
        shown = [self._message(output) for output in sorted(result.outputs, key=lambda one: one.index)]
        wanted = request.prompt_logprobs is not None
        return envelope.whole(
            shown,
            sum(choice.num_tokens for choice in self._choices),
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs) if wanted else None,
            prompt_token_ids=result.prompt_token_ids if request.return_token_ids else None,
            prompt_text=self._prepared.text if request.return_prompt_text else None,
        )

    def _message(self, output: CompletionOutput) -> dict[str, Any]:
        choice = self._choices[output.index]
        choice.num_tokens += len(output.token_ids)
        deltas = choice.parser.feed(output.text, output.token_ids, final=True)
        answer = fold_deltas(deltas)
        choice.called = bool(answer.calls)
        message = wire_message(self._role, self._echo, answer)
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(choice, output),
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._request.return_token_ids else None,
            "routed_experts": None,
        }

    # ---- both --------------------------------------------------------------------------------------------------

    def _finish_reason(self, choice: _ChatChoiceStream, output: CompletionOutput) -> str | None:
        """An answer that stopped after a call it chose to make stopped for that."""
        chosen = choice.called and not choice.lost and not self._forced and output.finish_reason == "stop"
        return "tool_calls" if chosen else output.finish_reason

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        most = self._request.top_logprobs or 0
        named = self._request.logprob_token_ids
        return chat_logprobs(self._names, output.token_ids, output.logprobs or (), most, named)

    def _last_message(self) -> str:
        """Its text, if it has the answer's role."""
        last = self._request.messages[-1]
        content = last.get("content")
        if last["role"] != self._role or not content:
            return ""
        if isinstance(content, str):
            return content
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise InputError("echo: the last message has parts that are no text", param="echo")
        return "\n".join(str(text) for text in texts)


def _shown(choice: _ChatChoiceStream, deltas: Sequence[Delta]) -> Sequence[Delta]:
    """Without the word that a call broke off, which is for whole answers; here it has been shown."""
    if deltas and (last := deltas[-1].call) is not None and last.broken is not None:
        choice.lost = last.index == 0
        return deltas[:-1]
    return deltas


def _wire(choice: _ChatChoiceStream, delta: Delta) -> dict[str, Any]:
    if delta.call is not None:
        choice.called = True
    return wire_delta(delta)


def _plain(choice: _ChatChoiceStream, delta: Delta) -> bytes:
    """A chunk that holds nothing but its delta."""
    if delta.content:
        return choice.head + encode(delta.content) + _PLAIN_END
    return choice.start + encode(_wire(choice, delta))[:-1] + _PLAIN_END
