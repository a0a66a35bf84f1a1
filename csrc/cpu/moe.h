// A mixture of experts: tokens gathered by expert, each expert's two products over its own few rows, and the weighted
// sum of what a token's experts gave, in the order of experts. Products are those of block.h: a row's result does not
// depend on the rows beside it.
#pragma once
#include <algorithm>
#include <vector>

#include "block.h"

namespace quire {
namespace QC_ISA {

// [gate | up] -> (up + 1) * gate * sigmoid(alpha * gate), gate clamped above, up on both sides.
template <int Dtype>
void clamped(const void* x, void* out, int64_t rows, int64_t width, float alpha, float limit) {
  typedef Numbers<Dtype> N;
  typedef typename N::Type T;
  auto work = [=](int64_t row) {
    const T *gate = static_cast<const T*>(x) + row * 2 * width, *up = gate + width;
    T* to = static_cast<T*>(out) + row * width;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int many = int(std::min<int64_t>(kLanes, width - i));
      float g[kLanes] = {}, u[kLanes] = {}, shrunk[kLanes];
      for (int j = 0; j < many; ++j) {
        g[j] = fminf(N::one(gate + i + j), limit);
        u[j] = fmaxf(fminf(N::one(up + i + j), limit), -limit);
      }
      const vf one = fill(1), v = load(g);
      store(shrunk, v / (one + exp_of(v * fill(-alpha))) * (load(u) + one));
      for (int j = 0; j < many; ++j) N::put_one(to + i + j, shrunk[j]);
    }
  };
  each_row(rows, width, work);
}

// Pairs of token and expert, sorted by expert; place[pair] is where a pair went.
struct Sorted {
  std::vector<int64_t> starts, order, place;

  void sort(const int64_t* index, int64_t pairs, int64_t experts) {
    starts.assign(size_t(experts + 1), 0), order.resize(size_t(pairs)), place.resize(size_t(pairs));
    for (int64_t i = 0; i < pairs; ++i) ++starts[size_t(index[i] + 1)];
    for (size_t e = 0; e < size_t(experts); ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts);
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t at = next[size_t(index[i])]++;
      order[size_t(at)] = i, place[size_t(i)] = at;
    }
  }
};

template <int Dtype>
void sum_experts(const qc_moe& w, const typename Numbers<Dtype>::Type* found, const int64_t* place, int64_t width) {
  typedef Numbers<Dtype> N;
  typedef typename N::Type T;
  auto work = [=](int64_t token) {
    static thread_local std::vector<std::pair<int64_t, float>> own;
    static thread_local std::vector<float> total;
    own.clear(), total.assign(size_t(width), 0.0f);
    for (int64_t i = token * w.top_k; i < (token + 1) * w.top_k; ++i) own.emplace_back(place[i], w.weights[i]);
    std::sort(own.begin(), own.end());
    for (const auto& [at, weight] : own)
      for (int64_t i = 0; i < width; ++i)
        total[size_t(i)] = N::rounded(total[size_t(i)] + N::rounded(N::one(found + at * width + i) * weight));
    T* to = static_cast<T*>(w.out) + token * width;
    const T* stream = static_cast<const T*>(w.stream);
    for (int64_t i = 0; i < width; ++i)
      N::put_one(to + i, stream ? N::one(stream + token * width + i) + total[size_t(i)] : total[size_t(i)]);
  };
  each_row(w.tokens, width * w.top_k, work);
}

template <int Dtype>
void run_moe(const qc_moe& w) {
  typedef typename Numbers<Dtype>::Type T;
  static thread_local std::vector<T> memory;
  static thread_local Sorted sorted;
  const int64_t pairs = w.tokens * w.top_k, width = w.up[0].width, ups = w.up[0].rows, ffn = w.down[0].width;
  const int64_t wide = w.down[0].rows;
  sorted.sort(w.index, pairs, w.experts);
  int64_t most = 0;
  for (size_t e = 0; e < size_t(w.experts); ++e) most = std::max(most, sorted.starts[e + 1] - sorted.starts[e]);
  memory.resize(size_t(pairs * wide + most * (width + ups + ffn)));
  T *found = memory.data(), *rows = found + pairs * wide, *up = rows + most * width, *middle = up + most * ups;
  for (size_t e = 0; e < size_t(w.experts); ++e) {
    const int64_t start = sorted.starts[e], count = sorted.starts[e + 1] - start;
    if (!count) continue;
    for (int64_t i = 0; i < count; ++i)
      memcpy(rows + i * width, static_cast<const T*>(w.x) + sorted.order[size_t(start + i)] / w.top_k * width, size_t(width) * sizeof(T));
    multiply<Dtype>(w.up[e], rows, up, count);
    if (w.act < 0) clamped<Dtype>(up, middle, count, ffn, w.alpha, w.limit);
    else gated_by<Dtype>(w.act, up, ups, middle, count, ffn);
    multiply<Dtype>(w.down[e], middle, found + start * wide, count);
  }
  sum_experts<Dtype>(w, found, sorted.place.data(), wide);
}

}  // namespace QC_ISA
}  // namespace quire
