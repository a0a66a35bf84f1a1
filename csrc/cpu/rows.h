// What is done to rows between products: norms, gated activations, the largest of a row.
#pragma once
#include <math.h>

#include "pool.h"
#include "simd.h"

namespace quire {
namespace QC_ISA {

constexpr int64_t kShare = 1 << 14;  // numbers below which waking other threads costs more than the work

// Work on rows in pieces of a few, shared when there is enough of it.
template <class F>
void each_row(int64_t rows, int64_t width, F& work) {
  if (rows * width < kShare) {
    for (int64_t row = 0; row < rows; ++row) work(row);
    return;
  }
  const int64_t items = rows < 4 * threads() ? rows : 4 * threads();
  auto some = [&](int item) {
    for (int64_t row = rows * item / items; row < rows * (item + 1) / items; ++row) work(row);
  };
  each(int(items), some);
}

// out = x / rms(x) * (weight + offset). `wide` rounds once, else before the weight is multiplied. May be in place.
template <int Dtype>
void norm_row(const typename Numbers<Dtype>::Type* x, const typename Numbers<Dtype>::Type* weight,
              typename Numbers<Dtype>::Type* out, int64_t width, float eps, float offset, bool wide) {
  typedef Numbers<Dtype> N;
  vf squares = fill(0);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    vf v = N::read(x + i);
    squares = fma(v, v, squares);
  }
  float total = sum(squares);
  for (; i < width; ++i) total += N::one(x + i) * N::one(x + i);
  const float inverse = 1 / sqrtf(total / float(width) + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) {
    const vf scaled = N::read(x + i) * fill(inverse), by = N::read(weight + i) + fill(offset);
    N::write(out + i, (wide ? scaled : N::all_rounded(scaled)) * by);
  }
  for (; i < width; ++i) {
    const float scaled = N::one(x + i) * inverse, by = N::one(weight + i) + offset;
    N::put_one(out + i, (wide ? scaled : N::rounded(scaled)) * by);
  }
}

// sum = x + more; returns sum.
template <int Dtype>
const typename Numbers<Dtype>::Type* add_row(const typename Numbers<Dtype>::Type* x, const typename Numbers<Dtype>::Type* more,
                                             typename Numbers<Dtype>::Type* sum, int64_t width) {
  typedef Numbers<Dtype> N;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) N::write(sum + i, N::read(x + i) + N::read(more + i));
  for (; i < width; ++i) N::put_one(sum + i, N::one(x + i) + N::one(more + i));
  return sum;
}

template <int Dtype>
void rms_norm(const void* x, int64_t x_stride, const void* delta, const void* weight, void* sum, void* out, int64_t rows,
              int64_t width, float eps, float offset, int wide) {
  typedef typename Numbers<Dtype>::Type T;
  auto work = [=](int64_t row) {
    const T* from = static_cast<const T*>(x) + row * x_stride;
    if (delta) from = add_row<Dtype>(from, static_cast<const T*>(delta) + row * width, static_cast<T*>(sum) + row * width, width);
    norm_row<Dtype>(from, static_cast<const T*>(weight), static_cast<T*>(out) + row * width, width, eps, offset, wide);
  };
  each_row(rows, width, work);
}

// Exact: what is rounded to 16 bits afterwards bears a quotient whose last bit may be wrong.
template <int Act, bool Exact>
inline vf act_of(vf x) {
  auto part = [](vf of, vf power) { return Exact ? of / (fill(1) + power) : quotient(of, fill(1) + power); };
  if (Act == QC_SILU) return part(x, exp_of(-x));
  if (Act == QC_QUICK_GELU) return part(x, exp_of(x * fill(-1.702f)));
  if (Act == QC_GELU_TANH) {  // x * sigmoid(2 u), which is x / 2 * (1 + tanh(u))
    vf u = x * fma(x * x, fill(0.044715f * 0.7978845608f), fill(0.7978845608f));
    return part(x, exp_of(u * fill(-2)));
  }
  vf above = larger(x, fill(0));
  return Act == QC_RELU ? above : above * above;
}

template <int Dtype, int Act>
void gated(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t width) {
  typedef Numbers<Dtype> N;
  typedef typename N::Type T;
  auto work = [=](int64_t row) {
    const T *gate = static_cast<const T*>(x) + row * x_stride, *up = gate + width;
    T* to = static_cast<T*>(out) + row * width;
    int64_t i = 0;  // rounded before it is multiplied, as one activation after the other would be
    for (; i + kLanes <= width; i += kLanes)
      N::write(to + i, N::all_rounded(act_of<Act, Dtype == QC_F32>(N::read(gate + i))) * N::read(up + i));
    for (; i < width; ++i) {
      float acted[kLanes];
      store(acted, act_of<Act, Dtype == QC_F32>(fill(N::one(gate + i))));
      N::put_one(to + i, N::rounded(acted[0]) * N::one(up + i));
    }
  };
  each_row(rows, width, work);
}

template <int Dtype>
void gated_by(int act, const void* x, int64_t x_stride, void* out, int64_t rows, int64_t width) {
  switch (act) {
    case QC_SILU: return gated<Dtype, QC_SILU>(x, x_stride, out, rows, width);
    case QC_GELU_TANH: return gated<Dtype, QC_GELU_TANH>(x, x_stride, out, rows, width);
    case QC_RELU: return gated<Dtype, QC_RELU>(x, x_stride, out, rows, width);
    case QC_RELU2: return gated<Dtype, QC_RELU2>(x, x_stride, out, rows, width);
    case QC_QUICK_GELU: return gated<Dtype, QC_QUICK_GELU>(x, x_stride, out, rows, width);
  }
}

// Index of the largest, the lowest among equals; NaN counts as largest.
template <int Dtype>
int64_t best_of(const typename Numbers<Dtype>::Type* from, int64_t width) {
  typedef Numbers<Dtype> N;
  vf most = fill(-INFINITY);
  vi odd = fill_int(0);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    vf v = N::read(from + i);
    odd |= (vi)(v != v);
    most = larger(most, v);
  }
  float top = largest(most);
  bool nan = false;
  for (int j = 0; j < kLanes; ++j) nan |= odd[j] != 0;
  for (; i < width; ++i) {
    const float v = N::one(from + i);
    nan |= v != v;
    top = v > top ? v : top;
  }
  for (i = 0; i + 16 * kLanes <= width; i += 16 * kLanes) {  // by many first, because most are not it
    vi hit = fill_int(0);
    for (int j = 0; j < 16; ++j) {
      vf v = N::read(from + i + j * kLanes);
      hit |= nan ? (vi)(v != v) : (vi)(v == fill(top));
    }
    if (largest_whole(hit & fill_int(1))) break;
  }
  for (; i < width; ++i) {
    const float v = N::one(from + i);
    if (nan ? v != v : v == top) break;
  }
  return i;
}

template <int Dtype>
void argmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* index) {
  auto work = [=](int64_t row) {
    index[row] = best_of<Dtype>(static_cast<const typename Numbers<Dtype>::Type*>(x) + row * x_stride, width);
  };
  each_row(rows, width, work);
}

}  // namespace QC_ISA
}  // namespace quire
