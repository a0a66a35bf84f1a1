// Attention over the paged cache, for any mix of prompt chunks and decodes: heads normed, turned and written to the
// cache, then one pass over the keys with a running maximum.
//
// A piece of work is a few queries of one row and the query heads of one kv head. Keys are read 32 at a time, cut at
// multiples of 32 positions, so that a query's result is the same in whichever chunk or batch it is computed.
#pragma once
#include <math.h>

#include <vector>

#include "dense.h"
#include "rows.h"

namespace quire {
namespace QC_ISA {

constexpr int kKeys = 32, kMaxSize = 256, kMaxRows = 16;

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
  typename Numbers<Cache>::Type* to = static_cast<typename Numbers<Cache>::Type*>(w.cache) + w.slots[token] * w.cache_stride;
  copy_numbers<Dtype, Cache>(row + int64_t(w.heads) * w.size, to, int64_t(2) * w.kv_heads * w.size);
}

struct Piece {
  int32_t row, first, count, head, heads;  // queries [first, first + count) of the row; query heads from `head` on
};

// Queries of one piece, side by side: entry = query * heads + head.
struct State {
  float q[kMaxRows][kMaxSize], out[kMaxRows][kMaxSize];
  float scores[kMaxRows][kKeys];
  float most[kMaxRows], total[kMaxRows];
};

template <int Cache, int R>
inline void some_scores(const typename Numbers<Cache>::Type* const (&keys)[4], int size, int r, int k, int many, State& state) {
  const float* a[R];
  float found[R][4];
  for (int i = 0; i < R; ++i) a[i] = state.q[r + i];
  dots<Cache, R, 4>(a, keys, size, found);
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < many; ++c) state.scores[r + i][k + c] = found[i][c];
}

template <int Cache>
void score(const qc_attention& w, const Piece& piece, int64_t base, int from, int to,
           const typename Numbers<Cache>::Type* const* keys, State& state) {
  typedef typename Numbers<Cache>::Type C;
  const int rows = piece.count * piece.heads;
  const int64_t start = w.contexts[piece.row] - (w.query_starts[piece.row + 1] - w.query_starts[piece.row]) + piece.first;
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < kKeys; ++k) state.scores[r][k] = -INFINITY;
  for (int k = from; k < to; k += 4) {
    const C* b[4];
    for (int c = 0; c < 4; ++c) b[c] = keys[k + c < to ? k + c : to - 1];
    const int many = to - k < 4 ? to - k : 4;
    int r = 0;
    for (; r + kDotRows <= rows; r += kDotRows) some_scores<Cache, kDotRows>(b, w.size, r, k, many, state);
    if (r + 3 == rows) some_scores<Cache, 3>(b, w.size, r, k, many, state), r += 3;
    if (r + 2 == rows) some_scores<Cache, 2>(b, w.size, r, k, many, state), r += 2;
    for (; r < rows; ++r) some_scores<Cache, 1>(b, w.size, r, k, many, state);
  }
  const bool plain = !w.softcap && !w.alibi && !w.window && !w.chunk;
  if (plain && base + to - 1 <= start) return;  // every query sees every key
  for (int r = 0; r < rows; ++r) {
    const int64_t at = start + r / piece.heads;
    const int head = piece.head + r % piece.heads;
    for (int k = from; k < to; ++k) {
      const int64_t gap = at - (base + k);
      float v = state.scores[r][k];
      if (w.softcap > 0) v = tanhf(v / w.softcap) * w.softcap;
      if (w.alibi) v -= w.alibi[head] * float(gap);
      const bool hidden = gap < 0 || (w.window && gap >= w.window) || (w.chunk && at / w.chunk != (base + k) / w.chunk);
      state.scores[r][k] = hidden ? -INFINITY : v;
    }
  }
}

// Scores become weights; what was summed so far shrinks where a larger score came.
inline bool soften(int size, State& state, int r) {
  vf most = fill(-INFINITY);
  for (int k = 0; k < kKeys; k += kLanes) most = larger(most, load(state.scores[r] + k));
  const float top = fmaxf(largest(most), state.most[r]);
  if (top == -INFINITY) {
    for (int k = 0; k < kKeys; ++k) state.scores[r][k] = 0;
    return false;
  }
  if (top > state.most[r]) {
    float shrink[kLanes];
    store(shrink, exp_of(fill(state.most[r] - top)));
    state.total[r] *= shrink[0];
    for (int d = 0; d < size; ++d) state.out[r][d] *= shrink[0];
    state.most[r] = top;
  }
  vf total = fill(0);
  for (int k = 0; k < kKeys; k += kLanes) {
    vf weight = exp_of(load(state.scores[r] + k) - fill(top));
    store(state.scores[r] + k, weight);
    total = total + weight;
  }
  state.total[r] += sum(total);
  return true;
}

template <int Cache, int R, int V>
inline void add_values(const typename Numbers<Cache>::Type* const* values, int from, int to, int at, int r, State& state) {
  vf out[R][V];
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < V; ++v) out[i][v] = load(state.out[r + i] + at + v * kLanes);
  for (int k = from; k < to; ++k) {
    vf value[V];
    for (int v = 0; v < V; ++v) value[v] = Numbers<Cache>::read(values[k] + at + v * kLanes);
    for (int i = 0; i < R; ++i) {
      vf weight = fill(state.scores[r + i][k]);
      for (int v = 0; v < V; ++v) out[i][v] = fma(weight, value[v], out[i][v]);
    }
  }
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < V; ++v) store(state.out[r + i] + at + v * kLanes, out[i][v]);
}

template <int Cache, int R>
void weigh(const typename Numbers<Cache>::Type* const* values, int from, int to, int size, int r, State& state) {
  int at = 0;
  for (; at + 4 * kLanes <= size; at += 4 * kLanes) add_values<Cache, R, 4>(values, from, to, at, r, state);
  for (; at + kLanes <= size; at += kLanes) add_values<Cache, R, 1>(values, from, to, at, r, state);
  for (; at < size; ++at)
    for (int i = 0; i < R; ++i)
      for (int k = from; k < to; ++k)
        state.out[r + i][at] = fmaf(state.scores[r + i][k], Numbers<Cache>::one(values[k] + at), state.out[r + i][at]);
}

// First key that some query of the piece sees.
inline int64_t first_key(const qc_attention& w, int64_t query) {
  int64_t first = 0;
  if (w.window && query - w.window + 1 > first) first = query - w.window + 1;
  if (w.chunk && query / w.chunk * w.chunk > first) first = query / w.chunk * w.chunk;
  return first;
}

template <int Dtype, int Cache>
void attend_piece(const qc_attention& w, const Piece& piece, State& state) {
  typedef typename Numbers<Dtype>::Type T;
  typedef typename Numbers<Cache>::Type C;
  const int64_t token = w.query_starts[piece.row] + piece.first;
  const int64_t start = w.contexts[piece.row] - (w.query_starts[piece.row + 1] - token);
  const int rows = piece.count * piece.heads, size = w.size, per = w.heads / w.kv_heads;
  for (int r = 0; r < rows; ++r) {
    const T* q = static_cast<const T*>(w.qkv) + (token + r / piece.heads) * w.qkv_stride;
    copy_numbers<Dtype, QC_F32>(q + int64_t(piece.head + r % piece.heads) * size, state.q[r], size);
    for (int d = 0; d < size; ++d) state.out[r][d] = 0, state.q[r][d] *= w.scale;
    state.most[r] = -INFINITY, state.total[r] = 0;
  }
  const int64_t first = first_key(w, start), last = start + piece.count;
  const int32_t* table = w.tables + piece.row * w.table_stride;
  const C* cache = static_cast<const C*>(w.cache) + int64_t(piece.head / per) * size;
  for (int64_t base = first / kKeys * kKeys; base < last; base += kKeys) {
    const int from = first > base ? int(first - base) : 0, to = last - base < kKeys ? int(last - base) : kKeys;
    const C *keys[kKeys], *values[kKeys];
    for (int k = from; k < to; ++k) {
      const int64_t at = base + k;
      keys[k] = cache + (int64_t(table[at / w.block_size]) * w.block_size + at % w.block_size) * w.cache_stride;
      values[k] = keys[k] + int64_t(w.kv_heads) * size;
    }
    score<Cache>(w, piece, base, from, to, keys, state);
    for (int r = 0; r < rows; ++r) soften(size, state, r);
    int r = 0;
    for (; r + 4 <= rows; r += 4) weigh<Cache, 4>(values, from, to, size, r, state);
    if (r + 3 == rows) weigh<Cache, 3>(values, from, to, size, r, state), r += 3;
    for (; r < rows; ++r) weigh<Cache, 1>(values, from, to, size, r, state);
  }
  for (int r = 0; r < rows; ++r) {
    const int head = piece.head + r % piece.heads;
    float total = state.total[r], shrink = 1;
    if (w.sinks) {
      const float top = fmaxf(state.most[r], w.sinks[head]);
      shrink = expf(state.most[r] - top);
      total = total * shrink + expf(w.sinks[head] - top);
    }
    const float by = total > 0 ? shrink / total : 0;
    T* out = static_cast<T*>(w.out) + ((token + r / piece.heads) * w.heads + head) * int64_t(size);
    for (int d = 0; d < size; ++d) Numbers<Dtype>::put_one(out + d, state.out[r][d] * by);
  }
}

inline void cut(const qc_attention& w, std::vector<Piece>& pieces) {
  const int per = w.heads / w.kv_heads;
  int queries = per >= kMaxRows ? 1 : kMaxRows / per;
  for (int fewer = queries; fewer > queries / 2; --fewer)
    if (fewer * per % kDotRows == 0) {  // no row is left over
      queries = fewer;
      break;
    }
  pieces.clear();
  for (int32_t row = 0; row < w.rows; ++row) {
    const int32_t count = w.query_starts[row + 1] - w.query_starts[row];
    for (int32_t first = count > 0 ? (count - 1) / queries * queries : -1; first >= 0; first -= queries)  // longest first
      for (int head = 0; head < w.heads; head += per)
        for (int part = 0; part < per; part += kMaxRows)
          pieces.push_back({row, first, first + queries < count ? queries : count - first, head + part,
                            part + kMaxRows < per ? kMaxRows : per - part});
  }
}

template <int Dtype, int Cache>
void attend(const qc_attention& w) {
  auto prepare = [&](int64_t token) { prepare_token<Dtype, Cache>(w, token); };
  each_row(w.tokens, int64_t(w.heads + 2 * w.kv_heads) * w.size, prepare);
  static thread_local std::vector<Piece> pieces;
  cut(w, pieces);
  const Piece* all = pieces.data();
  auto work = [&, all](int item) {
    static thread_local State state;
    attend_piece<Dtype, Cache>(w, all[item], state);
  };
  each(int(pieces.size()), work);
}

template <int Dtype>
void attend_over(const qc_attention& w) {
  switch (w.cache_dtype) {
    case QC_F32: return attend<Dtype, QC_F32>(w);
    case QC_BF16: return attend<Dtype, QC_BF16>(w);
    case QC_F16: return attend<Dtype, QC_F16>(w);
  }
}

}  // namespace QC_ISA
}  // namespace quire
