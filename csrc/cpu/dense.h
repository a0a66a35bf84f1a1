// Dot products of rows with rows, and products with weights stored as plain numbers of 16 or 32 bits.
#pragma once
#include <vector>

#include "pool.h"
#include "simd.h"

namespace quire {
namespace QC_ISA {

// out[r][c] = a[r] . b[c] over `size` numbers: one chain of sums per pair, the same whatever R and C are.
template <int Dtype, int R, int C>
__attribute__((noinline)) void dots(const float* const (&a)[R], const typename Numbers<Dtype>::Type* const (&b)[C], int64_t size,
                 float (&out)[R][C]) {
  typedef Numbers<Dtype> N;
  vf sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = fill(0);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    vf right[C];
    for (int c = 0; c < C; ++c) right[c] = N::read(b[c] + i);
    for (int r = 0; r < R; ++r) {
      vf left = load(a[r] + i);
      for (int c = 0; c < C; ++c) sums[r][c] = fma(left, right[c], sums[r][c]);
    }
  }
  // Unrolled by hand: sums that a loop indexes would be stored in every turn of the loop above.
  unroll(std::make_integer_sequence<int, R>(), [&](auto r) {
    if constexpr (C % 4 == 0) {
      unroll(std::make_integer_sequence<int, C / 4>(), [&](auto four) {
        constexpr int c = 4 * four;
        store_sums(out[r] + c, sums[r][c], sums[r][c + 1], sums[r][c + 2], sums[r][c + 3]);
      });
    } else {
      unroll(std::make_integer_sequence<int, C>(), [&](auto c) { out[r][c] = sum_alone(sums[r][c]); });
    }
    for (int64_t t = i; t < size; ++t)
      for (int c = 0; c < C; ++c) out[r][c] += a[r][t] * N::one(b[c] + t);
  });
}

// Products are summed in parts of kDepth inputs, so that a few columns of one part, widened, stay in the first cache while
// many rows pass. The same parts for one row.
constexpr int64_t kDepth = 512;
constexpr int kColumns = 16;

template <int Dtype>
struct Dense {
  typedef Numbers<Dtype> N;
  typedef typename N::Type T;
  const float* x;  // [m, k]
  const T *weight, *bias;
  T* out;
  int64_t weight_stride, out_stride, m, n, k;

  // Adds rows [row, to), at most R of them, times columns [first, first + C) over inputs [depth, depth + size) to `sums`.
  // b: columns of the weight from input `depth` on, as stored or widened.
  template <int R, int C, int From>
  void piece(int64_t row, int64_t to, int first, int64_t depth, int64_t size,
             const typename Numbers<From>::Type* const (&b)[C], float* sums) const {
    const float* a[R];
    float found[R][C];
    for (int r = 0; r < R; ++r) a[r] = x + (row + r < to ? row + r : to - 1) * k + depth;
    dots<From, R, C>(a, b, size, found);
    for (int r = 0; r < R && row + r < to; ++r)
      for (int c = 0; c < C; ++c) {
        float& here = sums[r * kColumns + first + c];
        here = depth ? here + found[r][c] : found[r][c];
      }
  }

  // b: `count` columns, one after another at `stride`.
  template <int From>
  void rows_of(int64_t from, int64_t to, int count, int64_t depth, int64_t size, const typename Numbers<From>::Type* b,
               int64_t stride, float* sums) const {
    for (int64_t row = from; row < to; sums += kDotRows * kColumns, row += kDotRows)
      for (int c = 0; c < count;) {
        const typename Numbers<From>::Type* columns[kDotColumns] = {};
        if (c + kDotColumns <= count) {
          for (int i = 0; i < kDotColumns; ++i) columns[i] = b + (c + i) * stride;
          if (to - row > 1) piece<kDotRows, kDotColumns, From>(row, to, c, depth, size, columns, sums);
          else piece<1, kDotColumns, From>(row, to, c, depth, size, columns, sums);
          c += kDotColumns;
        } else {
          const typename Numbers<From>::Type* one[1] = {b + c * stride};
          if (to - row > 1) piece<kDotRows, 1, From>(row, to, c, depth, size, one, sums);
          else piece<1, 1, From>(row, to, c, depth, size, one, sums);
          ++c;
        }
      }
  }

  void write(int64_t column, int count, int64_t from, int64_t to, const float* sums) const {
    for (int64_t row = from; row < to; ++row, sums += kColumns) {
      T* at = out + row * out_stride + column;
      int c = 0;
      for (; c + kLanes <= count; c += kLanes)
        N::write(at + c, bias ? load(sums + c) + N::read(bias + column + c) : load(sums + c));
      for (; c < count; ++c) N::put_one(at + c, bias ? sums[c] + N::one(bias + column + c) : sums[c]);
    }
  }

  // Rows [from, to) times columns [first, last): the rows should fit a core's second cache.
  void part(int64_t first, int64_t last, int64_t from, int64_t to) const {
    static thread_local std::vector<float> memory;
    memory.resize(size_t(kColumns * (kDepth + to - from)));
    float *wide = memory.data(), *sums = wide + kColumns * kDepth;
    for (int64_t column = first; column < last; column += kColumns) {
      const int count = int(last - column < kColumns ? last - column : kColumns);
      for (int64_t depth = 0; depth == 0 || depth < k; depth += kDepth) {
        const int64_t size = k - depth < kDepth ? k - depth : kDepth;
        const T* b = weight + column * weight_stride + depth;
        if (Dtype == QC_F32 || to - from < 2 * kDotRows) {
          rows_of<Dtype>(from, to, count, depth, size, b, weight_stride, sums);
          continue;
        }
        for (int c = 0; c < count; ++c) widen(b + c * weight_stride, size, wide + c * kDepth);
        rows_of<QC_F32>(from, to, count, depth, size, wide, kDepth, sums);
      }
      write(column, count, from, to, sums);
    }
  }

  static void widen(const T* from, int64_t size, float* to) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, N::read(from + i));
    for (; i < size; ++i) to[i] = N::one(from + i);
  }
};

#if QC_TILES
#define QC_LINEAR_BFLOATS linear_by_tiles  // amx.h
#elif defined(__AVX512BF16__) || defined(QC_EMULATE_BF16)
#define QC_LINEAR_BFLOATS linear_by_pairs  // bfloats.h
#endif
#ifdef QC_LINEAR_BFLOATS
void QC_LINEAR_BFLOATS(const uint16_t* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                       void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k);
#endif

template <int Dtype>
void linear(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const void* weight, int64_t weight_stride,
            const void* bias, void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  typedef typename Numbers<Dtype>::Type T;
#ifdef QC_LINEAR_BFLOATS
  if constexpr (Dtype == QC_BF16)
    return QC_LINEAR_BFLOATS(x, x_stride, weight, weight_stride, bias, out, out_stride, m, n, k);
#endif
  static thread_local std::vector<float> wide;
  wide.resize(size_t(m * k));
  float* rows = wide.data();
  auto widen = [=](int row) { Dense<Dtype>::widen(x + row * x_stride, k, rows + row * k); };
  if (m < 8) for (int row = 0; row < m; ++row) widen(row);
  else each(int(m), widen);
  Dense<Dtype> job = {rows, static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<T*>(out),
                      weight_stride, out_stride, m, n, k};
  int64_t tall = (1 << 17) / k / kDotRows * kDotRows;  // rows whose floats fill some of a second cache
  tall = tall < 2 * kDotRows ? 2 * kDotRows : tall;
  const int64_t floors = (m + tall - 1) / tall;
  int64_t wide_parts = 4 * threads();
  if (wide_parts > (n + 15) / 16) wide_parts = (n + 15) / 16;
  const int64_t width = ((n + wide_parts - 1) / wide_parts + 15) / 16 * 16;
  wide_parts = (n + width - 1) / width;
  auto work = [&](int item) {
    const int64_t floor = item % floors, part = item / floors, last = (part + 1) * width, to = (floor + 1) * tall;
    job.part(part * width, last < n ? last : n, floor * tall, to < m ? to : m);
  };
  each(int(wide_parts * floors), work);
}

}  // namespace QC_ISA
}  // namespace quire
