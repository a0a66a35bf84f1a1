// What adapters of low rank add to the results of a product: y += scale * (x A') B', each row with the adapter of its slot.
//
// A lies in panels of 16 ranks, [panels, width, 16], and B in panels of 32 results, [panels, rank, 32], both filled up with
// zeros: a step with few rows reads each number once, one after another. A rank is four sums, of every fourth input; a result
// grows rank by rank: neither depends on how many rows are computed together. Numbers are rounded where two products, a
// factor and an addition one after another would round them; A and B may be of another dtype than those. Rows of one slot
// that follow each other are computed together.
#pragma once
#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace quire {
namespace QC_ISA {

constexpr int64_t kLowShare = 1 << 15;  // products below which waking other threads costs more than the work
constexpr int kRanks = 16, kResults = 32;  // of a panel

template <int Dtype>
struct LowRankRun {
  typedef Numbers<Dtype> N;
  typedef typename N::Type T;
  const qc_low_rank& low;
  const T* x;
  T* y;
  int64_t x_stride, y_stride, rows, width;

  void add() const {
    static thread_local std::vector<float> memory;
    int64_t ranks = 0, results = 0;
    for (int64_t p = 0; p < low.count; ++p) ranks += low.pieces[p].rank, results += low.pieces[p].stop - low.pieces[p].start;
    memory.resize(size_t(rows * ranks));
    float* narrow = memory.data();  // [rows, ranks of all pieces], rounded
    auto down = [&](const qc_piece& own, int64_t at, int64_t first, int64_t last) {
      if (own.dtype == QC_BF16) project<QC_BF16>(own, narrow + at, ranks, first, last);
      else if (own.dtype == QC_F16) project<QC_F16>(own, narrow + at, ranks, first, last);
      else project<QC_F32>(own, narrow + at, ranks, first, last);
    };
    share(true, kRanks, down);
    auto up = [&](const qc_piece& own, int64_t at, int64_t first, int64_t last) {
      if (own.dtype == QC_BF16) expand<QC_BF16>(own, narrow + at, ranks, first, last);
      else if (own.dtype == QC_F16) expand<QC_F16>(own, narrow + at, ranks, first, last);
      else expand<QC_F32>(own, narrow + at, ranks, first, last);
    };
    share(false, 8 * kResults, up);
  }

 private:
  struct Item {
    int64_t piece, at, first, last;
  };

  // Work on the ranks of all pieces, or on their results, `size` at a time, by several threads if there is enough of it.
  template <class F>
  void share(bool of_ranks, int64_t size, F& work) const {
    static thread_local std::vector<Item> memory;
    memory.clear();
    int64_t products = 0, at = 0;
    for (int64_t p = 0; p < low.count; ++p) {
      const qc_piece& own = low.pieces[p];
      const int64_t all = of_ranks ? own.rank : own.stop - own.start;
      for (int64_t first = 0; first < all; first += size) memory.push_back({p, at, first, std::min(first + size, all)});
      products += rows * all * (of_ranks ? width : own.rank), at += own.rank;
    }
    const Item* items = memory.data();
    const int count = int(memory.size());
    auto one = [&](int item) { work(low.pieces[items[item].piece], items[item].at, items[item].first, items[item].last); };
    if (products < kLowShare) for (int i = 0; i < count; ++i) one(i);
    else each(count, one);
  }

  // Ranks [first, last), which begin a panel, of all rows: x A'.
  template <int Stored>
  void project(const qc_piece& own, float* narrow, int64_t stride, int64_t first, int64_t last) const {
    const typename Numbers<Stored>::Type* a = static_cast<const typename Numbers<Stored>::Type*>(own.a) + first * width;
    for (int64_t row = 0; row < rows; ++row) {
      alignas(64) float found[kRanks];
      dots<Stored>(a, x + row * x_stride, found);
      for (int64_t r = first; r < last; ++r) narrow[row * stride + r] = N::rounded(found[r - first]);
    }
  }

  template <int Stored>
  void dots(const typename Numbers<Stored>::Type* a, const T* from, float* found) const {
    typedef Numbers<Stored> S;
    constexpr int kVectors = kRanks / kLanes;
    vf sums[4][kVectors];
    QC_UNROLL for (int part = 0; part < 4; ++part)
      QC_UNROLL for (int v = 0; v < kVectors; ++v) sums[part][v] = fill(0);
    int64_t i = 0;
    for (; i + 4 <= width; i += 4, a += 4 * kRanks)
      QC_UNROLL for (int part = 0; part < 4; ++part) {
        const vf by = fill(N::one(from + i + part));
        QC_UNROLL for (int v = 0; v < kVectors; ++v)
          sums[part][v] = fma(by, S::read(a + part * kRanks + v * kLanes), sums[part][v]);
      }
    for (; i < width; ++i, a += kRanks) {
      const vf by = fill(N::one(from + i));
      QC_UNROLL for (int v = 0; v < kVectors; ++v) sums[0][v] = fma(by, S::read(a + v * kLanes), sums[0][v]);
    }
    QC_UNROLL for (int v = 0; v < kVectors; ++v)
      store(found + v * kLanes, (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]));
  }

  // Results [first, last), which begin a panel, of all rows grow.
  template <int Stored>
  void expand(const qc_piece& own, const float* narrow, int64_t stride, int64_t first, int64_t last) const {
    const typename Numbers<Stored>::Type* b = static_cast<const typename Numbers<Stored>::Type*>(own.b) + first * own.rank;
    for (; first < last; first += kResults, b += own.rank * kResults) {
      const int64_t count = std::min<int64_t>(last - first, kResults);
      int64_t row = 0;
      for (; row + 2 <= rows; row += 2) grow<Stored, 2>(own, b, narrow + row * stride, stride, row, first, count);
      for (; row < rows; ++row) grow<Stored, 1>(own, b, narrow + row * stride, stride, row, first, count);
    }
  }

  // `count` results of one panel, of R rows.
  template <int Stored, int R>
  void grow(const qc_piece& own, const typename Numbers<Stored>::Type* b, const float* narrow, int64_t stride, int64_t row,
            int64_t first, int64_t count) const {
    typedef Numbers<Stored> S;
    constexpr int kVectors = kResults / kLanes;
    vf sums[R][kVectors];
    QC_UNROLL for (int r = 0; r < R; ++r)
      QC_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = fill(0);
    for (int64_t rank = 0; rank < own.rank; ++rank, b += kResults) {
      vf by[R];
      QC_UNROLL for (int r = 0; r < R; ++r) by[r] = fill(narrow[r * stride + rank]);
      QC_UNROLL for (int v = 0; v < kVectors; ++v) {
        const vf other = S::read(b + v * kLanes);
        QC_UNROLL for (int r = 0; r < R; ++r) sums[r][v] = fma(by[r], other, sums[r][v]);
      }
    }
    const vf scale = fill(own.scale);
    for (int r = 0; r < R; ++r) {
      T* to = y + (row + r) * y_stride + own.start + first;
      int64_t left = count;
      for (int v = 0; v < kVectors && left > 0; ++v, to += kLanes, left -= kLanes) {
        if (left >= kLanes) {
          N::write(to, grown(N::read(to), sums[r][v], scale));
          continue;
        }
        T some[kLanes];
        N::write(some, grown(N::some(to, left), sums[r][v], scale));
        memcpy(to, some, size_t(left) * sizeof(T));
      }
    }
  }

  // Numbers of 32 bits are fused in the source: a compiler that may choose does so in some copies of this template and not in
  // others, and a row would have other bits alone than beside another.
  static vf grown(vf before, vf sum, vf scale) {
    if constexpr (Dtype == QC_F32) return fma(sum, scale, before);
    else return before + N::all_rounded(N::all_rounded(sum) * scale);
  }
};

// y [m, y_stride] grows; slots [m], 0: nothing is added to this row; low [slots].
template <int Dtype>
void add_low_rank(const qc_low_rank* low, const int32_t* slots, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                  int64_t m, int64_t width) {
  typedef typename Numbers<Dtype>::Type T;
  struct Run {
    int64_t first, rows;
  };
  static thread_local std::vector<Run> memory;
  memory.clear();
  int64_t longest = 0;
  for (int64_t row = 0; row < m;) {
    int64_t end = row + 1;
    while (end < m && slots[end] == slots[row]) ++end;
    if (slots[row] && low[slots[row] - 1].count) memory.push_back({row, end - row}), longest = std::max(longest, end - row);
    row = end;
  }
  const Run* runs = memory.data();
  const int count = int(memory.size());
  auto one = [&](int item) {
    const Run& run = runs[item];
    LowRankRun<Dtype>{low[slots[run.first] - 1], static_cast<const T*>(x) + run.first * x_stride,
                      static_cast<T*>(y) + run.first * y_stride, x_stride, y_stride, run.rows, width}.add();
  };
  if (count > 1 && longest <= 4) each(count, one);  // a job within a job is not shared
  else for (int i = 0; i < count; ++i) one(i);
}

}  // namespace QC_ISA
}  // namespace quire
