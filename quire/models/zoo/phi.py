"""Phi 1 to 4: parallel blocks with layer norm first, then Llama-like blocks stored fused."""

from __future__ import annotations

from dataclasses import replace

from quire.models.arch import Arch, with_window
from quire.models.view import View, read
from quire.models.zoo.defaults import DEFAULTS

_PHI_NAMES = (
    (r"\.dense\.", ".o_proj."),
    (r"\.fc1\.", ".up_proj."),
    (r"\.fc2\.", ".down_proj."),
    (r"\.(q|k)_layernorm\.", r".\1_norm."),
    (r"^model\.final_layernorm\.", "model.norm."),
)

# As PEFT writes a model with adapters in it: the matrix itself, beside which lie two adapters.
_PHI4MM_NAMES = ((r"\.base_layer\.", "."),)
_PHI4MM_ADAPTERS = r"^model\.layers\.\d+\..*\.lora_[AB]\.(?:vision|speech)\.weight$"


def phi(c: View) -> Arch:
    arch = read(
        c, order="parallel", one_norm=True, gated=False, qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True,
        names=_PHI_NAMES, qk_norm="head" if c.qk_layernorm else "", qk_norm_bias=True,
    )  # fmt: skip
    return replace(arch, norm=replace(arch.norm, kind="layer", bias=True))


def phi3(c: View) -> Arch:
    arch = read(c, qkv_bias=False, o_bias=False)
    rope = arch.layers[0].rope
    if rope is not None and rope.scaling is not None and rope.scaling["rope_type"] == "yarn":
        longrope = replace(rope, scaling={**rope.scaling, "rope_type": "longrope"})  # early releases say yarn
        arch = replace(arch, layers=tuple(replace(layer, rope=longrope) for layer in arch.layers))
    return with_window(arch, c.maybe("sliding_window"))


def phi4mm(c: View) -> Arch:
    """The language model of Phi-4-multimodal in its own repository. The adapters that its files have too lie there in
    folders, from which they are served."""
    arch = phi3(View(c.raw, DEFAULTS["Phi3ForCausalLM"], "Phi3ForCausalLM"))
    return replace(arch, names=(*_PHI4MM_NAMES, *arch.names), ignore=(*arch.ignore, _PHI4MM_ADAPTERS))
