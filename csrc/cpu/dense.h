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
  for (int r = 0; r < R; ++r) {
    if constexpr (C % 4 == 0) {
      for (int c = 0; c < C; c += 4) store_sums(out[r] + c, sums[r][c], sums[r][c + 1], sums[r][c + 2], sums[r][c + 3]);
    } else {
      for (int c = 0; c < C; ++c) out[r][c] = sum_alone(sums[r][c]);
    }
    for (int64_t t = i; t < size; ++t)
      for (int c = 0; c < C; ++c) out[r][c] += a[r][t] * N::one(b[c] + t);
  }
}

template <int Dtype>
struct Dense {
  typedef Numbers<Dtype> N;
  typedef typename N::Type T;
  const float* x;  // [m, k]
  const T *weight, *bias;
  T* out;
  int64_t weight_stride, out_stride, m, n, k;

  // b: rows of the weight, as stored or widened.
  template <int R, int C, int From>
  void piece(int64_t row, int64_t column, const typename Numbers<From>::Type* const (&b)[C]) const {
    const float* a[R];
    float found[R][C];
    for (int r = 0; r < R; ++r) a[r] = x + (row + r) * k;
    dots<From, R, C>(a, b, k, found);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) {
        const float value = bias ? found[r][c] + N::one(bias + column + c) : found[r][c];
        N::put_one(out + (row + r) * out_stride + column + c, value);
      }
  }

  template <int C, int From>
  void rows_of(int64_t column, int64_t from, int64_t to, const typename Numbers<From>::Type* const (&b)[C]) const {
    int64_t row = from;
    for (; row + kDotRows <= to; row += kDotRows) piece<kDotRows, C, From>(row, column, b);
    for (; row < to; ++row) piece<1, C, From>(row, column, b);
  }

  // For many rows the weight is widened once; the products are the same.
  template <int C>
  void columns(int64_t column, int64_t from, int64_t to) const {
    const T* b[C];
    for (int c = 0; c < C; ++c) b[c] = weight + (column + c) * weight_stride;
    if (Dtype == QC_F32 || to - from < 2 * kDotRows) return rows_of<C, Dtype>(column, from, to, b);
    static thread_local std::vector<float> memory;
    memory.resize(size_t(C * k));
    const float* wide[C];
    for (int c = 0; c < C; ++c) {
      float* to_row = memory.data() + c * k;
      int64_t i = 0;
      for (; i + kLanes <= k; i += kLanes) store(to_row + i, N::read(b[c] + i));
      for (; i < k; ++i) to_row[i] = N::one(b[c] + i);
      wide[c] = to_row;
    }
    rows_of<C, QC_F32>(column, from, to, wide);
  }

  // Rows [from, to) times columns [first, last): the rows should fit a core's second cache.
  void part(int64_t first, int64_t last, int64_t from, int64_t to) const {
    int64_t column = first;
    for (; column + kDotColumns <= last; column += kDotColumns) columns<kDotColumns>(column, from, to);
    for (; column < last; ++column) columns<1>(column, from, to);
  }
};

template <int Dtype>
void linear(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const void* weight, int64_t weight_stride,
            const void* bias, void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  typedef typename Numbers<Dtype>::Type T;
  static thread_local std::vector<float> wide;
  wide.resize(size_t(m * k));
  float* rows = wide.data();
  auto widen = [=](int row) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) store(rows + row * k + i, Numbers<Dtype>::read(x + row * x_stride + i));
    for (; i < k; ++i) rows[row * k + i] = Numbers<Dtype>::one(x + row * x_stride + i);
  };
  if (m < 8) for (int row = 0; row < m; ++row) widen(row);
  else each(int(m), widen);
  Dense<Dtype> job = {rows, static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<T*>(out),
                      weight_stride, out_stride, m, n, k};
  int64_t tall = (1 << 16) / k / kDotRows * kDotRows;  // rows whose floats fill some of a second cache
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
