// A block of a decoder with tile registers: what a product reads is written as tiles by whoever makes it, and
// the gated activation is applied to sums that have just left the tiles.
//
// Numbers are rounded where run_block() of block.h rounds them, so that the bits are the same.
#pragma once
#include "attention.h"
#include "opened.h"
#include "rows.h"
#include "sums.h"

#if QC_TILES
namespace quire {
namespace QC_ISA {

// act(x gate') * (x up'), as tiles: of `matrix`, the first half of its rows is the gate.
template <int Dtype, int Act>
struct GatedProduct {
  typedef Numbers<Dtype> N;
  const qc_matrix& matrix;
  const OpenProduct<Dtype> product;
  const TiledRows out;

  struct Place {
    int64_t kind;
    const char* data;
    int64_t bytes;
  };

  Place panel_at(int64_t column) const {
    const qc_segment* segment = matrix.segments;
    for (; column >= segment->rows; ++segment) column -= segment->rows;
    const int64_t bytes = product.blocks * kForms[segment->kind].bytes();
    return {segment->kind, static_cast<const char*>(segment->data) + column / kPanel * bytes, bytes};
  }

  // found [rows, gate 16 | up 16].
  QC_INLINE void write(const float* found, int64_t row, int64_t rows, int64_t column) const {
    for (int64_t r = 0; r < rows; ++r, found += 2 * kPanel) {
      uint16_t* to = reinterpret_cast<uint16_t*>(out.line(row + r, column / kBlock)) + column % kBlock;
      for (int i = 0; i < kPanel; i += kLanes) {
        const vf gate = N::all_rounded(load(found + i)), up = N::all_rounded(load(found + kPanel + i));
        Numbers<QC_BF16>::write(to + i, N::all_rounded(N::all_rounded(act_of<Act, Dtype == QC_F32>(gate)) * up));
      }
    }
  }

  // Panels [from, to) of the result for rows [row, end).
  void part(int64_t from, int64_t to, int64_t row, int64_t end) const {
    Tiles tiles(OpenProduct<Dtype>::shapes(end - row));
    if (OpenProduct<Dtype>::few(matrix.segments[0].kind, row, end)) part_of_few(from, to, row, end);
    else part_of_many(from, to, row, end);
  }

  void part_of_few(int64_t from, int64_t to, int64_t row, int64_t end) const {
    const TinyIsZero flushed;
    const float* floats = product.as_floats(row, end);
    alignas(64) float found[16 * 2 * kPanel];
    for (int64_t p = from; p < to; ++p) {
      const Place gate = panel_at(p * kPanel), up = panel_at(matrix.rows / 2 + p * kPanel);
      product.multiply_few(floats, row, end, gate.kind, gate.data, found, 2 * kPanel);
      product.multiply_few(floats, row, end, up.kind, up.data, found + kPanel, 2 * kPanel);
      write(found, row, end - row, p * kPanel);
    }
  }

  void part_of_many(int64_t from, int64_t to, int64_t row, int64_t end) const {
    static thread_local std::vector<char> gates, ups;
    Waiting waiting;
    auto writer = [this](const float* found, int, int64_t row, int64_t rows, int64_t column, int64_t) QC_INLINE {
      write(found, row, rows, column);
    };
    const int64_t blocks = product.blocks, passes = (end - row + 31) / 32, half = matrix.rows / 2;
    for (int64_t p = from; p < to; ++p) {
      const Place gate = panel_at(p * kPanel), up = panel_at(half + p * kPanel);
      const char* first = gate.kind == QC_B16 ? gate.data : product.opened(gate.kind, gate.data, 1, gates);
      const char* second = up.kind == QC_B16 ? up.data : product.opened(up.kind, up.data, 1, ups);
      const int64_t lines = p + 1 < to ? (gate.bytes / 64 + passes * blocks - 1) / (passes * blocks) : 0;
      Soon soon = {gate.data + gate.bytes, up.data + up.bytes, lines};
      for (int64_t r = row; r < end; r += 32) {
        const int tall = end - r > 16 ? 2 : 1;
        if (tall == 2) product.template multiply<2, 2>(product.x.tile(r), first, second - first, soon, waiting, writer);
        else product.template multiply<1, 2>(product.x.tile(r), first, second - first, soon, waiting, writer);
        waiting.put(2, r, end - r < 16 * tall ? end - r : 16 * tall, p * kPanel, kPanel);
      }
    }
    waiting.some(waiting.rows, writer);
  }
};

template <int Dtype, int Act>
void gated_product(const qc_matrix& matrix, const TiledRows& x, int64_t m, const TiledRows& out) {
  const Product job = {{{}, {}, nullptr, matrix.width}, matrix.segments, matrix.num_segments, m, 0, nullptr,
                       nullptr, nullptr};
  const GatedProduct<Dtype, Act> gated = {matrix, {job, x}, out};
  auto work = [&](int64_t first, int64_t last, int64_t row, int64_t end) { gated.part(first, last, row, end); };
  share_panels(m, matrix.width, matrix.rows / 2 / kPanel, work);
}

template <int Dtype>
void gated_product_by(int act, const qc_matrix& matrix, const TiledRows& x, int64_t m, const TiledRows& out) {
  switch (act) {
    case QC_SILU: return gated_product<Dtype, QC_SILU>(matrix, x, m, out);
    case QC_GELU_TANH: return gated_product<Dtype, QC_GELU_TANH>(matrix, x, m, out);
    case QC_RELU: return gated_product<Dtype, QC_RELU>(matrix, x, m, out);
    case QC_RELU2: return gated_product<Dtype, QC_RELU2>(matrix, x, m, out);
    case QC_QUICK_GELU: return gated_product<Dtype, QC_QUICK_GELU>(matrix, x, m, out);
  }
}

template <int Dtype>
void product_of_tiles(const qc_matrix& matrix, const TiledRows& x, void* out, int64_t m) {
  const Product job = {{{}, {}, nullptr, matrix.width}, matrix.segments, matrix.num_segments, m, matrix.rows,
                       matrix.bias, out, write_columns<Dtype>};
  product_of_tiles<Dtype>(x, job, count_panels(matrix.segments, matrix.num_segments));
}

// As rms_norm() of rows.h, but the result becomes tiles.
template <int Dtype>
void norm_to_tiles(const qc_block& b, int which, const void* x, const void* delta, void* sum, int64_t rows, const TiledRows& out) {
  typedef typename Numbers<Dtype>::Type T;
  const int64_t width = out.blocks * kBlock;
  auto work = [&](int64_t row) {
    static thread_local std::vector<T> normed;
    normed.resize(size_t(width));
    const T* from = static_cast<const T*>(x) + row * width;
    if (delta) from = add_row<Dtype>(from, static_cast<const T*>(delta) + row * width, static_cast<T*>(sum) + row * width, width);
    norm_row<Dtype>(from, static_cast<const T*>(b.norm_weight[which]), normed.data(), width, b.eps[which], b.offset[which],
                    b.wide[which]);
    out.put<Dtype>(row, normed.data());
  };
  each_row(rows, width, work);
}

// Whether all products of a block go through tiles of bfloat16 (those of B16 do for input of bfloat16), and its gate can be
// part of one.
template <int Dtype>
bool goes_by_tiles(const qc_block& b) {
  for (const qc_matrix* matrix : {&b.qkv, &b.o, &b.up, &b.down})
    if (!matrix->segments || matrix->width % kBlock || matrix->segments[0].kind > (Dtype == QC_BF16 ? QC_B16 : QC_Q8Z)) return false;
  if (b.up.bias || b.up.rows != 2 * b.down.width) return false;
  for (int64_t i = 0; i < b.up.num_segments; ++i)
    if (b.up.segments[i].rows % kPanel) return false;
  return true;
}

template <int Dtype>
void run_block_by_tiles(const qc_block& b, qc_attention& attention, const void* x, const void* delta, void* stream, void* out,
                        const qc_ranks* ranks) {
  typedef typename Numbers<Dtype>::Type T;
  static thread_local std::vector<T> memory;
  static thread_local std::vector<char> of_rows, of_gate;
  const int64_t m = attention.tokens, width = b.qkv.width, inner = b.o.width, wider = width > inner ? width : inner;
  const size_t room = size_t(m * (b.qkv.rows + inner + width));
  if (memory.size() < room) memory.resize(room);
  T *qkv = memory.data(), *attended = qkv + m * b.qkv.rows, *back = attended + m * inner;
  char* both = TiledRows::in(of_rows, m, wider).data;  // one after the other is there
  const TiledRows rows = {both, width / kBlock}, heads = {both, inner / kBlock}, gated = TiledRows::in(of_gate, m, b.down.width);

  norm_to_tiles<Dtype>(b, 0, x, delta, stream, m, rows);
  product_of_tiles<Dtype>(b.qkv, rows, qkv, m);
  attention.qkv = qkv, attention.qkv_stride = b.qkv.rows, attention.out = attended;
  attend_over<Dtype>(attention);
  heads.put_all<Dtype>(attended, inner, m);
  product_of_tiles<Dtype>(b.o, heads, back, m);
  if (ranks) sum_ranks<Dtype>(*ranks, back, m * width);
  norm_to_tiles<Dtype>(b, 1, delta ? stream : x, back, stream, m, rows);
  gated_product_by<Dtype>(b.act, b.up, rows, m, gated);
  product_of_tiles<Dtype>(b.down, gated, out, m);
  if (ranks) sum_ranks<Dtype>(*ranks, out, m * width);
}

}  // namespace QC_ISA
}  // namespace quire
#endif
