// Attention over the paged cache, for any mix of prompt chunks and decodes: heads normed, turned and written to the
// cache, then one pass over the keys with a running maximum.
//
// A piece of work is a few queries of one row and the query heads of one kv head. Keys are read 32 at a time, cut at
// multiples of 32 positions, and a context is summed up in spans of kSpan keys that are joined in order, so that a
// query's result is the same in whichever chunk or batch it is computed, and by however many threads.
#pragma once
#include <math.h>

#include <algorithm>
#include <vector>

#include "dense.h"
#include "rows.h"

namespace quire {
namespace QC_ISA {

constexpr int kKeys = 32, kMaxSize = 256, kMaxRows = 16, kSpan = 1024;

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
    vf most = fill(0);
    for (int d = 0; d < size; d += kLanes) most = larger(most, larger(load(head + d), -load(head + d)));
    const float top = largest(most), scale = top / 127, inverse = top > 0 ? 127 / top : 0;
    for (int d = 0; d < size; ++d) to[d] = int8_t(int(rintf(head[d] * inverse)));
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

struct Widened {
  float keys[kKeys][kMaxSize], values[kKeys][kMaxSize];
};

// Where 32 keys from `base` on lie, and their values, for the kv head of a piece.
template <int Cache>
void find_keys(const qc_attention& w, const Piece& piece, int64_t base, int from, int to,
               const typename Numbers<Stored<Cache>::kRead>::Type* (&keys)[kKeys],
               const typename Numbers<Stored<Cache>::kRead>::Type* (&values)[kKeys]) {
  typedef typename Stored<Cache>::Type C;
  const int kv_head = piece.head / (w.heads / w.kv_heads), size = w.size;
  const int32_t* table = w.tables + piece.row * w.table_stride;
  int64_t block = (base + from) / w.block_size, offset = (base + from) % w.block_size;
  for (int k = from; k < to; ++k) {
    const C* row = static_cast<const C*>(w.cache) + (int64_t(table[block]) * w.block_size + offset) * w.cache_stride;
    const C *key = row + int64_t(kv_head) * size, *value = row + int64_t(w.kv_heads + kv_head) * size;
    if constexpr (Cache == QC_I8) {
      static thread_local Widened wide;
      const C* scales = row + int64_t(2) * w.kv_heads * size;
      read_bytes(key, scales + 4 * kv_head, size, wide.keys[k]);
      read_bytes(value, scales + 4 * (w.kv_heads + kv_head), size, wide.values[k]);
      keys[k] = wide.keys[k], values[k] = wide.values[k];
    } else {
      keys[k] = key, values[k] = value;
    }
    if (++offset == w.block_size) offset = 0, ++block;
  }
}

// Keys [first, last) for all queries of a piece, into an empty state.
template <int Dtype, int Cache>
void attend_span(const qc_attention& w, const Piece& piece, int64_t first, int64_t last, State& state) {
  typedef typename Numbers<Dtype>::Type T;
  constexpr int Read = Stored<Cache>::kRead;
  const int64_t token = w.query_starts[piece.row] + piece.first;
  const int rows = piece.count * piece.heads, size = w.size;
  for (int r = 0; r < rows; ++r) {
    const T* q = static_cast<const T*>(w.qkv) + (token + r / piece.heads) * w.qkv_stride;
    copy_numbers<Dtype, QC_F32>(q + int64_t(piece.head + r % piece.heads) * size, state.q[r], size);
    for (int d = 0; d < size; ++d) state.out[r][d] = 0, state.q[r][d] *= w.scale;
    state.most[r] = -INFINITY, state.total[r] = 0;
  }
  for (int64_t base = first / kKeys * kKeys; base < last; base += kKeys) {
    const int from = first > base ? int(first - base) : 0, to = last - base < kKeys ? int(last - base) : kKeys;
    const typename Numbers<Read>::Type *keys[kKeys], *values[kKeys];
    find_keys<Cache>(w, piece, base, from, to, keys, values);
    score<Read>(w, piece, base, from, to, keys, state);
    for (int r = 0; r < rows; ++r) soften(size, state, r);
    int r = 0;
    for (; r + 4 <= rows; r += 4) weigh<Read, 4>(values, from, to, size, r, state);
    if (r + 3 == rows) weigh<Read, 3>(values, from, to, size, r, state), r += 3;
    for (; r < rows; ++r) weigh<Read, 1>(values, from, to, size, r, state);
  }
}

// Adds one more span to what was summed up before it.
inline void join(float& most, float& total, float* out, float more_most, float more_total, const float* more, int size) {
  const float top = fmaxf(most, more_most);
  if (top == -INFINITY) return;
  const float old = expf(most - top), fresh = expf(more_most - top);
  total = total * old + more_total * fresh, most = top;
  for (int d = 0; d < size; ++d) out[d] = out[d] * old + more[d] * fresh;
}

template <int Dtype>
void write_piece(const qc_attention& w, const Piece& piece, const State& state) {
  const int64_t token = w.query_starts[piece.row] + piece.first;
  for (int r = 0; r < piece.count * piece.heads; ++r) {
    const int head = piece.head + r % piece.heads;
    float total = state.total[r], shrink = 1;
    if (w.sinks) {
      const float top = fmaxf(state.most[r], w.sinks[head]);
      shrink = expf(state.most[r] - top);
      total = total * shrink + expf(w.sinks[head] - top);
    }
    const float by = total > 0 ? shrink / total : 0;
    typename Numbers<Dtype>::Type* out = static_cast<typename Numbers<Dtype>::Type*>(w.out) +
                                         ((token + r / piece.heads) * w.heads + head) * int64_t(w.size);
    for (int d = 0; d < w.size; ++d) Numbers<Dtype>::put_one(out + d, state.out[r][d] * by);
  }
}

// Keys that some query of the piece sees.
struct Reach {
  int64_t first, last;
  Reach(const qc_attention& w, const Piece& piece) {
    const int64_t start = w.contexts[piece.row] - (w.query_starts[piece.row + 1] - w.query_starts[piece.row]) + piece.first;
    first = first_key(w, start), last = start + piece.count;
  }
  int64_t spans() const { return (last + kSpan - 1) / kSpan - first / kSpan; }
  int64_t begin(int64_t span) const { return span ? (first / kSpan + span) * kSpan : first; }
  int64_t end(int64_t span) const { return std::min(last, (first / kSpan + span + 1) * kSpan); }
};

template <int Dtype, int Cache>
void attend_piece(const qc_attention& w, const Piece& piece, State& state) {
  const Reach reach(w, piece);
  attend_span<Dtype, Cache>(w, piece, reach.begin(0), reach.end(0), state);
  if (reach.spans() > 1) {
    static thread_local State more;
    for (int64_t span = 1; span < reach.spans(); ++span) {
      attend_span<Dtype, Cache>(w, piece, reach.begin(span), reach.end(span), more);
      for (int r = 0; r < piece.count * piece.heads; ++r)
        join(state.most[r], state.total[r], state.out[r], more.most[r], more.total[r], more.out[r], w.size);
    }
  }
  write_piece<Dtype>(w, piece, state);
}

// The same with every span a piece of work of its own: for a few rows with long contexts.
template <int Dtype, int Cache>
void attend_by_spans(const qc_attention& w, const std::vector<Piece>& pieces) {
  struct Part {
    int32_t piece;
    int64_t span;
  };
  static thread_local std::vector<Part> parts;
  static thread_local std::vector<float> memory;  // of every part and row: most, total, out
  parts.clear();
  for (size_t i = 0; i < pieces.size(); ++i)
    for (int64_t span = 0; span < Reach(w, pieces[i]).spans(); ++span) parts.push_back({int32_t(i), span});
  const int64_t entry = w.size + 2, room = entry * kMaxRows;
  memory.resize(parts.size() * size_t(room));
  const Part* all = parts.data();
  float* kept = memory.data();
  auto work = [&, all, kept](int item) {
    static thread_local State state;
    const Piece& piece = pieces[size_t(all[item].piece)];
    const Reach reach(w, piece);
    attend_span<Dtype, Cache>(w, piece, reach.begin(all[item].span), reach.end(all[item].span), state);
    for (int r = 0; r < piece.count * piece.heads; ++r) {
      float* to = kept + item * room + r * entry;
      to[0] = state.most[r], to[1] = state.total[r];
      memcpy(to + 2, state.out[r], size_t(w.size) * 4);
    }
  };
  each(int(parts.size()), work);
  static thread_local State state;
  for (size_t i = 0; i < parts.size();) {
    const Piece& piece = pieces[size_t(parts[i].piece)];
    for (size_t begin = i; i < parts.size() && parts[i].piece == parts[begin].piece; ++i)
      for (int r = 0; r < piece.count * piece.heads; ++r) {
        const float* from = kept + int64_t(i) * room + r * entry;
        if (i > begin) {
          join(state.most[r], state.total[r], state.out[r], from[0], from[1], from + 2, w.size);
        } else {
          state.most[r] = from[0], state.total[r] = from[1];
          memcpy(state.out[r], from + 2, size_t(w.size) * 4);
        }
      }
    write_piece<Dtype>(w, piece, state);
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
  bool is_long = false;
  for (int64_t row = 0; row < w.rows; ++row) is_long |= w.contexts[row] > 2 * kSpan;
  if (is_long && threads() > 1 && pieces.size() < size_t(8 * threads())) return attend_by_spans<Dtype, Cache>(w, pieces);
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
    case QC_I8: return attend<Dtype, QC_I8>(w);
  }
}

}  // namespace QC_ISA
}  // namespace quire
