// Products with packed weights: rows are quantized to 8 bits, 32 numbers at a time, then multiplied in integers. (With tile
// registers they go another way, see opened.h.)
#pragma once
#include <math.h>

#include <utility>
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
    vf v[kBlock / kLanes];
    vi most = fill_int(0);
    for (int i = 0; i < kBlock / kLanes; ++i) {
      v[i] = Numbers<Dtype>::read(x + b * kBlock + i * kLanes);
      most = larger_size(most, v[i]);
    }
    const float top = largest_size(most), step = top / 127, inverse = top > 0 ? 127 / top : 0;
    const int64_t at = first + b * kTileRows;
    vi whole[kBlock / kLanes];
    for (int i = 0; i < kBlock / kLanes; ++i)
      whole[i] = (vi)(fma(v[i], fill(inverse), fill(kMagic))) - fill_int(kMagicBits);
    int32_t sums[2];
    narrow(q + at * kBlock, whole, sums);
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

// What a tile reads of a block of a panel: as packed, or opened once for many rows. An opened block is 16 scales and 16
// second scales as floats, then bytes as in Q8Z, as dot() takes them; where that takes signed bytes, zero is gone.
template <int Kind, bool Open>
struct Panel {
  static constexpr int kind = Kind;
  static constexpr Form form = kForms[Kind];
  static constexpr bool added = form.added, halves = form.halves, seconds = added || halves;
  static constexpr int bits = form.bits;
  static constexpr int zero = Open && kSignedDot ? 0 : form.bits == 8 ? kSignedZero : form.zero;
  static constexpr bool open = Open;
  static constexpr int planes = Open ? 8 * kPanel : form.scales() + form.top();
  static constexpr int64_t bytes = Open ? 8 * kPanel + 8 * kChunk : form.bytes();

  static void quads(const uint8_t* block, int column, int half, vb (&w)[4]) {
    if constexpr (Open) {
      for (int i = 0; i < 4; ++i) w[i] = load_bytes(block + 8 * kPanel + kChunk * (4 * half + i) + 4 * column);
    } else {
      const uint8_t* top = block + form.scales() + 4 * column;
      unpack<Kind>(top + form.top(), top, half, w);
    }
  }

  static void scales(const uint8_t* block, int column, vf& scale, vf& second) {
    if constexpr (Open) {
      const float* from = reinterpret_cast<const float*>(block) + column;
      scale = second = load(from);
      if (seconds) second = load(from + kPanel);
    } else {
      const uint16_t* from = reinterpret_cast<const uint16_t*>(block) + column;
      scale = second = load_half(from);
      if (seconds) second = load_half(from + kPanel);
    }
  }

  static void fill_open(const uint8_t* from, int64_t blocks, uint8_t* to) {
    typedef Panel<Kind, false> Packed;
    for (int64_t b = 0; b < blocks; ++b, from += Packed::bytes, to += 8 * kPanel + 8 * kChunk)
      for (int column = 0; column < kPanel; column += kLanes) {
        vf scale, second;
        Packed::scales(from, column, scale, second);
        store(reinterpret_cast<float*>(to) + column, scale);
        store(reinterpret_cast<float*>(to) + kPanel + column, second);
        for (int half = 0; half < 2; ++half) {
          vb w[4];
          Packed::quads(from, column, half, w);
          for (int i = 0; i < 4; ++i) {
            if (kSignedDot && form.zero) w[i] -= (uint8_t)form.zero;
            memcpy(to + 8 * kPanel + kChunk * (4 * half + i) + 4 * column, &w[i], sizeof w[i]);
          }
        }
      }
  }
};

// Sums of products in integers begin here, so that their bits are those of a float (see kMagic).
alignas(16) constexpr int32_t kBegin[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};

// R rows from `row` on, times S vectors of columns of one panel from column `first` on; to: rows of kPanel floats.
template <class P, int R, int S>
inline void tile(const uint8_t* block, int first, const Quantized& x, int64_t row, float* to) {
  constexpr int kSums = P::halves ? 2 : 1, bits = P::bits;
  constexpr auto rows = std::make_integer_sequence<int, R>();
  const int64_t blocks = x.k / kBlock, start = row / kTileRows * blocks * kTileRows + row % kTileRows;
  vf result[R][S];  // of its own: nothing else can be at its address
  for (int r = 0; r < R; ++r)
    for (int s = 0; s < S; ++s) result[r][s] = fill(0);
  for (int64_t at = start; at < start + blocks * kTileRows; at += kTileRows, block += P::bytes) {
    if constexpr (R < 4 && !P::open && kAheadBytes > 0)  // memory is what one row waits for
      for (int line = 0; line < P::bytes; line += 64) __builtin_prefetch(block + kAheadBytes + line);
    vi sums[kSums][R][S];
    for (int h = 0; h < kSums; ++h)
      for (int r = 0; r < R; ++r) {
        const int32_t* count = x.count + 2 * (at + r);
        for (int s = 0; s < S; ++s)
          sums[h][r][s] = P::zero ? fill_int(kMagicBits - P::zero * (kSums == 2 ? count[h] : count[0] + count[1])) : fixed(kBegin);
      }
    for (int half = 0; half < 2; ++half) {
      Quads quads[R];
      for (int r = 0; r < R; ++r) quads[r] = load_quads(x.q + (at + r) * kBlock + 16 * half);
      for (int s = 0; s < S; ++s) {
        vb w[4];
        P::quads(block, first + kLanes * s, half, w);
        vi(&here)[R][S] = sums[kSums == 2 ? half : 0];
        for (int r = 0; r < R; ++r) here[r][s] = dot<0, bits>(here[r][s], w[0], quads[r]);
        for (int r = 0; r < R; ++r) here[r][s] = dot<1, bits>(here[r][s], w[1], quads[r]);
        for (int r = 0; r < R; ++r) here[r][s] = dot<2, bits>(here[r][s], w[2], quads[r]);
        for (int r = 0; r < R; ++r) here[r][s] = dot<3, bits>(here[r][s], w[3], quads[r]);
      }
    }
    Four step[(R + 3) / 4], total[(R + 3) / 4];
    for (int i = 0; i < (R + 3) / 4; ++i) step[i] = load_four(x.scale + at + 4 * i), total[i] = load_four(x.total + at + 4 * i);
    for (int s = 0; s < S; ++s) {
      vf scale, second;
      P::scales(block, first + kLanes * s, scale, second);
      unroll(rows, [&](auto r) {
        vf& out = result[r][s];
        out = fma(from_magic(sums[0][r][s]), times<r % 4>(scale, step[r / 4]), out);
        if constexpr (P::halves) out = fma(from_magic(sums[kSums - 1][r][s]), times<r % 4>(second, step[r / 4]), out);
        if constexpr (P::added) out = fma_one<r % 4>(second, total[r / 4], out);
      });
    }
  }
  unroll(rows, [&](auto r) {
    for (int s = 0; s < S; ++s) store(to + r * kPanel + s * kLanes, result[r][s]);
  });
}

#include "packed_arm.h"

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
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) N::write(to + i, bias ? load(from + i) + N::read(bias + column + i) : load(from + i));
  for (; i < count; ++i) N::put_one(to + i, bias ? from[i] + N::one(bias + column + i) : from[i]);
}

// R rows times one panel: up to 16 columns from `column` of the result on. Rows from job.m on are there, but not wanted.
template <class P, int R>
void rows_of(const Product& job, const uint8_t* panel, int64_t row, int64_t column, int64_t count) {
  constexpr int S = R == 1 ? kPanel / kLanes : 1;
  float numbers[R][kPanel];
  for (int first = 0; first < kPanel; first += S * kLanes) {
    if constexpr (R == 8 && kByHand<P>) tile_by_hand<P>(panel, first, job.x, row, numbers[0] + first);
    else tile<P, R, S>(panel, first, job.x, row, numbers[0] + first);
  }
  for (int r = 0; r < R && row + r < job.m; ++r) job.write(job, row + r, column, count < kPanel ? count : kPanel, numbers[r]);
}

// One panel for rows [row, to).
template <class P>
void some_rows(const Product& job, const uint8_t* panel, int64_t row, int64_t to, int64_t column, int64_t count) {
  constexpr int tall = P::halves && !kByHand<P> ? kTall / 2 : kTall;
  while (row < to) {
    const int64_t left = to - row;
    if (tall > 4 && left > 4) rows_of<P, tall>(job, panel, row, column, count), row += tall;
    else if (left > 2) rows_of<P, 4>(job, panel, row, column, count), row += 4;
    else if (left == 2) rows_of<P, 2>(job, panel, row, column, count), row += 2;
    else rows_of<P, 1>(job, panel, row, column, count), row += 1;
  }
}

constexpr int64_t kRowBytes = 1 << 18;  // quantized rows that stay in a second cache while panels pass

// Opening a panel pays for this many rows.
template <class P>
constexpr int64_t kOpenRows = kByHand<Panel<P::kind, true>> && !kByHand<P> ? 5 : 24;

template <int Kind>
void panel_of(const Product& job, const uint8_t* panel, int64_t row, int64_t to, int64_t column, int64_t count) {
  typedef Panel<Kind, false> Packed;
  if (Kind == QC_Q8Z || to - row < kOpenRows<Packed>) return some_rows<Packed>(job, panel, row, to, column, count);
  typedef Panel<Kind, true> Opened;
  static thread_local std::vector<float> memory;  // of floats, so that it is aligned
  memory.resize(size_t(job.x.k / kBlock * Opened::bytes / 4));
  uint8_t* opened = reinterpret_cast<uint8_t*>(memory.data());
  Opened::fill_open(panel, job.x.k / kBlock, opened);
  some_rows<Opened>(job, opened, row, to, column, count);
}

inline void panel_of_kind(int64_t kind, const Product& job, const uint8_t* panel, int64_t row, int64_t to, int64_t column,
                          int64_t count) {
  switch (kind) {
    case QC_Q4M: return panel_of<QC_Q4M>(job, panel, row, to, column, count);
    case QC_Q4Z: return panel_of<QC_Q4Z>(job, panel, row, to, column, count);
    case QC_Q5M: return panel_of<QC_Q5M>(job, panel, row, to, column, count);
    case QC_Q5Z: return panel_of<QC_Q5Z>(job, panel, row, to, column, count);
    case QC_Q6Z: return panel_of<QC_Q6Z>(job, panel, row, to, column, count);
    case QC_Q8Z: return panel_of<QC_Q8Z>(job, panel, row, to, column, count);
  }
}

inline int64_t panels_of(const qc_segment& segment) { return (segment.rows + kPanel - 1) / kPanel; }

inline int64_t count_panels(const qc_segment* segments, int64_t num_segments) {
  int64_t panels = 0;
  for (int64_t i = 0; i < num_segments; ++i) panels += panels_of(segments[i]);
  return panels;
}

// body(kind, panel, column, count) for panels [from, to) of all segments, counted through; count: columns from there on.
template <class F>
void over_panels(const Product& job, int64_t from, int64_t to, const F& body) {
  int64_t column = 0, before = 0;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    const qc_segment& segment = job.segments[i];
    const int64_t panels = panels_of(segment), bytes = job.x.k / kBlock * kForms[segment.kind].bytes();
    for (int64_t p = from > before ? from - before : 0; p < panels && before + p < to; ++p)
      body(segment.kind, static_cast<const uint8_t*>(segment.data) + p * bytes, column + p * kPanel, segment.rows - p * kPanel);
    column += segment.rows, before += panels;
  }
}

#if QC_TILES
template <int Dtype>
void packed_by_opening(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const Product& job, int64_t panels);  // opened.h
#endif

template <int Dtype>
void linear_in_panels(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const Product& job, int64_t panels);  // panels.h

// Segments of B16 have none of another kind beside them.
template <int Dtype>
void linear_packed(const typename Numbers<Dtype>::Type* x, int64_t x_stride, int64_t m, int64_t k,
                   const qc_segment* segments, int64_t num_segments, const void* bias, void* out, int64_t out_stride) {
  const int64_t panels = count_panels(segments, num_segments);
  Product job = {{nullptr, nullptr, nullptr, nullptr, k}, segments, num_segments, m, out_stride, bias, out, write_columns<Dtype>};
  if (segments[0].kind == QC_B16) return linear_in_panels<Dtype>(x, x_stride, job, panels);
#if QC_TILES
  return packed_by_opening<Dtype>(x, x_stride, job, panels);
#endif
  static thread_local std::vector<uint8_t> memory;
  const int64_t floats = (m + kTileRows - 1) / kTileRows * kTileRows * (k / kBlock) + 16;  // a tile may read a few more
  memory.resize(size_t(floats * (16 + kBlock) + 64));
  const uintptr_t start = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;  // all four then lie so
  float *scale = reinterpret_cast<float*>(start), *total = scale + floats;
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
  job.x = {q, scale, total, count, k};
  const int64_t parts = panels < 4 * threads() ? panels : 4 * threads();
  int64_t tall = kRowBytes / k / kTileRows * kTileRows;
  if (tall < 8 * kTileRows) tall = 8 * kTileRows;
  const int64_t floors = (m + tall - 1) / tall;
  auto work = [&](int item) {
    const int64_t part = item % parts, floor = item / parts, last = (floor + 1) * tall;
    over_panels(job, panels * part / parts, panels * (part + 1) / parts,
                [&](int64_t kind, const uint8_t* panel, int64_t column, int64_t count) {
                  panel_of_kind(kind, job, panel, floor * tall, last < m ? last : m, column, count);
                });
  };
  each(int(parts * floors), work);
}

}  // namespace QC_ISA
}  // namespace quire
