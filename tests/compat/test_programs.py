"""Programs written against the documented vLLM interface, run as they are: `import vllm` is answered by compat/.

Each runs as a user would run it, on a tiny checkpoint or the embedded model: with `run` in an interpreter of its own,
one program at least of each kind (offline, chat, several processes, asynchronous) and those that must not depend on the
interpreter; with `warm.run` in a fork of one that has torch imported (tests/warm_python.py). Of torchrun's programs one
is started by its command, the other by its launcher in such a fork. What it prints is held against what must be true.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from tests.pooling_models import make_pooling
from tests.server.hosted import Hosted
from tests.tiny_adapters import greedy, merge, write_adapter
from tests.tiny_models import make_tiny
from tests.warm_python import WarmPython

# Lines of several processes stay whole: an unbuffered stream writes a line's end by itself.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
PROGRAMS = Path(__file__).parent / "programs"
PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """OPT, as in most of the documented programs, but tiny and random."""
    folder = tmp_path_factory.mktemp("opt")
    make_tiny("OPTForCausalLM", folder)
    return str(folder)


def run(program: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=BUFFERED | variables)
    return printed_by(done, program)


class Warm:
    def __init__(self, python: WarmPython, *more: str) -> None:
        """`more`: what programs import beside torch, and need not import each."""
        self._python, self._more = python, more

    def run(self, program: str, *arguments: str, **variables: str) -> str:
        where, environment = PROGRAMS / f"{program}.py", os.environ | variables
        done = self._python.run(where, *arguments, env=environment, timeout=300, more=self._more)
        return printed_by(done, program)


@pytest.fixture
def warm(warm_python: WarmPython) -> Warm:
    return Warm(warm_python)


def printed_by(done: subprocess.CompletedProcess[str], program: str) -> str:
    assert done.returncode == 0, f"{program} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def quoted(text: str, label: str) -> list[str]:
    return [ast.literal_eval(found) for found in re.findall(rf"^{label}: (.+)$", text, re.MULTILINE)]


def id_lists(text: str, label: str) -> list[list[int]]:
    return [json.loads(found) for found in re.findall(rf"^{label}: (\[.*\])$", text, re.MULTILINE)]


def test_basic_generate(model: str) -> None:
    printed = run("basic_generate", model)
    assert quoted(printed, "Prompt") == PROMPTS
    texts = quoted(printed, "Output")
    assert len(texts) == 4
    assert len(set(texts)) == 4 and all(texts)


def test_pipeline_parallel(model: str, warm: Warm) -> None:
    printed = warm.run("pipeline_parallel", "--model", model, "-pp", "2")
    assert quoted(printed, "Prompt") == PROMPTS
    llm = LLM(model, max_model_len=128)
    try:
        whole = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    finally:
        llm.close()
    assert quoted(printed, "Output") == [one.outputs[0].text for one in whole]


def test_basic_chat_on_the_embedded_model(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    flags = ["--max-tokens", "12", "--temperature", "0", "--max-model-len", "1k"]
    printed = run("basic_chat", "--model", "", *flags, "--chat-template-path", str(template))
    one, many, other = re.split(r"^=+ \w+$", printed, flags=re.MULTILINE)[1:]
    (prompt,), (text,) = quoted(one, "Prompt"), quoted(one, "Generated text")
    assert prompt.startswith("<|im_start|>system\nYou are a helpful assistant<|im_end|>")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert len(text.split()) > 3
    assert quoted(many, "Generated text") == [text] * 10
    assert quoted(other, "Prompt")[0].startswith("system: You are a helpful assistant\nuser: Hello\n")


def test_structured_outputs_on_the_embedded_model(warm: Warm) -> None:
    printed = warm.run("structured_outputs")
    said = dict(re.findall(r"^(\w+): (.*)$", printed, re.MULTILINE))
    assert said["Choice"] in ("Positive", "Negative")
    assert re.fullmatch(r"\w+(@(\w+(\.(c(om?)?)?)?)?)?", said["Regex"])  # or a beginning, where max_tokens came first
    assert said["JSON"].startswith('{"brand"')
    assert re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ", said["Grammar"])


def test_chat_with_tools_on_the_embedded_model(warm: Warm) -> None:
    printed = warm.run("chat_with_tools")
    assert "Tag: True\nCalled: True\n" in printed
    assert re.search(r"^Result: It is 25 degrees in (Dallas|Austin), TX.$", printed, re.MULTILINE)
    assert quoted(printed, "Answer")[0]


def test_automatic_prefix_caching(model: str, warm: Warm) -> None:
    printed = warm.run("automatic_prefix_caching", model)
    (first, total), (second, _) = [(int(a), int(b)) for a, b in re.findall(r"Cached: (\d+) of (\d+)", printed)]
    assert first == 0
    assert 0.8 * total < second < total
    assert len(quoted(printed, "Output")) == 2


def test_prefix_caching_does_not_change_the_text(model: str, warm: Warm) -> None:
    printed = warm.run("prefix_caching", model)
    assert "Generated answers are the same: True" in printed
    texts = quoted(printed, "Generated text")
    assert len(texts) == 6 and texts[:3] == texts[3:] and all(texts)
    assert all(int(n) > 0 for n in re.findall(r"Cached tokens: (\d+)", printed))


def test_metrics(model: str, warm: Warm) -> None:
    printed = warm.run("metrics", model)
    counts = [(int(p), int(g)) for p, g in re.findall(r"^# (\d+) (\d+) ", printed, re.MULTILINE)]
    prompt_tokens, generated = sum(p for p, _ in counts), sum(g for _, g in counts)
    counters: dict[str, list[int]] = {}
    for name, value in re.findall(r"^(vllm:\w+) \(counter\) = (\d+)$", printed, re.MULTILINE):
        counters.setdefault(name, []).append(int(value))
    assert len(counts) == 4
    assert counters["vllm:prompt_tokens"] == [prompt_tokens]
    assert counters["vllm:generation_tokens"] == [generated]
    assert sum(counters["vllm:request_success"]) == 4
    gauges = dict(re.findall(r"^(vllm:\w+) \(gauge\) = (\S+)$", printed, re.MULTILINE))
    assert float(gauges["vllm:num_requests_running"]) == 0
    histograms = re.findall(r"^(vllm:\w+) \(histogram\)\n    sum = (\S+)\n    count = (\d+)", printed, re.MULTILINE)
    sums = {name: (float(total), int(count)) for name, total, count in histograms}
    assert sums["vllm:request_prompt_tokens"] == (prompt_tokens, 4)
    assert sums["vllm:request_generation_tokens"] == (generated, 4)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_inference_time_seconds"):
        total, count = sums[f"vllm:{name}"]
        assert count == 4 and 0 < total < 300, name
    assert sums["vllm:inter_token_latency_seconds"][1] == generated - 4


def test_reproducibility(model: str, warm: Warm) -> None:
    first, second = run("reproducibility", model), warm.run("reproducibility", model)
    assert len(set(quoted(first, "Generated text"))) == 4
    assert quoted(first, "Generated text") == quoted(second, "Generated text")
    assert quoted(first, "Random number") == quoted(second, "Random number")


@pytest.mark.parametrize("program", ["logits_processor_custom", "logits_processor_custom_req"])
def test_logits_processor(model: str, program: str, warm: Warm) -> None:
    printed = warm.run(program, model)
    forced, plain = id_lists(printed, "Ids"), id_lists(printed, "Plain")
    assert quoted(printed, "Prompt") == PROMPTS
    assert forced[0] == [128] * 16
    assert forced[2] == [67] * 16
    assert [forced[1], forced[3]] == [plain[1], plain[3]]  # rows that did not ask are left alone
    assert plain[0] != forced[0]
    if program == "logits_processor_custom":
        assert "Refused: " in printed and "is not int" in printed


def test_logits_processor_with_its_own_init(model: str, warm: Warm) -> None:
    printed = warm.run("logits_processor_custom_req_init", model)
    prompt_ids, (echoed, plain) = id_lists(printed, "Prompt ids")[0], id_lists(printed, "Ids")
    assert echoed == prompt_ids[:6]
    assert plain != echoed


def test_llm_engine_example(model: str, warm: Warm) -> None:
    printed = warm.run("llm_engine_example", "--model", model)
    outputs = [part for part in printed.split("-" * 50) if "RequestOutput(" in part]
    by_id = {re.search(r"request_id='?(\d+)", part).group(1): part for part in outputs}
    assert sorted(by_id) == ["0", "1", "2"]
    assert "Logprob(" in by_id["0"] and "prompt_logprobs=[None" in by_id["0"]
    assert by_id["1"].count("CompletionOutput(") == 1
    assert by_id["2"].count("CompletionOutput(") == 2
    assert all("finished=True" in part for part in outputs)


def test_llm_engine_without_a_model_takes_the_default(warm: Warm) -> None:
    assert warm.run("llm_engine_example", "--max-model-len", "256").count("RequestOutput(") == 3


def test_llm_engine_reset_kv(model: str, warm: Warm) -> None:
    never = warm.run("llm_engine_reset_kv", "--model", model, "--reset-at", "-1").splitlines()
    reset, *answers = warm.run("llm_engine_reset_kv", "--model", model).splitlines()
    assert reset == "Reset: True"
    assert len(answers) == 3
    assert sorted(map(json.loads, answers)) == sorted(map(json.loads, never))


def test_async_llm_streaming(model: str, warm: Warm) -> None:
    printed = run("async_llm_streaming", model)
    parts = printed.split("Prompt: ")[1:]
    assert len(parts) == 3
    for part in parts:
        assert "Finished" in part
        assert len(quoted(part, "Delta")) > 1
    assert printed.endswith("Shut down\n")
    in_process = warm.run("async_llm_streaming", model, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "".join(quoted(in_process, "Delta")) == "".join(quoted(printed, "Delta"))


def test_batch_inference(model: str, warm: Warm) -> None:
    assert warm.run("batch_inference", model) == "40 answers, same alone: True\n"


def test_a_sharded_state_is_saved_and_loaded(model: str, tmp_path: Path, warm: Warm) -> None:
    out = tmp_path / "sharded"
    warm.run("save_sharded_state", "--model", model, "--output", str(out))
    assert list(out.glob("model-rank-0-part-*.safetensors")) and (out / "config.json").exists()
    texts = [
        quoted(warm.run("load_sharded_state", "--model", *where, "--prompt", PROMPTS[0]), "Generated text")
        for where in ([str(out)], [model, "--load-format", "auto"])
    ]
    assert texts[0] == texts[1] and texts[0][0]


def test_weights_that_are_loaded_later(model: str, warm: Warm) -> None:
    printed = warm.run("skip_loading_weights_in_engine_init", model)
    assert quoted(printed, "Loaded") == quoted(printed, "Fresh") != quoted(printed, "Dummy")
    assert len(quoted(printed, "Dummy")) == 2


def test_the_list_of_programs_is_complete() -> None:
    """compat/README.md names every program that is run here, and no other."""
    text = (Path(__file__).parents[2] / "compat" / "README.md").read_text()
    listed = text.partition("documentation's own programs")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`([a-z_]+)`", listed)) == sorted(path.stem for path in PROGRAMS.glob("*.py"))


def test_data_parallel(tmp_path: Path) -> None:
    """A process per engine of a mixture of experts, each with its own prompts and parameters."""
    make_tiny("MixtralForCausalLM", tmp_path)
    printed = run("data_parallel", "--model", str(tmp_path))
    assert sorted(re.findall(r"^Parallel \d: (.*)$", printed, re.MULTILINE)) == ["0 of 2", "1 of 2"]
    lines = re.findall(r"^DP rank (\d): '(.*)' -> (\d+)$", printed, re.MULTILINE)
    assert sorted(lines) == sorted((str(i % 2), f"Prompt number {i}", str([8, 12][i % 2])) for i in range(5))


def torchrun(program: str, count: int, *words: str) -> str:
    path = str(PROGRAMS / f"{program}.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", path, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=BUFFERED | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_torchrun(model: str, warm_python: WarmPython) -> None:
    """Every rank runs the program, two of each of two stages, and has every answer."""
    program, launcher = "torchrun_example", Path(__file__).parent / "forked_ranks.py"
    done = warm_python.run(launcher, "4", str(PROGRAMS / f"{program}.py"), model, env=os.environ, timeout=900)
    printed = printed_by(done, program)
    assert quoted(printed, "Prompt") == PROMPTS * 5 and all(quoted(printed, "Output"))
    first, *others = (id_lists(printed, f"Rank {rank}")[0] for rank in range(4))
    assert others == [first] * 3 and len(first) == 20 and {len(tokens) for tokens in first} == {12}


def test_torchrun_dp(tmp_path: Path) -> None:
    """An engine of one rank each, with its own prompts."""
    make_tiny("GraniteMoeForCausalLM", tmp_path)
    printed = torchrun("torchrun_dp_example", 2, "--model", str(tmp_path), "--enable-ep")
    lines = re.findall(r"^DP rank (\d): '(.*)' -> (\d+)$", printed, re.MULTILINE)
    assert sorted(lines) == sorted((str(i % 2), f"{i}.Prompt number {i}", "8") for i in range(10))


def test_serve_with_two_engines_of_two_ranks(warm_python: WarmPython, tmp_path: Path) -> None:
    """`vllm serve -dp 2 -tp 2` and the openai client, which names engines."""
    make_tiny("LlamaForCausalLM", tmp_path / "model")
    command = tmp_path / "vllm"
    command.write_text("import sys; from vllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))")
    flags = ("-dp", "2", "-tp", "2", "--dtype", "float32", "--max-model-len", "128", "--port", "0")
    blocks = ("--num-gpu-blocks-override", "60")
    process = warm_python.start(command, "serve", str(tmp_path / "model"), *flags, *blocks, env=os.environ)
    server = Hosted(process)
    try:
        address = server.wait_for_line(r"Listening at (\S+) ", 600)[1].replace("//0.0.0.0:", "//127.0.0.1:")
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0, timeout=120)
        model = client.models.list().data[0].id
        texts = {
            client.completions.create(
                model=model, prompt=[7, 9, 30, 4], max_tokens=12, temperature=0, extra_body={"ignore_eos": True},
                extra_headers={"X-data-parallel-rank": rank},
            ).choices[0].text
            for rank in ("0", "1", "0", "1")
        }  # fmt: skip
        assert len(texts) == 1 and texts != {""}
        metrics = httpx.get(f"{address}/metrics", timeout=60).text
        done = re.findall(
            r'^vllm:request_success_total{.*engine="(\d)".*finished_reason="length".*} (\S+)$', metrics, re.M
        )
        assert sorted(done) == [("0", "2.0"), ("1", "2.0")]
    finally:
        process.terminate()
        server.wait(120)


@pytest.mark.parametrize("name", ["BertModel", "Qwen3Model"])
def test_embeddings(name: str, warm: Warm, tmp_path: Path) -> None:
    """As transformers computes them; shorter ones are cut and normalised."""
    model = make_pooling(name, tmp_path, is_matryoshka=True)
    printed = warm.run("basic_pooling", "embed", str(tmp_path))
    texts, vectors = quoted(printed, "Prompt"), quoted(printed, "Embedding")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    place = 0 if name == "BertModel" else -1
    for text, vector in zip(texts, vectors, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(hidden[place], dim=-1)
        torch.testing.assert_close(torch.tensor(vector), wanted, atol=1e-4, rtol=1e-4)
    short = torch.nn.functional.normalize(torch.tensor(vectors[0][:8]), dim=-1)
    torch.testing.assert_close(torch.tensor(quoted(printed, "Short")[0]), short, atol=1e-5, rtol=1e-5)
    assert quoted(printed, "Tokens") == [(len(tokenizer.encode(texts[0]).ids), 32)]


def test_classes_and_scores(warm: Warm, tmp_path: Path) -> None:
    model = make_pooling("BertForSequenceClassification", tmp_path / "three", num_labels=3)
    printed = warm.run("basic_pooling", "classify", str(tmp_path / "three"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "three" / "tokenizer.json"))
    assert quoted(printed, "Classes") == [3] * 4
    for text, found in zip(quoted(printed, "Prompt"), quoted(printed, "Probs"), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([tokenizer.encode(text).ids])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=1e-4)
    ranker = make_pooling("BertForSequenceClassification", tmp_path / "one", num_labels=1)
    printed = warm.run("basic_pooling", "score", str(tmp_path / "one"))
    pairs, scores = quoted(printed, "Prompt"), quoted(printed, "Score")
    assert len(pairs) == 3
    for (first, second), found in zip(pairs, scores, strict=True):
        both = tokenizer.encode(first, second)
        with torch.no_grad():
            logit = ranker(torch.tensor([both.ids]), token_type_ids=torch.tensor([both.type_ids])).logits[0, 0]
        assert found == pytest.approx(float(logit.sigmoid()), abs=1e-4)


def test_multilora_inference(warm: Warm, tmp_path: Path) -> None:
    """One slot for two adapters: all are answered, each by its own merged weights."""
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    adapters = [write_adapter(model, tmp_path / f"a{seed}", rank=8, seed=seed) for seed in (1, 2)]
    folders = [str(tmp_path / f"a{seed}") for seed in (1, 2)]
    printed = warm.run("multilora_inference", str(tmp_path / "model"), *folders)
    found = {number: (name, prompt, ids) for number, name, prompt, ids in quoted(printed, "Finished")}
    names = [None, None, "sql-lora", "sql-lora2", None, "sql-lora"]
    assert [found[str(number)][0] for number in range(6)] == names
    models = {"2": merge(model, adapters[0]), "3": merge(model, adapters[1]), "4": model}
    for number, one in models.items():
        _, prompt, ids = found[number]
        assert ids == greedy(one, prompt, 8)
    assert len({tuple(found[number][2]) for number in models}) == 3
