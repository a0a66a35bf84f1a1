"""GGUF tensor names and layouts -> the names and layouts of Hugging Face checkpoints, family by family.

Owns: which GGUF tensors make which checkpoint tensors, and undoing what the GGUF converters did to their values
(rows of q and k in rotation pairs, one added to norm weights, q/k/v ungrouped, experts stacked, projections split).
In: metadata and the names in the file. Out: recipes; nothing is read here.
Must not know: how bytes are decoded (gguf_types.py), or which model the tensors go to.

A family is data: a rule per GGUF stem ("attn_q" of "blk.3.attn_q.weight"). A rule sees its TensorLocation and gives a
Recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.schema.errors import CheckpointError

Pieces = Iterable[tuple[str, Tensor]]


class Recipe(NamedTuple):
    sources: tuple[str, ...]  # tensors in the file
    make: Callable[..., Pieces]  # their values -> named checkpoint tensors
    by_rows: bool = False  # it only names, splits or reorders whole rows, so it works on rows of bytes too
    prefix: str = ""  # of the names that it makes, "model.layers.3."; "": of no layer


class TensorLocation(NamedTuple):
    """Where a tensor stands: all that a rule may look at."""

    source: str  # the whole GGUF name
    stem: str
    suffix: str  # "weight" or "bias"
    prefix: str  # of checkpoint names: "model.layers.3." or ""
    num_heads: int
    num_kv_heads: int
    present: Mapping[str, Any]  # every tensor of the file

    def hf(self, stem: str) -> str:
        return f"{self.prefix}{stem}.{self.suffix}"

    def sibling(self, stem: str) -> str:
        return self.source.replace(f"{self.stem}.", f"{stem}.")


Rule = Callable[[TensorLocation], Recipe | None]  # None: a sibling's recipe takes this tensor along
Change = Callable[[TensorLocation, Tensor], Tensor]


class TensorNaming(NamedTuple):
    rules: dict[str, Rule]  # inside blk.N.
    top: dict[str, Rule]
    layers: str = "model.layers"


def recipes(metadata: Mapping[str, Any], present: Mapping[str, Any]) -> list[Recipe]:
    """One recipe per group of tensors, in file order; CheckpointError for a family or a tensor we cannot place."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or (family := FAMILIES.get(arch)) is None:
        raise CheckpointError(
            f"GGUF architecture {arch!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    last = _number(metadata, f"{arch}.block_count") - _per_layer(metadata, f"{arch}.nextn_predict_layers", 0)
    out, unknown = [], []
    for name in present:
        layer, stem, suffix = _parse(name)
        if stem in _UNUSED or layer >= last:  # layers past the last predict further tokens; nothing here uses them
            continue
        rule = family.top.get(stem) if layer < 0 else _layer_rule(family, stem)
        if rule is None:
            unknown.append(name)
            continue
        heads = _per_layer(metadata, f"{arch}.attention.head_count", layer)
        kv_heads = _per_layer(metadata, f"{arch}.attention.head_count_kv", layer) or heads
        prefix = f"{family.layers}.{layer}." if layer >= 0 else ""
        recipe = rule(TensorLocation(name, stem, suffix, prefix, heads, kv_heads, present))
        if recipe is not None:
            out.append(recipe._replace(prefix=prefix))
    if unknown:
        shown = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise CheckpointError(f"GGUF tensors that the {arch!r} family does not define: {shown}")
    return out


_UNUSED = {"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"}  # rope: read with the config
_BLOCK = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # files older than stacked experts


def _parse(name: str) -> tuple[int, str, str]:
    if match := _BLOCK.fullmatch(name):
        return int(match[1]), match[2], match[3] or "weight"
    stem, _, suffix = name.rpartition(".")
    return (-1, stem, suffix) if stem else (-1, name, "weight")


def _layer_rule(family: TensorNaming, stem: str) -> Rule | None:
    if (match := _ONE_EXPERT.fullmatch(stem)) and "ffn_gate_exps" in family.rules:
        return lambda here: Recipe(
            (here.source,), lambda t: [(f"{here.prefix}{_mixtral_name(match[1], int(match[2]))}", t)]
        )
    return family.rules.get(stem)


def _number(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    if not isinstance(value, int) or not 0 < value < 1 << 20:
        raise CheckpointError(f"GGUF metadata: {key} is {value!r}; wanted a positive number")
    return value


def _per_layer(metadata: Mapping[str, Any], key: str, layer: int) -> int:
    value = metadata.get(key, 0)
    if isinstance(value, list):
        value = value[layer] if 0 <= layer < len(value) else 0
    return value if isinstance(value, int) else 0


# Rules


def _mixtral_name(part: str, e: int) -> str:
    return f"block_sparse_moe.experts.{e}.{ {'gate': 'w1', 'up': 'w3', 'down': 'w2'}[part] }.weight"


def _mlp_name(part: str, e: int) -> str:
    return f"mlp.experts.{e}.{part}_proj.weight"


def named(to: str, change: Change | None = None) -> Rule:
    def rule(here: TensorLocation) -> Recipe:
        by_rows = change is None or change in (unpair_q, unpair_k, qkv_per_head, qkv_per_group)
        return Recipe((here.source,), lambda t: [(here.hf(to), t if change is None else change(here, t))], by_rows)

    return rule


def exactly(to: str) -> Rule:
    """A checkpoint tensor without ".weight" or ".bias" at its end."""
    return lambda here: Recipe((here.source,), lambda t: [(here.prefix + to, t)])


def split_qkv(change_q: Change | None = None, change_k: Change | None = None) -> Rule:
    """Rows of q, then k, then v, where the checkpoint has three tensors."""

    def make(here: TensorLocation, t: Tensor) -> Pieces:
        size = _rows_per(here, t, here.num_heads + 2 * here.num_kv_heads)
        q, k, v = t.split([here.num_heads * size, here.num_kv_heads * size, here.num_kv_heads * size])
        yield here.hf("self_attn.q_proj"), change_q(here, q) if change_q else q
        yield here.hf("self_attn.k_proj"), change_k(here, k) if change_k else k
        yield here.hf("self_attn.v_proj"), v

    return lambda here: Recipe((here.source,), lambda t: make(here, t), by_rows=True)


def experts(part: str, name: Callable[[str, int], str]) -> Rule:
    """[experts, ...] -> one tensor each."""

    def make(here: TensorLocation, stacked: Tensor) -> Pieces:
        for e, t in enumerate(stacked):
            yield f"{here.prefix}{name(part, e)}", t

    return lambda here: Recipe((here.source,), lambda t: make(here, t), by_rows=True)


def joined(
    first: str, second: str, join: Callable[[TensorLocation, Tensor, Tensor], tuple[str, Tensor]]
) -> dict[str, Rule]:
    """Two GGUF tensors that are one in the checkpoint; the recipe hangs on the first."""

    def rule(here: TensorLocation) -> Recipe:
        other = here.sibling(second)
        if other not in here.present:
            raise CheckpointError(f"GGUF file has {here.source!r} but not {other!r}")
        return Recipe((here.source, other), lambda a, b: [join(here, a, b)])

    def along(here: TensorLocation) -> None:
        if here.sibling(first) not in here.present:
            raise CheckpointError(f"GGUF file has {here.source!r} but not {here.sibling(first)!r}")

    return {first: rule, second: along}


def head_norms(to: str) -> Rule:
    """[heads, head size] -> one norm per head."""

    def make(here: TensorLocation, stacked: Tensor) -> Pieces:
        for h, t in enumerate(stacked):
            yield f"{here.prefix}{to}.norms.{h}.{here.suffix}", t

    return lambda here: Recipe((here.source,), lambda t: make(here, t))


# Changes


def _rows_per(here: TensorLocation, t: Tensor, parts: int) -> int:
    if parts < 1 or t.shape[0] % parts:
        raise CheckpointError(
            f"GGUF tensor {here.source!r} has {t.shape[0]} rows, which {here.num_heads} query heads and "
            f"{here.num_kv_heads} key heads cannot share"
        )
    return t.shape[0] // parts


def _unpair(here: TensorLocation, t: Tensor, heads: int) -> Tensor:
    """Rows in rotation pairs (0, half, 1, half + 1, …) within a head -> the two halves one after the other."""
    half = _rows_per(here, t, 2 * heads)
    return t.view(heads, half, 2, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


def unpair_q(here: TensorLocation, t: Tensor) -> Tensor:
    return _unpair(here, t, here.num_heads)


def unpair_k(here: TensorLocation, t: Tensor) -> Tensor:
    return _unpair(here, t, here.num_kv_heads)


def minus_one(here: TensorLocation, t: Tensor) -> Tensor:
    return (t.float() - 1).to(t.dtype) if here.suffix == "weight" else t


def turned(here: TensorLocation, t: Tensor) -> Tensor:
    return t.T if here.suffix == "weight" else t


def one_row(_: TensorLocation, t: Tensor) -> Tensor:
    return t.view(1, -1)


def qkv_per_head(here: TensorLocation, t: Tensor) -> Tensor:
    """[3, heads, size] -> [heads, 3, size]"""
    size = _rows_per(here, t, 3 * here.num_heads)
    return t.view(3, here.num_heads, size, *t.shape[1:]).transpose(0, 1).reshape(t.shape)


def qkv_per_group(here: TensorLocation, t: Tensor) -> Tensor:
    """All q, all k, all v -> per key head: its q heads, its k, its v."""
    groups = here.num_kv_heads
    size = _rows_per(here, t, here.num_heads + 2 * groups)
    parts = t.split([here.num_heads * size, groups * size, groups * size])
    return torch.cat([part.view(groups, -1, *t.shape[1:]) for part in parts], 1).reshape(t.shape)


def _kv_b(here: TensorLocation, k: Tensor, v: Tensor) -> tuple[str, Tensor]:
    """k [heads, rank, nope] and v [heads, size, rank] -> [heads × (nope + size), rank]"""
    return here.hf("self_attn.kv_b_proj"), torch.cat([k.transpose(1, 2), v], 1).flatten(0, 1)


def _input_linear(here: TensorLocation, gate: Tensor, up: Tensor) -> tuple[str, Tensor]:
    return here.hf("block_sparse_moe.input_linear"), torch.cat([gate, up], 1)


def _interleaved(here: TensorLocation, gate: Tensor, up: Tensor) -> tuple[str, Tensor]:
    """gpt-oss: gate and up take turns, and weights are [experts, in, out]."""
    both = torch.stack([gate, up], 2).flatten(1, 2)
    if here.suffix == "bias":
        return here.prefix + "mlp.experts.gate_up_proj_bias", both
    return here.prefix + "mlp.experts.gate_up_proj", both.transpose(1, 2)


def _oss_down(here: TensorLocation) -> Recipe | None:
    if here.suffix == "bias":
        return exactly("mlp.experts.down_proj_bias")(here)
    return Recipe((here.source,), lambda t: [(here.prefix + "mlp.experts.down_proj", t.transpose(1, 2))])


def _falcon_norm(here: TensorLocation) -> Recipe | None:
    """With two norms in front, the first belongs to the MLP."""
    return named("ln_mlp" if here.sibling("attn_norm_2") in here.present else "input_layernorm")(here)


# Families


def _experts(name: Callable[[str, int], str]) -> dict[str, Rule]:
    return {f"ffn_{part}_exps": experts(part, name) for part in ("gate", "up", "down")}


def _names(**stems: str) -> dict[str, Rule]:
    return {stem: named(to) for stem, to in stems.items()}


_TOP = _names(token_embd="model.embed_tokens", output_norm="model.norm", output="lm_head")
_ATTN = {
    **_names(
        attn_q="self_attn.q_proj",
        attn_k="self_attn.k_proj",
        attn_v="self_attn.v_proj",
        attn_output="self_attn.o_proj",
        attn_q_norm="self_attn.q_norm",
        attn_k_norm="self_attn.k_norm",
    ),
    "attn_qkv": split_qkv(),
}
_MLP = _names(ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_PRE = _names(attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")
_POST = _names(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm")
_SANDWICH = {**_PRE, **_POST, **_names(ffn_norm="pre_feedforward_layernorm")}
_PAIRED = {
    **_ATTN,
    "attn_q": named("self_attn.q_proj", unpair_q),
    "attn_k": named("self_attn.k_proj", unpair_k),
    "attn_qkv": split_qkv(unpair_q, unpair_k),
}
_MOE = {
    **_names(ffn_gate_inp="mlp.gate"),
    **_experts(_mlp_name),
    "exp_probs_b": exactly("mlp.gate.e_score_correction_bias"),
}
_SHARED = _names(
    ffn_gate_shexp="mlp.shared_experts.gate_proj",
    ffn_up_shexp="mlp.shared_experts.up_proj",
    ffn_down_shexp="mlp.shared_experts.down_proj",
)
_MIXTRAL_MOE = {**_names(ffn_gate_inp="block_sparse_moe.gate"), **_experts(_mixtral_name)}
_MLA = {
    **_names(
        attn_q_a="self_attn.q_a_proj",
        attn_q_a_norm="self_attn.q_a_layernorm",
        attn_q_b="self_attn.q_b_proj",
        attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
        attn_kv_a_norm="self_attn.kv_a_layernorm",
        attn_kv_b="self_attn.kv_b_proj",
    ),
    **joined("attn_k_b", "attn_v_b", _kv_b),
}


def _shifted(rules: dict[str, Rule], **stems: str) -> dict[str, Rule]:
    """Norm weights were stored with one added."""
    return {**rules, **{stem: named(to, minus_one) for stem, to in stems.items()}}


_GEMMA_TOP = _shifted(_TOP, output_norm="model.norm")
_GEMMA = _shifted(
    {**_ATTN, **_MLP},
    attn_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    attn_q_norm="self_attn.q_norm",
    attn_k_norm="self_attn.k_norm",
)
_GEMMA2 = _shifted(
    _GEMMA,
    ffn_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_LLAMA = TensorNaming({**_PAIRED, **_MLP, **_PRE, **_MIXTRAL_MOE}, _TOP)
_PLAIN = TensorNaming({**_ATTN, **_MLP, **_PRE}, _TOP)
_GATE_UP = _names(ffn_up="mlp.gate_up_proj")
_H_TO_4H = _names(
    attn_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    ffn_up="mlp.dense_h_to_4h",
    ffn_down="mlp.dense_4h_to_h",
)
_TRANSFORMER_TOP = _names(
    token_embd="transformer.word_embeddings",
    token_embd_norm="transformer.word_embeddings_layernorm",
    output_norm="transformer.ln_f",
    output="lm_head",
)

FAMILIES: dict[str, TensorNaming] = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "arcee": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "olmo": _LLAMA,
    "granitemoe": TensorNaming(
        {
            **_PAIRED,
            **_PRE,
            **_names(ffn_gate_inp="block_sparse_moe.router.layer", ffn_down_exps="block_sparse_moe.output_linear"),
            **joined("ffn_gate_exps", "ffn_up_exps", _input_linear),
        },
        _TOP,
    ),
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "command-r": _PLAIN,
    "cohere2": _PLAIN,
    "qwen2moe": TensorNaming(
        {
            **_PLAIN.rules,
            **_MOE,
            **_names(
                ffn_gate_shexp="mlp.shared_expert.gate_proj",
                ffn_up_shexp="mlp.shared_expert.up_proj",
                ffn_down_shexp="mlp.shared_expert.down_proj",
            ),
            "ffn_gate_inp_shexp": named("mlp.shared_expert_gate", one_row),
        },
        _TOP,
    ),
    "qwen3moe": TensorNaming({**_PLAIN.rules, **_MOE}, _TOP),
    "olmoe": TensorNaming({**_PLAIN.rules, **_MOE}, _TOP),
    "dots1": TensorNaming({**_PLAIN.rules, **_MOE, **_SHARED}, _TOP),
    "glm4moe": TensorNaming({**_PLAIN.rules, **_MOE, **_SHARED, **_POST}, _TOP),
    "deepseek2": TensorNaming({**_PLAIN.rules, **_MOE, **_SHARED, **_MLA}, _TOP),
    "gpt-oss": TensorNaming(
        {
            **_ATTN,
            **_PRE,
            **_POST,
            **_names(ffn_gate_inp="mlp.router"),
            **joined("ffn_gate_exps", "ffn_up_exps", _interleaved),
            "ffn_down_exps": _oss_down,
            "attn_sinks": exactly("self_attn.sinks"),
        },
        _TOP,
    ),
    "gemma": TensorNaming(_GEMMA, _GEMMA_TOP),
    "gemma2": TensorNaming(_GEMMA2, _GEMMA_TOP),
    "gemma3": TensorNaming(_GEMMA2, _GEMMA_TOP),
    "olmo2": TensorNaming({**_ATTN, **_MLP, **_POST}, _TOP),
    "exaone4": TensorNaming({**_ATTN, **_MLP, **_POST}, _TOP),
    "seed_oss": TensorNaming({**_PLAIN.rules, **_POST}, _TOP),
    "chatglm": TensorNaming({**_PLAIN.rules, **_GATE_UP}, _TOP),
    "glm4": TensorNaming(
        {
            **_PLAIN.rules,
            **_GATE_UP,
            **_names(post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"),
        },
        _TOP,
    ),
    "phi2": TensorNaming(
        {**_ATTN, **_PRE, **_names(attn_output="self_attn.dense", ffn_up="mlp.fc1", ffn_down="mlp.fc2")},
        {**_TOP, **_names(output_norm="model.final_layernorm")},
    ),
    "phi3": TensorNaming({**_PLAIN.rules, **_GATE_UP, **_names(attn_qkv="self_attn.qkv_proj")}, _TOP),
    "starcoder2": TensorNaming({**_ATTN, **_PRE, **_names(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")}, _TOP),
    "stablelm": TensorNaming(
        {
            **_PLAIN.rules,
            "attn_q_norm": head_norms("self_attn.q_layernorm"),
            "attn_k_norm": head_norms("self_attn.k_layernorm"),
        },
        _TOP,
    ),
    "nemotron": TensorNaming(
        _shifted({**_ATTN, **_MLP}, attn_norm="input_layernorm", ffn_norm="post_attention_layernorm"),
        _GEMMA_TOP,
    ),
    "gpt2": TensorNaming(
        {
            **_names(attn_norm="ln_1", ffn_norm="ln_2"),
            "attn_qkv": named("attn.c_attn", turned),
            "attn_output": named("attn.c_proj", turned),
            "ffn_up": named("mlp.c_fc", turned),
            "ffn_down": named("mlp.c_proj", turned),
        },
        _names(
            token_embd="transformer.wte",
            position_embd="transformer.wpe",
            output_norm="transformer.ln_f",
            output="lm_head",
        ),
        "transformer.h",
    ),
    "gptneox": TensorNaming(
        {
            **_H_TO_4H,
            "attn_qkv": named("attention.query_key_value", qkv_per_head),
            **_names(attn_output="attention.dense"),
        },
        _names(token_embd="gpt_neox.embed_in", output_norm="gpt_neox.final_layer_norm", output="embed_out"),
        "gpt_neox.layers",
    ),
    "bloom": TensorNaming(
        {
            **_H_TO_4H,
            "attn_qkv": named("self_attention.query_key_value", qkv_per_head),
            **_names(attn_output="self_attention.dense"),
        },
        _TRANSFORMER_TOP,
        "transformer.h",
    ),
    "falcon": TensorNaming(
        {
            **_H_TO_4H,
            "attn_norm": _falcon_norm,
            "attn_qkv": named("self_attention.query_key_value", qkv_per_group),
            **_names(attn_norm_2="ln_attn", attn_output="self_attention.dense"),
        },
        _TRANSFORMER_TOP,
        "transformer.h",
    ),
}
