"""Attention within texts and sums of texts on a GPU (ops/triton/texts.py) beside their references, on any device."""

import torch

from quire.ops.attention import ragged_attention
from quire.ops.texts import text_sums
from quire.ops.triton import texts

LENS = (5, 1, 64, 130, 65, 2)


def drawn(device, dtype, heads, kv_heads, size, lens=LENS):
    """Queries, keys and values as parts of one matrix, as a fused projection gives them."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn((sum(lens), (heads + 2 * kv_heads) * size), generator=generator).to(device=device, dtype=dtype)
    parts = fused.split([heads * size, kv_heads * size, kv_heads * size], 1)
    return [part.unflatten(1, (-1, size)) for part in parts]


def check_attention(device, dtype, heads, kv_heads, size, window=0, slopes=False, tolerance=2e-5):
    q, k, v = drawn(device, dtype, heads, kv_heads, size)
    near = torch.arange(1, heads + 1, device=device) / (4.0 * heads) if slopes else None
    found = texts.attend_texts(q, k, v, LENS, LENS, size**-0.5, window, near)
    wide = [part.float() for part in (q, k, v)]
    expected = ragged_attention.reference(*wide, LENS, LENS, scale=size**-0.5, window=window, near=near)
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def check_alone(device, dtype):
    """A text's result has the same bits whatever lies beside it."""
    q, k, v = drawn(device, dtype, 4, 4, 32)
    found = texts.attend_texts(q, k, v, LENS, LENS, 0.2)
    begin = 0
    for count in LENS:
        part = slice(begin, begin + count)
        alone = texts.attend_texts(q[part], k[part], v[part], (count,), (count,), 0.2)
        assert torch.equal(found[part], alone)
        begin += count


def check_cross(device, dtype):
    """Texts may have other keys than queries, and none of these."""
    query_lens, key_lens = (3, 0, 70), (40, 5, 9)
    q = drawn(device, dtype, 2, 2, 16, query_lens)[0]
    k, v = drawn(device, dtype, 2, 2, 16, key_lens)[1:]
    found = texts.attend_texts(q, k, v, query_lens, key_lens, 0.25)
    expected = ragged_attention.reference(q.float(), k.float(), v.float(), query_lens, key_lens, scale=0.25)
    torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-5)


def check_sums(device, dtype, width):
    x = torch.randn((sum(LENS), width), generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)
    found = texts.text_sums_cuda(x, LENS)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, text_sums.reference(x, LENS), atol=1e-4, rtol=1e-5)
    assert torch.equal(found[3], texts.text_sums_cuda(x[70:200], (130,))[0])
