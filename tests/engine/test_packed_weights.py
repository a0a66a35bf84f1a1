"""Weights multiplied as they are stored: the embedded GGUF and checkpoints rounded at load, through the whole engine.

Packed products round activations to 8 bits, so tokens may differ from the decoded model's; what must hold is that the
text is as likely, that nothing depends on the batch, and that float32 stays exact.
"""

import math
from typing import Any

import numpy
import pytest
import torch

from quire import LLM, SamplingParams
from quire.base import env, native
from quire.config import EngineArgs
from quire.layers.stored import packed_matrices
from quire.loader.load import load_model
from quire.ops.cpu.forms import register
from quire.ops.cpu.native import kernels
from quire.ops.packed import unpack
from quire.quant.shard import ShardGroup
from quire.schema.errors import CheckpointError, ConfigError
from tests.tiny_models import write_tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
TEXT = (
    "The river rises in the hills to the north of the town and runs for about thirty miles before it meets the sea. "
    "In winter it floods the low meadows, and the farmers move their sheep to higher ground. People have lived along "
    "its banks for thousands of years: they built mills, bridges and small harbours, and they argued about who owned "
    "the water. In 1843 a railway was opened through the valley, and most of the mills closed within twenty years. "
    "Today the water is clean again, and salmon have come back to the upper reaches. Children learn to swim in the "
    "pool below the old weir, as their grandparents did, and on summer evenings the whole village seems to be there."
)


def perplexity(llm: LLM, prompt: Any = TEXT) -> float:
    (out,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    pairs = zip(out.prompt_token_ids, out.prompt_logprobs, strict=True)
    found = [entry[token].logprob for token, entry in pairs if entry]
    return math.exp(-sum(found) / len(found))


@pytest.fixture(scope="module")
def packed_llm():
    llm = LLM(max_model_len=512, kv_cache_memory_bytes=64 << 20, device="cpu")
    yield llm
    llm.close()


def test_auto_keeps_the_blocks_of_a_gguf_file(packed_llm):
    config = packed_llm.llm_engine.vllm_config.model_config
    assert (config.dtype, config.weight_form, config.quantization) == ("float32", "stored", "gguf")
    model = packed_llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    block = model.layers[0]
    assert (
        block.attn.qkv.stored.name == "packed" and [p.kind for p in block.attn.qkv.stored.packed.parts] == ["Q4M"] * 3
    )
    assert block.attn.qkv.stored.packed.rows == 576 + 2 * 192 and not list(model.head.parameters())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size < 105e6  # the file has 98 MB; float32 would take 540 MB


def test_text_is_as_likely_as_decoded(packed_llm):
    exact = LLM(dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20, device="cpu")
    try:
        assert exact.llm_engine.vllm_config.model_config.weight_form == "plain"
        wanted = perplexity(exact)
    finally:
        exact.close()
    assert 5 < wanted < 40
    assert perplexity(packed_llm) == pytest.approx(wanted, rel=0.03)  # 150 tokens; benchmarks/cpu/quality.py has more


def test_a_dtype_and_gguf_together_keep_the_blocks():
    def form(**options):
        return EngineArgs(device="cpu", **options).create_engine_config().model_config.weight_form

    assert form() == "stored"
    assert form(dtype="float32") == "plain"
    assert form(dtype="float32", quantization="gguf") == "stored"
    assert form(dtype="bfloat16") == "plain"


@pytest.mark.parametrize(("name", "error"), [("int8_wo", 0.02), ("int4_wo", 0.35)])
@pytest.mark.parametrize(
    "arch",
    [
        "LlamaForCausalLM",
        "Qwen3MoeForCausalLM",
        "DeepseekV3ForCausalLM",
        "GPT2LMHeadModel",
        "OlmoForCausalLM",  # norms without weights: no parameter is there before the first matrix
        "Qwen3_5ForCausalLM",  # a checkpoint's tensor holds three of a matrix's four parts
    ],
)
def test_rounded_at_load(tmp_path, arch, name, error):
    """Every matrix whose rows are whole blocks is packed; routers and what layers read themselves stay plain."""
    register()
    write_tiny(arch, tmp_path)
    models = [
        load_model(EngineArgs(model=str(tmp_path), dtype="float32", device="cpu", **more).create_engine_config(), "cpu")
        for more in ({}, {"quantization": name})
    ]
    index, hidden = torch.arange(8), torch.randn(5, models[0].arch.width)
    rounded = dict(models[1].named_modules())
    for name, plain in models[0].named_modules():
        packed = rounded.get(name)
        if type(plain).__name__ == "Moe":
            assert packed.experts.stored.name == "packed" and packed.experts.stored.up[0].packed is not None
            x = torch.randn(9, plain.router.in_size)
            wanted, found = plain(x), packed(x)
            assert (found - wanted).norm() <= 2 * error * wanted.norm(), plain
        if type(plain).__name__ != "Linear":
            continue
        x = torch.randn(3, plain.in_size)
        wanted, found = plain(x), packed(x)
        assert (found - wanted).norm() <= error * wanted.norm() + 1e-6, plain
        assert packed.is_plain == (next(iter(plain.parts)) in ("gate", "kv_b_proj")), plain
    wanted, found = models[0].embed(index), models[1].embed(index)
    assert (found - wanted).norm() <= error * wanted.norm()
    wanted, found = models[0].logits(hidden), models[1].logits(hidden)
    assert (found - wanted).norm() <= error * wanted.norm()


def test_new_weights_replace_old_ones(tmp_path):
    """load_weights on a packed model, with parts in any order and other numbers than before."""
    register()
    write_tiny("LlamaForCausalLM", tmp_path)
    args = EngineArgs(model=str(tmp_path), dtype="float32", device="cpu", quantization="int8_wo")
    config = args.create_engine_config()
    model = load_model(config, "cpu")
    linear = model.layers[0].attn.qkv
    fresh = {part: torch.randn(rows, linear.in_size) for part, rows in linear.parts.items()}
    model.load_weights([(f"model.layers.0.self_attn.{part}.weight", fresh[part]) for part in reversed(fresh)])
    x = torch.randn(2, linear.in_size)
    wanted = x @ torch.cat(list(fresh.values())).T
    assert (linear(x) - wanted).norm() < 0.02 * wanted.norm()
    with pytest.raises(
        CheckpointError, match=r"^tensor 'model.norm.weight' is of type ndarray; it must be a torch.Tensor$"
    ):
        model.load_weights([("model.norm.weight", numpy.ones(linear.in_size))])


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="needs an unquantized checkpoint"):
        EngineArgs(device="cpu", quantization="int8_wo").create_engine_config()
    write_tiny("LlamaForCausalLM", tmp_path)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.CPU_KERNELS.forget()
    try:
        assert native.library() is None
        with pytest.raises(ConfigError, match="QUIRE_CPU_KERNELS is off"):
            EngineArgs(model=str(tmp_path), device="cpu", quantization="int8_wo").create_engine_config()
        about = EngineArgs(device="cpu").create_engine_config().model_config
        assert about.weight_form == "plain"
    finally:
        monkeypatch.undo()
        env.CPU_KERNELS.forget()


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_ranks_pack_what_one_would(tmp_path, arch):
    """The numbers of all ranks side by side are those of a model that is not cut."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4}
    more = {"moe_intermediate_size": 64} if "Moe" in arch else {}
    write_tiny(arch, tmp_path, **sizes, **more)
    args = EngineArgs(model=str(tmp_path), dtype="float32", device="cpu", quantization="int8_wo")
    config = args.create_engine_config()
    whole = packed_matrices(load_model(config, "cpu"))
    ranks = [packed_matrices(load_model(config, "cpu", ShardGroup(rank, 2))) for rank in (0, 1)]
    for name, matrix in whole.items():
        for part, kept in matrix.parts.items():
            own = [unpack(rank[name].parts[part]) for rank in ranks]
            axis = 1 if own[0].shape[1] < kept.width else 0
            assert torch.equal(torch.cat(own, axis), unpack(kept)), (name, part)
