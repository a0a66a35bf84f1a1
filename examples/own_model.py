"""An architecture of one's own, declared as data, run on Quire's layers. Its weights are random, so it talks nonsense.

    python examples/own_model.py

The declaration says what differs from Llama: here, queries and keys are normalised per head, and the norms have names
of their own in the checkpoint. docs/adding-a-model.md has more; docs/plugins.md shows models written with transformers.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire import LLM, ModelRegistry, SamplingParams
from quire.models.arch import Arch
from quire.models.view import View, read

HIDDEN, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 256


def declaration(config: View) -> Arch:
    names = ((r"\.query_norm\.", ".q_norm."), (r"\.key_norm\.", ".k_norm."))
    return read(config, qk_norm="head", names=names)


def write_checkpoint(folder: Path) -> None:
    """config.json and weights, as a training program would leave them."""
    config = {
        "architectures": ["MyForCausalLM"], "model_type": "my_model", "hidden_size": HIDDEN, "intermediate_size": 128,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (HIDDEN // HEADS,) for name in ("query", "key")}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (128, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (HIDDEN, 128)}
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    save_file({name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}, folder / "model.safetensors")


with tempfile.TemporaryDirectory() as name:
    write_checkpoint(Path(name))
    ModelRegistry.register_model("MyForCausalLM", declaration)
    # It has no tokenizer: prompts and answers are token ids.
    llm = LLM(name, skip_tokenizer_init=True, dtype="float32", max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    print(llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], params, use_tqdm=False)[0].outputs[0].token_ids)
