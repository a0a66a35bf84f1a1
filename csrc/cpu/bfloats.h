// Products of bfloat16 with the instruction that multiplies pairs (AVX512-BF16): two neighbouring inputs of 16 columns
// at a time.
//
// 16 rows of the weight are turned, some inputs at a time, so that one vector holds a pair of inputs of 16 columns, and
// serve all rows of the input before the next come. A result is one chain of sums over pairs in their order, whatever
// stands beside it.
#pragma once
#include "dense.h"
#include "turn.h"

#if (defined(__AVX512BF16__) && !QC_TILES) || defined(QC_EMULATE_BF16)
namespace quire {
namespace QC_ISA {

constexpr int kPairColumns = 32, kTurnedBlocks = 8;  // columns at a time; blocks of 32 inputs that are turned at a time

struct BfloatPairs {
  const uint16_t* x;  // [m, x_stride], inputs up to a multiple of 32 with zeros
  const uint16_t *weight, *bias;
  uint16_t* out;
  int64_t x_stride, weight_stride, out_stride, m, n, k;

  // Blocks [from, from + many) of the weight's rows from `column` on: [2 groups of 16 rows][many][16 pairs][16].
  void turn(int64_t column, int64_t from, int64_t many, char* to) const {
    for (int64_t group = 0; group < 2; ++group)
      for (int64_t b = from; b < from + many; ++b, to += 1024) {
        const int64_t row = column + 16 * group, left = k - b * kBlock;
        if (row + 16 <= n && left >= kBlock) {
          turn_16(weight + row * weight_stride + b * kBlock, 2 * weight_stride, to);
          continue;
        }
        uint16_t some[16][kBlock] = {};
        for (int64_t r = 0; r < 16 && row + r < n; ++r)
          memcpy(some[r], weight + (row + r) * weight_stride + b * kBlock, size_t(2 * (left < kBlock ? left : kBlock)));
        turn_16(some, 64, to);
      }
  }

  // R rows: sums [R][32] grow by the pairs of `many` turned blocks.
  template <int R>
  void add(const uint16_t* rows, const char* turned, int64_t many, float* sums) const {
    Floats all[R][2];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2; ++c) all[r][c] = (Floats)load_words(sums + r * kPairColumns + 16 * c);
    for (int64_t p = 0; p < 16 * many; ++p) {
      Words first = load_words(turned + 64 * p), second = load_words(turned + 1024 * many + 64 * p);
      for (int r = 0; r < R; ++r) {
        uint32_t pair;
        memcpy(&pair, rows + r * x_stride + 2 * p, 4);
        all[r][0] = add_pairs(all[r][0], first, pair), all[r][1] = add_pairs(all[r][1], second, pair);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2; ++c) store_words(sums + r * kPairColumns + 16 * c, (Words)all[r][c]);
  }

  void write(int64_t row, int64_t column, const float* sums) const {
    const int64_t count = n - column < kPairColumns ? n - column : kPairColumns;
    uint16_t* to = out + row * out_stride + column;
    typedef Numbers<QC_BF16> N;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) N::write(to + i, bias ? load(sums + i) + N::read(bias + column + i) : load(sums + i));
    for (; i < count; ++i) to[i] = float_to_bfloat(bias ? sums[i] + bfloat_to_float(bias[column + i]) : sums[i]);
  }

  // Columns [first, last) of rows [from, to).
  void part(int64_t first, int64_t last, int64_t from, int64_t to) const {
    static thread_local std::vector<float> memory, turned;
    turned.resize(kPairColumns / 16 * kTurnedBlocks * 256);
    const int64_t blocks = (k + kBlock - 1) / kBlock;
    for (int64_t column = first; column < last; column += kPairColumns) {
      memory.assign(size_t((to - from) * kPairColumns), 0.0f);
      for (int64_t b = 0; b < blocks; b += kTurnedBlocks) {
        const int64_t many = blocks - b < kTurnedBlocks ? blocks - b : kTurnedBlocks;
        char* weights = reinterpret_cast<char*>(turned.data());
        turn(column, b, many, weights);
        const uint16_t* inputs = x + b * kBlock;
        int64_t row = from;
        for (; row + 8 <= to; row += 8) add<8>(inputs + row * x_stride, weights, many, memory.data() + (row - from) * kPairColumns);
        for (; row < to; ++row) add<1>(inputs + row * x_stride, weights, many, memory.data() + (row - from) * kPairColumns);
      }
      for (int64_t row = from; row < to; ++row) write(row, column, memory.data() + (row - from) * kPairColumns);
    }
  }
};

inline void linear_by_pairs(const uint16_t* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                            void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  static thread_local std::vector<uint16_t> memory;
  if (k % kBlock) {
    const int64_t width = (k + kBlock - 1) / kBlock * kBlock;
    memory.assign(size_t(m * width), 0);
    for (int64_t row = 0; row < m; ++row) memcpy(memory.data() + row * width, x + row * x_stride, size_t(2 * k));
    x = memory.data(), x_stride = width;
  }
  const BfloatPairs job = {x, static_cast<const uint16_t*>(weight), static_cast<const uint16_t*>(bias), static_cast<uint16_t*>(out),
                           x_stride, weight_stride, out_stride, m, n, k};
  const int64_t strips = (n + kPairColumns - 1) / kPairColumns, tall = 256, floors = (m + tall - 1) / tall;
  const int64_t wanted = (4 * threads() + floors - 1) / floors, parts = wanted < strips ? wanted : strips;
  auto work = [&](int item) {
    const int64_t from = item % floors * tall, to = from + tall < m ? from + tall : m, part = item / floors;
    const int64_t end = strips * (part + 1) / parts * kPairColumns;
    job.part(strips * part / parts * kPairColumns, end < n ? end : n, from, to);
  };
  each(int(floors * parts), work);
}

}  // namespace QC_ISA
}  // namespace quire
#endif
