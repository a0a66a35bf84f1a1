"""Programs with tools against a live server: ask, call the function, send its result, get the answer.

Twice: over a scripted model, where the whole loop is known to the letter, and over the embedded model, held by
tool_choice to a call that fits its schema. The scripted model repeats its prompt, and its template writes what a model
would answer at each turn; <end> is its end of text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from tests.server.live import Live, live, live_fake

TEMPLATE = (
    "{%- set last = messages[-1] -%}{%- set first = messages | selectattr('role', 'equalto', 'user') | first -%}"
    "{%- if last.role == 'tool' -%}The weather is {{ last.content }}.<end>"
    '{%- elif tools -%}Let me look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
    "{{ (first.content | string).split(' ')[-1] }}\"}}\n</tool_call><end>"
    "{%- else -%}{{ last.content }}<end>{%- endif -%}"
)
ASKED = "How is the weather in Oslo"
FINAL = "The weather is 4 degrees in Oslo."
WORDS = "It is cold."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class Person(pydantic.BaseModel, extra="forbid"):  # or the model may add fields until it has no tokens left
    name: Annotated[str, pydantic.Field(max_length=12)]
    mood: Literal["glad", "sad"]


def get_weather(city: str) -> str:
    """How the weather is in a city."""
    return f"4 degrees in {city}"


@pytest.fixture(scope="module")
def smol() -> Iterator[Live]:
    """The embedded model; JSON without white space and the quicker of the grammars' backends keep it short."""
    held = {"backend": "guidance", "disable_any_whitespace": True}
    engine = {"max_model_len": 512, "served_model_name": "smol", "structured_outputs_config": held}
    with live(engine=engine) as server:
        yield server


@pytest.fixture(scope="module")
def scripted(smol: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Started after the embedded model's server: while it lives, every new engine has the fake worker."""
    options = {"chat_template": TEMPLATE, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with live_fake(tmp_path_factory.mktemp("agents"), engine={"generation_config": "vllm"}, **options) as found:
        yield found


def turns(model: str, first: Any, second: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(tool_choice, further fields) of each turn. The embedded model is told its last words."""
    yield first, {}
    yield second, {} if model == "fake" else {"structured_outputs": {"choice": [WORDS]}}


def openai_at(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


# ---- openai: chat -------------------------------------------------------------------------------------------------


def chat_loop(client: openai.OpenAI, model: str, first_choice: Any, *, stream: bool) -> str:
    """At most two turns with the model, as a program of a user's runs them."""
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for choice, more in turns(model, first_choice, "none"):
        given: Any = {"model": model, "messages": messages, "tools": [CHAT_TOOL], "tool_choice": choice,
                      "temperature": 0, "max_tokens": 120, "parallel_tool_calls": False,
                      "extra_body": more}  # fmt: skip
        if stream:
            with client.chat.completions.stream(**given) as flow:
                message = flow.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**given).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("no answer after the result")


@pytest.mark.parametrize("stream", [False, True])
def test_chat_scripted(scripted: Live, stream: bool) -> None:
    assert chat_loop(openai_at(scripted), "fake", "auto", stream=stream) == FINAL


def test_chat_embedded(smol: Live) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert chat_loop(openai_at(smol), "smol", "required", stream=False) == WORDS
    assert chat_loop(openai_at(smol), "smol", named, stream=True) == WORDS


def test_chat_parse(smol: Live) -> None:
    found = openai_at(smol).chat.completions.parse(
        model="smol", messages=[{"role": "user", "content": "Describe Ann."}], response_format=Person,
        temperature=0, max_tokens=60,
    )  # fmt: skip
    assert isinstance(found.choices[0].message.parsed, Person)
    strict = openai.pydantic_function_tool(Person, name="describe")
    found = openai_at(smol).chat.completions.parse(
        model="smol", messages=[{"role": "user", "content": "Ann."}], tools=[strict],
        tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=120,
    )  # fmt: skip
    (call,) = found.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Person)


# ---- openai: responses --------------------------------------------------------------------------------------------


def responses_loop(client: openai.OpenAI, model: str, first_choice: Any) -> tuple[str, list[str]]:
    """Streamed. (the last text, the types of all events)"""
    history: list[Any] = [{"role": "user", "content": ASKED}]
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    kinds: list[str] = []
    for choice, more in turns(model, first_choice, "none"):
        given: Any = {"model": model, "input": history, "tools": [tool], "tool_choice": choice, "temperature": 0,
                      "max_output_tokens": 120, "parallel_tool_calls": False, "extra_body": more}  # fmt: skip
        with client.responses.stream(**given) as flow:
            kinds += [event.type for event in flow]
            response = flow.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text, kinds
        history += response.output
        for call in calls:
            output = get_weather(**json.loads(call.arguments))
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    raise AssertionError("no answer after the result")


def test_responses_scripted(scripted: Live) -> None:
    text, kinds = responses_loop(openai_at(scripted), "fake", "auto")
    assert text == FINAL
    assert kinds.count("response.completed") == 2 and kinds.count("response.function_call_arguments.done") == 1


def test_responses_embedded(smol: Live) -> None:
    text, kinds = responses_loop(openai_at(smol), "smol", "required")
    assert text == WORDS and kinds.count("response.function_call_arguments.done") == 1
    found = openai_at(smol).responses.parse(
        model="smol", input="Describe Ann.", text_format=Person, temperature=0, max_output_tokens=60
    )
    assert isinstance(found.output_parsed, Person)


# ---- anthropic ----------------------------------------------------------------------------------------------------


def messages_loop(server: Live, model: str, first_choice: Any, *, stream: bool) -> str:
    import anthropic  # takes seconds, of every process that collects this file

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for choice, most in ((first_choice, 120), ({"type": "none"}, 120 if model == "fake" else 4)):
        given: Any = {"model": model, "messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": most,
                      "extra_body": {"temperature": 0}}  # fmt: skip
        if stream:
            with client.messages.stream(**given) as flow:
                message = flow.get_final_message()
        else:
            message = client.messages.create(**given)
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in message.content if block.type == "text")
        assert message.stop_reason == "tool_use"
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": get_weather(**use.input)} for use in uses]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    raise AssertionError("no answer after the result")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_scripted(scripted: Live, stream: bool) -> None:
    assert messages_loop(scripted, "fake", {"type": "auto"}, stream=stream) == FINAL


def test_anthropic_embedded(smol: Live) -> None:
    assert messages_loop(smol, "smol", {"type": "any", "disable_parallel_tool_use": True}, stream=True)


# ---- others' agents -----------------------------------------------------------------------------------------------


def test_instructor(smol: Live) -> None:
    instructor = pytest.importorskip("instructor")
    asked: Any = {"model": "smol", "messages": [{"role": "user", "content": "Describe Ann."}], "temperature": 0,
                  "max_tokens": 120, "response_model": Person, "max_retries": 0}  # fmt: skip
    client = instructor.from_openai(openai_at(smol), mode=instructor.Mode.TOOLS)
    assert isinstance(client.chat.completions.create(**asked), Person)


def pydantic_model(server: Live, model: str) -> Any:
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    return models.OpenAIChatModel(model, provider=provider)


async def test_pydantic_ai_scripted(scripted: Live) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    agent = pydantic_ai.Agent(pydantic_model(scripted, "fake"), tools=[get_weather])
    result = await agent.run(ASKED)
    assert result.output == FINAL
    parts = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert parts == ["user-prompt", "text", "tool-call", "tool-return", "text"]
    async with agent.run_stream(ASKED) as flow:
        assert await flow.get_output()


async def test_pydantic_ai_embedded(smol: Live) -> None:
    """Its answers are calls of a tool that returns them, which it requires."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    settings = {"temperature": 0.0, "max_tokens": 120, "parallel_tool_calls": False}
    agent = pydantic_ai.Agent(pydantic_model(smol, "smol"), output_type=Person, model_settings=settings)
    assert isinstance((await agent.run("Describe Ann.")).output, Person)


def langchain_loop(server: Live, model: str, choice: str | None) -> str:
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    tool = pytest.importorskip("langchain_core.tools").tool(get_weather)
    chat = langchain.ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=120)
    history = [messages.HumanMessage(ASKED)]
    extra: Any = {} if choice is None else {"tool_choice": choice}
    said = chat.bind_tools([tool], parallel_tool_calls=False, **extra).invoke(history)
    assert [call["name"] for call in said.tool_calls] == ["get_weather"]
    history += [said, *(tool.invoke(call) for call in said.tool_calls)]
    last = chat.bind_tools([tool], tool_choice="none", max_tokens=120 if model == "fake" else 4)
    return str(last.invoke(history).content)


def test_langchain_scripted(scripted: Live) -> None:
    assert langchain_loop(scripted, "fake", None) == FINAL


def test_langchain_embedded(smol: Live) -> None:
    assert langchain_loop(smol, "smol", "any")
