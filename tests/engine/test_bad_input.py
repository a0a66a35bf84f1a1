"""The bad-input table: each case is one clear exception that names value and limit, and the engine answers the next."""

import pytest

from quire import LLM, SamplingParams
from quire.schema.errors import InputError

VOCAB = 49152
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    engine = LLM(max_model_len=128, max_num_seqs=4)
    yield engine
    engine.close()


PROMPTS = [
    ("", ["empty"]),
    ([], ["empty"]),
    ({"prompt_token_ids": []}, ["empty"]),
    ([1, VOCAB], [str(VOCAB)]),
    ([1, -1], ["-1"]),
    ([1, 10**30], [str(10**30)]),
    ([1] * 200, ["200", "128"]),
    ("word " * 500, ["128"]),
    ({"nothing": 1}, ["nothing"]),
    (17.5, ["float"]),
    ({"prompt": "x", "cache_salt": 5}, ["cache_salt"]),
    ({"prompt": "x", "multi_modal_data": {"image": object()}}, ["multi_modal_data"]),
]

PARAMS = [
    (lambda: SamplingParams(temperature=-1), ["temperature", "-1"]),
    (lambda: SamplingParams(max_tokens=10**9, min_tokens=10**9), ["min_tokens", "128"]),
    (lambda: SamplingParams(logprobs=10**6), ["logprobs", "1000000", "20"]),
    (lambda: SamplingParams(prompt_logprobs=21), ["prompt_logprobs", "21", "20"]),
    (lambda: SamplingParams(allowed_token_ids=[VOCAB]), ["allowed_token_ids", str(VOCAB)]),
    (lambda: SamplingParams(logit_bias={VOCAB + 5: 1.0}), ["logit_bias", str(VOCAB + 5)]),
    (lambda: SamplingParams(stop_token_ids=[-3]), ["stop_token_ids", "-3"]),
    (lambda: SamplingParams(thinking_token_budget=5), ["thinking_token_budget"]),
    (lambda: "not params", ["SamplingParams", "str"]),
    (lambda: [GREEDY, GREEDY], ["2", "1"]),
]


@pytest.mark.parametrize(("prompt", "words"), PROMPTS, ids=lambda x: repr(x)[:30])
def test_bad_prompts(llm, prompt, words):
    with pytest.raises(InputError) as caught:
        llm.generate([prompt], GREEDY, use_tqdm=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(llm.generate("The capital of", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(("make", "words"), PARAMS, ids=[str(i) for i in range(len(PARAMS))])
def test_bad_params(llm, make, words):
    with pytest.raises((InputError, TypeError)) as caught:
        llm.generate(["The capital of"], make(), use_tqdm=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(llm.generate("The capital of", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_one_bad_prompt_in_many_leaves_nothing_behind(llm):
    with pytest.raises(InputError):
        llm.generate(["fine", "also fine", [VOCAB + 1]], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    outputs = llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert [len(out.outputs[0].token_ids) for out in outputs] == [4, 4]


OPTIONS = [
    ({"max_model_length": 5}, ["max_model_length", "max_model_len"]),
    ({"max_model_len": -7}, ["max_model_len", "-7"]),
    ({"max_model_len": 10**7}, ["max_model_len", str(10**7), "8192"]),
    ({"dtype": "float12"}, ["dtype", "float12"]),
    ({"block_size": 0}, ["block_size", "0"]),
    ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5"]),
    ({"max_num_seqs": 0}, ["max_num_seqs"]),
    ({"prefill_context_parallel_size": 2}, ["prefill_context_parallel_size"]),
    ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, ["max_cpu_loras", "2", "4"]),
    ({"enable_lora": True, "max_lora_rank": 7}, ["max_lora_rank", "7"]),
    ({"speculative_config": {"method": "ngram"}}, ["speculative_config"]),
    ({"num_gpu_blocks_override": 2, "max_model_len": 4096}, ["num_gpu_blocks_override", "4096"]),
    ({"model": "no/such-folder-or-hub-id"}, ["no/such-folder-or-hub-id"]),
    ({"load_format": "npcache"}, ["npcache"]),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=[str(o)[:50] for o, _ in OPTIONS])
def test_bad_options(options, words):
    with pytest.raises((InputError, TypeError)) as caught:
        LLM(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
