// What attention does to each token first: heads are normed and turned, keys and values written to the cache.
#pragma once
#include <math.h>

#include "rows.h"

namespace quire {
namespace QC_ISA {

constexpr int kMaxSize = QC_MAX_SIZE;

template <int Dtype, int Turn>
void turn_head(typename Numbers<Dtype>::Type* head, const void* cos, const void* sin, int turned, bool pairs) {
  typedef Numbers<Dtype> N;
  typedef Numbers<Turn> C;
  const typename C::Type *c = static_cast<const typename C::Type*>(cos), *s = static_cast<const typename C::Type*>(sin);
  const int half = turned / 2;
  int i = 0;
  if (!pairs)
    for (; i + kLanes <= half; i += kLanes) {
      vf first = N::read(head + i), second = N::read(head + half + i);
      N::write(head + i, fma(first, C::read(c + i), second * C::read(s + i)));
      N::write(head + half + i, fma(second, C::read(c + half + i), first * C::read(s + half + i)));
    }
  for (; i < half; ++i) {
    const int a = pairs ? 2 * i : i, b = pairs ? 2 * i + 1 : half + i;
    const float first = N::one(head + a), second = N::one(head + b);
    N::put_one(head + a, fmaf(first, C::one(c + a), second * C::one(s + a)));
    N::put_one(head + b, fmaf(second, C::one(c + b), first * C::one(s + b)));
  }
}

template <int From, int To>
void copy_numbers(const typename Numbers<From>::Type* from, typename Numbers<To>::Type* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Numbers<To>::write(to + i, Numbers<From>::read(from + i));
  for (; i < count; ++i) Numbers<To>::put_one(to + i, Numbers<From>::one(from + i));
}

// How a cache is stored, and the dtype its numbers are computed with.
template <int Cache>
struct Stored {
  typedef typename Numbers<Cache>::Type Type;
  static constexpr int kRead = Cache;
};
template <>
struct Stored<QC_I8> {
  typedef int8_t Type;
  static constexpr int kRead = QC_F32;
};

// Heads rounded to bytes, the largest becomes 127; behind all of them a scale for each.
template <int Dtype>
void write_bytes(const typename Numbers<Dtype>::Type* from, int8_t* to, int heads, int size) {
  int8_t* scales = to + int64_t(heads) * size;
  for (int h = 0; h < heads; ++h, from += size, to += size) {
    float head[kMaxSize + kLanes] = {};
    copy_numbers<Dtype, QC_F32>(from, head, size);
    vi most = fill_int(0);
    for (int d = 0; d < size; d += kLanes) most = larger_size(most, load(head + d));
    const float top = largest_size(most), scale = top / 127, inverse = top > 0 ? 127 / top : 0;
    for (int d = 0; d < size; ++d) {
      float whole = rintf(head[d] * inverse);
      whole = whole > -127 ? whole : -127;  // what is no number, too: its scale says that it is none
      to[d] = int8_t(int(whole < 127 ? whole : 127));
    }
    memcpy(scales + 4 * h, &scale, 4);
  }
}

inline void read_bytes(const int8_t* from, const int8_t* scale_at, int size, float* to) {
  float scale;
  memcpy(&scale, scale_at, 4);
  for (int d = 0; d < size; ++d) to[d] = scale * float(from[d]);
}

// One token: norm and turn its query and key heads in place, write keys and values to the cache.
template <int Dtype, int Cache>
void prepare_token(const qc_attention& w, int64_t token) {
  typedef typename Numbers<Dtype>::Type T;
  T* row = static_cast<T*>(w.qkv) + token * w.qkv_stride;
  for (int h = 0; h < w.heads + w.kv_heads; ++h) {
    const bool is_key = h >= w.heads;
    const T* weight = static_cast<const T*>(is_key ? w.k_weight : w.q_weight);
    T* head = row + int64_t(h) * w.size;
    if (weight) {
      if (w.norm_each) weight += int64_t(is_key ? h - w.heads : h) * w.size;
      norm_row<Dtype>(head, weight, head, w.size, w.eps, w.offset, w.norm_wide);
    }
    if (w.cos && w.turn_dtype == QC_F32)
      turn_head<Dtype, QC_F32>(head, static_cast<const float*>(w.cos) + token * w.turned,
                               static_cast<const float*>(w.sin) + token * w.turned, w.turned, w.pairs);
    else if (w.cos)
      turn_head<Dtype, Dtype>(head, static_cast<const T*>(w.cos) + token * w.turned,
                              static_cast<const T*>(w.sin) + token * w.turned, w.turned, w.pairs);
  }
  if (w.slots[token] < 0) return;
  typename Stored<Cache>::Type* to = static_cast<typename Stored<Cache>::Type*>(w.cache) + w.slots[token] * w.cache_stride;
  const T* from = row + int64_t(w.heads) * w.size;
  if constexpr (Cache == QC_I8) write_bytes<Dtype>(from, to, 2 * w.kv_heads, w.size);
  else copy_numbers<Dtype, Cache>(from, to, int64_t(2) * w.kv_heads * w.size);
}

}  // namespace QC_ISA
}  // namespace quire
