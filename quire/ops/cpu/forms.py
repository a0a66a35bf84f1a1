"""The compiled forms of ops on CPU: `compiled` returns them as a table, from which `Kernels` picks a model's forms.

Each form has the signature of its op. If the kernels do not support the tensors (another dtype, odd strides), it falls
back to the op without kernels. Must not know: modules, models, configuration.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from quire.base.log import logger
from quire.ops import sample
from quire.ops.act import gated_of, logarithm
from quire.ops.attention import ragged_attention
from quire.ops.cpu import block, low_rank, moe_forms
from quire.ops.cpu.native import DTYPES, KINDS, DrawWork, Segment, kernels, usable, why_not
from quire.ops.linear import heads_matmul, linear
from quire.ops.norm import add_rms_norm, add_rms_norm_wide, rms_norm, rms_norm_wide
from quire.ops.op import FormTable, Kernels, cpu_dtypes, same_bits
from quire.ops.packed import (
    Matrix,
    Packed,
    kind_of,
    lay_panels,
    likes_panels,
    pack,
    pack_numbers,
    packed_linear,
    packed_rows,
    panel_kind,
)

_log = logger(__name__)
_NAMES = {number: name for name, number in KINDS.items()}
ACTS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "relu2": 3, "quick_gelu": 4}
FEW_ROWS = 32  # plain matmuls of more rows are left to torch if it uses units for the dtype and the kernels do not
TILED = {"amx": torch.bfloat16}  # units that the kernels use
PAIRED = ("amx", "avx512bf16")  # sets with instructions for pairs of bfloat16
ALL_ROWS = 1 << 62
MOST_TOP = 4096  # most likely tokens; longer lists than this are sorted by torch


def register(threads: int = 1) -> bool:
    """Log which kernels run, and set the number of threads; False if there are none. Threads belong to the process,
    like torch's: every model in it computes on them, and no result depends on their number."""
    library = kernels()
    if library is None:
        _log.warning("compiled CPU kernels are not used, everything runs in torch, which is slower: %s", why_not())
        return False
    library.qc_set_threads(threads)
    _log.info("CPU kernels: %s (of %s), %d threads", library.qc_isa().decode(), ", ".join(usable(library)), threads)
    return True


def compiled() -> tuple[FormTable | None, ctypes.CDLL | None]:
    """The forms and the library they call; nothing if there are no kernels, or the environment disables them."""
    library = kernels()
    return (None, None) if library is None else (_table(library), library)


def few_rows(chosen: Kernels, dtype: torch.dtype) -> int:
    """The most rows that compiled kernels multiply with plain weights."""
    if chosen.library is None or dtype is torch.float32 or TILED.get(chosen.library.qc_isa().decode()) is dtype:
        return ALL_ROWS
    return FEW_ROWS if dtype in cpu_dtypes() and not chosen.batch_invariant else ALL_ROWS


@cache
def _table(library: ctypes.CDLL) -> FormTable:
    table = FormTable("cpu")
    _add_packed(table, library)
    _add_rows(table, library)
    _add_linear(table, library)
    _add_logits(table, library)
    moe_forms.add_forms(table, library, ACTS, few_rows)
    block.add_forms(table, library, ACTS, few_rows)
    low_rank.add_forms(table, library)
    table.made(ragged_attention)(partial(_ragged_form, library))
    return table


def _ragged_form(library: ctypes.CDLL, before: Callable[..., Tensor], chosen: Kernels) -> Callable[..., Tensor]:
    from quire.ops.cpu.text_forms import ragged_form  # lazy: models that read whole texts

    return ragged_form(library, before)


def _add_packed(table: FormTable, library: ctypes.CDLL) -> None:
    read_rows = library.qc_unpack_rows

    @table.form(kind_of)
    def kind(type_id: int) -> str | None:
        return _NAMES.get(library.qc_kind_of(type_id))

    @table.form(pack)
    def pack_native(raw: Tensor, type_id: int, rows: int, width: int) -> Packed:
        number = library.qc_kind_of(type_id)
        out = _packed(library, number, rows, width)
        raw = raw.contiguous()
        library.qc_pack(type_id, raw.data_ptr(), rows, width, out.data.data_ptr())
        return out

    @table.form(pack_numbers)
    def pack_numbers_native(numbers: Tensor, kind: str) -> Packed:
        numbers = (numbers if numbers.dtype in DTYPES else numbers.float()).contiguous()
        out = _packed(library, KINDS[kind], *numbers.shape)
        rows, width = numbers.shape
        library.qc_pack_float(KINDS[kind], numbers.data_ptr(), DTYPES[numbers.dtype], rows, width, out.data.data_ptr())
        return out

    table.made(packed_linear)(partial(_packed_linear_form, library))

    @table.form(likes_panels)
    def likes_panels_native(dtype: torch.dtype, whole_texts: bool = False) -> bool:
        if dtype is torch.float32:
            return whole_texts
        return dtype is torch.bfloat16 and library.qc_isa().decode() in PAIRED

    @table.form(lay_panels)
    def lay_panels_native(weight: Tensor, back: bool = False) -> None:
        if not weight.is_contiguous():
            raise ValueError(
                f"a matrix of {tuple(weight.shape)} is not contiguous: it cannot be rearranged into panels in place"
            )
        library.qc_lay_panels(KINDS[panel_kind(weight.dtype)], weight.data_ptr(), *weight.shape, back)

    @table.form(packed_rows)
    def packed_rows_native(index: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
        indices = index.long().contiguous()
        out = torch.empty((*index.shape, packed.width), dtype=dtype)
        read_rows(
            KINDS[packed.kind], packed.data.data_ptr(), packed.rows, packed.width, indices.data_ptr(), indices.numel(),
            out.data_ptr(), DTYPES[dtype],
        )  # fmt: skip
        return out


def _packed_linear_form(library: ctypes.CDLL, before: Callable[..., Tensor], chosen: Kernels) -> Callable[..., Tensor]:
    multiply = library.qc_linear_packed

    def packed_linear_native(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
        if matrix.handle is None:
            segments = (Segment * len(matrix.parts))(
                *(Segment(KINDS[part.kind], part.rows, part.data.data_ptr()) for part in matrix.parts)
            )
            matrix.handle = (ctypes.addressof(segments), len(segments), matrix.rows, matrix.parts[0].width, segments)
        segments_at, count, rows, width, _ = matrix.handle
        flat = x if x.dim() == 2 else x.reshape(-1, width)
        if flat.stride(1) != 1 or x.dtype not in DTYPES:
            flat = flat.contiguous() if x.dtype in DTYPES else flat.float().contiguous()
        out = torch.empty((flat.shape[0], rows), dtype=flat.dtype)
        multiply(
            flat.data_ptr(), flat.stride(0), flat.shape[0], width, segments_at, count,
            None if bias is None else bias.data_ptr(), out.data_ptr(), rows, DTYPES[flat.dtype],
        )  # fmt: skip
        return out if x.dim() == 2 else out.view(*x.shape[:-1], rows)

    return packed_linear_native


def _packed(library: ctypes.CDLL, kind: int, rows: int, width: int) -> Packed:
    size = library.qc_packed_bytes(kind, rows, width)
    if size < 0:
        raise ValueError(f"rows of {width} cannot be packed: expected a multiple of 32")
    return Packed(torch.empty(size, dtype=torch.uint8), _NAMES[kind], rows, width)


def _add_rows(table: FormTable, library: ctypes.CDLL) -> None:
    norm = library.qc_rms_norm

    # Never decide by strides, which may depend on the number of rows: a row's bits must not.
    def fits(x: Tensor, weight: Tensor) -> bool:
        return x.dtype in DTYPES and x.dtype is weight.dtype and weight.dim() == 1

    def normed(x: Tensor, weight: Tensor, eps: float, offset: float, wide: bool) -> Tensor:
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        norm(
            x.data_ptr(), width, None, weight.data_ptr(), None, out.data_ptr(), x.numel() // width, width, eps, offset,
            wide, DTYPES[x.dtype],
        )  # fmt: skip
        return out

    def joined(
        x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float, wide: bool
    ) -> tuple[Tensor, Tensor]:
        x, delta = x.contiguous(), delta.contiguous()
        total, out, width = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
        norm(
            x.data_ptr(), width, delta.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(),
            x.numel() // width, width, eps, offset, wide, DTYPES[x.dtype],
        )  # fmt: skip
        return out, total

    @table.made(rms_norm)
    def rms_norm_form(before: Callable[..., Tensor], chosen: Kernels) -> Callable[..., Tensor]:
        def rms_norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return normed(x, weight, eps, 0.0, False) if fits(x, weight) else before(x, weight, eps)

        return rms_norm_native

    @table.made(rms_norm_wide)
    def rms_norm_wide_form(before: Callable[..., Tensor], chosen: Kernels) -> Callable[..., Tensor]:
        def rms_norm_wide_native(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
            return normed(x, weight, eps, offset, True) if fits(x, weight) else before(x, weight, eps, offset)

        return rms_norm_wide_native

    @table.made(add_rms_norm)
    def add_rms_norm_form(
        before: Callable[..., tuple[Tensor, Tensor]], chosen: Kernels
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        def add_rms_norm_native(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            if fits(x, weight) and delta.dtype is x.dtype and delta.shape == x.shape:
                return joined(x, delta, weight, eps, 0.0, False)
            return before(x, delta, weight, eps)

        return add_rms_norm_native

    @table.made(add_rms_norm_wide)
    def add_rms_norm_wide_form(
        before: Callable[..., tuple[Tensor, Tensor]], chosen: Kernels
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        def add_rms_norm_wide_native(
            x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
        ) -> tuple[Tensor, Tensor]:
            if fits(x, weight) and delta.dtype is x.dtype and delta.shape == x.shape:
                return joined(x, delta, weight, eps, offset, True)
            return before(x, delta, weight, eps, offset)

        return add_rms_norm_wide_native

    for name, number in ACTS.items():
        table.made(gated_of(name))(partial(_gated_form, library, number))


def _gated_form(
    library: ctypes.CDLL, number: int, before: Callable[[Tensor], Tensor], chosen: Kernels
) -> Callable[[Tensor], Tensor]:
    gate = library.qc_gated

    def gated_native(x: Tensor) -> Tensor:
        if x.dim() != 2 or x.dtype not in DTYPES:
            return before(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, width), dtype=x.dtype)
        gate(number, x.data_ptr(), x.stride(0), out.data_ptr(), rows, width, DTYPES[x.dtype])
        return out

    return gated_native


def _add_linear(table: FormTable, library: ctypes.CDLL) -> None:
    table.made(linear)(partial(_linear_form, library))

    @table.made(heads_matmul, same_bits)
    def heads_matmul_form(before: Callable[..., Tensor], chosen: Kernels) -> Callable[..., Tensor]:
        multiply = chosen.of(linear)

        def heads_matmul_native(x: Tensor, weight: Tensor) -> Tensor:
            heads = [multiply(x[:, head], _as_rows(weight[head])) for head in range(x.shape[1])]
            return torch.stack(heads, 1)

        return heads_matmul_native


def _as_rows(weight: Tensor) -> Tensor:
    """[A, B] -> [B, A] as `linear` expects it: contiguous rows."""
    turned = weight.t()
    return turned if turned.stride(1) == 1 else turned.contiguous()


def _linear_form(library: ctypes.CDLL, before: Callable[..., Tensor], chosen: Kernels) -> Callable[..., Tensor]:
    """Matmuls of more rows than `most` are left to torch, whose order of summation depends on the number of rows."""
    most = {dtype: few_rows(chosen, dtype) for dtype in DTYPES}
    multiply = library.qc_linear

    def linear_native(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype, width = x.dtype, x.shape[-1]
        flat = x if x.dim() == 2 else x.reshape(-1, width)
        rows = flat.shape[0]
        if rows > most.get(dtype, -1) or weight.dtype is not dtype or weight.stride(1) != 1:
            return before(x, weight, bias)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        out = torch.empty((rows, weight.shape[0]), dtype=dtype)
        multiply(
            flat.data_ptr(), flat.stride(0), weight.data_ptr(), weight.stride(0),
            None if bias is None else bias.data_ptr(), out.data_ptr(), weight.shape[0], rows, weight.shape[0], width,
            DTYPES[dtype],
        )  # fmt: skip
        return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)

    return linear_native


def _add_logits(table: FormTable, library: ctypes.CDLL) -> None:
    """Sampling, bitmasks, log probabilities: csrc/cpu/sample.h."""
    table.made(sample.draw)(partial(_draw_form, library))
    table.form(sample.allow_words_)(_allow_form(library))
    table.form(sample.log_probs)(_log_probs_form(library))
    table.form(sample.chosen_and_top)(_chosen_and_top_form(library))


def _logit_rows(x: Tensor) -> Tensor:
    """Rows as the kernels read them: of a supported dtype, contiguous within a row."""
    x = x if x.dtype in DTYPES else x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _draw_form(
    library: ctypes.CDLL, before: Callable[..., tuple[Tensor, Tensor]], chosen: Kernels
) -> Callable[..., tuple[Tensor, Tensor]]:
    log = chosen.of(logarithm)

    def draw_native(
        logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor,
        top_p: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        logits = _logit_rows(logits)
        count, width = logits.shape
        tokens, scores = torch.empty(count, dtype=torch.int64), torch.empty(count)
        columns = {
            "temperature": temperature, "floors": log(min_p), "top_p": top_p, "top_k": top_k,
            "seeds": seeds, "positions": positions, "tokens": tokens, "scores": scores,
        }  # fmt: skip
        contiguous = {name: column.contiguous() for name, column in columns.items()}
        work = DrawWork(logits=logits.data_ptr(), stride=logits.stride(0), rows=count, width=width)
        work.dtype = DTYPES[logits.dtype]
        for name, column in contiguous.items():
            setattr(work, name, column.data_ptr())
        library.qc_draw_tokens(ctypes.byref(work))
        return tokens, scores

    return draw_native


def _allow_form(library: ctypes.CDLL) -> Callable[..., None]:
    def allow_words_native_(logits: Tensor, rows: Tensor, words: Tensor) -> None:
        if logits.dtype is not torch.float32 or logits.stride(1) != 1:
            return sample.allow_words_.reference(logits, rows, words)
        words, rows = words.contiguous(), rows.long().contiguous()
        library.qc_allow(
            logits.data_ptr(), logits.stride(0), *logits.shape, rows.data_ptr(), len(rows), words.data_ptr(),
            words.shape[1],
        )  # fmt: skip
        return None

    return allow_words_native_


def _log_probs_form(library: ctypes.CDLL) -> Callable[..., Tensor]:
    def log_probs_native(logits: Tensor) -> Tensor:
        logits = _logit_rows(logits)
        out = torch.empty(logits.shape)
        library.qc_log_softmax(logits.data_ptr(), logits.stride(0), *logits.shape, out.data_ptr(), DTYPES[logits.dtype])
        return out

    return log_probs_native


def _chosen_and_top_form(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def chosen_and_top_native(values: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        if k > MOST_TOP or values.dtype is not torch.float32:
            return sample.chosen_and_top.reference(values, chosen, k)
        values, chosen = values.contiguous(), chosen.long().contiguous()
        rows, width = values.shape
        ids = torch.empty((rows, 1 + k), dtype=torch.int64)
        picked, ranks = torch.empty((rows, 1 + k)), torch.empty(rows, dtype=torch.int64)
        library.qc_top(
            values.data_ptr(), rows, width, chosen.data_ptr(), k, picked.data_ptr(), ids.data_ptr(), ranks.data_ptr()
        )
        return ids, picked, ranks

    return chosen_and_top_native
