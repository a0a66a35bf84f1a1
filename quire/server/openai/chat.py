"""POST /v1/chat/completions: messages in, the next message out.

In: a ChatRequest. Out: one JSON answer, or its chunks: the role first, then content, at last the reason it ended. Both
come from one producer, `ChatAnswer._deltas`: a stream writes each piece, a whole answer is the fold of the pieces. Text
that may hold thoughts or calls goes through an OutputParser (text/parse). Must not know: engines, sockets, how a parser
finds what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from quire.schema.errors import InputError
from quire.schema.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from quire.server.openai.chat_open import OpenedChat, open_chat, prepare_chat
from quire.server.openai.chat_protocol import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ChatToolCall,
    FunctionDelta,
    ToolCallDelta,
)
from quire.server.openai.envelope import Envelope, WireTemplate, encode, to_json
from quire.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.server.openai.protocol import Usage
from quire.server.route import HttpCall
from quire.server.stream import drained, send_events
from quire.text.parse.base import Delta, Folded, OutputParser, fold

# a chunk that holds nothing but text, in two halves
_PLAIN = ChatChunkChoice(index=0, delta=ChatDelta(content=""), logprobs=None, finish_reason=None, token_ids=None)
_PLAIN_START, _PLAIN_END = (to_json(_PLAIN) + b"]}\n\n").split(b'""')
# the first and the last chunk of an answer that is nothing but text
_FIRST = WireTemplate(
    ChatChunkChoice(index=-1, delta=ChatDelta(role="<role>", content=""), logprobs=None, finish_reason=None),
    -1, "<role>",
)  # fmt: skip
_LAST = WireTemplate(
    ChatChunkChoice(
        index=-1, delta=ChatDelta(content="<content>"), logprobs=None, finish_reason="<why>", stop_reason="<stop>",
        token_ids=None,
    ),
    -1, "<content>", "<why>", "<stop>",
)  # fmt: skip
_NO_PROMPT = to_json(
    ChatChunk(id="", object="chat.completion.chunk", created=0, model="", choices=[], prompt_token_ids=None,
              prompt_text=None)
).partition(b'"choices":[')[2] + b"\n\n"  # fmt: skip


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
            await call.reply(await drained(call, flow, answer))


class _ChatChoiceStream:
    """One growing answer. Its pieces are collected only where the answer is to be whole."""

    __slots__ = (
        "begun", "called", "deltas", "end", "index", "logprobs", "lost", "num_tokens", "parser", "plain_start",
        "token_ids",
    )  # fmt: skip

    def __init__(self, index: int, parser: OutputParser | None) -> None:
        """Without a parser all text is content."""
        self.index, self.parser = index, parser
        self.plain_start = b""
        self.begun = self.called = self.lost = False  # called: there was a tool call; lost: and it broke off
        self.num_tokens = 0
        self.deltas: list[Delta] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.end: tuple[str | None, int | str | None] = None, None


class ChatAnswer:
    """One call's results as OpenAI's chat completions."""

    def __init__(self, chat: OpenedChat, public_id: str) -> None:
        self._request = request = chat.prepared.request
        self._role = chat.role
        self._forced = bool(chat.prepared.tools.forced)  # one function was named: its call is the answer
        self._prepared = chat.opened.requests[0]
        self._envelope = Envelope(chat.options, chat.model, request, chat.opened, public_id, ChatChunk)
        self._chat = chat
        self._choices = [
            _ChatChoiceStream(index, chat.new_parser() if chat.is_parsed else None) for index in range(request.n or 1)
        ]
        self._echo = self._last_message() if request.echo else ""
        self._with_logprobs = bool(request.logprobs or request.logprob_token_ids)
        self._is_plain = not self._with_logprobs and not request.return_token_ids and not self._envelope.continuous
        self._prompt_logprobs: PromptLogprobs | None = None

    def _deltas(self, choice: _ChatChoiceStream, output: CompletionOutput) -> Sequence[Delta]:
        """What is new in an answer: the one way from results to what is shown of them."""
        choice.num_tokens += len(output.token_ids)
        if choice.parser is None:
            return (Delta(output.text),) if output.text else ()
        deltas = choice.parser.feed(output.text, output.token_ids, final=output.finish_reason is not None)
        for delta in deltas:
            if (call := delta.call) is not None:
                choice.called = True
                choice.lost = call.broken is not None and call.index == 0
        return deltas

    def _note(self, result: RequestOutput) -> None:
        if result.finished:
            self._envelope.note_cached(result.request_id, result.num_cached_tokens)
        if result.prompt_logprobs is not None:
            self._prompt_logprobs = result.prompt_logprobs

    def _finish_reason(self, choice: _ChatChoiceStream, output: CompletionOutput) -> str | None:
        """An answer that stopped after a call it chose to make stopped for that."""
        chosen = choice.called and not choice.lost and not self._forced and output.finish_reason == "stop"
        return "tool_calls" if chosen else output.finish_reason

    @cached_property
    def _names(self) -> TokenNames:
        as_ids, chat = self._request.return_tokens_as_token_ids, self._chat
        as_ids = chat.options.return_tokens_as_token_ids if as_ids is None else as_ids
        return TokenNames(chat.model.engine.tokenizer, as_ids=as_ids)

    def _logprobs(self, output: CompletionOutput) -> Any:
        """As plain data; the wire types make sure of it."""
        if not self._with_logprobs:
            return None
        most = self._request.top_logprobs or 0
        named = self._request.logprob_token_ids
        return chat_logprobs(self._names, output.token_ids, output.logprobs or (), most, named)

    # ---- streamed ----------------------------------------------------------------------------------------------

    def chunk(self, results: list[RequestOutput]) -> bytes:
        parts: list[bytes] = []
        for result in results:
            self._note(result)
            for output in result.outputs:
                parts.append(self._event(self._choices[output.index], output))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> bytes:
        if not self._envelope.include_usage:
            return b""
        return self._envelope.usage_chunk(sum(choice.num_tokens for choice in self._choices))

    def _event(self, choice: _ChatChoiceStream, output: CompletionOutput) -> bytes:
        deltas = self._deltas(choice, output)
        ended = output.finish_reason is not None
        if self._is_plain and not ended and choice.begun and len(deltas) == 1 and (content := deltas[0].content):
            return choice.plain_start + encode(content) + _PLAIN_END
        opening = b"" if choice.begun else self._opening(choice)
        if deltas and (last := deltas[-1].call) is not None and last.broken is not None:
            deltas = deltas[:-1]  # that a call broke off is for whole answers; here it has been shown
        if self._is_plain and not ended:
            return opening + b"".join([_plain(choice, delta) for delta in deltas])
        if not deltas and not ended and not output.token_ids:
            return opening
        # an end stands with content or with nothing: clients do not look for calls beside it
        alone = not deltas or (ended and not deltas[-1].content)
        events = [_plain(choice, delta) for delta in (deltas if alone else deltas[:-1])]
        reason = self._finish_reason(choice, output)
        if self._is_plain:
            content = "" if alone else deltas[-1].content
            news = _LAST.fill(choice.index, content, reason, output.stop_reason)
            return b"".join([opening, *events, self._envelope.head, news, b"]}\n\n"])
        fields: dict[str, Any] = {"stop_reason": output.stop_reason} if ended else {}
        typed = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content="") if alone else _wire_delta(deltas[-1]),
            logprobs=self._logprobs(output),
            finish_reason=reason,
            token_ids=output.token_ids if self._request.return_token_ids else None,
            **fields,
        )
        return opening + b"".join(events) + self._envelope.event(typed, self._usage_so_far(choice))

    def _opening(self, choice: _ChatChoiceStream) -> bytes:
        """The role, and with echo the last message."""
        request = self._request
        choice.begun = True
        choice.plain_start = self._envelope.head + _PLAIN_START.replace(b"0", b"%d" % choice.index, 1)
        if self._is_plain and not request.return_prompt_text:
            event = self._envelope.head + _FIRST.fill(choice.index, self._role) + _NO_PROMPT
        else:
            delta = ChatDelta(role=self._role, content="")
            event = self._envelope.event(
                ChatChunkChoice(index=choice.index, delta=delta, logprobs=None, finish_reason=None),
                self._usage_so_far(choice, before=True),
                prompt_token_ids=self._prepared.token_ids if request.return_token_ids else None,
                prompt_text=self._prepared.text if request.return_prompt_text else None,
            )
        return event + _plain(choice, Delta(self._echo)) if self._echo else event

    def _usage_so_far(self, choice: _ChatChoiceStream, *, before: bool = False) -> Usage | None:
        if not self._envelope.continuous:
            return None
        return self._envelope.usage(0 if before else choice.num_tokens, completion_tokens_details=None)

    # ---- whole -------------------------------------------------------------------------------------------------

    def take(self, results: list[RequestOutput]) -> None:
        for result in results:
            self._note(result)
            for output in result.outputs:
                self._collect(self._choices[output.index], output)

    def _collect(self, choice: _ChatChoiceStream, output: CompletionOutput) -> None:
        choice.begun = True
        choice.deltas += self._deltas(choice, output)
        if self._request.return_token_ids:
            choice.token_ids += output.token_ids
        if (logprobs := self._logprobs(output)) is not None:
            choice.logprobs += logprobs["content"]
        choice.end = self._finish_reason(choice, output), output.stop_reason

    def whole(self) -> bytes:
        return to_json(self.response())

    def response(self) -> ChatResponse:
        """After the last result."""
        request = self._request
        shows_prompt = request.prompt_logprobs is not None
        return self._envelope.whole(
            ChatResponse,
            [self._message(choice) for choice in self._choices if choice.begun],
            sum(choice.num_tokens for choice in self._choices),
            prompt_logprobs=prompt_logprobs(self._prompt_logprobs) if shows_prompt else None,
            prompt_token_ids=self._prepared.token_ids if request.return_token_ids else None,
            prompt_text=self._prepared.text if request.return_prompt_text else None,
        )

    def _message(self, choice: _ChatChoiceStream) -> ChatChoice:
        finish_reason, stop_reason = choice.end
        return ChatChoice(
            index=choice.index,
            message=_wire_message(self._role, self._echo, fold(choice.deltas)),
            logprobs=ChatLogprobs(content=choice.logprobs) if self._with_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=choice.token_ids if self._request.return_token_ids else None,
            routed_experts=None,
        )

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
            raise InputError("echo: the last message has parts that are not text", param="echo")
        return "\n".join(str(text) for text in texts)


def _plain(choice: _ChatChoiceStream, delta: Delta) -> bytes:
    """A chunk that holds nothing but its delta."""
    if delta.content:
        return choice.plain_start + encode(delta.content) + _PLAIN_END
    start = choice.plain_start.removesuffix(b'{"content":')
    return start + to_json(_wire_delta(delta)) + _PLAIN_END[1:]


def _wire_delta(delta: Delta) -> ChatDelta:
    """A thought goes by two names: `reasoning`, and `reasoning_content` for older clients."""
    if (part := delta.call) is not None:
        if part.name is None:
            function = FunctionDelta(arguments=part.arguments)
            return ChatDelta(tool_calls=[ToolCallDelta(index=part.index, function=function)])
        function = FunctionDelta(name=part.name, arguments=part.arguments)
        return ChatDelta(tool_calls=[ToolCallDelta(index=part.index, id=part.id, type="function", function=function)])
    if delta.reasoning:
        return ChatDelta(reasoning=delta.reasoning, reasoning_content=delta.reasoning)
    return ChatDelta(content=delta.content)


def _wire_message(role: str, echo: str, answer: Folded) -> ChatMessage:
    """One that is calls or thought alone has no content."""
    content = echo + answer.content
    older = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return ChatMessage(
        role=role,
        content=content if content or not (answer.calls or answer.reasoning) else None,
        refusal=None,
        annotations=None,
        audio=None,
        function_call=None,
        tool_calls=[
            ChatToolCall(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))
            for call in answer.calls
        ],
        reasoning=answer.reasoning or None,
        **older,
    )
