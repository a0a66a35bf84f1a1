"""Mixers that carry a running state instead of keys: short convolution, Mamba 1 and 2, gated delta rule.

In: the tokens of one step (rows one after another), state tensors [num_blocks, ...] and a StateWork that says which
tokens follow which state. Out: one vector per token; the states after each piece are written to their blocks.
All arithmetic of a state is float32, whatever it is stored in. Every op has two forms inside: `decodes` (rows that
compute one token, all at once) and pieces (longer runs, in chunks of matrix products).
In batch-invariant mode on CPU both give way to a walk, token by token, each from a copy of the state before it.
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

FRESH, KEPT = -1, -2  # loads: the state is zero; the state is what the piece before left
CHUNK = 64  # tokens whose pairwise products are made at once
CHANNEL_CHUNK = 16  # the same where a pair has a number per channel


@dataclass(frozen=True)
class StateWork:
    """How the tokens of one step move the states of one KV group. Stores of -1 write nothing."""

    tokens: Tensor | None  # [D] int64: tokens that are their row's only one in this step; None: all tokens, in order
    load: Tensor  # [D] int64: block of the state before it, or FRESH
    store: Tensor  # [D] int64
    pieces: Tensor  # [N, 4] int32: first token, end, load (a block, FRESH or KEPT), store
    spans: np.ndarray  # host [N, 3]: first token, end, 1 where load is KEPT
    made: dict[str, Any] = field(default_factory=dict)  # lists that faster forms make of it, by their name

    @classmethod
    def fresh(cls, tokens: int, device: torch.device) -> StateWork:
        """One row from its beginning; nothing is kept."""
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
    """States [D, ...] in float32; zero where there is none."""
    found = states[load.clamp(min=0)].float()
    return torch.where(load.view(-1, *[1] * (states.ndim - 1)) >= 0, found, 0.0)


def _put(states: Tensor, store: Tensor, values: Tensor) -> None:
    kept = store >= 0
    if not bool(kept.all()):
        store, values = store[kept], values[kept]
    states[store] = values.to(states.dtype)


def _runs(work: StateWork, states: Tensor) -> Iterator[tuple[int, int, Tensor, list[Tensor]]]:
    """(first token, end, state before in float32, box for the state after) of each piece; stores what the box got."""
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
    """Each channel's own convolution over its last K inputs, then the activation. [T, C]."""
    out = torch.empty_like(x)
    wide, shift = weight.float(), None if bias is None else bias.float()
    if len(work.load):
        own = x if work.tokens is None else x[work.tokens]
        window = torch.cat((_take(states, work.load), own.float()[..., None]), -1)  # [D, C, K]
        found = (window * wide).sum(-1)
        found = found if shift is None else found + shift
        out[slice(None) if work.tokens is None else work.tokens] = found.to(x.dtype)
        _put(states, work.store, window[..., 1:])
    for begin, end, state, box in _runs(work, states):
        window = torch.cat((state, x[begin:end].float().t()), -1)  # [C, K - 1 + n]
        found = F.conv1d(window[None], wide[:, None], shift, groups=x.shape[1])[0]
        out[begin:end] = found.t().to(x.dtype)
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
        own = slice(None) if work.tokens is None else work.tokens
        bs, cs = (t[own].float().repeat_interleave(per, 1) for t in (b, c))  # [D, H, N]
        inputs = x[own].float() * step[own][..., None]
        state = _take(states, work.load) * log_decay[own].exp()[..., None, None]
        state = state + inputs[..., None] * bs[:, :, None]
        out[own] = torch.einsum("dhpn,dhn->dhp", state, cs).to(x.dtype)
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
    """Mamba 1: every channel and state entry decays at its own rate. [T, C]."""
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step, a = F.softplus(step), -a_log.float().exp()
    wide, bs, cs = x.float(), b.float(), c.float()
    out = torch.empty_like(wide)
    if len(work.load):
        own = slice(None) if work.tokens is None else work.tokens
        state = _take(states, work.load) * (step[own][..., None] * a).exp()
        state = state + (step[own] * wide[own])[..., None] * bs[own][:, None]
        out[own] = torch.einsum("dcn,dn->dc", state, cs[own])
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
    beta_scale: float,  # 1, or 2 where states may also change sign
    states: Tensor,  # [num_blocks, Hv, K, V]
    work: StateWork,
) -> Tensor:
    """Gated delta rule: state = e^g state; state += beta k (v - k state); y = q state. Queries and keys of length one.

    g = -exp(a_log) softplus(a + dt_bias), beta = beta_scale sigmoid(b). [T, Hv, V].
    """
    log_decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    beta = beta_scale * b.float().sigmoid()
    per, out = v.shape[1] // q.shape[1], torch.empty_like(v)
    q = _unit(q) * q.shape[-1] ** -0.5
    k = _unit(k)
    if len(work.load):
        own = slice(None) if work.tokens is None else work.tokens
        qs, ks = (t[own].repeat_interleave(per, 1) for t in (q, k))  # [D, Hv, K]
        state = _take(states, work.load) * log_decay[own].exp()[..., None, None]
        change = (v[own].float() - torch.einsum("dhkv,dhk->dhv", state, ks)) * beta[own][..., None]
        state = state + ks[..., None] * change[:, :, None]
        out[own] = torch.einsum("dhkv,dhk->dhv", state, qs).to(v.dtype)
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
    """The delta rule with a decay per channel. Queries and keys of length one. [T, H, V]."""
    out, q, k = torch.empty_like(v), _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    if len(work.load):
        own = slice(None) if work.tokens is None else work.tokens
        state = _take(states, work.load) * log_decay[own].exp()[..., None]
        change = (v[own].float() - torch.einsum("dhkv,dhk->dhv", state, k[own])) * beta[own][..., None]
        state = state + k[own][..., None] * change[:, :, None]
        out[own] = torch.einsum("dhkv,dhk->dhv", state, q[own]).to(v.dtype)
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
    """As _delta_chunk; what is left of a token after another differs by channel, so all pairs are made of them."""
    qs, ks, total = (t.transpose(0, 1) for t in (q, k, log_decay.cumsum(0)))  # [H, L, K]
    weight, grown = beta.t()[..., None], total.exp()
    pairs = (total[:, :, None] - total[:, None]).clamp(max=0).exp() * ks[:, None]  # [H, L, L, K]; right where j <= i
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
    """(y [L, Hv, V], state after [Hv, K, V]). What each token finds of the earlier ones of its chunk is a triangular
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

    weight: as long as a group (shared by all) or as the whole of x's last dimension.
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
    """All of a step's work as (first token, end, load, store); a single token is a piece of one."""
    load, store = work.load.tolist(), work.store.tolist()
    tokens = range(len(load)) if work.tokens is None else work.tokens.tolist()
    singles = [(token, token + 1, a, b) for token, a, b in zip(tokens, load, store, strict=True)]
    return singles + [(begin, end, a, b) for begin, end, a, b in work.pieces.tolist()]


def _one_token(load: int) -> StateWork:
    """A row of one token; its state is block 0 of a tensor of its own, before and after."""
    none = torch.empty(0, dtype=torch.int64)
    pieces = torch.tensor([[0, 1, load, 0]], dtype=torch.int32)
    return StateWork(none, none, none, pieces, np.array([[0, 1, 0]], np.int32))


def _walk(run: Callable[..., Tensor], rows: Sequence[Tensor], states: Tensor, work: StateWork) -> Tensor:
    """run(one token of each of rows, [1, ...] state, its work) for every token. A state is rounded to what it is
    stored in after each, so that it makes no difference where a step ends."""
    found: list[Tensor] = [torch.empty(0)] * len(rows[0])
    own = torch.empty(0)
    begins, goes_on = _one_token(FRESH), _one_token(0)
    for begin, end, load, store in _pieces(work):
        if load != KEPT:
            own = fresh(states[load : load + 1]) if load >= 0 else states.new_empty((1, *states.shape[1:]))
        for token in range(begin, end):
            starts = load == FRESH and token == begin
            found[token] = run([fresh(x[token : token + 1]) for x in rows], own, begins if starts else goes_on)
        if store >= 0:
            states[store] = own[0]
    return torch.cat(found)


def _walk_by_token(scan: Op, rows: int) -> None:
    """Add the batch-invariant CPU form of an op whose first `rows` arguments have tokens, and where `states` and `work`
    follow each other, with or without more behind them."""

    def walked(*args: Any) -> Tensor:
        at = next(i for i, given in enumerate(args) if isinstance(given, StateWork))
        between, after = args[rows : at - 1], args[at + 1 :]

        def run(own: Sequence[Tensor], state: Tensor, work: StateWork) -> Tensor:
            found: Tensor = scan.reference(*own, *between, state, work, *after)
            return found

        return _walk(run, args[:rows], args[at - 1], args[at])

    walked.__name__ = f"{scan.name}_walked"
    scan.form("cpu", same_bits)(walked)


for _scan, _rows in ((causal_conv, 1), (ssd_scan, 4), (selective_scan, 4), (delta_scan, 5), (channel_delta_scan, 5)):
    _walk_by_token(_scan, _rows)
