"""Structured output over HTTP: every way to ask for it, every client, and what hostile requests get."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.server.live import Live

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "age"],
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 99,
                                                                      "minimum": 0}},
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Describe a person."}]


def text_of(packed: Live, path: str, **body: Any) -> str:
    asked = {"prompt": "A person:"} if path == TEXT else {"messages": MESSAGES}
    answer = packed.post(path, {"model": "smol", "temperature": 0, "max_tokens": 60, **asked, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"] if path == TEXT else choice["message"]["content"])


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
    ],
)
def test_a_schema_in_every_way(packed: Live, path: str, body: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text_of(packed, path, **body)), SCHEMA)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_other_constraints(packed: Live, path: str) -> None:
    assert text_of(packed, path, structured_outputs={"choice": ["red", "blue"]}) in ("red", "blue")
    assert text_of(packed, path, guided_choice=["red", "blue"]) in ("red", "blue")
    assert re.fullmatch(r"\d{3}-\d{2}", text_of(packed, path, structured_outputs={"regex": r"\d{3}-\d{2}"}))
    assert re.fullmatch(r"[a-f]{4}", text_of(packed, path, guided_regex="[a-f]{4}"))
    assert text_of(packed, path, structured_outputs={"grammar": 'root ::= "on" | "off"'}) in ("on", "off")
    assert text_of(packed, path, guided_grammar='root ::= "on" | "off"') in ("on", "off")
    form = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"}
    assert re.fullmatch(
        r"<n>\d\d</n>", text_of(packed, path, response_format={"type": "structural_tag", "format": form})
    )
    assert text_of(packed, path, response_format={"type": "text"}, max_tokens=30, stop=[" "]) is not None


def test_json_object_is_an_object(packed: Live) -> None:
    answer = packed.post(CHAT, {"model": "smol", "messages": MESSAGES, "temperature": 0, "max_tokens": 120,
                              "response_format": {"type": "json_object"}}).json()["choices"][0]  # fmt: skip
    text = answer["message"]["content"]
    assert text.lstrip().startswith("{")
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_parse_with_a_pydantic_model_and_a_stream(packed: Live) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=10)
        age: int = pydantic.Field(ge=0, le=99)

    client = openai.OpenAI(base_url=f"{packed.url}/v1", api_key="none")
    parsed = client.chat.completions.parse(
        model="smol",
        messages=MESSAGES,
        response_format=Person,
        temperature=0,
        max_tokens=60,
    )
    found = parsed.choices[0].message.parsed
    assert isinstance(found, Person)
    with client.chat.completions.stream(
        model="smol",
        messages=MESSAGES,
        response_format=Person,
        temperature=0,
        max_tokens=60,
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found


def test_eight_at_once_equal_each_alone(smol: Live) -> None:
    bodies: list[dict[str, Any]] = [
        {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"regex": "[a-z]{5}"}},
        {"structured_outputs": {"choice": ["red", "blue"]}}, {"guided_json": SCHEMA},
        {"structured_outputs": {"regex": r"[A-Z]{2}\d{4}"}},
        {"structured_outputs": {"grammar": 'start: "x" /[0-9]+/ "y"'}},
        {"structured_outputs": {"json": {"type": "string", "pattern": "^[ab]{6}$"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}}}},
    ]  # fmt: skip

    def ask(body: dict[str, Any]) -> str:
        answer = smol.post(TEXT, {"model": "smol", "prompt": "A:", "temperature": 0, "max_tokens": 20, **body})
        return str(answer.json()["choices"][0]["text"])

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, bodies)) == alone


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, "'not'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"structured_outputs": {}, "guided_json": {"type": "strin"}}, "strin"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one"),
        ({"structured_outputs": {"jsn": {}}}, "jsn"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "only one"),
        ({"structured_outputs": {"regex": "(((a{999}){999}){999}){999}"}}, "repeats"),
        ({"structured_outputs": {"choice": ["x"] * 30_000}}, "30000"),
        ({"structured_outputs": {"grammar": "root ::= root2"}}, "root2"),
        ({"structured_outputs": {"json": {"type": "string", "description": "x" * 2_000_000}}}, "max_grammar_bytes"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_constraints_get_400(packed: Live, body: dict[str, Any], words: str, stream: bool) -> None:
    answer = packed.post(CHAT, {"model": "smol", "messages": MESSAGES, "max_tokens": 5, "stream": stream, **body})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_the_server_outlives_a_grammar_that_compiles_forever(packed: Live) -> None:
    rules = "\n".join(f"r{i} ::= (r{i + 1} | [a-z] r{i + 1}){{0,90}}" for i in range(12))
    answer = packed.post(TEXT, {"model": "smol", "prompt": "A", "max_tokens": 3,
                              "structured_outputs": {"grammar": f"root ::= r0\n{rules}\nr12 ::= [a-z]"}})  # fmt: skip
    assert answer.status_code in (200, 400), answer.text
    assert text_of(packed, TEXT, structured_outputs={"choice": ["still here"]}) == "still here"


def test_a_refusal_names_the_clients_field(packed: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}
    chat = {"model": "smol", "messages": MESSAGES, "max_tokens": 5}
    for body, param in (({"guided_regex": "(("}, "guided_regex"), ({"response_format": form}, "response_format")):
        assert packed.post(CHAT, {**chat, **body}).json()["error"]["param"] == param
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}}
    assert packed.post("/v1/responses", {"input": "x", "text": text}).json()["error"]["param"] == "text.format"
