"""Every declared architecture through the whole engine: greedy tokens equal transformers', however the work is cut."""

import random

import pytest
import torch

from quire import LLM, SamplingParams
from tests.products import KINDS
from tests.tiny_models import ARCHS, VOCAB, make_tiny

FEW, MANY = (14, 5), (24, 24)  # tokens: at first, and again with what the prefix cache holds
RUNS = [
    {"enable_prefix_caching": False, "block_size": 16, "num_gpu_blocks_override": 1000},
    {"max_num_batched_tokens": 24, "block_size": 4, "async_scheduling": True, "num_gpu_blocks_override": 2000},
    {"num_gpu_blocks_override": 18, "block_size": 8, "max_num_batched_tokens": 64, "max_model_len": 112},
]

# Layers of two kinds: blocks for each group's table. Two groups, or one per layer where the kinds are 3 to 1, 6 to 1.
TWO = dict.fromkeys(
    ("Gemma2ForCausalLM", "Exaone4ForCausalLM", "GptOssForCausalLM", "MinistralForCausalLM", "VaultGemmaForCausalLM",
     "ExaoneMoeForCausalLM", "MellumForCausalLM", "AfmoeForCausalLM", "GPTNeoForCausalLM"), 30
)  # fmt: skip
FOUR = dict.fromkeys(
    ("Olmo3ForCausalLM", "Cohere2ForCausalLM", "CwmForCausalLM", "GraniteSWAForCausalLM",
     "GraniteMoeSWAForCausalLM", "Cohere2MoeForCausalLM", "Llama4ForCausalLM"), 50
)  # fmt: skip
FEW_BLOCKS = {**TWO, **FOUR, "FlintForCausalLM": 56, "Kolibri1ForCausalLM": 62, "Gemma3ForCausalLM": 84,
              "Gemma3nForCausalLM": 44}  # fmt: skip
# Most or all layers forget all but five tokens, so such a model hardly ever lacks blocks for more than one request.
WINDOWED = ("MistralForCausalLM", "Phi3ForCausalLM", "Starcoder2ForCausalLM", "MixtralForCausalLM", *FEW_BLOCKS)
# Layers with running states grow little or not at all, and pages are large; test_hybrid_engine.py preempts them.
STATES = (
    "Mamba2ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "FalconH1ForCausalLM", "JambaForCausalLM",
    "BambaForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "OlmoHybridForCausalLM",
    "MiniMaxForCausalLM", "Zamba2ForCausalLM", "KimiLinearForCausalLM",
)  # fmt: skip


# One of each kind goes through every run, the others, made of the same layers, through the hardest one; with --long
# all go through every one, with more tokens. Few cross the ends of blocks, and make requests run out of them, too.
EVERY_RUN = KINDS


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    tails = [[rng.randrange(4, VOCAB) for _ in range(rng.choice([1, 2, 7, 19, 33]))] for _ in range(8)]
    return [stem + tail if i % 2 else tail for i, tail in enumerate(tails)]


def greedy_by_transformers(model, prompt: list[int], given: list[int]) -> list[int]:
    """The argmax before every given token: equal to `given` exactly if greedy decoding would have written it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + given])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_tokens_equal_transformers(arch, tmp_path):
    check(arch, tmp_path, RUNS if arch in EVERY_RUN else RUNS[-1:], FEW)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
def test_many_greedy_tokens_equal_transformers_in_every_run(arch, tmp_path):
    check(arch, tmp_path, RUNS, MANY)


def check(arch, tmp_path, runs, counts):
    model = make_tiny(arch, tmp_path)
    known = {}
    for options in runs:
        few, cached = options is RUNS[-1], options.get("enable_prefix_caching", True)
        prompts = prompts_of(7)[-4:] if few else prompts_of(7)  # four are enough to run out of blocks
        if few:
            options = {**options, "num_gpu_blocks_override": FEW_BLOCKS.get(arch, 18)}
        llm = LLM(str(tmp_path), **{"dtype": "float32", "max_model_len": 256, "disable_log_stats": False} | options)
        for count in counts if cached else counts[:1]:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            for prompt, result in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
                tokens = result.outputs[0].token_ids
                assert len(tokens) == count
                if known.setdefault(tuple(prompt), tokens) is tokens:
                    assert tokens == greedy_by_transformers(model, prompt, tokens)
                assert tokens == known[tuple(prompt)][:count], f"{options} changed the tokens"
        preempted = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
        assert preempted > 0 or not few or arch in WINDOWED or arch in STATES
        llm.close()
