"""GGUF names and layouts, family by family: a tiny checkpoint written as a GGUF file comes back as it was.

The writer below does what the converters of llama.cpp do (names come from the gguf package's own map), so that each
change of layout is stated twice, in opposite directions, by different code.
"""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire.checkpoint import gguf_config
from quire.loader.gguf_file import GGUFWeights
from quire.loader.gguf_names import FAMILIES
from quire.schema.errors import CheckpointError
from tests.tiny_models import make_tiny

PERMUTED = {"llama", "mistral3", "arcee", "smollm3", "granite", "granitemoe", "olmo"}
SHIFTED = {"gemma", "gemma2", "gemma3", "nemotron"}
FAMILY_OF = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe", "SeedOssForCausalLM": "seed_oss",
    "ArceeForCausalLM": "arcee", "SmolLM3ForCausalLM": "smollm3", "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3", "PhiForCausalLM": "phi2", "Phi3ForCausalLM": "phi3",
    "OlmoForCausalLM": "olmo", "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo2", "OlmoeForCausalLM": "olmoe",
    "CohereForCausalLM": "command-r", "Cohere2ForCausalLM": "cohere2", "Starcoder2ForCausalLM": "starcoder2",
    "StableLmForCausalLM": "stablelm", "GraniteForCausalLM": "granite", "GraniteMoeForCausalLM": "granitemoe",
    "NemotronForCausalLM": "nemotron", "GPTNeoXForCausalLM": "gptneox", "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2", "BloomForCausalLM": "bloom", "GlmForCausalLM": "chatglm", "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe", "Exaone4ForCausalLM": "exaone4", "GptOssForCausalLM": "gpt-oss",
    "DeepseekV2ForCausalLM": "deepseek2", "DeepseekV3ForCausalLM": "deepseek2", "Dots1ForCausalLM": "dots1",
}  # fmt: skip


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def paired(t: torch.Tensor, heads: int) -> torch.Tensor:
    return t.reshape(heads, 2, -1, *t.shape[1:]).swapaxes(1, 2).reshape(t.shape)


def gguf_tensors(family: str, state: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """The checkpoint as its converter would store it."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    map_ = gguf.get_tensor_name_map(arch, 16)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    out: dict[str, torch.Tensor] = {}

    def put(name: str, t: torch.Tensor) -> None:
        found = map_.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found and found not in out, (name, found)
        out[found] = t

    state = stack_experts(family, state)
    for name, t in state.items():
        if name == "lm_head.weight" and family.startswith("gemma"):
            continue
        if family in PERMUTED and re.search(r"\.[qk]_proj\.", name):
            t = paired(t, heads if ".q_proj." in name else kv_heads)
        if family in SHIFTED and name.endswith("norm.weight"):
            t = t + 1
        if family == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
            t = t.T
        if "query_key_value" in name:
            t = ungroup(t, heads, kv_heads if family == "falcon" else heads)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if family == "gpt-oss" and "sinks" in name:
            name += ".weight"
        if "kv_b_proj" in name:
            k, v = t.view(heads, -1, t.shape[1]).split([config.qk_nope_head_dim, config.v_head_dim], 1)
            put(name.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2))
            name, t = name.replace("kv_b_proj", "v_b_proj"), v
        put(name.removeprefix("transformer.") if family == "bloom" else name, t)
    return out


def ungroup(t: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    per = heads // groups
    rows = t.view(groups, per + 2, -1, *t.shape[1:])
    return torch.cat([rows[:, :per].flatten(0, 2), rows[:, per].flatten(0, 1), rows[:, per + 1].flatten(0, 1)])


def stack_experts(family: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, t in state.items():
        if match := re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name):
            stem = (
                match[1].replace("model.", "").replace("block_sparse_moe", "feed_forward")
                if match[3][0] == "w"
                else match[1]
            )
            stack = stacks.setdefault(f"{stem}.experts.{match[3]}.weight", [])
            assert len(stack) == int(match[2])
            stack.append(t)
        elif family == "gpt-oss" and ".experts." in name:
            stem, part = name.rsplit(".", 1)
            suffix = "bias" if part.endswith("_bias") else "weight"
            t = t if suffix == "bias" else t.transpose(1, 2)
            if part.startswith("down"):
                out[f"{stem}.down_proj.{suffix}"] = t
            else:
                out[f"{stem}.gate_proj.{suffix}"], out[f"{stem}.up_proj.{suffix}"] = t[:, ::2], t[:, 1::2]
        elif name.endswith("input_linear.weight"):
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), t.chunk(2, 1), strict=True):
                out[f"model.layers.{layer}.mlp.experts.{part}_proj.weight"] = half
        else:
            out[name] = t
    return out | {name: torch.stack(stack) for name, stack in stacks.items()}


def write_gguf(path: Path, family: str, tensors: dict[str, torch.Tensor], config, **more) -> str:
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    writer.add_head_count_kv(1 if family == "deepseek2" else kv_heads or config.num_attention_heads)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, t in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(t.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def tensors_of(path: str) -> list[tuple[str, torch.Tensor]]:
    weights = GGUFWeights(path)
    return [item for recipe in weights.recipes for item in weights.read(recipe, torch.float32, "cpu")]


def check(path: str, want: dict[str, torch.Tensor]) -> None:
    named = tensors_of(path)
    got = dict(named)
    assert len(got) == len(named)
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert got[name].shape == t.shape, name
        assert torch.allclose(got[name], t.float(), rtol=0, atol=3e-7), name


@pytest.mark.parametrize("arch_name", FAMILY_OF)
def test_every_family_comes_back(arch_name, tmp_path):
    config = make_tiny(arch_name, tmp_path).config
    family, state = FAMILY_OF[arch_name], state_of(tmp_path)
    path = write_gguf(tmp_path / "m.gguf", family, gguf_tensors(family, state, config), config)
    check(path, state)


def test_every_family_is_tried():
    assert set(FAMILY_OF.values()) == set(FAMILIES)


def test_configurations_are_read_for_the_same_families():
    assert set(gguf_config.FAMILIES) == set(FAMILIES)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = make_tiny("LlamaForCausalLM", folder).config
    state = state_of(folder)
    return config, state, gguf_tensors("llama", state, config)


def test_layout_changes_are_real(llama, tmp_path):
    """The round trip would show a change left out: stored q differs from the checkpoint's."""
    _, state, tensors = llama
    q = state["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.allclose(tensors["blk.0.attn_q.weight"], q)


def test_fused_qkv_is_split(llama, tmp_path):
    config, state, tensors = llama
    tensors = dict(tensors)
    for layer in range(config.num_hidden_layers):
        parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = torch.cat(parts)
    check(write_gguf(tmp_path / "m.gguf", "llama", tensors, config), state)


def test_separate_experts_of_older_files(tmp_path):
    config = make_tiny("MixtralForCausalLM", tmp_path).config
    state, tensors = state_of(tmp_path), {}
    for name, t in gguf_tensors("llama", state, config).items():
        if match := re.fullmatch(r"(blk\.\d+\.ffn_\w+)_exps\.weight", name):
            tensors |= {f"{match[1]}.{e}.weight": one for e, one in enumerate(t)}
        else:
            tensors[name] = t
    check(write_gguf(tmp_path / "m.gguf", "llama", tensors, config), state)


def test_latent_projection_in_one_piece_of_older_files(tmp_path):
    config = make_tiny("DeepseekV2ForCausalLM", tmp_path).config
    state = state_of(tmp_path)
    tensors = {n: t for n, t in gguf_tensors("deepseek2", state, config).items() if not n.endswith("_b.weight")}
    for layer in range(config.num_hidden_layers):
        tensors[f"blk.{layer}.attn_kv_b.weight"] = state[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        tensors[f"blk.{layer}.attn_q_b.weight"] = state[f"model.layers.{layer}.self_attn.q_b_proj.weight"]
    check(write_gguf(tmp_path / "m.gguf", "deepseek2", tensors, config), state)


def test_heads_with_norms_of_their_own(tmp_path):
    config = make_tiny("StableLmForCausalLM", tmp_path, qk_layernorm=True, use_qkv_bias=True).config
    state = state_of(tmp_path)
    plain = {name: t for name, t in state.items() if ".norms." not in name}
    tensors = gguf_tensors("stablelm", plain, config)
    for layer in range(config.num_hidden_layers):
        for part, heads in (("q", 4), ("k", 2)):
            stem = f"model.layers.{layer}.self_attn.{part}_layernorm.norms"
            tensors[f"blk.{layer}.attn_{part}_norm.weight"] = torch.stack(
                [state[f"{stem}.{h}.weight"] for h in range(heads)]
            )
    check(write_gguf(tmp_path / "m.gguf", "stablelm", tensors, config), state)


def test_falcon_with_one_norm(tmp_path):
    config = make_tiny("FalconForCausalLM", tmp_path, new_decoder_architecture=False, num_kv_heads=1).config
    state = state_of(tmp_path)
    tensors = gguf_tensors("falcon", state, config)
    assert "blk.0.attn_norm_2.weight" not in tensors
    check(write_gguf(tmp_path / "m.gguf", "falcon", tensors, config), state)


def test_rope_tensors_and_prediction_layers_are_left_out(llama, tmp_path):
    config, state, tensors = llama
    more = {"rope_freqs.weight": torch.ones(8), "blk.0.attn_rot_embd.weight": torch.ones(8)}
    check(write_gguf(tmp_path / "m.gguf", "llama", tensors | more, config), state)
    extra = {"blk.4.nextn.eh_proj.weight": torch.ones(8), "blk.4.attn_norm.weight": torch.ones(8)}
    path = write_gguf(tmp_path / "n.gguf", "llama", tensors | extra, config, llama__nextn_predict_layers=0)
    check(path, state)


def test_unknown_families_and_tensors_are_named(llama, tmp_path):
    config, _, tensors = llama
    path = write_gguf(tmp_path / "a.gguf", "mamba", tensors, config)
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' is not supported; supported are arcee, bloom"):
        GGUFWeights(path)
    odd = {f"blk.0.odd{i}.weight": torch.ones(8) for i in range(12)}
    path = write_gguf(tmp_path / "b.gguf", "llama", tensors | odd, config)
    with pytest.raises(CheckpointError, match=r"'llama' family does not define: blk\.0\.odd0\.weight.* and 4 more"):
        GGUFWeights(path)


def test_impossible_metadata_is_named(llama, tmp_path):
    _, _, tensors = llama
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_head_count(7)
    writer.add_block_count(4)
    writer.add_tensor("blk.0.attn_q.weight", tensors["blk.0.attn_q.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.weight' has 64 rows, which 7 query heads"):
        tensors_of(str(tmp_path / "a.gguf"))
