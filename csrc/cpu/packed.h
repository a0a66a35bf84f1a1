// Products with packed weights: rows are quantized to 8 bits, 32 numbers at a time, then multiplied in integers.
#pragma once
#include <math.h>

#include <vector>

#include "pool.h"
#include "simd.h"

namespace quire {
namespace QC_ISA {

// 1.5 * 2^23: adding it to a float rounds to a whole number; whole numbers added to its bits are floats above it. (On
// some cores conversion instructions compete with products for the same unit, and subtraction does not.)
constexpr float kMagic = 12582912.0f;
constexpr int kMagicBits = 0x4b400000;
inline vf from_magic(vi v) { return (vf)v - fill(kMagic); }

// Quantized rows in tiles of T = kTileRows, so that what a tile multiplies together lies together: [tiles, k / 32, T]
// groups of q [32], scale, total (scale * sum of q) and count [2] (sums of q by halves).
struct Quantized {
  const int8_t* q;
  const float *scale, *total;
  const int32_t* count;
  int64_t k;
};

template <int Dtype>
void quantize_row(const typename Numbers<Dtype>::Type* x, int64_t k, int64_t row, int8_t* q, float* scale, float* total,
                  int32_t* count) {
  const int64_t first = row / kTileRows * (k / kBlock) * kTileRows + row % kTileRows;
  for (int64_t b = 0; b < k / kBlock; ++b) {
    vf v[kBlock / kLanes], most = fill(0);
    for (int i = 0; i < kBlock / kLanes; ++i) {
      v[i] = Numbers<Dtype>::read(x + b * kBlock + i * kLanes);
      most = larger(most, larger(v[i], -v[i]));
    }
    const float top = largest(most), step = top / 127, inverse = top > 0 ? 127 / top : 0;
    const int64_t at = first + b * kTileRows;
    int32_t whole[kBlock], sums[2] = {0, 0};
    for (int i = 0; i < kBlock / kLanes; ++i) {
      vi rounded = (vi)(fma(v[i], fill(inverse), fill(kMagic))) - fill_int(kMagicBits);
      memcpy(whole + i * kLanes, &rounded, sizeof rounded);
    }
    for (int i = 0; i < kBlock; ++i) q[at * kBlock + i] = int8_t(whole[i]), sums[i / 16] += whole[i];
    scale[at] = step, total[at] = step * float(sums[0] + sums[1]);
    count[2 * at] = sums[0], count[2 * at + 1] = sums[1];
  }
}

// The bytes of quads 4 * half .. 4 * half + 3 of `kLanes` columns.
template <int Kind>
inline void unpack(const uint8_t* planes, const uint8_t* top, int half, vb (&w)[4]) {
  constexpr Form form = kForms[Kind];
  if constexpr (form.bits == 8) {
    for (int i = 0; i < 4; ++i) w[i] = signed_bytes(load_bytes(planes + kChunk * (4 * half + i)));
    return;
  }
  for (int i = 0; i < 4; ++i) {
    vb both = load_bytes(planes + kChunk * i);
    w[i] = half ? both >> 4 : both & (uint8_t)15;
  }
  if constexpr (form.bits == 5) {
    vb bits = load_bytes(top);
    for (int i = 0; i < 4; ++i) w[i] |= ((bits >> (4 * half + i)) & (uint8_t)1) << 4;
  }
  if constexpr (form.bits == 6) {
    vb bits = load_bytes(top + kChunk * half);
    for (int i = 0; i < 4; ++i) w[i] |= ((bits >> (2 * i)) & (uint8_t)3) << 4;
  }
}

// R rows from `row` on, times S vectors of columns of one panel from column `first` on; sums[r][s] get the products.
template <int Kind, int R, int S>
inline void tile(const uint8_t* panel, int first, const Quantized& x, int64_t row, vf (&result)[R][S]) {
  constexpr Form form = kForms[Kind];
  constexpr int zero = form.bits == 8 ? kSignedZero : form.zero;
  constexpr int kSums = R == 1 || form.halves ? 2 : 1;
  const int64_t blocks = x.k / kBlock, start = row / kTileRows * blocks * kTileRows + row % kTileRows;
  for (int r = 0; r < R; ++r)
    for (int s = 0; s < S; ++s) result[r][s] = fill(0);
  for (int64_t at = start; at < start + blocks * kTileRows; at += kTileRows, panel += form.bytes()) {
    vi sums[kSums][R][S];
    for (int h = 0; h < kSums; ++h)
      for (int r = 0; r < R; ++r) {
        const int32_t* count = x.count + 2 * (at + r);
        int begin = h && !form.halves ? 0 : kMagicBits;
        if (zero) begin -= zero * (kSums == 2 ? count[h] : count[0] + count[1]);
        for (int s = 0; s < S; ++s) sums[h][r][s] = fill_int(begin);
      }
    const uint8_t *top = panel + form.scales() + 4 * first, *planes = top + form.top();
    for (int half = 0; half < 2; ++half)
      for (int s = 0; s < S; ++s) {
        vb w[4];
        unpack<Kind>(planes + 4 * kLanes * s, top + 4 * kLanes * s, half, w);
        for (int r = 0; r < R; ++r) {
          Quads quads = load_quads(x.q + (at + r) * kBlock + 16 * half);
          vi here = sums[kSums == 2 ? half : 0][r][s];
          here = dot<0, form.bits>(here, w[0], quads);
          here = dot<1, form.bits>(here, w[1], quads);
          here = dot<2, form.bits>(here, w[2], quads);
          here = dot<3, form.bits>(here, w[3], quads);
          sums[kSums == 2 ? half : 0][r][s] = here;
        }
      }
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel) + first;
    for (int s = 0; s < S; ++s) {
      vf scale = load_half(scales + kLanes * s), second = scale;
      if (form.added || form.halves) second = load_half(scales + kPanel + kLanes * s);
      for (int r = 0; r < R; ++r) {
        const float step = x.scale[at + r];
        vf& out = result[r][s];
        if (form.halves) {
          out = fma(from_magic(sums[0][r][s]), scale * fill(step), out);
          out = fma(from_magic(sums[kSums - 1][r][s]), second * fill(step), out);
        } else {
          vi whole = sums[0][r][s];
          if (kSums == 2) whole += sums[kSums - 1][r][s];
          out = fma(from_magic(whole), scale * fill(step), out);
          if (form.added) out = fma(second, fill(x.total[at + r]), out);
        }
      }
    }
  }
}

struct Product {
  Quantized x;
  const qc_segment* segments;
  int64_t num_segments, m, out_stride;
  const void* bias;
  void* out;
  void (*write)(const Product& job, int64_t row, int64_t column, int64_t count, const float* from);
};

template <int Dtype>
void write_columns(const Product& job, int64_t row, int64_t column, int64_t count, const float* from) {
  typedef Numbers<Dtype> N;
  typename N::Type* to = static_cast<typename N::Type*>(job.out) + row * job.out_stride + column;
  const typename N::Type* bias = static_cast<const typename N::Type*>(job.bias);
  for (int64_t i = 0; i < count; ++i) N::put_one(to + i, bias ? from[i] + N::one(bias + column + i) : from[i]);
}

template <int Kind, int R, int S>
inline void tile_to(const Product& job, const uint8_t* panel, int first, int64_t row, int64_t column, int64_t count) {
  vf result[R][S];
  tile<Kind, R, S>(panel, first, job.x, row, result);
  for (int r = 0; r < R; ++r) {
    float numbers[S * kLanes];
    for (int s = 0; s < S; ++s) store(numbers + s * kLanes, result[r][s]);
    if (count > 0) job.write(job, row + r, column, count < S * kLanes ? count : S * kLanes, numbers);
  }
}

// One panel (up to 16 columns from `column` of the result on) for all rows.
template <int Kind>
void panel_of(const Product& job, const uint8_t* panel, int64_t column, int64_t count) {
  constexpr int tall = kForms[Kind].halves ? kTileRows / 2 : kTileRows;
  int64_t row = 0;
  for (; row + tall <= job.m; row += tall)
    for (int first = 0; first < kPanel; first += kLanes)
      tile_to<Kind, tall, 1>(job, panel, first, row, column + first, count - first);
  for (; row + 2 <= job.m; row += 2)
    for (int first = 0; first < kPanel; first += kLanes)
      tile_to<Kind, 2, 1>(job, panel, first, row, column + first, count - first);
  for (; row < job.m; ++row) tile_to<Kind, 1, kPanel / kLanes>(job, panel, 0, row, column, count);
}

inline void panel_of_kind(int64_t kind, const Product& job, const uint8_t* panel, int64_t column, int64_t count) {
  switch (kind) {
    case QC_Q4M: return panel_of<QC_Q4M>(job, panel, column, count);
    case QC_Q4Z: return panel_of<QC_Q4Z>(job, panel, column, count);
    case QC_Q5M: return panel_of<QC_Q5M>(job, panel, column, count);
    case QC_Q5Z: return panel_of<QC_Q5Z>(job, panel, column, count);
    case QC_Q6Z: return panel_of<QC_Q6Z>(job, panel, column, count);
    case QC_Q8Z: return panel_of<QC_Q8Z>(job, panel, column, count);
  }
}

// Panels [from, to) of all segments, counted through.
inline void some_panels(const Product& job, int64_t from, int64_t to) {
  int64_t column = 0, before = 0;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    const qc_segment& segment = job.segments[i];
    const int64_t panels = (segment.rows + kPanel - 1) / kPanel;
    const int64_t bytes = job.x.k / kBlock * kForms[segment.kind].bytes();
    for (int64_t p = from > before ? from - before : 0; p < panels && before + p < to; ++p)
      panel_of_kind(segment.kind, job, static_cast<const uint8_t*>(segment.data) + p * bytes,
                           column + p * kPanel, segment.rows - p * kPanel);
    column += segment.rows, before += panels;
  }
}

template <int Dtype>
void linear_packed(const typename Numbers<Dtype>::Type* x, int64_t x_stride, int64_t m, int64_t k,
                   const qc_segment* segments, int64_t num_segments, const void* bias, void* out, int64_t out_stride) {
  static thread_local std::vector<uint8_t> memory;
  const int64_t floats = (m + kTileRows - 1) / kTileRows * kTileRows * (k / kBlock);
  memory.resize(size_t(floats * (16 + kBlock)));
  float *scale = reinterpret_cast<float*>(memory.data()), *total = scale + floats;
  int32_t* count = reinterpret_cast<int32_t*>(total + floats);
  int8_t* q = reinterpret_cast<int8_t*>(count + 2 * floats);
  auto quantize = [=](int64_t row) {
    quantize_row<Dtype>(x + row * x_stride, k, row, q, scale, total, count);
  };
  if (m < 8) {
    for (int64_t row = 0; row < m; ++row) quantize(row);
  } else {
    auto some = [&](int item) { for (int64_t r = item * 4; r < m && r < item * 4 + 4; ++r) quantize(r); };
    each(int((m + 3) / 4), some);
  }
  Product job = {{q, scale, total, count, k}, segments, num_segments, m, out_stride, bias, out, write_columns<Dtype>};
  int64_t panels = 0;
  for (int64_t i = 0; i < num_segments; ++i) panels += (segments[i].rows + kPanel - 1) / kPanel;
  const int64_t items = panels < 4 * threads() ? panels : 4 * threads();
  auto work = [&](int item) { some_panels(job, panels * item / items, panels * (item + 1) / items); };
  each(int(items), work);
}

}  // namespace QC_ISA
}  // namespace quire
