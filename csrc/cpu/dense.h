// Dot products of rows with rows, and products with weights stored as plain numbers of 16 or 32 bits.
#pragma once
#include <vector>

#include "pool.h"
#include "simd.h"

namespace quire {
namespace QC_ISA {

// out[r][c], `stride` apart, = the sum of sums[r][c] over its lanes, added to what is there or not.
template <int R>
inline void put_sums(const vf (&sums)[R][4], float* out, int64_t stride, bool add) {
  QC_UNROLL for (int r = 0; r < R; ++r) {
    Sums found = sum_each(sums[r][0], sums[r][1], sums[r][2], sums[r][3]), before = {};
    if (add) memcpy(&before, out + r * stride, sizeof before);
    found += before;
    memcpy(out + r * stride, &found, sizeof found);
  }
}

// R rows a times 4 rows b of `size` numbers. Each pair has a vector of sums, which begins with the rest of an odd size
// and is summed up at the end: the same whatever R is, and the same for rows that lie together (dots_together).
template <int Dtype, int R>
__attribute__((noinline)) void dots(const float* const (&a)[R], const typename Numbers<Dtype>::Type* const (&b)[4], int64_t size,
                                    float* out, int64_t stride, bool add) {
  typedef Numbers<Dtype> N;
  vf sums[R][4];
  int64_t i = size % kLanes;
  QC_UNROLL for (int r = 0; r < R; ++r)
    QC_UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = i ? Numbers<QC_F32>::some(a[r], i) * N::some(b[c], i) : fill(0);
  for (; i < size; i += kLanes) {
    vf left[R];
    QC_UNROLL for (int r = 0; r < R; ++r) left[r] = load(a[r] + i);
    QC_UNROLL for (int c = 0; c < 4; ++c) {
      vf right = N::read(b[c] + i);
      QC_UNROLL for (int r = 0; r < R; ++r) sums[r][c] = fma(left[r], right, sums[r][c]);
    }
  }
  put_sums(sums, out, stride, add);
}

// Rows widened and put together, vector by vector.
template <int Dtype, int R>
void put_together(const typename Numbers<Dtype>::Type* const (&rows)[R], int64_t size, float* to) {
  typedef Numbers<Dtype> N;
  int64_t i = size % kLanes;
  if (i) {
    for (int r = 0; r < R; ++r) store(to + r * kLanes, N::some(rows[r], i));
    to += R * kLanes;
  }
  for (; i < size; i += kLanes, to += R * kLanes)
    QC_UNROLL for (int r = 0; r < R; ++r) store(to + r * kLanes, N::read(rows[r] + i));
}

inline int64_t whole_vectors(int64_t size) { return (size + kLanes - 1) / kLanes; }

// dots() of kDotRows rows a and 4 rows b that were put together.
__attribute__((noinline)) inline void dots_together(const float* a, const float* b, int64_t vectors, float* out, int64_t stride,
                                                    bool add) {
  constexpr int R = kDotRows;
  vf sums[R][4];
  QC_UNROLL for (int r = 0; r < R; ++r)
    QC_UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = fill(0);
  for (; vectors > 0; --vectors, a += R * kLanes, b += 4 * kLanes) {
    vf left[R];
    __builtin_prefetch(a + 256);  // rows of the next tile, from the second cache
    QC_UNROLL for (int r = 0; r < R; ++r) left[r] = load(a + r * kLanes);
    QC_UNROLL for (int c = 0; c < 4; ++c) {
      vf right = load(b + c * kLanes);
      QC_UNROLL for (int r = 0; r < R; ++r) sums[r][c] = fma(left[r], right, sums[r][c]);
    }
  }
  put_sums(sums, out, stride, add);
}

// Products are summed in parts of at most kDepth inputs, all but the last of one size that follows from k alone. For many
// rows, kNear columns of a part are put together to stay in the first cache while the rows pass.
constexpr int64_t kDepth = 320, kColumns = 128;
constexpr int kNear = 8, kFewRows = 8;

inline int64_t depth_of(int64_t k) {
  const int64_t parts = k > kDepth ? (k + kDepth - 1) / kDepth : 1;
  return (k / parts + 16) / 16 * 16;  // never 0
}

template <int Dtype>
struct Dense {
  typedef Numbers<Dtype> N;
  typedef typename N::Type T;
  const float* x;  // parts one after another, each [m, size], or tiles of kDotRows rows put together
  const T *weight, *bias;
  T* out;
  int64_t weight_stride, out_stride, m, n, k, depth;

  // Sums [rows, kColumns] of rows [from, to) times `count` columns grow by inputs [at, at + size).
  void few(int64_t from, int64_t to, int64_t column, int64_t count, int64_t at, int64_t size, float* sums) const {
    for (int64_t c = 0; c < count; c += 4) {
      const T* b[4];
      for (int i = 0; i < 4; ++i) b[i] = weight + (column + (c + i < count ? c + i : count - 1)) * weight_stride + at;
      float* to_sums = sums + c;
      for (int64_t row = from; row < to; to_sums += kDotRows * kColumns, row += kDotRows) {
        const float* a[kDotRows];
        for (int r = 0; r < kDotRows; ++r) a[r] = x + at * m + (row + r < to ? row + r : to - 1) * size;
        if (to - row > 2) dots<Dtype, kDotRows>(a, b, size, to_sums, kColumns, at > 0);
        else if (to - row == 2) dots<Dtype, 2>({a[0], a[1]}, b, size, to_sums, kColumns, at > 0);
        else dots<Dtype, 1>({a[0]}, b, size, to_sums, kColumns, at > 0);
      }
    }
  }

  void many(int64_t from, int64_t to, int64_t column, int64_t count, int64_t at, int64_t size, float* near, float* sums) const {
    const int64_t vectors = whole_vectors(size), wide = vectors * kLanes, rows = (m + kDotRows - 1) / kDotRows * kDotRows;
    for (int64_t c = 0; c < count; c += kNear) {
      const int some = int(count - c < kNear ? count - c : kNear);
      for (int i = 0; i < some; i += 4) {
        const T* b[4];
        for (int j = 0; j < 4; ++j) b[j] = weight + (column + c + (i + j < some ? i + j : some - 1)) * weight_stride + at;
        put_together<Dtype, 4>(b, size, near + i * wide);
      }
      for (int64_t row = from; row < to; row += kDotRows)
        for (int i = 0; i < some; i += 4)
          dots_together(x + at * rows + row * wide, near + i * wide, vectors, sums + (row - from) * kColumns + c + i, kColumns,
                        at > 0);
    }
  }

  void write(int64_t column, int64_t count, int64_t from, int64_t to, const float* sums) const {
    for (int64_t row = from; row < to; ++row, sums += kColumns) {
      T* at = out + row * out_stride + column;
      int64_t c = 0;
      for (; c + kLanes <= count; c += kLanes)
        N::write(at + c, bias ? load(sums + c) + N::read(bias + column + c) : load(sums + c));
      for (; c < count; ++c) N::put_one(at + c, bias ? sums[c] + N::one(bias + column + c) : sums[c]);
    }
  }

  // Rows [from, to), the first a multiple of kDotRows, times columns [first, last), at most kColumns.
  void part(int64_t first, int64_t last, int64_t from, int64_t to) const {
    static thread_local std::vector<float> memory;
    memory.resize(size_t(kNear * (depth + kLanes) + kColumns * (to - from + kDotRows)));
    float *near = memory.data(), *sums = near + kNear * (depth + kLanes);
    for (int64_t at = 0; at == 0 || at < k; at += depth) {
      const int64_t size = k - at < depth ? k - at : depth;
      if (m < kFewRows) few(from, to, first, last - first, at, size, sums);
      else many(from, to, first, last - first, at, size, near, sums);
    }
    write(first, last - first, from, to, sums);
  }

  // Puts rows [row, row + kDotRows), as far as there are any, where `x` will be read.
  void bring(const T* from, int64_t stride, int64_t row, float* to) const {
    const int64_t rows = (m + kDotRows - 1) / kDotRows * kDotRows;
    for (int64_t at = 0; at < k; at += depth) {
      const int64_t size = k - at < depth ? k - at : depth;
      const T* all[kDotRows];
      for (int r = 0; r < kDotRows; ++r) all[r] = from + (row + r < m ? row + r : m - 1) * stride + at;
      if (m >= kFewRows) put_together<Dtype, kDotRows>(all, size, to + at * rows + row * (whole_vectors(size) * kLanes));
      else for (int r = 0; r < kDotRows && row + r < m; ++r) widen(all[r], size, to + at * m + (row + r) * size);
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
  static thread_local std::vector<float> memory;
  const int64_t tiles = (m + kDotRows - 1) / kDotRows;
  memory.resize(size_t(tiles * kDotRows * (k + kLanes)));
  const Dense<Dtype> job = {memory.data(), static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<T*>(out),
                            weight_stride, out_stride, m, n, k, depth_of(k)};
  auto bring = [&, to = memory.data()](int tile) { job.bring(x, x_stride, int64_t(tile) * kDotRows, to); };
  if (m < kFewRows) for (int tile = 0; tile < tiles; ++tile) bring(tile);
  else each(int(tiles), bring);
  int64_t tall = (1 << 17) / job.depth / kDotRows * kDotRows;  // rows of which a part fills some of a second cache
  const int64_t floors = (m + tall - 1) / tall;
  int64_t width = (n / (4 * threads()) + 16) / 16 * 16;
  if (width > kColumns) width = kColumns;
  auto work = [&](int item) {
    const int64_t from = item % floors * tall, to = from + tall, first = item / floors * width, last = first + width;
    job.part(first, last < n ? last : n, from, to < m ? to : m);
  };
  each(int((n + width - 1) / width * floors), work);
}

}  // namespace QC_ISA
}  // namespace quire
