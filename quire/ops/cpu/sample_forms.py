"""The compiled forms of operations on logits: sampling, bitmasks, log probabilities. See csrc/cpu/sample.h.

Each takes what its op takes and never changes what the op leaves alone. Must not know: requests, rows of a worker.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.ops import sample
from quire.ops.act import logarithm
from quire.ops.cpu.native import DTYPES, DrawWork
from quire.ops.op import FormTable, Kernels

MOST_TOP = 4096  # longer lists than this are sorted by torch


def add_forms(table: FormTable, library: ctypes.CDLL) -> None:
    table.made(sample.draw)(partial(_draw, library))
    table.form(sample.allow_words_)(_allow(library))
    table.form(sample.log_probs)(_log_probs(library))
    table.form(sample.chosen_and_top)(_chosen_and_top(library))


def _rows(x: Tensor) -> Tensor:
    """Rows as the kernels read them: of a supported dtype, contiguous within a row."""
    x = x if x.dtype in DTYPES else x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _draw(
    library: ctypes.CDLL, before: Callable[..., tuple[Tensor, Tensor]], kernels: Kernels
) -> Callable[..., tuple[Tensor, Tensor]]:
    log = kernels.of(logarithm)

    def draw_native(
        logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor,
        top_p: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        logits = _rows(logits)
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


def _allow(library: ctypes.CDLL) -> Callable[..., None]:
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


def _log_probs(library: ctypes.CDLL) -> Callable[..., Tensor]:
    def log_probs_native(logits: Tensor) -> Tensor:
        logits = _rows(logits)
        out = torch.empty(logits.shape)
        library.qc_log_softmax(logits.data_ptr(), logits.stride(0), *logits.shape, out.data_ptr(), DTYPES[logits.dtype])
        return out

    return log_probs_native


def _chosen_and_top(library: ctypes.CDLL) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
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
