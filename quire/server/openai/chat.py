"""POST /v1/chat/completions: messages in, the next message out.

In: a ChatRequest. Out: one JSON answer, or its chunks: the role first, then content, at last the reason it ended. All
text goes through an OutputParser (text/parse); what it makes of the text is what is shown, in both forms.
Must not know: engines, sockets, how a parser finds what it finds.
"""

from __future__ import annotations

from typing import Any

from quire.schema.errors import InputError
from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.schema.prompt import Prompt
from quire.server.openai.chat_prompt import render_prompt
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.envelope import Envelope, encode
from quire.server.openai.limits import check_chat, check_request
from quire.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.server.openai.params import Opened, most_tokens, open_requests, sampling_params
from quire.server.route import Call
from quire.server.state import ServerState
from quire.server.stream import fold, send_events
from quire.text.parse.base import OutputParser

_PLAIN_END = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


async def create_chat_completion(call: Call, request: ChatRequest) -> None:
    """Answer a conversation.

    Streams with `stream: true`.
    """
    state = call.state
    state.served.check(request.model)
    check_request(request, state.options, 1)
    check_chat(request, state.options)
    opens = request.add_generation_prompt
    opens = not request.continue_final_message if opens is None else opens
    public_id = f"chatcmpl-{call.request_id(request.request_id)}"
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    asked = request.max_completion_tokens if name == "max_completion_tokens" else request.max_tokens
    most = most_tokens(state, asked, None, name=name)
    logprobs = {"logprobs": request.top_logprobs or 0} if request.logprobs else {}
    params = sampling_params(request, state, max_tokens=most, **logprobs)
    hidden = request.tool_choice == "none" and state.options.exclude_tools_when_tool_choice_none
    text = await render_prompt(
        state,
        request.messages,
        tools=None if hidden else request.tools,
        documents=request.documents,
        add_generation_prompt=opens,
        continue_final_message=bool(request.continue_final_message),
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning_effort,
    )
    opened = await open_requests(
        call, request, public_id, [Prompt(text=text, cache_salt=request.cache_salt)], params,
        add_special_tokens=bool(request.add_special_tokens), most=asked,
    )  # fmt: skip
    role = state.options.response_role if opens else request.messages[-1]["role"]
    with opened.flow:
        answer = ChatAnswer(state, request, opened, public_id, role)
        if request.stream:
            await send_events(call, opened.flow, answer)
        else:
            await call.reply(answer.whole(await fold(call, opened.flow)))


class _Choice:
    """One growing answer."""

    __slots__ = ("begun", "head", "index", "num_tokens", "parser")

    def __init__(self, index: int, head: bytes, parser: OutputParser) -> None:
        self.index = index
        self.head = head + b'{"index":%d,"delta":{"content":' % index
        self.begun = False
        self.num_tokens = 0
        self.parser = parser


class ChatAnswer:
    """One call's results as OpenAI's chat completions."""

    def __init__(self, state: ServerState, request: ChatRequest, opened: Opened, public_id: str, role: str) -> None:
        self._request = request
        self._role = role
        self._asked = opened.asked[0]
        self._envelope = Envelope(state, request, opened, public_id, "chat.completion.chunk")
        self._public_id, self._state, self._opened = public_id, state, opened
        as_ids = request.return_tokens_as_token_ids
        as_ids = state.options.return_tokens_as_token_ids if as_ids is None else as_ids
        self._names = TokenNames(state.engine.tokenizer, as_ids=as_ids)
        self._choices = [_Choice(i, self._envelope.head, state.parser()) for i in range(request.n or 1)]
        self._echo = self._last_message() if request.echo else ""
        self._is_plain = not request.logprobs and not request.return_token_ids and not self._envelope.continuous

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

    def _opening(self, choice: _Choice) -> bytes:
        """The role, and with echo the last message."""
        request = self._request
        fields = {
            "index": choice.index,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        told = {
            "prompt_token_ids": self._asked.token_ids if request.return_token_ids else None,
            "prompt_text": self._asked.text if request.return_prompt_text else None,
        }
        event = self._envelope.head + encode(fields) + b"]" + self._usage(choice) + b"," + encode(told)[1:] + b"\n\n"
        if self._echo:
            event += choice.head + encode(self._echo) + _PLAIN_END
        return event

    def _event(self, choice: _Choice, output: CompletionOutput) -> bytes:
        choice.num_tokens += len(output.token_ids)
        ended = output.finish_reason is not None
        deltas = choice.parser.feed(output.text, output.token_ids, final=ended)
        if self._is_plain and not ended:
            return b"".join([choice.head + encode(delta.content) + _PLAIN_END for delta in deltas])
        if not deltas and not ended and not output.token_ids:
            return b""
        texts = [delta.content for delta in deltas] or [""]
        events = [choice.head + encode(text) + _PLAIN_END for text in texts[:-1]]
        fields: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": texts[-1]},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
        }
        if ended:
            fields["stop_reason"] = output.stop_reason
        fields["token_ids"] = output.token_ids if self._request.return_token_ids else None
        events.append(self._envelope.head + encode(fields) + b"]" + self._usage(choice) + b"}\n\n")
        return b"".join(events)

    def _usage(self, choice: _Choice) -> bytes:
        if not self._envelope.continuous:
            return b""
        usage = self._envelope.usage(choice.num_tokens)
        usage["completion_tokens_details"] = None
        return b',"usage":' + encode(usage)

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, results: dict[str, RequestOutput]) -> bytes:
        request = self._request
        envelope = Envelope(self._state, request, self._opened, self._public_id, "chat.completion")
        result = results[self._asked.request_id]
        envelope.note_cached(result.request_id, result.num_cached_tokens)
        shown = [self._message(output) for output in sorted(result.outputs, key=lambda one: one.index)]
        wanted = request.prompt_logprobs is not None
        return envelope.whole(
            shown,
            sum(choice.num_tokens for choice in self._choices),
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs) if wanted else None,
            prompt_token_ids=result.prompt_token_ids if request.return_token_ids else None,
            prompt_text=self._asked.text if request.return_prompt_text else None,
        )

    def _message(self, output: CompletionOutput) -> dict[str, Any]:
        choice = self._choices[output.index]
        choice.num_tokens += len(output.token_ids)
        deltas = choice.parser.feed(output.text, output.token_ids, final=True)
        message: dict[str, Any] = {
            "role": self._role,
            "content": self._echo + "".join(delta.content for delta in deltas),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        }
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._request.return_token_ids else None,
            "routed_experts": None,
        }

    # ---- both --------------------------------------------------------------------------------------------------

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        most = self._request.top_logprobs or 0
        return chat_logprobs(self._names, output.token_ids, output.logprobs or (), most)

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
