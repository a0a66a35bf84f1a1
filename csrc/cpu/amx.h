// Products of plain bfloat16 with tile registers: 16 rows of the weight are a tile as they lie, and the input is turned, so
// the weight needs no form of its own. Every product, of one row too, is made so: a result is summed by the same instruction in the same order
// (32 inputs at a time, from the first on) whatever stands beside it.
#pragma once
#include "dense.h"
#include "packed.h"
#include "tiles.h"
#include "turn.h"

#include <utility>

#if QC_TILES
namespace quire {
namespace QC_ISA {

#define QC_INLINE __attribute__((always_inline))

// body(0), body(1) ... body(N - 1) with constants: arrays of vectors that they index stay in registers, which after an
// instruction that touches memory they would not in a loop.
template <class F, int... I>
QC_INLINE inline void constants(std::integer_sequence<int, I...>, F&& body) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
QC_INLINE inline void constant_times(F&& body) {
  constants(std::make_integer_sequence<int, N>(), body);
}

#ifndef QC_SECOND_CACHE  // a test wants less
#define QC_SECOND_CACHE (1 << 20)
#endif
constexpr int64_t kSecondCache = QC_SECOND_CACHE;  // bytes of input that a core works on at a time

// `memory` grows where it must: what shrinks would be cleared when it grows again.
inline char* aligned(std::vector<char>& memory, int64_t bytes) {
  if (memory.size() < size_t(bytes + 64)) memory.resize(size_t(bytes + 64));
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

struct BfloatTiles {
  const char* x;  // turned: [tiles of rows, blocks, 16 pairs of inputs, columns] words
  const uint16_t *weight, *bias;
  uint16_t* out;
  int64_t weight_stride, out_stride, m, n, k, blocks;
  int columns;  // rows of x in a tile

  int64_t x_block() const { return int64_t(16) * 4 * columns; }

  TileShapes shapes() const {  // tiles 0..3: sums; 4, 5: rows of the weight; 6, 7: turned input
    TileShapes all;
    for (int i = 0; i < 4; ++i) all.set(i, 16, 4 * columns);
    for (int i = 0; i < 2; ++i) all.set(4 + i, 16, 64), all.set(6 + i, 16, 4 * columns);
    return all;
  }

  // Rows of a weight where they lie, or copied with zeros around them.
  struct Strip {
    const char* at;
    int64_t row, tile, block, ahead;  // bytes to the next of each; what is wanted soon (0: nothing)
  };

  // A tiles of the weight times B tiles of the input; found: [A * B][16 columns of the result][16 rows].
  template <int A, int B>
  void multiply(const Strip& strip, const char* b, float* found) const {
    const char* a = strip.at;
    const int64_t width = 4 * columns, next = blocks * x_block();
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t i = 0; i < blocks; ++i, a += strip.block, b += x_block()) {
      tile_load<6>(b, width);
      if constexpr (B == 2) tile_load<7>(b + next, width);
      tile_load<4>(a, strip.row);
      tile_dot_bfloats<0, 4, 6>();
      if constexpr (B == 2) tile_dot_bfloats<1, 4, 7>();
      tile_load<5>(a + strip.tile, strip.row);
      tile_dot_bfloats<B, 5, 6>();
      if constexpr (B == 2) tile_dot_bfloats<3, 5, 7>();
      if constexpr (A == 4) {
        tile_load<4>(a + 2 * strip.tile, strip.row);
        tile_dot_bfloats<2, 4, 6>();
        tile_load<5>(a + 3 * strip.tile, strip.row);
        tile_dot_bfloats<3, 5, 6>();
      }
      if (strip.ahead)
        for (int r = 0; r < 16 * A; ++r) __builtin_prefetch(a + r * strip.row + strip.ahead, 0, 2);
    }
    tile_store<0>(found, 64), tile_store<1>(found + 256, 64);
    if (A * B == 4) tile_store<2>(found + 512, 64), tile_store<3>(found + 768, 64);
  }

  // found [16 columns][16 rows] to the result, from (row, column) on.
  void write(const float* found, int64_t row, int64_t column) const {
    const int64_t rows = m - row < columns ? m - row : columns;
    if (n - column >= 16) {
      Words joined[8];
      for (int i = 0; i < 8; ++i) {
        Floats a = (Floats)load_words(found + 32 * i), b = (Floats)load_words(found + 32 * i + 16);
        if (bias) a += bfloat_to_float(bias[column + 2 * i]), b += bfloat_to_float(bias[column + 2 * i + 1]);
        joined[i] = join_bfloats(a, b);
      }
      return turn_8_to(joined, reinterpret_cast<char*>(out + row * out_stride + column), 2 * out_stride, int(rows));
    }
    write_rest(found, row, column, rows);
  }

  __attribute__((noinline)) void write_rest(const float* found, int64_t row, int64_t column, int64_t rows) const {
    for (int64_t c = 0; column + c < n; ++c)
      for (int64_t r = 0; r < rows; ++r) {
        const float value = bias ? found[16 * c + r] + bfloat_to_float(bias[column + c]) : found[16 * c + r];
        out[(row + r) * out_stride + column + c] = tiny_to_zero(value);
      }
  }

  // As join_bfloats rounds: where that is an instruction, numbers too small to be normal become zero.
  static uint16_t tiny_to_zero(float value) {
    uint16_t bits = float_to_bfloat(value);
#if defined(__AVX512BF16__)
    if (__builtin_fabsf(value) < 1.17549435e-38f) bits &= 0x8000;
#endif
    return bits;
  }

  template <int A>
  Strip strip_at(int64_t column, std::vector<char>& memory) const {
    const int64_t row = 2 * weight_stride, rows = n - column < 16 * A ? n - column : 16 * A;
    const char* from = reinterpret_cast<const char*>(weight + column * weight_stride);
    if (rows == 16 * A && k % kBlock == 0) {
      const int64_t whole = 16 * A * row;
      return {from, row, 16 * row, 64, whole <= kSecondCache / 4 ? whole : 1024};
    }
    char* to = aligned(memory, A * blocks * 1024);
    memset(to, 0, size_t(A * blocks * 1024));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t left = 2 * k - 64 * b;
        memcpy(to + (r / 16 * blocks + b) * 1024 + r % 16 * 64, from + r * row + 64 * b, size_t(left < 64 ? left : 64));
      }
    return {to, 64, blocks * 1024, 1024, 0};
  }

  // Columns [first, last) of the result for tiles of rows [from, to); A: 4 where there is one tile of rows only.
  template <int A>
  void part(int64_t first, int64_t last, int64_t from, int64_t to) const {
    static thread_local std::vector<char> memory;
    Tiles tiles(shapes());
    alignas(64) float found[4 * 256];
    for (int64_t column = first; column < last; column += 16 * A) {
      Strip strip = strip_at<A>(column, memory);
      for (int64_t tile = from; tile < to;) {
        const char* b = x + tile * blocks * x_block();
        const int many = A == 2 && tile + 1 < to ? 2 : 1;
        if constexpr (A == 2) {
          if (many == 2) multiply<2, 2>(strip, b, found);
          else multiply<2, 1>(strip, b, found);
        } else {
          multiply<A, 1>(strip, b, found);
        }
        for (int i = 0; i < A; ++i)
          for (int j = 0; j < many; ++j)
            if (column + 16 * i < n) write(found + (i * many + j) * 256, (tile + j) * 16, column + 16 * i);
        tile += many, strip.ahead = 0;
      }
    }
  }
};

// One tile of rows of x, turned: pairs of inputs down, rows across, zeros where there is nothing.
inline void turn_rows(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t k, int columns, char* to) {
  for (int64_t b = 0; b * kBlock < k; ++b, to += 16 * 4 * columns) {
    if (rows == 16 && (b + 1) * kBlock <= k) {
      turn_16(x + b * kBlock, 2 * x_stride, to);
      continue;
    }
    memset(to, 0, size_t(16 * 4 * columns));
    const int64_t left = k - b * kBlock < kBlock ? k - b * kBlock : kBlock;
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* from = x + r * x_stride + b * kBlock;
      for (int64_t i = 0; i + 2 <= left; i += 2) memcpy(to + (i / 2 * columns + r) * 4, from + i, 4);
      if (left % 2) memcpy(to + (left / 2 * columns + r) * 4, from + left - 1, 2);
    }
  }
}

inline void linear_by_tiles(const uint16_t* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                            void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  static thread_local std::vector<char> memory;
  const int columns = m < 16 ? int(m) : 16;
  const int64_t tiles = (m + 15) / 16, blocks = (k + kBlock - 1) / kBlock, bytes = blocks * 16 * 4 * columns;
  char* turned = aligned(memory, tiles * bytes);
  auto turn = [=](int tile) {
    turn_rows(x + tile * 16 * x_stride, x_stride, m - tile * 16 < 16 ? m - tile * 16 : 16, k, columns, turned + tile * bytes);
  };
  each(int(tiles), turn);
  BfloatTiles job = {turned, static_cast<const uint16_t*>(weight), static_cast<const uint16_t*>(bias), static_cast<uint16_t*>(out),
                     weight_stride, out_stride, m, n, k, blocks, columns};
  const int64_t width = tiles == 1 ? 64 : 32, strips = (n + width - 1) / width;
  int64_t tall = kSecondCache / bytes / 2 * 2;
  tall = tall < 4 ? 4 : tall;
  const int64_t floors = (tiles + tall - 1) / tall, wanted = (4 * threads() + floors - 1) / floors;
  const int64_t parts = wanted < strips ? wanted : strips;
  auto work = [&](int item) {
    const int64_t from = item % floors * tall, to = from + tall < tiles ? from + tall : tiles, part = item / floors;
    const int64_t first = strips * part / parts * width, end = strips * (part + 1) / parts * width, last = end < n ? end : n;
    if (tiles == 1) job.part<4>(first, last, from, to);
    else job.part<2>(first, last, from, to);
  };
  each(int(floors * parts), work);
}

}  // namespace QC_ISA
}  // namespace quire
#endif
