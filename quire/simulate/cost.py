"""How long a device takes for a step: bytes over bandwidths, operations over rates, and what every layer costs anyway.

In: a plan of the scheduler. Out: seconds of each pipeline stage. A matmul takes what reading its weights and computing
its products take together, more like the longer of the two than like their sum (`_either`). Weights are read once per
step; of a mixture, those experts that some token goes to, as if tokens chose at random. Collectives pay a latency and
their bytes. Must not know: the scheduler, time of day.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from quire.schema.step import StepPlan
from quire.simulate.devices import DeviceModel, LinkModel
from quire.simulate.shape import BYTES, ModelShape
from quire.simulate.topology import Topology

TILE = 128  # rows: from there on a matmul takes as long as one of the next multiple
_SHARPNESS = 1.8  # of the knee between waiting for weights and computing
_ACTIVATION_PASSES = (
    10  # numbers read or written around the matmuls of a layer, in hidden sizes; and in FFN sizes below
)
_FFN_PASSES = 2
_CACHED_STATES = 8  # hidden states of a step that must fit the cache, for a kernel to find what the last one wrote
_LOGIT_PASSES = 3  # over float32 logits, to choose a token


class CachedPrefix(NamedTuple):
    """What a request shares with others."""

    block: int  # the last one, which tells prefixes apart
    tokens: int


class StepLoad(NamedTuple):
    """What a plan asks of a device; pairs are of a query and a key, by window of the layer (0: full attention)."""

    tokens: int
    sampled: int  # rows that choose a token
    decode_keys: dict[int, int]  # that decodes read, less the shared ones
    shared_keys: int  # that a decode reads after another one of the step did, where a whole layer's fit the cache
    fresh_pairs: dict[int, int]  # of prompts from their first token
    paged_pairs: dict[int, int]  # of pieces that look back into the KV cache


def load_of(plan: StepPlan, windows: tuple[int, ...], prefixes: Mapping[str, CachedPrefix] | None = None) -> StepLoad:
    """`windows`: the different ones of the model's layers. `prefixes`: of requests that took theirs from the cache."""
    keys, fresh, paged = dict.fromkeys(windows, 0), dict.fromkeys(windows, 0), dict.fromkeys(windows, 0)
    sampled, shared, seen = 0, 0, set[int]()
    if windows == (0,) and not prefixes and plan.total_tokens == len(plan.grants):  # decodes, as most steps are
        starts = [grant.start for grant in plan.grants]
        keys[0] = sum(starts) + len(starts)
        return StepLoad(len(starts), sum([grant.samples for grant in plan.grants]), keys, 0, fresh, paged)
    for grant in plan.grants:
        sampled += grant.samples
        start, count = grant.start, grant.count
        for window in windows:
            if count == 1:
                keys[window] += start + 1 if not window else min(start + 1, window)
            elif start:
                paged[window] += _pairs(start, count, window)
            else:
                fresh[window] += _pairs(0, count, window)
        if prefixes and count == 1 and (prefix := prefixes.get(grant.request_id)) is not None:
            if prefix.block in seen:
                shared += prefix.tokens
                keys[0] -= prefix.tokens
            seen.add(prefix.block)
    return StepLoad(plan.total_tokens, sampled, keys, shared, fresh, paged)


def _pairs(start: int, count: int, window: int) -> int:
    whole = count * start + count * (count + 1) // 2
    if not window or start + count <= window:
        return whole
    inside = max(0, min(count, window - start))  # queries whose window is not full yet
    return inside * start + inside * (inside + 1) // 2 + (count - inside) * window


def _either(seconds: float, other: float) -> float:
    longer, shorter = (seconds, other) if seconds > other else (other, seconds)
    if not longer:
        return 0.0
    return longer * float((1.0 + (shorter / longer) ** _SHARPNESS) ** (1.0 / _SHARPNESS))


class CostModel:
    def __init__(self, shape: ModelShape, device: DeviceModel, topology: Topology) -> None:
        self.shape, self.device, self.topology = shape, device, topology
        self.windows = tuple(sorted(set(shape.windows)))
        self._layers = Counter(shape.windows)
        self._stage_share = topology.stage_layers(shape) / shape.num_layers
        is_one_machine = topology.tensor_size <= device.devices_per_machine
        self._link = device.link if is_one_machine else device.network
        fits = topology.replica_size <= device.devices_per_machine
        self._stage_link = device.link if fits else device.network

    def keeps(self, prefix: CachedPrefix) -> bool:
        """Whether the keys and values of a layer fit the device's cache, so that a second row finds them there."""
        return prefix.tokens * self.shape.kv_token_bytes(self.topology.tensor_size) <= self.device.cache_bytes

    def stage_seconds(self, load: StepLoad) -> float:
        """Of one stage of the pipeline, which is the whole step where there is one."""
        layers = self._layer_seconds(load) * self._stage_share
        seconds = self.device.step_seconds + layers + self._head_seconds(load.sampled)
        if self.topology.pipeline_size > 1:
            link = self._stage_link
            seconds += link.latency + load.tokens * self.shape.hidden_size * BYTES / link.bandwidth
        return seconds

    def _layer_seconds(self, load: StepLoad) -> float:
        """Of all layers."""
        shape, device, ranks = self.shape, self.device, self.topology.tensor_size
        rows = _padded(load.tokens)
        num_dense = shape.num_layers - shape.num_moe_layers
        fixed = device.layer_seconds + (device.batched_layer_seconds if load.tokens > 1 else 0.0)
        if any(load.decode_keys.values()) and (any(load.fresh_pairs.values()) or any(load.paged_pairs.values())):
            fixed += device.mixed_head_seconds * shape.num_heads / ranks
        seconds = shape.num_layers * (fixed + self._matmul(rows, shape.attention_params / ranks))
        seconds += num_dense * self._matmul(rows, shape.ffn_params / ranks)
        if shape.num_moe_layers:
            seconds += shape.num_moe_layers * self._mixture_seconds(load.tokens, rows)
        seconds += self._attention_seconds(load) + self._activation_seconds(load.tokens)
        if ranks > 1:
            seconds += self._collective_seconds(load.tokens)
        return seconds

    def _matmul(self, rows: int, params: float) -> float:
        device = self.device
        return _either(params * BYTES / device.weight_bandwidth, 2 * rows * params / device.matmul_rate)

    def _mixture_seconds(self, tokens: int, rows: int) -> float:
        shape, device, ranks = self.shape, self.device, self.topology.tensor_size
        in_use = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** tokens)
        read = in_use * shape.expert_params * BYTES / device.expert_bandwidth
        products = 2 * tokens * shape.top_k * shape.expert_params / device.expert_rate
        seconds = _either(read, products) / ranks
        if self.topology.has_expert_parallel:
            seconds *= self._imbalance(tokens)
        return seconds + self._matmul(rows, shape.shared_params / ranks) + device.expert_layer_seconds

    def _imbalance(self, tokens: int) -> float:
        """The fullest rank's share over the mean, as if tokens chose experts at random."""
        ranks, draws = self.topology.tensor_size, tokens * self.shape.top_k
        deviation = float((ranks / max(draws, 1)) ** 0.5)
        return min(float(ranks), 1 + deviation * float((2 * _log2(ranks)) ** 0.5))

    def _attention_seconds(self, load: StepLoad) -> float:
        shape, device, ranks = self.shape, self.device, self.topology.tensor_size
        key_bytes = shape.kv_token_bytes(ranks)
        per_pair = 2 * shape.num_heads / ranks * (shape.head_size + shape.value_size)
        seconds = 0.0
        for window, num_layers in self._layers.items():
            prompts = load.fresh_pairs[window] / device.attention_rate + load.paged_pairs[window] / device.paged_rate
            seconds += num_layers * (load.decode_keys[window] * key_bytes / device.kv_bandwidth + per_pair * prompts)
        return seconds + shape.num_layers * load.shared_keys * key_bytes / device.cached_bandwidth

    def _activation_seconds(self, tokens: int) -> float:
        shape = self.shape
        wide = shape.top_k * shape.expert_params if shape.num_experts else shape.ffn_params
        width = (
            shape.hidden_size * _ACTIVATION_PASSES + _FFN_PASSES * wide / shape.hidden_size / self.topology.tensor_size
        )
        device = self.device
        is_cached = tokens * shape.hidden_size * BYTES * _CACHED_STATES <= device.cache_bytes
        bandwidth = device.cached_bandwidth if is_cached else device.activation_bandwidth
        return shape.num_layers * tokens * width * BYTES / bandwidth

    def _head_seconds(self, sampled: int) -> float:
        """Logits of the rows that choose a token, and the choice."""
        shape, ranks = self.shape, self.topology.tensor_size
        if not sampled:
            return 0.0
        choice = sampled * shape.vocab_size * 4 * _LOGIT_PASSES / self.device.activation_bandwidth
        seconds = self._matmul(_padded(sampled), shape.head_params / ranks) + choice
        if ranks > 1:
            seconds += _gather(self._link, sampled * shape.vocab_size * BYTES, ranks)
        return seconds

    def _collective_seconds(self, tokens: int) -> float:
        """Two sums over ranks per layer; experts on ranks of their own exchange tokens twice instead of one of them."""
        shape, ranks, link = self.shape, self.topology.tensor_size, self._link
        hidden = tokens * shape.hidden_size * BYTES
        num_exchanges = shape.num_moe_layers if self.topology.has_expert_parallel else 0
        sums = (2 * shape.num_layers - num_exchanges) * (
            link.latency + 2 * hidden * (ranks - 1) / ranks / link.bandwidth
        )
        sent = hidden / ranks * min(shape.top_k, ranks) * (ranks - 1) / ranks if num_exchanges else 0.0
        return sums + 2 * num_exchanges * (link.latency + sent / link.bandwidth)


def _gather(link: LinkModel, num_bytes: float, ranks: int) -> float:
    return link.latency + num_bytes * (ranks - 1) / ranks / link.bandwidth


def _padded(rows: int) -> int:
    return rows if rows <= TILE else -(-rows // TILE) * TILE


def _log2(value: int) -> float:
    return float(max(value.bit_length() - 1, 1))
