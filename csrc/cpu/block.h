// Whole blocks of a decoder in one call: norm, fused product, attention, product back, norm, gated mlp. The same kernels
// one after another; what is saved is the caller's time between them.
#pragma once
#include <vector>

#include "attention.h"
#include "block_tiles.h"
#include "dense.h"
#include "low_rank.h"
#include "packed.h"
#include "rows.h"
#include "sums.h"

namespace quire {
namespace QC_ISA {

template <int Dtype>
void multiply(const qc_matrix& matrix, const void* x, void* out, int64_t m) {
  const typename Numbers<Dtype>::Type* from = static_cast<const typename Numbers<Dtype>::Type*>(x);
  if (matrix.segments)
    linear_packed<Dtype>(from, matrix.width, m, matrix.width, matrix.segments, matrix.num_segments, matrix.bias, out, matrix.rows);
  else
    linear<Dtype>(from, matrix.width, matrix.weight, matrix.weight_stride, matrix.bias, out, matrix.rows, m, matrix.rows, matrix.width);
}

// The same with what adapters add (null: none do).
template <int Dtype>
void multiply(const qc_matrix& matrix, const qc_low_rank* low, const int32_t* adapters, const void* x, void* out, int64_t m) {
  multiply<Dtype>(matrix, x, out, m);
  if (adapters && low) add_low_rank<Dtype>(low, adapters, x, matrix.width, out, matrix.rows, m, matrix.width);
}

// MayTile: a test wants to compare. Steps with adapters go without tiles.
template <int Dtype, bool MayTile = true>
void run_block(const qc_block& b, const qc_turn& turn, const int32_t* adapters, const void* x, const void* delta, void* stream,
               void* out, const qc_ranks* ranks = nullptr) {
  const qc_attention& step = *turn.step;
  qc_attention w = b.attention;
  w.cos = turn.cos, w.sin = turn.sin, w.turned = turn.turned, w.turn_dtype = turn.dtype;
  w.slots = step.slots, w.tables = step.tables, w.query_starts = step.query_starts, w.contexts = step.contexts;
  w.tokens = step.tokens, w.rows = step.rows, w.table_stride = step.table_stride, w.block_size = step.block_size;
  w.window = step.window, w.chunk = step.chunk;
#if QC_TILES
  if (MayTile && !adapters && goes_by_tiles<Dtype>(b)) return run_block_by_tiles<Dtype>(b, w, x, delta, stream, out, ranks);
#endif
  typedef typename Numbers<Dtype>::Type T;
  static thread_local std::vector<T> memory;
  const int64_t m = step.tokens, width = b.qkv.width, ffn = b.down.width, inner = b.o.width;
  const int64_t most = b.qkv.rows > b.up.rows ? b.qkv.rows : b.up.rows;
  memory.resize(size_t(m * (width + most + (inner > ffn ? inner : ffn) + width)));
  T *normed = memory.data(), *wide = normed + m * width, *middle = wide + m * most, *back = middle + m * (inner > ffn ? inner : ffn);

  rms_norm<Dtype>(x, width, delta, b.norm_weight[0], stream, normed, m, width, b.eps[0], b.offset[0], b.wide[0]);
  multiply<Dtype>(b.qkv, b.low[0], adapters, normed, wide, m);
  w.qkv = wide, w.qkv_stride = b.qkv.rows, w.out = middle;
  attend_over<Dtype>(w);
  multiply<Dtype>(b.o, b.low[1], adapters, middle, back, m);
  if (ranks) sum_ranks<Dtype>(*ranks, back, m * width);
  rms_norm<Dtype>(delta ? stream : x, width, back, b.norm_weight[1], stream, normed, m, width, b.eps[1], b.offset[1], b.wide[1]);
  multiply<Dtype>(b.up, b.low[2], adapters, normed, wide, m);
  gated_by<Dtype>(b.act, wide, b.up.rows, middle, m, ffn);
  multiply<Dtype>(b.down, b.low[3], adapters, middle, out, m);
  if (ranks) sum_ranks<Dtype>(*ranks, out, m * width);
}

template <int Dtype>
void run_blocks(const qc_block* const* blocks, const int32_t* which, int64_t count, const qc_turn* turns,
                const int32_t* adapters, const void* x, const void* delta, void* stream, void* out, const qc_ranks* ranks) {
  for (int64_t i = 0; i < count; ++i) {
    run_block<Dtype>(*blocks[i], turns[which[i]], adapters, x, delta, stream, out, ranks);
    x = stream, delta = out;  // both are read before they are written again
  }
}

}  // namespace QC_ISA
}  // namespace quire
