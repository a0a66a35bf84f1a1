"""What /render says is what is sent: fed to /inference/v1/generate, it gives the same tokens as the request itself."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.base.net import free_port
from quire.cli.launch import launch
from quire.config import EngineArgs, UsageContext
from quire.engine.absent import AbsentEngine
from quire.schema.errors import ConfigError, NotBuiltError
from tests.fake_engine import write_model
from tests.seq2seq_models import make_model
from tests.server.live import Live, error_of, events, live
from tests.server.test_disconnect import running, send, wait_for

PATH = "/inference/v1/generate"
CHAT: Any = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "temperature": 0}


def generate(server: Live, body: Any) -> dict[str, Any]:
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_prompts_of_encoders_are_not_rendered(tmp_path: Path) -> None:
    """Token ids that are the decoder's would be read as the encoder's, and answered."""
    make_model("T5ForConditionalGeneration", tmp_path)
    with live(str(tmp_path), engine={"dtype": "float32", "num_gpu_blocks_override": 100}) as server:
        for path, asked in (("/v1/completions", {"prompt": "Hi there"}), ("/v1/chat/completions", CHAT)):
            assert "encoder" in error_of(server.post(f"{path}/render", asked))["message"]


@pytest.mark.parametrize("further", [{}, {"temperature": 0.9, "seed": 5, "n": 2, "top_k": 40, "stop": [","]}])
def test_a_rendered_chat_gives_the_same_answer(smol: Live, further: dict[str, Any]) -> None:
    asked = {**CHAT, **further, "return_token_ids": True}
    rendered = smol.post("/v1/chat/completions/render", asked).json()
    itself = smol.post("/v1/chat/completions", asked).json()
    assert rendered["token_ids"] == itself["prompt_token_ids"]
    found = generate(smol, rendered)
    assert [choice["token_ids"] for choice in found["choices"]] == [one["token_ids"] for one in itself["choices"]]
    assert [choice["finish_reason"] for choice in found["choices"]] == [
        one["finish_reason"] for one in itself["choices"]
    ]
    assert found["usage"]["completion_tokens"] == itself["usage"]["completion_tokens"]
    assert found["request_id"] == rendered["request_id"]


def test_rendered_completions(smol: Live) -> None:
    asked: Any = {"prompt": ["The sea is", "One, two,"], "max_tokens": 4, "temperature": 0, "logit_bias": {"28": 2}}
    rendered = smol.post("/v1/completions/render", asked).json()
    assert len({one["request_id"] for one in rendered}) == 2
    itself = smol.post("/v1/completions", {**asked, "return_token_ids": True}).json()["choices"]
    for one, choice in zip(rendered, itself, strict=True):
        assert one["token_ids"] == choice["prompt_token_ids"] and one["sampling_params"]["logit_bias"] == {"28": 2.0}
        assert generate(smol, one)["choices"][0]["token_ids"] == choice["token_ids"]


def test_where_tokens_stand(smol: Live) -> None:
    """Every token's place in the text, also of characters that are cut and of special tokens."""
    tokenizer = smol.engine.tokenizer
    assert tokenizer is not None
    text = "The sea, naïve 東京 🌧 is <|im_end|> deep."
    (one,) = smol.post("/v1/completions/render", {"prompt": text, "return_token_offsets": True}).json()
    places = one["token_offsets"]
    assert len(places) == len(one["token_ids"])
    end = 0
    for token_id, (first, past) in zip(one["token_ids"], places, strict=True):
        said = tokenizer.token_text(token_id)
        assert text[first:past] == said or "\ufffd" in said
        assert end - 1 <= first <= end <= past  # nothing is left out; a character that is cut counts for both
        end = past
    assert end == len(text)
    chat = smol.post("/v1/chat/completions/render", {**CHAT, "return_token_offsets": True}).json()
    assert len(chat["token_offsets"]) == len(chat["token_ids"])
    assert generate(smol, chat)["choices"]
    assert smol.post("/v1/completions/render", {"prompt": text}).json()[0]["token_offsets"] is None
    (ids,) = smol.post("/v1/completions/render", {"prompt": [504, 5061], "return_token_offsets": True}).json()
    assert ids["token_offsets"] is None


_TELLS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
_TALK = [
    {"role": "user", "content": "Naïve <b>?"},
    {"role": "assistant", "content": "Yes, 東京 🌧."},
    {"role": "user", "content": "Again, Yes, 東京 🌧."},
    {"role": "assistant", "content": "No"},
]


@pytest.fixture(scope="module")
def telling() -> Iterator[Live]:
    """A template that says where the model wrote."""
    with live(engine={"max_model_len": 512}, chat_template=_TELLS, trust_request_chat_template=True) as server:
        yield server


def written_by_the_model(server: Live, **further: Any) -> list[str] | None:
    """The text of each run of tokens that the mask names."""
    body = {"messages": _TALK, "add_generation_prompt": False, "return_assistant_tokens_mask": True, **further}
    answer = server.post("/v1/chat/completions/render", body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    mask, runs = found["assistant_tokens_mask"], [[]]
    if mask is None:
        return None
    assert len(mask) == len(found["token_ids"]) and set(mask) <= {0, 1}
    for token_id, mine in zip(found["token_ids"], mask, strict=True):
        if mine:
            runs[-1].append(token_id)
        elif runs[-1]:
            runs.append([])
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None and server.post(PATH, found).status_code == 200
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def test_which_tokens_the_model_wrote(telling: Live, smol: Live) -> None:
    own = ["Yes, 東京 🌧.<|im_end|>", "No<|im_end|>"]
    assert written_by_the_model(telling) == own
    assert written_by_the_model(telling, chat_template="A:" + _TELLS) == own  # in a process of its own
    assert written_by_the_model(telling, continue_final_message=True) == [own[0], "No"]
    assert written_by_the_model(telling, messages=_TALK[:1]) == []
    assert written_by_the_model(telling, truncate_prompt_tokens=3) is None
    assert written_by_the_model(smol) is None  # its template does not say
    plain = telling.post("/v1/chat/completions/render", {"messages": _TALK}).json()
    assert plain["assistant_tokens_mask"] is None


def test_a_template_that_marks_would_change_is_not_believed(telling: Live) -> None:
    changes = "{% set all %}{% generation %} {{ messages[1].content }} {% endgeneration %}{% endset %}{{ all | trim }}"
    assert written_by_the_model(telling, chat_template=changes) is None


# ---- a server without an engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`quire launch render` as a program, on a folder whose checkpoint this version cannot run and that has no
    weights."""
    folder = tmp_path_factory.mktemp("render")
    model = write_model(folder / "model")
    about = json.loads((folder / "model" / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "model" / "config.json").write_text(json.dumps(about))
    port = free_port()
    command = [sys.executable, "-m", "quire.cli.main", "launch", "render", model, "--port", str(port)]
    command += ["--served-model-name", "fake", "--max-model-len", "512"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as server:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
        try:
            while time.monotonic() < until and server.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                time.sleep(0.05)
            yield url
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_what_is_rendered_without_an_engine_is_the_same(rendering: str, fake: Live) -> None:
    for path, body in (
        ("/v1/chat/completions/render", {"messages": CHAT["messages"], "tools": None, "logit_bias": {"5": 1}}),
        ("/v1/completions/render", {"prompt": ["abc", "de"], "return_token_offsets": True, "stop": ["x"]}),
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [70, 71]}),
    ):
        mine, theirs = httpx.post(rendering + path, json=body, timeout=60).json(), fake.post(path, body).json()
        for one in (mine, theirs):
            for entry in one if isinstance(one, list) else [one]:
                entry.pop("request_id", None)
        assert mine == theirs, path
    rendered = httpx.post(f"{rendering}/v1/chat/completions/render", json=CHAT, timeout=60).json()
    assert generate(fake, rendered)["choices"][0]["token_ids"]
    wrong = httpx.post(f"{rendering}/v1/completions/render", json={"prompt": [99999]}, timeout=60)
    assert "out of vocabulary" in error_of(wrong)["message"]


def test_a_server_without_an_engine_generates_nothing(rendering: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", PATH, "/v1/responses", "/invocations"):
        error = error_of(httpx.post(rendering + path, json={**CHAT, "prompt": "a"}, timeout=60), 501)
        assert "quire launch render" in error["message"] and path in error["message"]
    theirs = httpx.post(f"{rendering}/v1/messages", json=CHAT, timeout=60)
    assert theirs.status_code == 501 and theirs.json()["type"] == "error"  # in Anthropic's form
    assert [one["id"] for one in httpx.get(f"{rendering}/v1/models", timeout=60).json()["data"]] == ["fake"]
    assert httpx.get(f"{rendering}/docs", timeout=60).status_code == 200
    assert httpx.get(rendering, timeout=60).status_code == 404  # the chat page would have nobody to talk to
    assert httpx.get(f"{rendering}/metrics", timeout=60).status_code == 200


def test_an_engine_that_is_absent_refuses_by_name(tmp_path: Path) -> None:
    config = EngineArgs(model=write_model(tmp_path)).create_engine_config(UsageContext.RENDER_SERVER)
    absent = AbsentEngine(config)
    assert absent.wait_ready().vocab_size == 260
    for run in (lambda: absent.submit([]), absent.receive, lambda: absent.call("sleep")):
        with pytest.raises(NotBuiltError, match="no engine here"):
            run()


def test_launch_names_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch([], "quire launch") == 0 and "render" in capsys.readouterr().out
    assert launch(["rendr"], "quire launch") == 2 and "did you mean 'render'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="api_server_count"):
        launch(["render", "--api-server-count", "2"], "quire launch")


def test_defaults_are_filled_in(fake: Live) -> None:
    """The model's generation config says temperature 0.5 and at most 33 tokens."""
    rendered = fake.post("/v1/chat/completions/render", {"messages": CHAT["messages"]}).json()
    assert rendered["sampling_params"]["temperature"] == 0.5 and rendered["sampling_params"]["max_tokens"] == 33
    assert len(fake.engine.front.outputs) == 0
    cut = fake.post("/v1/completions/render", {"prompt": "abcdef", "truncate_prompt_tokens": 2}).json()
    assert len(cut[0]["token_ids"]) == 2 and "truncate_prompt_tokens" not in cut[0]["sampling_params"]


def test_refused_as_the_request_itself(fake: Live) -> None:
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        error = error_of(fake.post(path, {**CHAT, "temperature": -1}))
        assert error["param"] == "temperature"
        error_of(fake.post(path, {**CHAT, "model": "nope"}), 404)
    error_of(fake.post("/v1/completions/render", {"prompt": [99999]}))


# ---- generate -----------------------------------------------------------------------------------------------------


def test_streamed_is_whole(smol: Live) -> None:
    body = {
        "token_ids": [504, 5061, 314],
        "sampling_params": {"max_tokens": 6, "temperature": 0.0, "logprobs": 2, "n": 2},
    }
    whole = generate(smol, body)
    parts = events(smol.post(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}}).text)
    assert parts[-1]["usage"] == whole["usage"] and parts[-1]["choices"] == []
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert [i for part in mine for i in part["token_ids"]] == choice["token_ids"] and len(mine) > 1
        logprobs = [entry for part in mine for entry in part["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"] and len(logprobs[0]["top_logprobs"]) == 2
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_what_is_not_said_is_sampling_params_own(fake: Live) -> None:
    found = generate(fake, {"token_ids": [70, 71]})
    assert found["choices"][0]["token_ids"] == [70, 71] * 8  # 16 tokens, not the generation config's 33
    with_prompt = generate(
        fake, {"token_ids": [70, 71, 72], "sampling_params": {"prompt_logprobs": 1, "max_tokens": 1}}
    )
    assert with_prompt["prompt_logprobs"][0] is None and set(with_prompt["prompt_logprobs"][1]) >= {"71"}


def test_text_may_be_switched_off(fake: Live) -> None:
    """Nothing of it is shown here; only stop strings need it."""
    for told in (True, False):
        body = {"token_ids": [70, 71], "sampling_params": {"detokenize": told, "max_tokens": 2, "logprobs": 1}}
        assert generate(fake, body)["choices"][0]["token_ids"] == [70, 71]
    wrong = error_of(fake.post(PATH, {"token_ids": [5], "sampling_params": {"detokenize": False, "stop": ["a"]}}))
    assert "detokenize" in wrong["message"]
    error_of(fake.post(PATH, {"token_ids": [5], "sampling_params": {"detokenize": "maybe"}}))


def test_stop_strings(fake: Live) -> None:
    asked = {"token_ids": [5, 6, 7, 8], "sampling_params": {"stop_token_ids": [7]}}
    choice = generate(fake, asked)["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == 7 and choice["token_ids"] == [5, 6, 7]
    ids = [byte + 4 for byte in b"abcd"]
    choice = generate(fake, {"token_ids": ids, "sampling_params": {"stop": ["bc"]}})["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "bc"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"token_ids": [5], "sampling_params": {"colour": 1}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"output_kind": 0}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 512}}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"n": 1000}}, "n"),
        ({"token_ids": [5], "sampling_params": {"top_p": "much"}}, "top_p"),
        ({"token_ids": [99999]}, "prompt"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [5], "features": {"a": 1}}, "features"),
        ({"token_ids": [5], "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"token_ids": [5], "colour": 1}, "colour"),
        ({}, "token_ids"),
    ],
)
def test_refusals_name_the_field(fake: Live, body: dict[str, Any], param: str) -> None:
    assert error_of(fake.post(PATH, body))["param"] == param


def test_an_error_in_a_stream(fake: Live) -> None:
    body = {"token_ids": [5, 6, 7], "stream": True, "sampling_params": {"extra_args": {"fail_at": 3}}}
    assert "cannot go on" in events(fake.post(PATH, body).text)[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes(fake: Live, stream: bool) -> None:
    params = {"max_tokens": 40, "extra_args": {"sleep": 0.3}}
    client = send(fake, PATH, {"token_ids": [5, 6], "stream": stream, "sampling_params": params})
    wait_for(lambda: running(fake)[0], 1)
    client.close()
    wait_for(lambda: fake.state.load.count, 0)
    wait_for(lambda: running(fake), (0, 0.0))


def test_the_page(fake: Live) -> None:
    page = httpx.get(f"{fake.url}/openapi.json", timeout=60).json()
    rendered = page["paths"]["/v1/chat/completions/render"]["post"]["responses"]["200"]["content"]
    taken = page["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert taken.endswith("/TokensRequest") and rendered["application/json"]["schema"]["$ref"].endswith("TokensRequest")
