"""Models with running states through the whole engine, with states saved for reuse: tokens equal transformers' whatever
is reused, preempted, looked ahead or cut; and what the options of states mean."""

import pytest

from quire import LLM, SamplingParams
from quire.schema.errors import ConfigError
from tests.engine.test_every_architecture import greedy_by_transformers, prompts_of
from tests.tiny_models import make_tiny, write_tiny

COMMON = {"dtype": "float32", "max_model_len": 112, "disable_log_stats": False, "enable_prefix_caching": True}
# Blocks with which eight requests do not fit at once.
FEW = {
    "Qwen3NextForCausalLM": 34, "BambaForCausalLM": 30, "FalconH1ForCausalLM": 30, "NemotronHForCausalLM": 34,
    "JambaForCausalLM": 30, "Lfm2ForCausalLM": 34, "Mamba2ForCausalLM": 14,
    "OlmoHybridForCausalLM": 34, "MiniMaxForCausalLM": 26,
}  # fmt: skip
STEADY = "Mamba2ForCausalLM"  # nothing of it grows with a request, so whoever is admitted stays
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def metric(llm, name):
    return next(found.value for found in llm.get_metrics() if found.name == name)


def runs_of(arch):
    return [
        {"block_size": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": FEW[arch]},
        {"block_size": 4, "max_num_batched_tokens": 24, "async_scheduling": True, "num_gpu_blocks_override": 2000},
        {"block_size": 4, "mamba_block_size": 40, "num_gpu_blocks_override": 2000},
    ]


@pytest.mark.parametrize("arch", FEW)
def test_reused_states_give_the_same_tokens(arch, tmp_path):
    """With few blocks, and with many in one of two ways in turn."""
    few, *many = runs_of(arch)
    check_reused_states(arch, [few, many[list(FEW).index(arch) % len(many)]], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("arch", FEW)
def test_reused_states_give_the_same_tokens_in_every_run(arch, tmp_path):
    check_reused_states(arch, runs_of(arch), tmp_path)


def check_reused_states(arch, runs, tmp_path):
    model, prompts = make_tiny(arch, tmp_path), prompts_of(7)
    wanted = None
    for options in runs:
        llm = LLM(str(tmp_path), **COMMON, **options)
        outputs = [llm.generate(prompts, GREEDY, use_tqdm=False) for _ in range(2)]
        tokens = [[out.outputs[0].token_ids for out in turn] for turn in outputs]
        if wanted is None:
            wanted = tokens[0]
            for prompt, given in zip(prompts, wanted, strict=True):
                assert given == greedy_by_transformers(model, prompt, given)
        assert tokens == [wanted, wanted], options
        preempted = metric(llm, "vllm:num_preemptions")
        assert preempted > 0 or options is not runs[0] or arch == STEADY
        if options is not runs[0]:  # with few blocks, what could be reused may have gone
            assert any(out.num_cached_tokens for out in outputs[1])
        llm.close()


def test_without_reuse_a_request_has_one_state(tmp_path):
    write_tiny("Qwen3NextForCausalLM", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=256, block_size=16)
    assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    layout = llm.llm_engine.front.client.loop.scheduler.kv
    assert [policy.peak(256, 256) for policy in layout.policies].count(1) == 3
    llm.close()


def test_precision_of_states(tmp_path):
    write_tiny("Qwen3NextForCausalLM", tmp_path)
    for options, wanted in (
        ({}, {("float32", "bfloat16")}),
        ({"mamba_cache_dtype": "float16"}, {("float16", "float16")}),
        ({"mamba_cache_dtype": "float16", "mamba_ssm_cache_dtype": "float32"}, {("float32", "float16")}),
    ):
        llm = LLM(str(tmp_path), dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=40, **options)
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        specs = [layer.cache.spec for layer in model.kv_layers()]
        assert {spec.state_dtypes for spec in specs if spec.state_shapes} == wanted
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        llm.close()


def test_options_that_contradict_each_other(tmp_path):
    write_tiny("Mamba2ForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match=r"mamba_block_size=64.*enable_prefix_caching"):
        LLM(str(tmp_path), max_model_len=64, mamba_block_size=64)
    with pytest.raises(ConfigError, match=r"mamba_cache_mode=align.*enable_prefix_caching"):
        LLM(str(tmp_path), max_model_len=64, mamba_cache_mode="align", enable_prefix_caching=False)
    llm = LLM(str(tmp_path), max_model_len=64, mamba_cache_mode="align", num_gpu_blocks_override=40)
    assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    llm.close()
