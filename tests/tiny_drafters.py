"""Tiny random drafters in the layouts they are published in, each with an oracle: what it drafts, in plain torch.

An oracle is a function (tokens, states, count) -> tokens: a text, the hidden states of the model for all of it but the
last token [n, width], and how many tokens to draft. It recomputes everything for every draft, without a cache. Layers
of a known kind are transformers' own; what is particular to a drafter is written out here.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_models import VOCAB, tiny_model

Oracle = Callable[[list[int], Tensor, int], list[int]]
WIDTH, HEADS, KV_HEADS, SIZE, FFN, EPS = 64, 4, 2, 16, 96, 1e-6
LAYER: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=FFN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=SIZE,
    vocab_size=VOCAB, max_position_embeddings=512, rms_norm_eps=EPS, rope_theta=10000.0, hidden_act="silu",
)  # fmt: skip


class Weights:
    """Random tensors by name, the same ones each time."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, centre: float = 0.0, std: float = 0.25) -> Tensor:
        self.tensors[name] = centre + std * torch.randn(shape, generator=self._generator)
        return self.tensors[name]

    def norm(self, name: str, width: int = WIDTH) -> Tensor:
        return self(name, width, centre=1.0, std=0.4)

    def write(self, folder: Path, config: dict[str, Any], file: str = "model.safetensors") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        if file.endswith(".safetensors"):
            save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / file)
        else:
            torch.save(self.tensors, folder / file)


def rms(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


# ---- heads without keys and values ---------------------------------------------------------------------------------


def medusa(
    folder: Path, head: Tensor, *, converted: bool = False, bare: bool = False, depth: int = 2, count: int = 4
) -> Oracle:
    """`converted`: as vLLM has it, with a vocabulary of its own; else as its authors do. `bare`: with the model's
    head."""
    w, chosen = Weights(1), torch.arange(3, VOCAB, 2)
    blocks, ends = [], []
    for i in range(count):
        at = f"blocks.{i}.layers.{{}}" if converted else f"{i}.{{}}.linear"
        layers = []
        for j in range(depth):
            weight = w(f"{at.format(j)}.weight", WIDTH, WIDTH)
            bias = torch.zeros(WIDTH) if converted else w(f"{at.format(j)}.bias", WIDTH)
            layers.append((weight, bias))
        blocks.append(layers)
        name = f"lm_heads.{i}.weight" if converted else f"{i}.{depth}.weight"
        ends.append(head if bare else w(name, len(chosen) if converted else VOCAB, WIDTH))
    config: dict[str, Any] = {"medusa_num_heads": count, "medusa_num_layers": depth, "base_model_name_or_path": "x"}
    if converted:
        w.tensors["token_map"] = chosen
        config = dict(
            model_type="medusa", architectures=["MedusaModel"], hidden_size=WIDTH, vocab_size=VOCAB, num_heads=count,
            num_hidden_layers=depth, truncated_vocab_size=len(chosen),
        )  # fmt: skip
    w.write(folder, config, "model.safetensors" if converted else "medusa_lm_head.pt")

    def oracle(tokens: list[int], states: Tensor, wanted: int) -> list[int]:
        said = []
        for layers, end in zip(blocks[:wanted], ends, strict=False):
            x = states[-1]
            for weight, bias in layers:
                x = x + F.silu(weight @ x + bias)
            best = int((end @ x).argmax())
            said.append(int(chosen[best]) if converted else best)
        return said

    return oracle


def mlp_speculator(folder: Path, *, tied: bool, count: int = 4, inner: int = 48) -> Oracle:
    w, own = Weights(2), 1 if tied else count
    emb = [w(f"speculator.emb.{i}.weight", VOCAB, inner) for i in range(own)]
    first = w("speculator.proj.0.weight", inner, WIDTH)
    others = [w(f"speculator.proj.{i}.weight", inner, inner) for i in range(1, 2 if tied else count)]
    heads = [w(f"speculator.head.{i}.weight", VOCAB, inner) for i in range(own)]
    norms = [(w.norm(f"speculator.ln.{i}.weight", inner), w(f"speculator.ln.{i}.bias", inner)) for i in range(own)]
    config = dict(
        model_type="mlp_speculator", architectures=["MLPSpeculatorPreTrainedModel"], vocab_size=VOCAB, emb_dim=WIDTH,
        inner_dim=inner, n_predict=count, tie_weights=tied, scale_input=tied, top_k_tokens_per_head=[1] * count,
    )  # fmt: skip
    w.write(folder, config)
    keep = 0.5 ** (0.5 / count)
    share = math.sqrt((1 - keep**2) * (inner / 2)) / keep

    def oracle(tokens: list[int], states: Tensor, wanted: int) -> list[int]:
        state, token, said = states[-1], tokens[-1], []
        if tied:
            state = rms(state) / math.sqrt(2)
        for i in range(wanted):
            at = 0 if tied else i
            matrix = first if i == 0 else others[0 if tied else i - 1]
            state = matrix @ state + share * emb[at][token]
            state = F.gelu(rms(state) * norms[at][0] + norms[at][1])
            token = int((heads[at] @ state).argmax())
            said.append(token)
        return said

    return oracle


# ---- layers over pairs of a state and the token after it -----------------------------------------------------------


def rotated(x: Tensor) -> Tensor:
    """[T, H, SIZE]"""
    half = SIZE // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class PlainLayer:
    """A layer of Llama's, from its own tensors."""

    def __init__(self, w: Weights, prefix: str, inputs: int = WIDTH) -> None:
        self.q = w(f"{prefix}self_attn.q_proj.weight", HEADS * SIZE, inputs)
        self.k = w(f"{prefix}self_attn.k_proj.weight", KV_HEADS * SIZE, inputs)
        self.v = w(f"{prefix}self_attn.v_proj.weight", KV_HEADS * SIZE, inputs)
        self.o = w(f"{prefix}self_attn.o_proj.weight", WIDTH, HEADS * SIZE)
        self.gate, self.up = (w(f"{prefix}mlp.{name}_proj.weight", FFN, WIDTH) for name in ("gate", "up"))
        self.down = w(f"{prefix}mlp.down_proj.weight", WIDTH, FFN)
        self.norm = w.norm(f"{prefix}post_attention_layernorm.weight")

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ m.t()).view(len(x), -1, SIZE) for m in (self.q, self.k, self.v))
        q, k = rotated(q), rotated(k)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(SIZE)
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(len(x), -1) @ self.o.t()

    def finish(self, x: Tensor) -> Tensor:
        h = rms(x, self.norm)
        return x + (F.silu(h @ self.gate.t()) * (h @ self.up.t())) @ self.down.t()


def chain(step: Callable[[Tensor, Tensor], Tensor], choose: Callable[[Tensor], int]) -> Oracle:
    """`step`: tokens [n] and states [n, width] -> states after them; it goes on with the last of these."""

    def oracle(tokens: list[int], states: Tensor, wanted: int) -> list[int]:
        said: list[int] = []
        for _ in range(wanted):
            after = step(torch.tensor([*tokens[-len(states) + len(said) :], *said]), states)
            said.append(choose(after[-1]))
            states = torch.cat((states, after[-1:]))
        return said

    return oracle


def eagle(folder: Path, embedding: Tensor, head: Tensor, *, own: bool, library: bool = False) -> Oracle:
    """`own`: with an embedding and a bias; else the model's. `library`: as the speculators library writes it."""
    w = Weights(3)
    layer = PlainLayer(w, "transformer." if library else "layers.0.")
    fc = w("fusion_fc.weight" if library else "fc.weight", WIDTH, 2 * WIDTH)
    bias = w("fc.bias", WIDTH) if own else torch.zeros(WIDTH)
    table = w("embed_tokens.weight", VOCAB, WIDTH) if own else embedding
    config: dict[str, Any] = dict(LAYER, architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=1)
    if library:
        config = speculators("eagle", dict(config), fusion_bias=False, layernorms=False)
    w.write(folder, config, "pytorch_model.bin" if own else "model.safetensors")

    def step(tokens: Tensor, states: Tensor) -> Tensor:
        x = torch.cat((table[tokens], states), -1) @ fc.t() + bias
        return layer.finish(x + layer.attend(x))

    return chain(step, lambda state: int((head @ state).argmax()))


def speculators(method: str, layer: dict[str, Any], verifier: str = "x", **more: Any) -> dict[str, Any]:
    """A configuration as the speculators library writes it."""
    layer.pop("architectures", None)
    proposals = [{"proposal_type": "greedy", "speculative_tokens": 4}]
    inner = dict(
        algorithm=method, default_proposal_method="greedy", proposal_methods=proposals,
        verifier={"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
    )  # fmt: skip
    return dict(
        architectures=["Speculator"], speculators_model_type=method, speculators_config=inner,
        transformer_layer_config=layer, speculators_version="0.1.0", **more,
    )  # fmt: skip


def eagle3(
    folder: Path, embedding: Tensor, head: Tensor, *, library: bool = False, taps: list[int] | None = None,
    verifier: str = "x",
) -> Oracle:  # fmt: skip
    """The states are those of all taps, side by side."""
    w, small, count = Weights(4), 200, 3 if taps is None else len(taps)
    prefix = "layers.0." if library else "midlayer."
    layer = PlainLayer(w, prefix, 2 * WIDTH)
    of_token, of_state = w.norm(f"{prefix}input_layernorm.weight"), w.norm(f"{prefix}hidden_norm.weight")
    fc, end = w("fc.weight", WIDTH, count * WIDTH), w.norm("norm.weight")
    own_head = w("lm_head.weight", small, WIDTH)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))[:small].sort().values
    w.tensors["d2t"] = ids - torch.arange(small)
    w.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    table = w("embed_tokens.weight", VOCAB, WIDTH) if library else embedding
    config: dict[str, Any] = dict(LAYER, model_type="llama", num_hidden_layers=1, draft_vocab_size=small)
    if library:
        config.pop("draft_vocab_size")
        config = speculators(
            "eagle3", config, verifier, draft_vocab_size=small, norm_before_residual=True,
            eagle_aux_hidden_state_layer_ids=taps,
        )  # fmt: skip
    else:
        config |= dict(architectures=["LlamaForCausalLMEagle3"], eagle_aux_hidden_state_layer_ids=taps)
    w.write(folder, config)

    def step(tokens: Tensor, states: Tensor) -> Tensor:
        h = rms(states, of_state)
        out = layer.attend(torch.cat((rms(table[tokens], of_token), h), -1))
        return layer.finish((h if library else states) + out)

    inner = chain(step, lambda state: int(ids[int((own_head @ rms(state, end)).argmax())]))
    return lambda tokens, states, wanted: inner(tokens, states @ fc.t(), wanted)


# ---- multi-token prediction ----------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {  # overrides of a transformers model whose one layer is the module's
    "DeepseekV3ForCausalLM": dict(first_k_dense_replace=0),
    "Glm4MoeForCausalLM": dict(first_k_dense_replace=0),
    "Ernie4_5_MoeForCausalLM": dict(moe_layer_start_index=1),
    "Qwen2ForCausalLM": {},  # written as MiMo
    "Qwen3NextForCausalLM": dict(layer_types=["full_attention"]),
}
MTP_FAMILIES = (*FAMILIES, "LongcatFlashForCausalLM")


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model-mtp.safetensors")
    (folder / "model.safetensors").rename(folder / "model-main.safetensors")


def mtp(folder: Path, model: Any, family: str) -> Oracle:
    """Adds the module to the checkpoint of a model. `model`: transformers' own, which wrote it."""
    if family.startswith("Longcat"):
        return longcat(folder, model)
    w, count = Weights(5), model.config.num_hidden_layers
    one = tiny_model(family, seed=6, num_hidden_layers=1, **FAMILIES[family])
    layer, prefix = {}, f"model.layers.{count}."
    names = dict(token="enorm", state="hnorm", join="eh_proj", end="shared_head.norm")
    if family.startswith("Ernie"):
        prefix = "model.mtp_block.0."
        names = dict(token="mtp_emb_norm.0", state="mtp_hidden_norm.0", join="mtp_linear_proj.0", end="")
    elif family.startswith("Qwen2"):
        prefix = "model.mtp_layers.0."
        names = dict(token="token_layernorm", state="hidden_layernorm", join="input_proj", end="final_layernorm")
    elif family.startswith("Qwen3Next"):
        prefix = "mtp.layers.0."
        names = dict(token="pre_fc_norm_embedding", state="pre_fc_norm_hidden", join="fc", end="norm")
    for name, tensor in one.state_dict().items():
        if name.startswith("model.layers.0."):
            layer[name.replace("model.layers.0.", prefix)] = tensor
    beside = {"Ernie4_5_MoeForCausalLM": "model.", "Qwen3NextForCausalLM": "mtp."}.get(family, prefix)
    of_token, of_state = (w.norm(f"{beside}{names[key]}.weight") for key in ("token", "state"))
    join = w(f"{beside}{names['join']}.weight", WIDTH, 2 * WIDTH)
    with torch.no_grad():
        if names["end"]:
            one.model.norm.weight.copy_(w.norm(f"{beside}{names['end']}.weight"))
        else:
            one.model.norm.weight.copy_(model.model.norm.weight)
    if prefix == f"model.layers.{count}.":  # copies of the model's own, which nobody needs
        w.tensors[f"{prefix}embed_tokens.weight"] = model.model.embed_tokens.weight.data.clone()
        w.tensors[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.data.clone()
    add_tensors(folder, {**w.tensors, **layer})
    config = json.loads((folder / "config.json").read_text())
    if not family.startswith("Qwen3Next"):  # whose configuration does not tell
        config |= {"num_nextn_predict_layers": 1}
    if family.startswith("Qwen2"):
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(json.dumps(config))
    table, eps = model.model.embed_tokens.weight.data, model.config.rms_norm_eps
    if family.startswith("Qwen3Next"):  # stored around zero
        of_token, of_state = 1 + of_token, 1 + of_state

    def step(tokens: Tensor, states: Tensor) -> Tensor:
        pair = rms(table[tokens], of_token, eps), rms(states, of_state, eps)
        x = torch.cat(pair[::-1] if family.startswith("Qwen2") else pair, -1) @ join.t()
        with torch.no_grad():
            return one.model(inputs_embeds=x[None]).last_hidden_state[0]

    head = model.get_output_embeddings().weight.data
    return chain(step, lambda state: int((head @ state).argmax()))


class LongcatModule(torch.nn.Module):
    """One attention and one mlp, unlike the layers of the model; transformers has the parts, but not the whole."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        parts, config = importlib.import_module(type(model).__module__), model.config
        self.input_layernorm, self.post_attention_layernorm, self.end = (
            parts.LongcatFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = parts.LongcatFlashMLA(config, 0)
        self.mlp = parts.LongcatFlashMLP(config)
        self.rotary = parts.LongcatFlashRotaryEmbedding(config)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """[T, width]"""
        turn = self.rotary(x, torch.arange(len(x))[None])
        mask = torch.full((len(x), len(x)), -math.inf).triu(1)[None, None]
        x = x + self.self_attn(self.input_layernorm(x)[None], turn, mask)[0][0]
        return self.end(x + self.mlp(self.post_attention_layernorm(x)))


def longcat(folder: Path, model: Any) -> Oracle:
    w, module, eps = Weights(5), LongcatModule(model), model.config.rms_norm_eps
    prefix, within = "model.mtp.layers.0.", {"mlp.": "transformer_layer.mlp.", "end.": "../norm."}
    for name, parameter in module.named_parameters():
        place = next((new + name.removeprefix(old) for old, new in within.items() if name.startswith(old)), name)
        shown = f"{prefix}{place}" if not place.startswith("../") else f"model.mtp.{place[3:]}"
        drawn = w.norm(shown, len(parameter)) if parameter.ndim == 1 else w(shown, *parameter.shape)
        parameter.data.copy_(drawn)
    of_token, of_state = w.norm(f"{prefix}enorm.m.weight"), w.norm(f"{prefix}hnorm.m.weight")
    join = w(f"{prefix}eh_proj.weight", WIDTH, 2 * WIDTH)
    table, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    w.tensors["model.mtp.embed_tokens.weight"] = table.clone()  # which nobody needs
    add_tensors(folder, w.tensors)

    def step(tokens: Tensor, states: Tensor) -> Tensor:
        pair = rms(table[tokens], of_token, eps), rms(states, of_state, eps)
        after: Tensor = module(torch.cat(pair, -1) @ join.t())
        return after

    return chain(step, lambda state: int((head @ state).argmax()))
