"""The promise of the spine: greedy output equals transformers token for token, however the work was cut up.

Oracle: transformers scores prompt + our output in one pass; greedy means that every output token is the argmax of the
position before it, which is the same statement as "generate() would have written these tokens", without its cost.
Every variation (chunks, block sizes, prefix hits, preemptions, look-ahead, process) must then give the same tokens.
"""

import random

import gguf
import pytest
import torch
import transformers
from transformers.initialization import no_init_weights

from quire import LLM, SamplingParams
from quire.base import env
from quire.checkpoint.source import locate
from tests.gguf_tensors import tensors_of

pytestmark = pytest.mark.usefixtures("warm_children")
TEXT = "the river ran under an old stone bridge while seven children counted boats and argued about names"
WORDS = TEXT.split()
NUM_PROMPTS, NUM_NEW, NUM_AGAIN = 8, 12, 4  # of 1 to 120 words, two of them with one beginning
NUM_VARIED = 6  # prompts of each varied run: the whole set takes minutes on two cores


def mixed_prompts(seed: int, count: int) -> list[str]:
    """Lengths from one word to a few hundred; some share long beginnings so that the prefix cache has work."""
    rng = random.Random(seed)
    stem = " ".join(rng.choices(WORDS, k=60))
    prompts = []
    for i in range(count):
        words = rng.choices(WORDS, k=rng.choice([1, 3, 8, 20, 50, 120]))
        prompts.append((stem + " " if i % 4 == 0 else "") + " ".join(words))
    return prompts


@pytest.fixture(scope="module")
def oracle():
    """transformers' Llama, filled from the file by the gguf package: nothing of Quire is on this path."""
    heads = {"attn_q": 9, "attn_k": 3}  # the converter interleaved the rows of these for another form of rope
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    with no_init_weights():  # all are filled
        model = transformers.LlamaForCausalLM(config).eval()
    ours = {names.get_name(name.removesuffix(".weight")): name for name in model.state_dict()}
    weights = {}
    for tensor in tensors_of(locate(None).path):
        stem = tensor.name.removesuffix(".weight")
        value = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if count := heads.get(stem.rpartition(".")[2]):
            value = value.view(count, 32, 2, 576).transpose(1, 2).reshape(value.shape)
        weights[ours[stem]] = value
    assert set(model.state_dict()) - set(weights) == {"lm_head.weight"}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def assert_greedy(oracle, outputs) -> None:
    for out in outputs:
        ids = out.prompt_token_ids + out.outputs[0].token_ids
        with torch.inference_mode():  # logits of the positions before each output token, and of the last
            logits = oracle(torch.tensor([ids]), logits_to_keep=len(out.outputs[0].token_ids) + 1).logits[0]
        assert len(logits) == len(out.outputs[0].token_ids) + 1
        want = logits[:-1].argmax(-1).tolist()
        assert out.outputs[0].token_ids == want, f"prompt {out.prompt!r} differs from transformers"


def tokens_of(outputs) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


def generate(prompts, **options) -> list:
    llm = LLM(**{"dtype": "float32", "max_model_len": 1024, "seed": 0, "disable_log_stats": False, **options})
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    if "num_gpu_blocks_override" in options:
        assert next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions") > 0
    if options.get("enable_prefix_caching", True):  # now every prompt is in the prefix cache
        few = SamplingParams(temperature=0, max_tokens=NUM_AGAIN, ignore_eos=True)
        again = llm.generate(prompts[:5], few, use_tqdm=False)
        assert tokens_of(again) == [tokens[:NUM_AGAIN] for tokens in tokens_of(outputs)[:5]]
        assert any(out.num_cached_tokens for out in again)
    llm.close()
    return outputs


@pytest.fixture(scope="module")
def plain(oracle):
    """The reference run: no caching, no look-ahead, whole prompts; checked against transformers once for all."""
    outputs = generate(
        mixed_prompts(1, NUM_PROMPTS), enable_prefix_caching=False, max_num_batched_tokens=4096, async_scheduling=False
    )
    assert_greedy(oracle, outputs)
    return outputs


def test_smollm2_equals_transformers(plain):
    assert len(plain) == NUM_PROMPTS and all(len(out.outputs[0].token_ids) == NUM_NEW for out in plain)


VARIATIONS = {
    "small chunks, prefix hits, block 8": {"max_num_batched_tokens": 96, "block_size": 8},
    "look-ahead, block 32, few rows": {"async_scheduling": True, "block_size": 32, "max_num_seqs": 7},
    "preemption, look-ahead": {
        "num_gpu_blocks_override": 22, "max_model_len": 320, "async_scheduling": True, "max_num_batched_tokens": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIATIONS)
def test_smollm2_is_the_same_however_the_work_is_cut(plain, name):
    outputs = generate(mixed_prompts(1, NUM_PROMPTS)[:NUM_VARIED], **VARIATIONS[name])
    assert tokens_of(outputs) == tokens_of(plain)[:NUM_VARIED]


def test_smollm2_in_a_process_of_its_own(plain, monkeypatch):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "1")
    env.forget_all()
    try:
        prompts = mixed_prompts(1, NUM_PROMPTS)[:NUM_VARIED]
        outputs = generate(prompts, async_scheduling=True, max_num_batched_tokens=128)
    finally:
        monkeypatch.undo()
        env.forget_all()
    assert tokens_of(outputs) == tokens_of(plain)[:NUM_VARIED]


def test_prompt_logprobs_agree(oracle):
    llm = LLM(dtype="float32", max_model_len=1024, max_num_batched_tokens=48)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, logprobs=3)
    outputs = llm.generate(mixed_prompts(2, 4), params, use_tqdm=False)
    llm.close()
    worst = 0.0
    for out in outputs:
        ids = torch.tensor([out.prompt_token_ids + out.outputs[0].token_ids])
        with torch.inference_mode():
            want = oracle(ids).logits[0].log_softmax(-1)
        assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(out.prompt_token_ids)
        positions = [*out.prompt_logprobs[1:], *out.outputs[0].logprobs]
        for at, entries in enumerate(positions):
            token = ids[0, at + 1].item()
            assert token in entries and 3 <= len(entries) <= 4
            for token_id, entry in entries.items():
                worst = max(worst, abs(entry.logprob - want[at, token_id].item()))
            better = [int((want[at] > want[at, token] + slack).sum()) + 1 for slack in (1e-3, -1e-3)]
            assert better[0] <= entries[token].rank <= better[1]  # deep down, neighbours lie closer than rounding
    assert worst < 1e-3
