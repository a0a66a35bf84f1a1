// Products with packed weights: rows are quantized to 8 bits, 32 numbers at a time, then multiplied in integers. (With tile
// registers they go another way, see opened.h.)
//
// A block with a large number has a large step, and most of a product's error comes from the few blocks of a row that have
// one: such blocks are fine, they keep what rounding took from them in 8 more bits, which are multiplied after all others.
// Which blocks are fine depends on the row alone; a row that is multiplied beside one with other fine blocks has zeros there.
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

// Numbers in tiles of T = kTileRows rows, so that what a tile multiplies together lies together: [tiles, k / 32, T] groups of
// q [32], scale, total (scale * sum of q), count [2] (sums of q by halves) and begin (where sums of products with signed bytes
// begin, see kMagic and kSignedZero).
struct Plane {
  int8_t* q;
  float *scale, *total;
  int32_t *count, *begin;

  static constexpr int64_t kBytes = kBlock + 20;  // of a group
  static Plane at(char* memory, int64_t groups) {
    float* scale = reinterpret_cast<float*>(memory);
    int32_t* count = reinterpret_cast<int32_t*>(scale + 2 * groups);
    return {reinterpret_cast<int8_t*>(scale + 5 * groups), scale, scale + groups, count, count + 2 * groups};
  }
  void put(int64_t group, const vi (&whole)[kBlock / kLanes], float step) const {
    int32_t sums[2];
    narrow(q + group * kBlock, whole, sums);
    const uint32_t counted = uint32_t(sums[0]) + uint32_t(sums[1]);
    scale[group] = step, total[group] = step * float(int32_t(counted));
    count[2 * group] = sums[0], count[2 * group + 1] = sums[1];
    begin[group] = int32_t(uint32_t(kMagicBits) - uint32_t(kSignedZero) * counted);
  }
};

constexpr int kFineRows = 4;  // rows of a tile of the fine plane

// Quantized rows. The fine plane has only blocks that are fine in some row of its tile: `chosen` [tiles, 1 + k / 32] is how
// many and which. Its totals are part of the coarse ones.
struct Quantized {
  Plane coarse, fine;
  int32_t* chosen;
  int64_t k;

  int32_t* chosen_of(int64_t row) const { return chosen + row / kFineRows * (1 + k / kBlock); }
  int64_t group(int64_t row, int tall) const { return row / tall * (k / kBlock) * tall + row % tall; }
};

constexpr float kFineFrom = 12;  // a block is fine if its largest number is so many times the row's root mean square
constexpr float kFinePart = 254;  // of a step: what rounding takes then fits 8 bits

template <int Dtype>
struct Quantizer {
  typedef Numbers<Dtype> N;
  const typename N::Type* x;
  int64_t x_stride, m;
  Quantized to;

  void read(const typename N::Type* from, vf (&v)[kBlock / kLanes]) const {
    for (int i = 0; i < kBlock / kLanes; ++i) v[i] = N::read(from + i * kLanes);
  }

  // The largest size in each block; returns the least that makes a block fine.
  float measure(const typename N::Type* row, float* tops) const {
    vf squares = fill(0), v[kBlock / kLanes];
    for (int64_t b = 0; b < to.k / kBlock; ++b) {
      read(row + b * kBlock, v);
      vi most = fill_int(0);
      for (int i = 0; i < kBlock / kLanes; ++i) most = larger_size(most, v[i]), squares = fma(v[i], v[i], squares);
      tops[b] = largest_size(most);
    }
    return kFineFrom * sqrtf(sum(squares) / float(to.k));
  }

  // Block b of a row; at: its place in the fine plane, below 0: it has none there.
  void put(int64_t row, int64_t b, float top, bool is_fine, int64_t at) const {
    const float step = top / 127, inverse = top > 0 ? 127 / top : 0;
    const int64_t group = to.group(row, kTileRows) + b * kTileRows;
    vf v[kBlock / kLanes];
    vi whole[kBlock / kLanes], rest[kBlock / kLanes];
    read(x + row * x_stride + b * kBlock, v);
    for (int i = 0; i < kBlock / kLanes; ++i) {
      const vf shifted = fma(v[i], fill(inverse), fill(kMagic));
      whole[i] = plus((vi)shifted, fill_int(-kMagicBits));
      const vf left = fma(v[i], fill(inverse), fill(kMagic) - shifted) * fill(kFinePart);
      rest[i] = is_fine ? plus((vi)(left + fill(kMagic)), fill_int(-kMagicBits)) : fill_int(0);
    }
    to.coarse.put(group, whole, step);
    if (at < 0) return;
    const int64_t place = to.group(row, kFineRows) + at * kFineRows;
    to.fine.put(place, rest, is_fine ? step / kFinePart : 0);
    to.coarse.total[group] += to.fine.total[place];
  }

  // Rows [first, first + kFineRows), as far as there are any.
  void some(int64_t first) const {
    static thread_local std::vector<float> memory;
    const int64_t blocks = to.k / kBlock, rows = m - first < kFineRows ? m - first : kFineRows;
    memory.resize(size_t(rows * blocks));
    float from[kFineRows], *tops = memory.data();
    for (int64_t r = 0; r < rows; ++r) from[r] = measure(x + (first + r) * x_stride, tops + r * blocks);
    int32_t* chosen = to.chosen_of(first);
    chosen[0] = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      bool any = false;
      for (int64_t r = 0; r < rows; ++r) any |= tops[r * blocks + b] > from[r];
      const int64_t at = any ? chosen[0]++ : -1;
      if (any) chosen[1 + at] = int32_t(b);
      for (int64_t r = 0; r < rows; ++r) put(first + r, b, tops[r * blocks + b], tops[r * blocks + b] > from[r], at);
    }
  }
};

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

// R rows from `row` on, times S vectors of columns of one panel from column `first` on; to: rows of kPanel floats. Fine: what
// is there grows by the fine plane.
template <class P, int R, int S, bool Fine = false>
inline void tile(const uint8_t* panel, int first, const Quantized& x, int64_t row, float* to) {
  constexpr int kSums = P::halves ? 2 : 1, bits = P::bits;
  constexpr auto rows = std::make_integer_sequence<int, R>();
  const Plane plane = Fine ? x.fine : x.coarse;
  constexpr int tall = Fine ? kFineRows : kTileRows;
  const int32_t* chosen = x.chosen_of(row);
  const int64_t blocks = Fine ? chosen[0] : x.k / kBlock;
  int64_t at = x.group(row, tall);
  vf result[R][S];  // of its own: nothing else can be at its address
  unroll(rows, [&](auto r) {  // a loop would become a call to clear memory, which takes a fifth of a short product
    for (int s = 0; s < S; ++s) result[r][s] = Fine ? load(to + r * kPanel + s * kLanes) : fill(0);
  });
  for (int64_t b = 0; b < blocks; ++b, at += tall) {
    const uint8_t* block = panel + (Fine ? chosen[1 + b] : b) * P::bytes;
    if constexpr (R < 4 && !Fine && !P::open && kAheadBytes > 0)  // memory is what one row waits for
      for (int line = 0; line < P::bytes; line += 64) __builtin_prefetch(block + kAheadBytes + line);
    vi sums[kSums][R][S];
    for (int h = 0; h < kSums; ++h)
      for (int r = 0; r < R; ++r) {
        const int32_t* count = plane.count + 2 * (at + r);
        const uint32_t counted = kSums == 2 ? uint32_t(count[h]) : uint32_t(count[0]) + uint32_t(count[1]);  // of a row not wanted: anything
        for (int s = 0; s < S; ++s)
          if constexpr (P::zero == 128 && kSums == 1) sums[h][r][s] = fill_int(plane.begin[at + r]);
          else sums[h][r][s] = P::zero ? fill_int(int32_t(uint32_t(kMagicBits) - uint32_t(P::zero) * counted)) : fixed(kBegin);
      }
    for (int half = 0; half < 2; ++half) {
      Quads quads[R];
      for (int r = 0; r < R; ++r) quads[r] = load_quads(plane.q + (at + r) * kBlock + 16 * half);
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
    for (int i = 0; i < (R + 3) / 4; ++i) step[i] = load_four(plane.scale + at + 4 * i), total[i] = load_four(plane.total + at + 4 * i);
    for (int s = 0; s < S; ++s) {
      vf scale, second;
      P::scales(block, first + kLanes * s, scale, second);
      unroll(rows, [&](auto r) {
        vf& out = result[r][s];
        out = fma(from_magic(sums[0][r][s]), times<r % 4>(scale, step[r / 4]), out);
        if constexpr (P::halves) out = fma(from_magic(sums[kSums - 1][r][s]), times<r % 4>(second, step[r / 4]), out);
        if constexpr (P::added && !Fine) out = fma_one<r % 4>(second, total[r / 4], out);
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
  // Rows from `row` on, `count` columns of each from `column` on; `from`: rows so many floats apart.
  void (*write)(const Product& job, int64_t row, int64_t rows, int64_t column, int64_t count, const float* from, int64_t stride);
};

template <int Dtype>
void write_columns(const Product& job, int64_t row, int64_t rows, int64_t column, int64_t count, const float* from,
                   int64_t stride) {
  typedef Numbers<Dtype> N;
  typename N::Type* to = static_cast<typename N::Type*>(job.out) + row * job.out_stride + column;
  const typename N::Type* bias = job.bias ? static_cast<const typename N::Type*>(job.bias) + column : nullptr;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const vf more = bias ? N::read(bias + i) : fill(0);
    for (int64_t r = 0; r < rows; ++r) {
      const vf v = load(from + r * stride + i);
      N::write(to + r * job.out_stride + i, bias ? v + more : v);
    }
  }
  for (; i < count; ++i)
    for (int64_t r = 0; r < rows; ++r) {
      const float v = from[r * stride + i];
      N::put_one(to + r * job.out_stride + i, bias ? v + N::one(bias + i) : v);
    }
}

// R rows times one panel: up to 16 columns from `column` of the result on. Rows from job.m on are there, but not wanted.
template <class P, int R>
void rows_of(const Product& job, const uint8_t* panel, int64_t row, int64_t column, int64_t count) {
  constexpr int S = R == 1 ? kPanel / kLanes : 1;
  float numbers[R][kPanel];
  for (int first = 0; first < kPanel; first += S * kLanes) {
    if constexpr (R == 8 && kByHand<P>) tile_by_hand<P>(panel, first, job.x, row, numbers[0] + first);
    else tile<P, R, S>(panel, first, job.x, row, numbers[0] + first);
    constexpr int some = R < kFineRows ? R : kFineRows;
    for (int r = 0; r < R && row + r < job.m; r += some)
      if (job.x.chosen_of(row + r)[0]) tile<P, some, S, true>(panel, first, job.x, row + r, numbers[r] + first);
  }
  job.write(job, row, job.m - row < R ? job.m - row : R, column, count < kPanel ? count : kPanel, numbers[0], kPanel);
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

template <int Dtype>
void linear_in_float_panels(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const Product& job, int64_t panels);  // float_panels.h

// Segments of B16 and of B32 have none of another kind beside them.
template <int Dtype>
void linear_packed(const typename Numbers<Dtype>::Type* x, int64_t x_stride, int64_t m, int64_t k,
                   const qc_segment* segments, int64_t num_segments, const void* bias, void* out, int64_t out_stride) {
  const int64_t panels = count_panels(segments, num_segments);
  Product job = {{{}, {}, nullptr, k}, segments, num_segments, m, out_stride, bias, out, write_columns<Dtype>};
  if (segments[0].kind == QC_B32) return linear_in_float_panels<Dtype>(x, x_stride, job, panels);
  if (segments[0].kind == QC_B16) return linear_in_panels<Dtype>(x, x_stride, job, panels);
#if QC_TILES
  return packed_by_opening<Dtype>(x, x_stride, job, panels);
#endif
  static thread_local std::vector<char> memory;
  const int64_t tiles = (m + kTileRows - 1) / kTileRows, groups = tiles * kTileRows * (k / kBlock) + 16;  // a tile may read a few more
  const int64_t all = (groups * Plane::kBytes + 63) / 64 * 64;
  memory.resize(size_t(2 * all + 4 * ((m + kFineRows - 1) / kFineRows) * (1 + k / kBlock) + 64));
  char* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);  // all parts then lie so
  job.x = {Plane::at(start, groups), Plane::at(start + all, groups), reinterpret_cast<int32_t*>(start + 2 * all), k};
  const Quantizer<Dtype> quantizer = {x, x_stride, m, job.x};
  auto quantize = [&](int item) { quantizer.some(int64_t(item) * kFineRows); };
  const int items = int((m + kFineRows - 1) / kFineRows);
  if (items <= 2) for (int item = 0; item < items; ++item) quantize(item);
  else each(items, quantize);
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
