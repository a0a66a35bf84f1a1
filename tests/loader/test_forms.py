"""Further forms of checkpoints: sharded state, Mistral's own files, overrides; and what loading costs in memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.checkpoint.weight_files import find_sharded
from quire.config import EngineArgs
from quire.loader.by_layer import by_layer, check_complete
from quire.loader.mistral_names import halves_of, hf_name
from quire.loader.sharded import write_safetensors
from quire.schema.errors import CheckpointError, ConfigError, InputError, NotBuiltError
from tests.tiny_models import make_tiny, write_tiny

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[17, 44, 101, 9, 230, 77, 5], [8, 9]]
COMMON = dict(dtype="float32", max_model_len=64)


def answers(folder: Path, **options) -> list[list[int]]:
    llm = LLM(str(folder), **COMMON | options)
    found = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    llm.close()
    return found


# --- sharded state


@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_a_sharded_state_is_written_and_read_back(impl, tmp_path):
    write_tiny("Qwen3MoeForCausalLM", tmp_path / "hf", tie_word_embeddings=True)
    out = tmp_path / "sharded"
    llm = LLM(str(tmp_path / "hf"), model_impl=impl, **COMMON)
    wanted = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    names = llm.llm_engine.engine_core.save_sharded_state(path=str(out), pattern=None, max_size=60_000)[0]
    llm.close()
    assert len(names) > 3 and names[0] == "model-rank-0-part-0.safetensors"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((tmp_path / "hf" / name).read_bytes())
    assert answers(out, load_format="sharded_state", model_impl=impl) == wanted
    with pytest.raises(CheckpointError, match="saved with"):
        answers(out, load_format="sharded_state", model_impl=impl, dtype="bfloat16")
    (out / names[1]).unlink()
    with pytest.raises(CheckpointError, match="parts from 0 on"):
        answers(out, load_format="sharded_state", model_impl=impl)


def test_patterns_of_sharded_files(tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    llm = LLM(str(tmp_path), **COMMON)
    core = llm.llm_engine.engine_core
    with pytest.raises(InputError, match="part"):
        core.save_sharded_state(path=str(tmp_path), pattern="all.safetensors")
    wanted = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    core.save_sharded_state(path=tmp_path, pattern="r{rank}.p{part}.safetensors")
    llm.close()
    (tmp_path / "model.safetensors").unlink()
    extra = {"pattern": "r{rank}.p{part}.safetensors"}
    assert answers(tmp_path, load_format="sharded_state", model_loader_extra_config=extra) == wanted
    with pytest.raises(NotBuiltError, match="num_threads is unknown to load_format"):
        answers(tmp_path, model_loader_extra_config={"num_threads": 4})


def test_a_missing_tensor_of_a_sharded_state_is_named(tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    write_safetensors(str(tmp_path / "model-rank-0-part-0.safetensors"), {"embed.weight": torch.zeros(64, 64)})
    assert find_sharded(str(tmp_path), 0, "model-rank-{rank}-part-{part}.safetensors").kind == "safetensors"
    with pytest.raises(CheckpointError, match=r"'embed\.weight' is torch.float32"):
        answers(tmp_path, load_format="sharded_state")


# --- Mistral's own form


def to_mistral(folder: Path, out: Path) -> None:
    """The same model as Mistral would have published it."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    spell = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "gate_proj": "w1",
             "down_proj": "w2", "up_proj": "w3"}  # fmt: skip
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = name.removeprefix("model.").split(".")
        for kind in "qkvo":
            if f"{kind}_proj" in parts:
                parts[2:4] = ["attention", f"w{kind}"]
                if kind in heads:  # halves -> neighbours
                    rows = tensor.view(heads[kind], 2, -1, tensor.shape[1]).transpose(1, 2)
                    tensor = rows.reshape(tensor.shape)
        if "mlp" in parts and parts[3] in ("experts", "gate"):
            parts[2:4] = [parts[3]]
        parts = ["feed_forward" if part == "mlp" else spell.get(part, part) for part in parts]
        new = {"embed_tokens": "tok_embeddings", "lm_head": "output"}.get(parts[0], parts[0])
        tensors[".".join([new, *parts[1:]])] = tensor.contiguous()
    params = dict(
        dim=config["hidden_size"], n_layers=config["num_hidden_layers"], n_heads=heads["q"], n_kv_heads=heads["k"],
        head_dim=config["head_dim"], hidden_dim=config["intermediate_size"], norm_eps=config["rms_norm_eps"],
        vocab_size=config["vocab_size"], max_position_embeddings=512, sliding_window=config["sliding_window"],
        rope_theta=config["rope_parameters"]["rope_theta"],
    )  # fmt: skip
    if "num_local_experts" in config:
        params["moe"] = {
            "num_experts": config["num_local_experts"], "num_experts_per_tok": config["num_experts_per_tok"],
        }  # fmt: skip
    out.mkdir()
    save_file(tensors, out / "consolidated.safetensors")
    (out / "params.json").write_text(json.dumps(params))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((folder / name).read_bytes())


@pytest.mark.parametrize("arch", ["MistralForCausalLM", "MixtralForCausalLM"])
def test_mistrals_own_files(arch, tmp_path):
    write_tiny(arch, tmp_path / "hf")
    to_mistral(tmp_path / "hf", tmp_path / "own")
    wanted = answers(tmp_path / "hf")
    assert answers(tmp_path / "own", config_format="mistral", load_format="mistral") == wanted
    assert answers(tmp_path / "own") == wanted  # nothing else is there, so nothing need be said
    with pytest.raises(CheckpointError, match=r"config\.json"):
        answers(tmp_path / "own", config_format="hf")


def test_mistral_configurations_that_are_not_text_or_not_whole(tmp_path):
    write_tiny("MistralForCausalLM", tmp_path / "hf")
    to_mistral(tmp_path / "hf", tmp_path / "own")
    params = json.loads((tmp_path / "own/params.json").read_text())
    (tmp_path / "own/params.json").write_text(json.dumps(params | {"vision_encoder": {"hidden_size": 4}}))
    with pytest.raises(NotBuiltError, match="vision_encoder"):
        answers(tmp_path / "own")
    del params["n_heads"]
    (tmp_path / "own/params.json").write_text(json.dumps(params))
    with pytest.raises(CheckpointError, match="n_heads"):
        answers(tmp_path / "own")


def test_mistral_names_and_rows():
    assert hf_name("layers.3.feed_forward.experts.2.w1.weight") == "model.layers.3.block_sparse_moe.experts.2.w1.weight"
    assert hf_name("layers.3.attention.wq.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hf_name("layers.0.feed_forward.w2.weight") == "model.layers.0.mlp.down_proj.weight"
    assert halves_of(torch.arange(8)[:, None], 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    with pytest.raises(CheckpointError, match="heads of an even size"):
        halves_of(torch.zeros(6, 2), 2)


# --- overrides and errors


def test_overrides_change_the_configuration(tmp_path):
    model = make_tiny("LlamaForCausalLM", tmp_path, num_hidden_layers=4)
    plain = answers(tmp_path)
    turned = answers(tmp_path, hf_overrides={"rope_parameters": {"rope_theta": 100.0}})

    def change(config):
        config.rope_parameters.rope_theta = 100.0
        return config

    assert answers(tmp_path, hf_overrides=change) == turned != plain
    assert answers(tmp_path, hf_overrides=change, model_impl="transformers") == turned
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    with pytest.raises(CheckpointError, match=r"layers 2-3: .*no place|have no place in it \(layers 2-3"):
        answers(tmp_path, hf_overrides={"num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="layers 4-5"):
        answers(tmp_path, hf_overrides={"num_hidden_layers": 6})
    with pytest.raises(ConfigError, match="must return the configuration"):
        EngineArgs(str(tmp_path), hf_overrides=lambda config: None).create_engine_config()


def test_errors_name_tensors_layer_by_layer():
    names = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in (0, 1, 2, 5) for part in ("up", "down")]
    assert by_layer(["lm_head.weight", *names]) == (
        "lm_head.weight; layers 0-2, 5: mlp.up_proj.weight, mlp.down_proj.weight"
    )
    assert by_layer(names[:1]) == names[0]
    assert by_layer([f"h.{i}.w{i}" for i in range(9)]).endswith("other sets of names in 5 more layers")
    with pytest.raises(
        CheckpointError, match=r"x does not fit .*: 1 tensor is missing \(a\); 1 tensor has no place in it \(b\)"
    ):
        check_complete("x", ["a"], ["b"])


def test_an_index_of_bin_files(tmp_path):
    write_tiny("LlamaForCausalLM", tmp_path)
    wanted = answers(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    half = len(tensors) // 2
    files = {
        "pytorch_model-00001-of-00002.bin": list(tensors)[:half],
        "pytorch_model-00002-of-00002.bin": list(tensors)[half:],
    }
    for name, inside in files.items():
        torch.save({key: tensors[key] for key in inside}, tmp_path / name)
    owners = {key: name for name, inside in files.items() for key in inside}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owners}))
    assert answers(tmp_path) == wanted
    assert answers(tmp_path, model_impl="transformers") == wanted


# --- memory

MEASURE = """
import sys
import torch
from quire.config import EngineArgs
from quire.loader.load import make_model, reload_weights
from quire.ops.op import Kernels

config = EngineArgs(sys.argv[1], dtype=sys.argv[2], max_model_len=64, device="cpu").create_engine_config()


def memory(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024


torch.empty(1 << 20).normal_()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = memory("VmRSS")
model = make_model(config, Kernels.here("cpu"))
reload_weights(model, config)
held = sum(p.numel() * p.element_size() for _, p in model.named_parameters())
print(memory("VmHWM") - before, held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_model_is_never_held_twice(tmp_path):
    """About 200 MB of weights in four files, read into parameters of the same and of half the size."""
    sizes = dict(vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_hidden_layers=3, num_attention_heads=8)
    config = dict(sizes, num_key_value_heads=8, architectures=["LlamaForCausalLM"], model_type="llama", 
                  rms_norm_eps=1e-5, max_position_embeddings=128, tie_word_embeddings=True)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    width, ffn = 1024, 3072
    shards = [{"model.embed_tokens.weight": torch.zeros(8192, width), "model.norm.weight": torch.ones(width)}]
    for i in range(3):
        layer, prefix = {}, f"model.layers.{i}."
        layer |= {f"{prefix}self_attn.{part}_proj.weight": torch.zeros(width, width) for part in "qkvo"}
        layer |= {f"{prefix}mlp.{part}_proj.weight": torch.zeros(ffn, width) for part in ("gate", "up")}
        layer[f"{prefix}mlp.down_proj.weight"] = torch.zeros(width, ffn)
        layer |= {
            prefix + norm: torch.ones(width) for norm in ("input_layernorm.weight", "post_attention_layernorm.weight")
        }
        shards.append(layer)
    for i, shard in enumerate(shards):
        save_file(shard, tmp_path / f"model-{i + 1:05}-of-00004.safetensors")
    for dtype, slack in (("float32", 0.25), ("bfloat16", 0.6)):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path), dtype], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]
        grown, held = map(int, done.stdout.split())
        assert held > (170e6 if dtype == "float32" else 85e6)
        assert held * 0.9 < grown < held * (1 + slack), (
            f"{dtype}: {grown / 1e6:.0f} MB for {held / 1e6:.0f} MB of weights"
        )
