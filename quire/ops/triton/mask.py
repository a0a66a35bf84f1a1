"""Grammar masks on CUDA: bits in, -inf in place of every logit whose bit is not set.

Floor: a mask only writes what it forbids, at most n V b bytes, and reads n V / 8: 256 rows of 151,936 float32, most of
them forbidden, 156 MB or 36 us at 4.3 TB/s; one row: a launch, about 2 us. Unpacked in torch the rows are gathered,
filled and scattered: four times the bytes and five launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops import sample
from quire.ops.op import FormTable
from quire.ops.triton.sizes import cdiv

_BLOCK = 1024


# Strides are not specialized on: there are no wide loads or stores, and one kernel works for any vocabulary.
@triton.jit(
    do_not_specialize=["num_words", "vocab", "logits_stride", "words_stride"], do_not_specialize_on_alignment=["words"]
)
def _allow_kernel(logits, rows, words, num_words, vocab, logits_stride, words_stride, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + n).to(tl.int64)
    word = tl.load(words + n * words_stride + ids // 32, mask=ids // 32 < num_words, other=0)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    nothing = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * logits_stride + ids, nothing, mask=forbidden & (ids < vocab))


def allow_words_cuda_(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    if logits.stride(1) != 1 or words.stride(1) != 1:
        return sample.allow_words_.reference(logits, rows, words)
    vocab = logits.shape[1]
    _allow_kernel[(rows.shape[0], cdiv(vocab, _BLOCK))](
        logits, rows, words, words.shape[1], vocab, logits.stride(0), words.stride(0), BLOCK=_BLOCK
    )
    return None


def add_forms(table: FormTable) -> None:
    table.form(sample.allow_words_)(allow_words_cuda_)
