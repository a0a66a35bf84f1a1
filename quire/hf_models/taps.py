"""Attention calls of transformers' modules, routed through Quire's plans.

transformers looks attention functions up in a table, by the name in `config._attn_implementation`; Quire registers
two. Under `NAME` the queries, keys and values of a module go to the plan and cache of its taps. Under
`TRIAL` the same happens, and masks are rules (`MaskRule`) instead of tensors, so a trial can tell which keys
each layer attends to, however long its window is. Must not know: which model it is, or where plans come from.

    module.forward ── ALL_ATTENTION_FUNCTIONS["quire"] ──▶ Taps of the module's model ──▶ plan.run(q, k, v, cache)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from quire.layers.batch import AttentionPlan, LayerCache
from quire.schema.errors import ConfigError
from quire.schema.kv import KVKind, KVSpec

NAME, TRIAL = "quire", "quire_trial"
_HARMLESS = frozenset({  # tensors that models pass for other attention functions
    "position_ids", "cache_position", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k",
})  # fmt: skip
_FAR = 100_003  # a position beyond most windows
_OWNERS: WeakKeyDictionary[nn.Module, Taps] = WeakKeyDictionary()


class RefusalError(ConfigError):
    """Why this method would not give transformers' logits."""


@dataclass(frozen=True)
class CallShape:
    """What one attention call of a forward pass caches per token, and which keys it attends to."""

    kv_heads: int
    key_size: int
    value_size: int
    kind: KVKind
    window: int

    def spec(self, layer: str, block_size: int, dtype: str) -> KVSpec:
        value = -1 if self.value_size == self.key_size else self.value_size
        return KVSpec(
            layer=layer, kind=self.kind, block_size=block_size, num_kv_heads=self.kv_heads, head_size=self.key_size,
            v_head_size=value, dtype=dtype, window=self.window,
        )  # fmt: skip


class MaskRule:
    """A mask as the rule that decides each entry, instead of a tensor."""

    def __init__(self, rule: Callable[..., Any], local_size: int | None) -> None:
        self.rule, self.local_size = rule, local_size

    def keys_seen(self) -> tuple[KVKind, int]:
        """The kind of attention with the same keys as the rule, at every boundary where the kinds differ."""
        size = self.local_size or 0
        q, k = _boundaries(size)
        zero = torch.zeros_like(q)
        seen = self.rule(zero, zero, q, k)
        seen = seen if isinstance(seen, Tensor) else torch.full_like(q, bool(seen), dtype=torch.bool)
        if torch.equal(seen, k <= q):
            return KVKind.FULL, 0
        if size and torch.equal(seen, (k <= q) & (k > q - size)):
            return KVKind.WINDOW, size
        if size and torch.equal(seen, (k <= q) & (k // size == q // size)):
            return KVKind.CHUNK, size
        raise RefusalError("a layer's mask is neither causal, nor a sliding window, nor causal within chunks")


def _boundaries(size: int) -> tuple[Tensor, Tensor]:
    """Pairs of query and key positions on both sides of every boundary of causal, window and chunk rules."""
    steps = (0, 1, 2, 7, 19, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 5, 3 * size + 1, _FAR)
    pairs: set[tuple[int, int]] = set()
    for q in (step for step in steps if step >= 0):
        first = q // size * size if size else 0
        for at in (0, q, q - size, first):
            pairs.update((q, at + by) for by in (-2, -1, 0, 1, 2) if at + by >= 0)
    both = torch.tensor(sorted(pairs))
    return both[:, 0], both[:, 1]


class PlanSource(Protocol):
    """Where a call's plan and cache come from."""

    def plan_of(self, layer: str, shape: CallShape | None) -> tuple[AttentionPlan, LayerCache | None]:
        """`shape` is passed in a trial only."""
        ...


class Taps:
    """The attention calls of one model. A module that attends twice in a pass has two layers."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._source: PlanSource | None = None
        self._calls: Counter[str] = Counter()
        self.shapes: dict[str, CallShape] = {}  # by layer, in order; filled by a trial
        for module in model.modules():
            _OWNERS[module] = self

    @contextmanager
    def reading(self, source: PlanSource) -> Iterator[None]:
        """One forward pass."""
        self._source = source
        self._calls.clear()
        try:
            yield
        finally:
            self._source = None

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, settings: dict[str, Any]) -> Tensor:
        """q [1, Hq, T, D], k and v [1, Hkv, T, *] -> [1, T, Hq, Dv]."""
        if self._source is None:
            raise RuntimeError("a model that runs under Quire was called outside of a step: it has no cache then")
        name = self._names[id(module)]
        self._calls[name] += 1
        layer = name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"
        sinks = settings.pop("s_aux", None)
        softcap = settings.pop("softcap", None) or 0.0
        scale = settings.pop("scaling", None)
        shape = None
        if mask is not None or layer not in self.shapes:
            shape = self.shapes[layer] = _shape_of(layer, q, k, v, mask, settings)
        plan, cache = self._source.plan_of(layer, shape)
        out = plan.run(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), cache,
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale), softcap=float(softcap), sinks=sinks,
        )  # fmt: skip
        return out[None]


def _shape_of(layer: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, settings: dict[str, Any]) -> CallShape:
    """Derived from a trial's call; RefusalError if it needs something that a plan does not support."""
    if q.shape[0] != 1 or k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
        raise RefusalError(
            f"{layer} attends to other tokens than those of the step (q {list(q.shape)}, k {list(k.shape)})"
        )
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise RefusalError(f"{layer} has {q.shape[1]} query heads over {k.shape[1]} keys and {v.shape[1]} values")
    extra = [name for name, it in settings.items() if isinstance(it, Tensor) and name not in _HARMLESS]
    if extra:
        raise RefusalError(
            f"{layer} passes {', '.join(sorted(extra))} to its attention, which Quire's attention does not support"
        )
    if isinstance(mask, MaskRule):
        kind, window = mask.keys_seen()
    elif mask is None:
        window = settings.get("sliding_window") or 0
        kind = KVKind.WINDOW if window else KVKind.FULL
    else:
        raise RefusalError(f"{layer} creates its own mask")
    return CallShape(k.shape[1], k.shape[3], v.shape[3], kind, int(window))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **settings: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers' modules call."""
    taps = _OWNERS.get(module)
    if taps is None:
        raise RuntimeError(f"{type(module).__name__} uses Quire's attention but belongs to no model that Quire runs")
    return taps.attend(module, query, key, value, attention_mask, settings), None


def _describe_mask(*_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any) -> MaskRule:
    """The mask function of the trial."""
    return MaskRule(mask_function, local_size)


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(TRIAL, _attend)
AttentionMaskInterface.register(TRIAL, _describe_mask)


def set_attention(model: nn.Module, name: str) -> None:
    """Make every configuration inside the model select this attention function."""
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name
