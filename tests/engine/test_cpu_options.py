"""What only a CPU worker has: a cache of bytes, names of rounding at load, draws that know no neighbours."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.loader.gguf_file import GGUFWeights
from quire.ops.cpu.forms import register
from quire.ops.cpu.native import kernels
from quire.ops.op import Kernels
from quire.ops.packed import unpack
from quire.quant.arena import Arena
from quire.quant.experts import ExpertShape
from quire.quant.packed import PackedChoice
from quire.quant.shard import Span
from quire.schema.errors import ConfigError, NotBuiltError
from tests.engine.test_packed_weights import perplexity
from tests.tiny_models import write_tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
PROMPTS = ["The sky is", "Once upon a time there was a king who", "1, 2, 3,", "To be or"]


def open_llm(**options):
    return LLM(max_model_len=512, kv_cache_memory_bytes=48 << 20, device="cpu", **options)


@pytest.fixture(scope="module")
def llm():
    llm = open_llm(kv_cache_dtype="int8_per_token_head")
    yield llm
    llm.close()


def test_a_cache_of_bytes_through_the_engine(llm):
    worker = llm.llm_engine.model_executor.driver_worker.worker
    assert {spec.dtype for spec in worker._specs} == {"int8"}
    (out,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert "Paris" in out.outputs[0].text
    assert {spec.page_bytes for spec in worker._specs} == {16 * 2 * 3 * (64 + 4)}


def test_text_is_as_likely_with_a_cache_of_bytes(llm):
    """Over 490 tokens: 8-bit inputs of `avx512` move a token by 0.06 nats rms, which is 1% of the perplexity of 140."""
    text = (Path(__file__).parents[2] / "benchmarks" / "cpu" / "quality.txt").read_text()
    prompt = {"prompt_token_ids": llm.get_tokenizer().encode(text)[:490]}
    plain = open_llm()
    try:
        assert perplexity(llm, prompt) == pytest.approx(perplexity(plain, prompt), rel=0.01)
    finally:
        plain.close()


def test_draws_do_not_depend_on_neighbours(llm):
    """Rows with every kind of filter and a row that asks for log probabilities, together and alone."""
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=20, min_p=0.01, seed=3, max_tokens=5, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    ]
    together = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    alone = [
        llm.generate([p], own, use_tqdm=False)[0].outputs[0].token_ids for p, own in zip(PROMPTS, params, strict=True)
    ]
    assert alone == together


def test_parameters_are_counted_as_numbers(llm):
    """Packed matrices hold more numbers than bytes."""
    info = llm.llm_engine.model_executor.driver_worker.worker.load()
    assert info.num_parameters == 134_515_008  # as the model's card says
    assert info.weight_bytes < info.num_parameters


@pytest.mark.parametrize(("given", "meant"), [
    ("int8_weight_only", "int8_wo"), ("INT8-WO", "int8_wo"), ("torchao_int4_weight_only", "int4_wo"),
    ("int4wo", "int4_wo"),
])  # fmt: skip
def test_spellings_of_rounding_at_load(tmp_path, given, meant):
    write_tiny("LlamaForCausalLM", tmp_path)
    config = EngineArgs(model=str(tmp_path), device="cpu", quantization=given).create_engine_config()
    assert config.model_config.quantization == meant


def test_refused_caches(tmp_path):
    with pytest.raises(NotBuiltError, match="int8_per_token_head"):
        EngineArgs(device="cpu", kv_cache_dtype="nvfp4").create_engine_config()
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        EngineArgs(device="cpu", kv_cache_dtype="int7").create_engine_config()
    write_tiny("DeepseekV3ForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="int8 cache"):
        LLM(str(tmp_path), device="cpu", kv_cache_dtype="int8_per_token_head", kv_cache_memory_bytes=8 << 20)


def test_stacked_experts_of_a_gguf_file_stay_blocks(tmp_path):
    """[experts, rows, width] in the file: each expert's rows of bytes arrive on their own, and are its numbers."""
    register()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_block_count(1)
    writer.add_head_count(2)
    numbers = np.random.default_rng(0).standard_normal((3, 40, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.ffn_up_exps.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GGUFWeights(str(tmp_path / "m.gguf"))
    (recipe,) = weights.recipes
    found = list(weights.read(recipe, torch.float32, "cpu", keeps=lambda type_id: True))
    assert [name.split(".")[-3] for name, _ in found] == ["0", "1", "2"]
    choice = PackedChoice(torch.float32, Arena(torch.device("cpu")), Kernels.here("cpu"), None)
    shape = ExpertShape(3, 64, Span.all(40), gated=False, bias=False, act=torch.relu, rule=None)
    experts = choice.of_experts("experts.").create(shape)
    places = {slot.name: slot.target for slot in experts.slots()}
    for expert, (_, rows) in enumerate(found):
        assert rows.shape == (40, 64)
        places[f"{expert}.up_proj.weight"].copy_(rows)
        experts.up[expert].finish()
        (part,) = experts.up[expert].packed.parts
        assert part.kind == "Q8Z"
        torch.testing.assert_close(unpack(part), rows.numbers())
        torch.testing.assert_close(unpack(part), torch.from_numpy(numbers[expert]), rtol=0, atol=0.02)
