// Products of float32 by tiles of bfloat16. A number is the sum of three bfloat16: itself rounded, what is left rounded, and
// the rest, which together are all of its 24 bits. Of the nine products of their parts six are summed; the others are below
// what float32 rounds.
//
// A result is summed in one order (32 inputs at a time, of each the six products) whatever stands beside it. Infinities, and
// numbers beyond the largest bfloat16, make a result NaN. Parts too small to be normal, below 2^-126, are zero: numbers below
// 2^-103 are off by up to so much.
#pragma once
#include <algorithm>
#include <vector>

#include "amx.h"

#if QC_TILES
namespace quire {
namespace QC_ISA {

constexpr int kParts = 3;
constexpr int64_t kTile = 1024, kTiles = kParts * kTile;  // bytes of a part of 16 x 32 numbers, and of all its parts

// Sixteen bfloat16 as floats.
inline Floats widened(const char* from) {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  Halves halves;
  memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// 32 inputs of a row, as a line of each part of a tile.
QC_INLINE inline void put_line(Floats a, Floats b, char* to) {
  QC_UNROLL for (int part = 0; part < kParts; ++part) {
    store_words(to + part * kTile, side_by_side(a, b));
    if (part + 1 < kParts) a -= widened(to + part * kTile), b -= widened(to + part * kTile + 32);
  }
}

// Two inputs of 16 columns, side by side, as a line of each part of a tile.
QC_INLINE inline void put_pairs(Floats a, Floats b, char* to) {
  QC_UNROLL for (int part = 0; part < kParts; ++part) {
    const Words both = join_bfloats(a, b);
    store_words(to + part * kTile, both);
    if (part + 1 < kParts) a -= (Floats)(both << 16), b -= (Floats)(both & 0xffff0000u);
  }
}

// Chunks of 16 columns, one for each of `inputs` inputs, a multiple of 32; `stride` floats apart.
inline void put_panel(const float* from, int64_t stride, int64_t inputs, char* to) {
  for (int64_t i = 0; i < inputs; i += kBlock, to += kTiles)
    for (int pair = 0; pair < kBlock / 2; ++pair, from += 2 * stride)
      put_pairs((Floats)load_words(from), (Floats)load_words(from + stride), to + 64 * pair);
}

inline TileShapes shapes_of_parts(int64_t rows) {  // 0..3: sums; 4, 5: rows; 6, 7: panels
  TileShapes all;
  for (int i = 0; i < 8; ++i) all.set(i, i < 6 && rows < 16 ? int(rows) : 16, 64);
  return all;
}

// Memory that is read next, brought to the second cache `lines` lines at a time.
struct Nearer {
  const char *at = nullptr, *end = nullptr;
  int64_t lines = 0;

  void some() {
    const char* to = at + 64 * lines < end ? at + 64 * lines : end;
    for (; at < to; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// A block of one or two tiles of rows times one of one or two panels; `next`: bytes to the second of each.
template <int A, int B>
inline void multiply_block(const char* a, int64_t a_next, const char* b, int64_t b_next) {
  auto rows = [&](auto part) QC_INLINE {  // the next part of the rows
    tile_load<4>(a + part * kTile, 64);
    tile_dot_bfloats<0, 4, 6>();
    if constexpr (B == 2) tile_dot_bfloats<1, 4, 7>();
    if constexpr (A == 2) {
      tile_load<5>(a + a_next + part * kTile, 64);
      tile_dot_bfloats<2, 5, 6>();
      if constexpr (B == 2) tile_dot_bfloats<3, 5, 7>();
    }
  };
  auto panels = [&](auto part) QC_INLINE {  // the next part of the panels
    tile_load<6>(b + part * kTile, 64);
    tile_dot_bfloats<0, 4, 6>();
    if constexpr (A == 2) tile_dot_bfloats<2, 5, 6>();
    if constexpr (B == 2) {
      tile_load<7>(b + b_next + part * kTile, 64);
      tile_dot_bfloats<1, 4, 7>();
      if constexpr (A == 2) tile_dot_bfloats<3, 5, 7>();
    }
  };
  constexpr std::integral_constant<int, 0> high;
  constexpr std::integral_constant<int, 1> middle;
  constexpr std::integral_constant<int, 2> low;
  tile_load<4>(a, 64);
  if constexpr (A == 2) tile_load<5>(a + a_next, 64);
  panels(low);
  panels(middle);
  rows(middle);
  panels(high);
  rows(low);
  rows(high);
}

inline void zero_sums() { tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(); }

template <int A, int B>
inline void store_sums(float* to, int64_t stride) {
  tile_store<0>(to, 4 * stride);
  if constexpr (B == 2) tile_store<1>(to + 16, 4 * stride);
  if constexpr (A == 2) tile_store<2>(to + 16 * stride, 4 * stride);
  if constexpr (A == 2 && B == 2) tile_store<3>(to + 16 * stride + 16, 4 * stride);
}

// Tiles of rows from `a` on times panels from `b` on, one or two of each, the second `blocks` tiles behind; to [rows][columns]
// of `stride` floats. What is read next comes nearer meanwhile.
template <int A, int B>
inline void multiply_parts(const char* a, const char* b, int64_t blocks, float* to, int64_t stride, Nearer& soon) {
  const int64_t next = blocks * kTiles;
  zero_sums();
  for (int64_t i = 0; i < blocks; ++i, a += kTiles, b += kTiles) {
    multiply_block<A, B>(a, next, b, next);
    soon.some();
  }
  store_sums<A, B>(to, stride);
}

// The same times panels that are not parted yet: a block is, just before it is multiplied, to places in the first cache.
template <int A, int B>
inline void multiply_parting(const char* a, const float* panels, int64_t blocks, float* to, int64_t stride) {
  constexpr int64_t kLead = 2, kPlaces = 4, kNumbers = kBlock * kPanel;  // parted so long before, or the tile waits
  alignas(64) char places[kPlaces][2 * kTiles];
  zero_sums();
  for (int64_t i = -kLead; i < blocks; ++i) {
    if (i + kLead < blocks)
      for (int p = 0; p < B; ++p)
        put_panel(panels + (p * blocks + i + kLead) * kNumbers, kPanel, kBlock, places[(i + kLead) % kPlaces] + p * kTiles);
    if (i >= 0) multiply_block<A, B>(a + i * kTiles, blocks * kTiles, places[i % kPlaces], kTiles);
  }
  store_sums<A, B>(to, stride);
}

inline void multiply_parts(bool two_tiles, bool two_panels, const char* a, const char* b, int64_t blocks, float* to,
                           int64_t stride, Nearer& soon) {
  if (two_tiles && two_panels) multiply_parts<2, 2>(a, b, blocks, to, stride, soon);
  else if (two_tiles) multiply_parts<2, 1>(a, b, blocks, to, stride, soon);
  else if (two_panels) multiply_parts<1, 2>(a, b, blocks, to, stride, soon);
  else multiply_parts<1, 1>(a, b, blocks, to, stride, soon);
}

// Rows as parts: [tiles of 16 rows, blocks, parts, 16, 32]. Rows that fill up the last tile are zero; a single tile has only
// as many as there are.
struct PartedRows {
  char* data;
  int64_t blocks;

  static int64_t bytes(int64_t rows, int64_t k) { return (rows + 15) / 16 * (k / kBlock) * kTiles; }
  char* tile(int64_t row) const { return data + row / 16 * blocks * kTiles; }

  // The tile of rows [row, row + 16), as far as there are any; line after line, as they lie.
  template <int Dtype>
  void put_tile(int64_t row, const typename Numbers<Dtype>::Type* x, int64_t x_stride, int64_t rows) const {
    char* to = tile(row);
    const int64_t there = rows - row < 16 ? rows - row : 16;
    const typename Numbers<Dtype>::Type* from = x + row * x_stride;
    for (int64_t b = 0; b < blocks; ++b, from += kBlock, to += kTiles) {
      for (int64_t r = 0; r < there; ++r) {
        alignas(64) float wide[kBlock];
        for (int i = 0; i < kBlock; i += kLanes) store(wide + i, Numbers<Dtype>::read(from + r * x_stride + i));
        put_line((Floats)load_words(wide), (Floats)load_words(wide + 16), to + 64 * r);
      }
      for (int part = 0; part < kParts && rows > 16; ++part) memset(to + part * kTile + 64 * there, 0, size_t(64 * (16 - there)));
    }
  }
};

// Panels of B32, parted on their way to the tiles: some pairs of them at a time, as many as stay in a second cache while
// rows pass, or one pair where the rows stay there.
struct PartedProduct {
  const Product& job;
  const PartedRows x;

  // Panels [from, to) of all segments, counted through, for rows [row, end).
  void part(int64_t from, int64_t to, int64_t row, int64_t end) const {
    static thread_local std::vector<char> memory;
    Tiles tiles(shapes_of_parts(end - row));
    const int64_t bytes = x.blocks * kTiles, passes = (end - row + 15) / 16;
    const int64_t together = end - row <= 32 || 2 * passes * bytes <= kSecondCache ? 2 : std::max<int64_t>(kSecondCache / (2 * bytes), 1) * 2;
    int64_t column = 0, before = 0;
    for (int64_t i = 0; i < job.num_segments; ++i) {
      const qc_segment& segment = job.segments[i];
      const int64_t num = panels_of(segment), last = to - before < num ? to - before : num;
      for (int64_t p = from > before ? from - before : 0; p < last; p += together) {
        const int64_t many = last - p < together ? last - p : together;
        if (end - row <= 32) {
          few(static_cast<const float*>(segment.data) + p * kPanel * job.x.k, many, column + p * kPanel, segment.rows - p * kPanel,
              row, end);
          continue;
        }
        char* parted = aligned(memory, many * bytes);
        const float* stored = static_cast<const float*>(segment.data) + p * kPanel * job.x.k;
        put_panel(stored, kPanel, many * job.x.k, parted);  // panels lie one behind the other
        some(parted, many, column + p * kPanel, segment.rows - p * kPanel, row, end);
      }
      column += segment.rows, before += num;
    }
  }

  // One or two panels as stored, for a tile of rows or two.
  void few(const float* panels, int64_t many, int64_t column, int64_t count, int64_t row, int64_t end) const {
    alignas(64) float found[32 * 2 * kPanel];
    const bool tall = end - row > 16;
    if (tall && many == 2) multiply_parting<2, 2>(x.tile(row), panels, x.blocks, found, 2 * kPanel);
    else if (tall) multiply_parting<2, 1>(x.tile(row), panels, x.blocks, found, 2 * kPanel);
    else if (many == 2) multiply_parting<1, 2>(x.tile(row), panels, x.blocks, found, 2 * kPanel);
    else multiply_parting<1, 1>(x.tile(row), panels, x.blocks, found, 2 * kPanel);
    job.write(job, row, end - row, column, count < many * kPanel ? count : many * kPanel, found, 2 * kPanel);
  }

  // `many` parted panels; count: columns from `column` on that there are.
  void some(const char* panels, int64_t many, int64_t column, int64_t count, int64_t row, int64_t end) const {
    alignas(64) float found[32 * 2 * kPanel];
    const int64_t pairs = (many + 1) / 2, bytes = 2 * x.blocks * kTiles;  // of two tiles of rows, and of a pair of panels
    Nearer soon;
    for (; row < end; row += 32) {
      const int64_t left = end - row - 32;
      soon = {x.tile(row) + bytes, x.tile(row) + bytes + (left > 16 ? bytes : left > 0 ? bytes / 2 : 0), 0};
      soon.lines = (soon.end - soon.at) / 64 / (pairs * x.blocks) + 1;
      for (int64_t p = 0; p < many; p += 2) {
        const bool tall = end - row > 16, wide = many - p > 1;
        const int64_t most = wide ? 2 * kPanel : kPanel;
        multiply_parts(tall, wide, x.tile(row), panels + p * x.blocks * kTiles, x.blocks, found, 2 * kPanel, soon);
        job.write(job, row, end - row < 32 ? end - row : 32, column + p * kPanel, count - p * kPanel < most ? count - p * kPanel : most, found,
                  2 * kPanel);
      }
    }
  }
};

constexpr int64_t kPartedBytes = 1 << 24;  // of rows that are parted at once

template <int Dtype>
void floats_by_tiles(const typename Numbers<Dtype>::Type* x, int64_t x_stride, Product job, int64_t panels) {
  if (job.m <= 0) return;
  static thread_local std::vector<char> memory;
  const int64_t k = job.x.k, all = job.m, row_bytes = PartedRows::bytes(16, k) / 16;
  const int64_t most = std::max<int64_t>(kPartedBytes / row_bytes, 32) / 32 * 32, slabs = (all + most - 1) / most;
  const int64_t slab = ((all + slabs - 1) / slabs + 31) / 32 * 32;
  for (int64_t start = 0; start < all; start += slab) {
    const int64_t rows = all - start < slab ? all - start : slab;
    const PartedRows parted = {aligned(memory, PartedRows::bytes(rows, k)), k / kBlock};
    const auto* from = x + start * x_stride;
    auto put = [&](int tile) { parted.put_tile<Dtype>(int64_t(tile) * 16, from, x_stride, rows); };
    each(int((rows + 15) / 16), put);
    job.m = rows;
    const PartedProduct product = {job, parted};
    const int64_t wanted = threads() > 1 ? 4 * threads() : 1, pairs = (panels + 1) / 2;
    const int64_t parts = pairs < wanted ? pairs : wanted, passes = (rows + 31) / 32;
    const int64_t floors = std::min((wanted + parts - 1) / parts, passes);
    auto work = [&](int item) {
      const int64_t part = item / floors, floor = item % floors, last = pairs * (part + 1) / parts * 2;
      const int64_t end = passes * (floor + 1) / floors * 32;
      product.part(pairs * part / parts * 2, last < panels ? last : panels, passes * floor / floors * 32,
                   end < rows ? end : rows);
    };
    each(int(floors * parts), work);
    job.out = static_cast<typename Numbers<Dtype>::Type*>(job.out) + rows * job.out_stride;
  }
}

}  // namespace QC_ISA
}  // namespace quire
#endif
