"""Layers with a recurrent state instead of keys: short convolution, Mamba 1 and 2, gated delta rule.

In: the tokens of one step (rows one after another), state tensors [num_blocks, ...] and a StateWork that maps
tokens to states. Out: one vector per token; the states after each piece are written to their blocks.
All arithmetic on states is float32, whatever they are stored in. Every op has two paths: decodes (rows that
compute one token, all at once) and pieces (longer runs, as chunked matmuls).
In batch-invariant mode on CPU both are replaced by a token-by-token loop, each from a copy of the previous state.
Must not know: requests, block tables, layers.

    row   [ .................. | .......... | ...... ]      a piece ends where a block of the row ends
            piece 0              piece 1      piece 2       load: a block, FRESH, or KEPT (what the piece before left)
                               ^ store 0    ^ store 1 ^ store 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.act import PLAIN
from quire.ops.alone import fresh, keep_apart
from quire.ops.op import Op, op, same_bits

FRESH, KEPT = -1, -2  # loads: the state is zero; the state is that after the previous piece
CHUNK = 64  # tokens whose pairwise products are computed at once
CHANNEL_CHUNK = 16  # the same if a pair has a value per channel


@dataclass(frozen=True)
class StateWork:
    """How the tokens of one step update the states of one KV group. Stores of -1 write nothing."""

    tokens: Tensor | None  # [D] int64: tokens that are their row's only one in this step; None: all tokens, in order
    load: Tensor  # [D] int64: block of the state before it, or FRESH
    store: Tensor  # [D] int64
    pieces: Tensor  # [N, 4] int32: first token, end, load (a block, FRESH or KEPT), store
    spans: np.ndarray  # host [N, 3]: first token, end, 1 where load is KEPT
    made: dict[str, Any] = field(default_factory=dict)  # lists that faster forms derive from it, by name

    @classmethod
    def fresh(cls, tokens: int, device: torch.device) -> StateWork:
        """One row from its start; no state is stored."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        pieces = torch.tensor([[0, tokens, FRESH, -1]], dtype=torch.int32, device=device)
        return cls(none, none, none, pieces, np.array([[0, tokens, 0]], np.int32))


@op
def state_places(tables: Tensor, rows: Tensor | None, contexts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(load, store), int64 [R], of rows that compute one token each; tables [_, W] int32, contexts [R] (0: padding)."""
    index = torch.arange(len(contexts), device=contexts.device) if rows is None else rows.long()
    wide = contexts.long()
    load = tables[index, (wide - 2).clamp(min=0) // size].long()
    store = tables[index, (wide - 1).clamp(min=0) // size].long()
    return torch.where(wide > 1, load, FRESH), torch.where(wide > 0, store, -1)


def _take(states: Tensor, load: Tensor) -> Tensor:
    """States [D, ...] in float32; zero if there is none."""
    values = states[load.clamp(min=0)].float()
    return torch.where(load.view(-1, *[1] * (states.ndim - 1)) >= 0, values, 0.0)


def _put(states: Tensor, store: Tensor, values: Tensor) -> None:
    valid = store >= 0
    if not bool(valid.all()):
        store, values = store[valid], values[valid]
    states[store] = values.to(states.dtype)


def _runs(work: StateWork, states: Tensor) -> Iterator[tuple[int, int, Tensor, list[Tensor]]]:
    """(first token, end, float32 state before, holder of the state after) of each piece; stores the holder's state."""
    last = torch.empty(0)
    for begin, end, load, store in work.pieces.tolist():
        if load == KEPT:
            state = last
        else:
            state = states[load].float() if load >= 0 else torch.zeros_like(states[0], dtype=torch.float32)
        box: list[Tensor] = []
        yield begin, end, state, box
        last = box[0]
        if store >= 0:
            states[store] = last.to(states.dtype)


@op
def causal_conv(
    x: Tensor,  # [T, C]
    weight: Tensor,  # [C, K], the last column for the token itself
    bias: Tensor | None,  # [C]
    states: Tensor,  # [num_blocks, C, K - 1]: the last inputs, oldest first
    work: StateWork,
    act: str,  # "" for none
) -> Tensor:
    """Depthwise convolution over the last K inputs of each channel, then the activation. [T, C]."""
    out = torch.empty_like(x)
    wide, shift = weight.float(), None if bias is None else bias.float()
    if len(work.load):
        tokens = x if work.tokens is None else x[work.tokens]
        window = torch.cat((_take(states, work.load), tokens.float()[..., None]), -1)  # [D, C, K]
        result = (window * wide).sum(-1)
        result = result if shift is None else result + shift
        out[slice(None) if work.tokens is None else work.tokens] = result.to(x.dtype)
        _put(states, work.store, window[..., 1:])
    for begin, end, state, box in _runs(work, states):
        window = torch.cat((state, x[begin:end].float().t()), -1)  # [C, K - 1 + n]
        result = F.conv1d(window[None], wide[:, None], shift, groups=x.shape[1])[0]
        out[begin:end] = result.t().to(x.dtype)
        box.append(window[:, window.shape[1] - states.shape[2] :])
    return PLAIN[act].reference(out) if act else out


@op
def ssd_scan(
    x: Tensor,  # [T, H, P]
    dt: Tensor,  # [T, H], before bias and softplus
    b: Tensor,  # [T, G, N]
    c: Tensor,  # [T, G, N]
    a_log: Tensor,  # [H]
    d: Tensor | None,  # [H] or [H, P]
    dt_bias: Tensor,  # [H]
    dt_limit: tuple[float, float],
    states: Tensor,  # [num_blocks, H, P, N]
    work: StateWork,
) -> Tensor:
    """Mamba 2: state = exp(dt A) state + dt x B; y = C state + D x, with A = -exp(a_log). [T, H, P]."""
    step = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    return _linear_scan(x, step, step * -a_log.float().exp(), b, c, d, states, work)


def _linear_scan(
    x: Tensor, step: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, work: StateWork
) -> Tensor:
    """step and log_decay [T, H] float32."""
    per = x.shape[1] // b.shape[1]
    out = torch.empty_like(x)
    if len(work.load):
        decoding = slice(None) if work.tokens is None else work.tokens
        bs, cs = (t[decoding].float().repeat_interleave(per, 1) for t in (b, c))  # [D, H, N]
        inputs = x[decoding].float() * step[decoding][..., None]
        state = _take(states, work.load) * log_decay[decoding].exp()[..., None, None]
        state = state + inputs[..., None] * bs[:, :, None]
        out[decoding] = torch.einsum("dhpn,dhn->dhp", state, cs).to(x.dtype)
        _put(states, work.store, state)
    for begin, end, state, box in _runs(work, states):
        for at in range(begin, end, CHUNK):
            span = slice(at, min(at + CHUNK, end))
            y, state = _linear_chunk(x[span], step[span], log_decay[span], b[span], c[span], state, per)
            out[span] = y.to(x.dtype)
        box.append(state)
    if d is not None:
        out = (out.float() + x.float() * d.float().view(d.shape[0], -1)).to(x.dtype)
    return out


def _linear_chunk(
    x: Tensor, step: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, per: int
) -> tuple[Tensor, Tensor]:
    """(y [L, H, P], state after [H, P, N]) of a few tokens, all pairs at once."""
    bs, cs = (t.float().repeat_interleave(per, 1).transpose(0, 1) for t in (b, c))  # [H, L, N]
    inputs = (x.float() * step[..., None]).transpose(0, 1)  # [H, L, P]
    total = log_decay.cumsum(0).t()  # [H, L]
    pairs = (total[:, :, None] - total[:, None]).tril().exp().tril()
    y = ((cs @ bs.transpose(1, 2)) * pairs) @ inputs + (cs * total.exp()[..., None]) @ state.transpose(1, 2)
    rest = (total[:, -1:] - total).exp()
    state = state * total[:, -1].exp()[:, None, None] + (inputs * rest[..., None]).transpose(1, 2) @ bs
    return y.transpose(0, 1), state


@op
def selective_scan(
    x: Tensor,  # [T, C]
    dt: Tensor,  # [T, C], before bias and softplus
    b: Tensor,  # [T, N]
    c: Tensor,  # [T, N]
    a_log: Tensor,  # [C, N]
    d: Tensor,  # [C]
    dt_bias: Tensor | None,  # [C]
    states: Tensor,  # [num_blocks, C, N]
    work: StateWork,
) -> Tensor:
    """Mamba 1: every channel and state entry has a separate decay rate. [T, C]."""
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step, a = F.softplus(step), -a_log.float().exp()
    wide, bs, cs = x.float(), b.float(), c.float()
    out = torch.empty_like(wide)
    if len(work.load):
        decoding = slice(None) if work.tokens is None else work.tokens
        state = _take(states, work.load) * (step[decoding][..., None] * a).exp()
        state = state + (step[decoding] * wide[decoding])[..., None] * bs[decoding][:, None]
        out[decoding] = torch.einsum("dcn,dn->dc", state, cs[decoding])
        _put(states, work.store, state)
    for begin, end, state, box in _runs(work, states):
        for at in range(begin, end, CHUNK):
            span = slice(at, min(at + CHUNK, end))
            decay = (step[span][..., None] * a).exp()  # [L, C, N]
            added = (step[span] * wide[span])[..., None] * bs[span][:, None]
            for i in range(len(decay)):
                state = state * decay[i] + added[i]
                added[i] = state
            out[span] = torch.einsum("lcn,ln->lc", added, cs[span])
        box.append(state)
    return (out + wide * d.float()).to(x.dtype)


@op
def delta_scan(
    q: Tensor,  # [T, Hk, K]
    k: Tensor,  # [T, Hk, K]
    v: Tensor,  # [T, Hv, V]
    a: Tensor,  # [T, Hv], before bias and softplus
    b: Tensor,  # [T, Hv], before the sigmoid
    a_log: Tensor,  # [Hv]
    dt_bias: Tensor,  # [Hv]
    beta_scale: float,  # 1, or 2 if states may also change sign
    states: Tensor,  # [num_blocks, Hv, K, V]
    work: StateWork,
) -> Tensor:
    """Gated delta rule: state = e^g state; state += beta k (v - k state); y = q state. Unit-length queries and keys.

    g = -exp(a_log) softplus(a + dt_bias), beta = beta_scale sigmoid(b). [T, Hv, V].
    """
    log_decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    beta = beta_scale * b.float().sigmoid()
    per, out = v.shape[1] // q.shape[1], torch.empty_like(v)
    q = _unit(q) * q.shape[-1] ** -0.5
    k = _unit(k)
    if len(work.load):
        decoding = slice(None) if work.tokens is None else work.tokens
        qs, ks = (t[decoding].repeat_interleave(per, 1) for t in (q, k))  # [D, Hv, K]
        state = _take(states, work.load) * log_decay[decoding].exp()[..., None, None]
        change = (v[decoding].float() - torch.einsum("dhkv,dhk->dhv", state, ks)) * beta[decoding][..., None]
        state = state + ks[..., None] * change[:, :, None]
        out[decoding] = torch.einsum("dhkv,dhk->dhv", state, qs).to(v.dtype)
        _put(states, work.store, state)
    for begin, end, state, box in _runs(work, states):
        for at in range(begin, end, CHUNK):
            span = slice(at, min(at + CHUNK, end))
            y, state = _delta_chunk(q[span], k[span], v[span], log_decay[span], beta[span], state, per)
            out[span] = y.to(v.dtype)
        box.append(state)
    return out


@op
def channel_delta_scan(
    q: Tensor,  # [T, H, K]
    k: Tensor,  # [T, H, K]
    v: Tensor,  # [T, H, V]
    log_decay: Tensor,  # [T, H, K] float32: of every entry of a key
    beta: Tensor,  # [T, H] float32
    states: Tensor,  # [num_blocks, H, K, V]
    work: StateWork,
) -> Tensor:
    """The delta rule with a decay per channel. Unit-length queries and keys. [T, H, V]."""
    out, q, k = torch.empty_like(v), _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    if len(work.load):
        decoding = slice(None) if work.tokens is None else work.tokens
        state = _take(states, work.load) * log_decay[decoding].exp()[..., None]
        change = (v[decoding].float() - torch.einsum("dhkv,dhk->dhv", state, k[decoding])) * beta[decoding][..., None]
        state = state + k[decoding][..., None] * change[:, :, None]
        out[decoding] = torch.einsum("dhkv,dhk->dhv", state, q[decoding]).to(v.dtype)
        _put(states, work.store, state)
    for begin, end, state, box in _runs(work, states):
        for at in range(begin, end, CHANNEL_CHUNK):
            span = slice(at, min(at + CHANNEL_CHUNK, end))
            y, state = _channel_chunk(q[span], k[span], v[span], log_decay[span], beta[span], state)
            out[span] = y.to(v.dtype)
        box.append(state)
    return out


def _channel_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As _delta_chunk; the decay between two tokens differs by channel, so all pairs are computed explicitly."""
    qs, ks, total = (t.transpose(0, 1) for t in (q, k, log_decay.cumsum(0)))  # [H, L, K]
    weight, grown = beta.t()[..., None], total.exp()
    pairs = (total[:, :, None] - total[:, None]).clamp(max=0).exp() * ks[:, None]  # [H, L, L, K]; valid where j <= i
    system = ((ks * weight)[:, :, None] * pairs).sum(-1)
    known = v.float().transpose(0, 1) * weight - (ks * weight * grown) @ state
    change = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)  # [H, L, V]
    y = (qs * grown) @ state + (qs[:, :, None] * pairs).sum(-1).tril() @ change
    rest = (total[:, -1:] - total).exp()
    state = state * grown[:, -1, :, None] + (ks * rest).transpose(1, 2) @ change
    return y.transpose(0, 1), state


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)


def _delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, per: int
) -> tuple[Tensor, Tensor]:
    """(y [L, Hv, V], state after [Hv, K, V]). The effect of earlier tokens of the chunk is a triangular
    system: change_i = beta_i (v_i - k_i (state decayed to i)), solved for all i at once."""
    qs, ks = (t.repeat_interleave(per, 1).transpose(0, 1) for t in (q, k))  # [H, L, K]
    weight = beta.t()[..., None]  # [H, L, 1]
    total = log_decay.cumsum(0).t()  # [H, L]
    grown = total.exp()[..., None]
    pairs = (total[:, :, None] - total[:, None]).tril().exp().tril()
    system = (ks * weight) @ ks.transpose(1, 2) * pairs
    known = v.float().transpose(0, 1) * weight - (ks * weight * grown) @ state
    change = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)  # [H, L, V]
    y = (qs * grown) @ state + ((qs @ ks.transpose(1, 2)) * pairs) @ change
    rest = (total[:, -1:] - total).exp()[..., None]
    state = state * grown[:, -1:] + (ks * rest).transpose(1, 2) @ change
    return y.transpose(0, 1), state


@op
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, norm_first: bool) -> Tensor:
    """RMS norm over groups of `group` entries of the last dimension, times silu(gate) before it or after it.

    weight: as long as a group (shared by all) or as x's last dimension.
    """
    wide, opened = x.float(), F.silu(gate.float())
    if not norm_first:
        wide = wide * opened
    parts = wide.unflatten(-1, (-1, group))
    parts = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    normed = (parts * weight.view(-1, group)).flatten(-2)
    return (normed * opened).to(x.dtype) if norm_first else normed


keep_apart(gated_rms_norm, 2)


def _pieces(work: StateWork) -> list[tuple[int, int, int, int]]:
    """All of a step's work as (first token, end, load, store); a single token is a piece of length one."""
    load, store = work.load.tolist(), work.store.tolist()
    tokens = range(len(load)) if work.tokens is None else work.tokens.tolist()
    singles = [(token, token + 1, a, b) for token, a, b in zip(tokens, load, store, strict=True)]
    return singles + [(begin, end, a, b) for begin, end, a, b in work.pieces.tolist()]


def _one_token(load: int) -> StateWork:
    """A row of one token; its state is block 0 of a separate tensor, before and after."""
    none = torch.empty(0, dtype=torch.int64)
    pieces = torch.tensor([[0, 1, load, 0]], dtype=torch.int32)
    return StateWork(none, none, none, pieces, np.array([[0, 1, 0]], np.int32))


def _walk(run: Callable[..., Tensor], rows: Sequence[Tensor], states: Tensor, work: StateWork) -> Tensor:
    """run(one token of each of rows, [1, ...] state, its work) for every token. A state is rounded to its storage
    dtype after each, so it makes no difference where a step ends."""
    results: list[Tensor] = [torch.empty(0)] * len(rows[0])
    state = torch.empty(0)
    begins, goes_on = _one_token(FRESH), _one_token(0)
    for begin, end, load, store in _pieces(work):
        if load != KEPT:
            state = fresh(states[load : load + 1]) if load >= 0 else states.new_empty((1, *states.shape[1:]))
        for token in range(begin, end):
            starts = load == FRESH and token == begin
            results[token] = run([fresh(x[token : token + 1]) for x in rows], state, begins if starts else goes_on)
        if store >= 0:
            states[store] = state[0]
    return torch.cat(results)


def _walk_by_token(scan: Op, rows: int) -> None:
    """Add the batch-invariant CPU form of an op whose first `rows` arguments have tokens, and which takes `states` and
    `work` one after the other, possibly followed by more."""

    def walked(*args: Any) -> Tensor:
        at = next(i for i, argument in enumerate(args) if isinstance(argument, StateWork))
        between, after = args[rows : at - 1], args[at + 1 :]

        def run(token: Sequence[Tensor], state: Tensor, work: StateWork) -> Tensor:
            result: Tensor = scan.reference(*token, *between, state, work, *after)
            return result

        return _walk(run, args[:rows], args[at - 1], args[at])

    walked.__name__ = f"{scan.name}_walked"
    scan.form("cpu", same_bits)(walked)


for _scan, _rows in ((causal_conv, 1), (ssd_scan, 4), (selective_scan, 4), (delta_scan, 5), (channel_delta_scan, 5)):
    _walk_by_token(_scan, _rows)
