// Attention over the paged cache, for any mix of prompt chunks and decodes: what is new is written to the cache (see
// prepare.h), then one pass over the keys with a running maximum.
//
// A piece is some queries of one row and the query heads of one kv head (of several, where tiles take a few queries: see
// attention_tiles.h); work is shared by pieces, or by runs of short ones. Keys are read kKeys at a time, cut at
// multiples of kKeys positions, and a context is summed up in spans of kSpan keys that are joined in order, so that a
// query's result is the same in whichever chunk or batch it is computed, and by however many threads.
#pragma once
#include <math.h>

#include <algorithm>
#include <vector>

#include "dense.h"
#include "keys.h"
#include "prepare.h"

namespace quire {
namespace QC_ISA {

constexpr int kKeys = 64, kMaxRows = 96, kSpan = 1024;
constexpr int kFewQueries = 16;  // columns of a tile: so many queries it takes
constexpr int kRun = 4 * kLanes;  // scores at a time
constexpr float kLog2e = 1.44269504f;  // scores are powers of two, not of e

struct Piece {
  int32_t row, first, count, head, heads;  // queries [first, first + count) of the row; query heads from `head` on
  int rows() const { return count * heads; }
};

// Whether tiles do the work for a cache, of any number of queries.
template <int Cache>
bool by_tiles(const qc_attention& w) {
  return QC_TILES && Cache == QC_BF16 && w.size % 32 == 0;
}

// Queries of one piece, side by side: row = query * heads + head. With many of them, those of a tile of products lie
// together (see dense.h), and rows are filled up to whole tiles.
struct State {
  float most[kMaxRows], total[kMaxRows];
  float *q, *out, *scores;  // [rows, width] twice, [rows, kKeys]
  float *keys, *values;  // [kKeys, width] each: widened
  int64_t width, start;  // start: position of the first query
  int rows, heads;
  bool many;
  const Piece* next = nullptr;  // what will be read after this, from a key on, as far as that is known
  int64_t next_key = 0;

  // How many keys of a block from `base` on come no later than the query of a row, up to `most`.
  int seen(int64_t base, int row, int most) const {
    return int(std::clamp<int64_t>(start + row / heads + 1 - base, 0, most));
  }

  // whole: rows of a tile, where there are many.
  void resize(const qc_attention& w, const Piece& piece, int whole = kTileOfRows) {
    start = w.contexts[piece.row] - (w.query_starts[piece.row + 1] - w.query_starts[piece.row]) + piece.first;
    heads = piece.heads;
    many = piece.rows() >= kFewRows;
    rows = many ? (piece.rows() + whole - 1) / whole * whole : piece.rows();
    width = whole_vectors(w.size) * kLanes;
    const size_t room = size_t(rows * (2 * width + kKeys) + 2 * kKeys * width);
    if (memory_.size() < room) memory_.resize(room);
    q = memory_.data(), out = q + rows * width, keys = out + rows * width, values = keys + kKeys * width;
    scores = values + kKeys * width;
  }

 private:
  std::vector<float> memory_;
};

template <int Dtype>
void bring_queries(const qc_attention& w, const Piece& piece, State& state) {
  typedef typename Numbers<Dtype>::Type T;
  const T* first = static_cast<const T*>(w.qkv) + (w.query_starts[piece.row] + piece.first) * w.qkv_stride;
  const float scale = w.softcap > 0 ? w.scale : w.scale * kLog2e;
  float scaled[kDotRows][kMaxSize];
  for (int row = 0; row < state.rows; row += kDotRows) {
    const float* some[kDotRows];
    for (int i = 0; i < kDotRows; ++i) {
      const int r = std::min(row + i, piece.rows() - 1);
      const T* q = first + r / piece.heads * w.qkv_stride + int64_t(piece.head + r % piece.heads) * w.size;
      float* to = state.many || row + i >= state.rows ? scaled[i] : state.q + (row + i) * state.width;
      copy_numbers<Dtype, QC_F32>(q, to, w.size);
      for (int d = 0; d < w.size; ++d) to[d] *= scale;
      some[i] = to;
    }
    if (state.many) put_together<QC_F32, kDotRows>(some, w.size, state.q + row * state.width);
  }
  std::fill(state.out, state.out + state.rows * state.width, 0.0f);
  std::fill(state.most, state.most + state.rows, -INFINITY);
  std::fill(state.total, state.total + state.rows, 0.0f);
}

// Where keys [from, to) of a block of keys from `base` on lie, and their values, for the kv head of a piece. With many
// queries they are widened: keys put together by four, values one after another.
template <int Cache>
void find_keys(const qc_attention& w, const Piece& piece, int64_t base, int from, int to, State& state,
               const typename Numbers<Stored<Cache>::kRead>::Type* (&keys)[kKeys],
               const typename Numbers<Stored<Cache>::kRead>::Type* (&values)[kKeys]) {
  typedef typename Stored<Cache>::Type C;
  const int kv_head = piece.head / (w.heads / w.kv_heads), size = w.size;
  const int32_t* table = w.tables + piece.row * w.table_stride;
  int64_t block = (base + from) / w.block_size, offset = (base + from) % w.block_size;
  const int64_t ahead = kKeys % w.block_size ? 0 : kKeys / w.block_size;
  for (int k = from; k < to; ++k) {
    const C* row = static_cast<const C*>(w.cache) + (int64_t(table[block]) * w.block_size + offset) * w.cache_stride;
    const C *key = row + int64_t(kv_head) * size, *value = row + int64_t(w.kv_heads + kv_head) * size;
    if constexpr (Cache == QC_I8) {
      static thread_local float wide[kKeys][kMaxSize];
      const C* scales = row + int64_t(2) * w.kv_heads * size;
      read_bytes(key, scales + 4 * kv_head, size, wide[k]);
      read_bytes(value, scales + 4 * (w.kv_heads + kv_head), size, state.values + k * state.width);
      keys[k] = wide[k], values[k] = state.values + k * state.width;
    } else {
      keys[k] = key, values[k] = value;
    }
    if (ahead && base + k + kKeys < w.contexts[piece.row]) {  // the same key of the next block comes nearer meanwhile
      const int64_t next = (int64_t(table[block + ahead]) - table[block]) * w.block_size * w.cache_stride;
      for (int at = 0; at < size; at += 64 / int(sizeof(C)))
        __builtin_prefetch(key + next + at), __builtin_prefetch(value + next + at);
    }
    if (++offset == w.block_size) offset = 0, ++block;
  }
  for (int k = from / 4 * 4; k < from; ++k) keys[k] = keys[from], values[k] = values[from];
  for (int k = to; k % 4; ++k) keys[k] = keys[to - 1], values[k] = values[to - 1];
  if (!state.many) return;
  for (int k = from / 4 * 4; k < to; k += 4) {
    constexpr int Read = Stored<Cache>::kRead;
    put_together<Read, 4>({keys[k], keys[k + 1], keys[k + 2], keys[k + 3]}, size, state.keys + k * state.width);
    for (int i = k; i < k + 4 && Cache != QC_I8; ++i) copy_numbers<Read, QC_F32>(values[i], state.values + i * state.width, size);
  }
}

template <int Read, int R>
inline void score_rows(const typename Numbers<Read>::Type* const* keys, int from, int to, int size, int r, State& state) {
  const float* q[R];
  for (int i = 0; i < R; ++i) q[i] = state.q + (r + i) * state.width;
  for (int k = from; k < to; k += 4)
    dots<Read, R>(q, {keys[k], keys[k + 1], keys[k + 2], keys[k + 3]}, size, state.scores + r * kKeys + k, kKeys, false);
}

// Scores of keys [from, to), as far as queries come after them.
template <int Read>
void score(const typename Numbers<Read>::Type* const* keys, int64_t base, int from, int to, int size, State& state) {
  from = from / 4 * 4;
  if (state.many) {
    const int64_t vectors = state.width / kLanes;
    for (int k = from; k < to; k += 4) {
      const int first = int(std::max<int64_t>(base + k - state.start, 0)) * state.heads;  // row that sees key k
      for (int r = first / kDotRows * kDotRows; r < state.rows; r += kDotRows)
        dots_together(state.q + r * state.width, state.keys + k * state.width, vectors, state.scores + r * kKeys + k, kKeys, false);
    }
    return;
  }
  int r = 0;
  for (; r + kDotRows <= state.rows; r += kDotRows) score_rows<Read, kDotRows>(keys, from, to, size, r, state);
  if (r + 3 == state.rows) score_rows<Read, 3>(keys, from, to, size, r, state), r += 3;
  if (r + 2 == state.rows) score_rows<Read, 2>(keys, from, to, size, r, state), r += 2;
  if (r < state.rows) score_rows<Read, 1>(keys, from, to, size, r, state);
}

// What is done to scores of keys [from, to), and of others in the same run: capped, shifted, hidden.
inline void shape(const qc_attention& w, const Piece& piece, int64_t base, int from, int to, State& state) {
  const int begin = from / kRun * kRun, end = (to + kRun - 1) / kRun * kRun;
  const bool all_seen = base + to <= state.start + 1 && first_key(w, state.start + piece.count - 1) <= base + from;
  if (all_seen && begin == from && end == to && !(w.softcap > 0) && !w.alibi) return;
  for (int r = 0; r < piece.rows(); ++r) {
    float* scores = state.scores + r * kKeys;
    const int64_t at = state.start + r / piece.heads;
    if (w.softcap > 0)  // cap * tanh(score / cap)
      for (int k = begin; k < end; k += kLanes) {
        const vf cap = fill(w.softcap * kLog2e);
        store(scores + k, cap - (cap + cap) / (exp_of(load(scores + k) * fill(2 / w.softcap)) + fill(1)));
      }
    if (w.alibi)
      for (int k = from; k < to; ++k) scores[k] -= kLog2e * w.alibi[piece.head + r % piece.heads] * float(at - (base + k));
    const int first = int(std::max<int64_t>(first_key(w, at) - base, from)), last = state.seen(base, r, to);
    for (int k = begin; k < first && k < end; ++k) scores[k] = -INFINITY;
    for (int k = std::max(last, begin); k < end; ++k) scores[k] = -INFINITY;
  }
}

// Scores become weights, kRun at a time; what was summed so far shrinks where a larger score came.
inline void soften(int from, int to, int rows, State& state) {
  const int begin = from / kRun * kRun;
  float grown[kMaxRows];
  for (int r = 0; r < rows; ++r) {
    const float* scores = state.scores + r * kKeys;
    vf most[4];
    QC_UNROLL for (int i = 0; i < 4; ++i) most[i] = load(scores + begin + i * kLanes);
    for (int k = begin + kRun; k < to; k += kRun)
      QC_UNROLL for (int i = 0; i < 4; ++i) most[i] = larger(most[i], load(scores + k + i * kLanes));
    grown[r] = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  }
  for (int r = 0; r < rows; ++r) {
    float *scores = state.scores + r * kKeys, *out = state.out + r * state.width;
    if (grown[r] > state.most[r]) {
      const vf shrink = power_of_two(fill(state.most[r] - grown[r]));
      for (int64_t d = 0; d < state.width; d += kLanes) store(out + d, load(out + d) * shrink);
      state.total[r] *= shrink[0];
      state.most[r] = grown[r];
    }
    const vf top = fill(state.most[r] == -INFINITY ? 0 : state.most[r]);  // nothing seen yet: all weights 0
    vf total[4] = {fill(0), fill(0), fill(0), fill(0)};
    for (int k = begin; k < to; k += kRun) {
      vf weight[4];
      QC_UNROLL for (int i = 0; i < 4; ++i) weight[i] = power_of_two(load(scores + k + i * kLanes) - top);
      QC_UNROLL for (int i = 0; i < 4; ++i) store(scores + k + i * kLanes, weight[i]), total[i] = total[i] + weight[i];
    }
    state.total[r] += sum((total[0] + total[1]) + (total[2] + total[3]));
  }
}

// Where the values of a block of keys lie: anywhere, or widened one after another.
template <int Read>
struct Anywhere {
  typedef Numbers<Read> N;
  const typename N::Type* const* values;
  const typename N::Type* at(int key) const { return values[key]; }
};
struct InOrder {
  typedef Numbers<QC_F32> N;
  const float* values;
  int64_t width;
  const float* at(int key) const { return values + key * width; }
};

// R rows of the result grow by the values of keys [from, to), multiples of 4, times their weights: V vectors of each.
template <int R, int V, class Values>
inline void add_values(const Values values, int from, int to, int at, const float* weights, float* out, int64_t width) {
  vf sums[R][V];
  QC_UNROLL for (int i = 0; i < R; ++i)
    QC_UNROLL for (int v = 0; v < V; ++v) sums[i][v] = load(out + i * width + at + v * kLanes);
  for (int k = from; k < to; k += 4) {
    Four by[R];
    QC_UNROLL for (int i = 0; i < R; ++i) by[i] = load_four(weights + i * kKeys + k);
    unroll(std::make_integer_sequence<int, 4>(), [&](auto j) {
      QC_UNROLL for (int v = 0; v < V; ++v) {
        vf value = Values::N::read(values.at(k + j) + at + v * kLanes);
        QC_UNROLL for (int i = 0; i < R; ++i) sums[i][v] = fma_one<j>(value, by[i], sums[i][v]);
      }
    });
  }
  QC_UNROLL for (int i = 0; i < R; ++i)
    QC_UNROLL for (int v = 0; v < V; ++v) store(out + i * width + at + v * kLanes, sums[i][v]);
}

template <int R, int V, class Values>
__attribute__((noinline)) void weigh_rows(const Values values, int from, int to, int size, int r, State& state) {
  const float* weights = state.scores + r * kKeys;
  float* out = state.out + r * state.width;
  int at = 0;
  for (; at + V * kLanes <= size; at += V * kLanes) add_values<R, V>(values, from, to, at, weights, out, state.width);
  for (; at + kLanes <= size; at += kLanes) add_values<R, 1>(values, from, to, at, weights, out, state.width);
  for (; at < size; ++at)
    for (int i = 0; i < R; ++i)
      for (int k = from; k < to; ++k) {
        float& here = out[i * state.width + at];
        here = fmaf(weights[i * kKeys + k], Values::N::one(values.at(k) + at), here);
      }
}

template <int Read>
void weigh(const typename Numbers<Read>::Type* const* found, int64_t base, int from, int to, int size, State& state) {
  from = from / 4 * 4;
  int r = 0;
  if (state.many) {
    const InOrder values = {state.values, state.width};
    for (; r < state.rows; r += kTileOfRows)
      weigh_rows<kTileOfRows, 2>(values, from, (state.seen(base, r + kTileOfRows - 1, to) + 3) / 4 * 4, size, r, state);
    return;
  }
  to = (to + 3) / 4 * 4;
  const Anywhere<Read> values = {found};
  for (; r + 4 <= state.rows; r += 4) weigh_rows<4, 2>(values, from, to, size, r, state);
  if (r + 3 == state.rows) weigh_rows<3, 2>(values, from, to, size, r, state), r += 3;
  for (; r < state.rows; ++r) weigh_rows<1, 4>(values, from, to, size, r, state);
}

#if QC_TILES
template <int Dtype>
void attend_span_by_tiles(const qc_attention& w, const Piece& piece, int64_t first, int64_t last, State& state);  // attention_tiles.h
#endif

// Keys [first, last) for all queries of a piece, into an empty state.
template <int Dtype, int Cache>
void attend_span(const qc_attention& w, const Piece& piece, int64_t first, int64_t last, State& state) {
  constexpr int Read = Stored<Cache>::kRead;
#if QC_TILES
  if constexpr (Cache == QC_BF16)
    if (by_tiles<Cache>(w)) return attend_span_by_tiles<Dtype>(w, piece, first, last, state);
#endif
  state.resize(w, piece);
  bring_queries<Dtype>(w, piece, state);
  for (int64_t base = first / kKeys * kKeys; base < last; base += kKeys) {
    const int from = first > base ? int(first - base) : 0, to = last - base < kKeys ? int(last - base) : kKeys;
    const typename Numbers<Read>::Type *keys[kKeys], *values[kKeys];
    find_keys<Cache>(w, piece, base, from, to, state, keys, values);
    score<Read>(keys, base, from, to, w.size, state);
    shape(w, piece, base, from, to, state);
    soften(from, to, piece.rows(), state);
    weigh<Read>(values, base, from, to, w.size, state);
  }
}

// Adds one more span to what was summed up before it.
inline void join(float& most, float& total, float* out, float more_most, float more_total, const float* more, int size) {
  const float top = fmaxf(most, more_most);
  if (top == -INFINITY) return;
  const float old = exp2f(most - top), fresh = exp2f(more_most - top);
  total = total * old + more_total * fresh, most = top;
  for (int d = 0; d < size; ++d) out[d] = out[d] * old + more[d] * fresh;
}

template <int Dtype>
void write_piece(const qc_attention& w, const Piece& piece, State& state) {
  const int64_t token = w.query_starts[piece.row] + piece.first;
  for (int r = 0; r < piece.rows(); ++r) {
    const int head = piece.head + r % piece.heads;
    float total = state.total[r], shrink = 1;
    if (w.sinks) {
      const float sink = w.sinks[head] * kLog2e, top = fmaxf(state.most[r], sink);
      shrink = exp2f(state.most[r] - top);
      total = total * shrink + exp2f(sink - top);
    }
    const float by = total > 0 ? shrink / total : 0;
    float* from = state.out + r * state.width;
    for (int d = 0; d < w.size; ++d) from[d] *= by;
    copy_numbers<QC_F32, Dtype>(from, static_cast<typename Numbers<Dtype>::Type*>(w.out) +
                                ((token + r / piece.heads) * w.heads + head) * int64_t(w.size), w.size);
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

// next: the piece that this thread will take up after this one, as far as that is known.
template <int Dtype, int Cache>
void attend_piece(const qc_attention& w, const Piece& piece, const Piece* next, State& state) {
  const Reach reach(w, piece);
  auto look_ahead = [&](int64_t span, State& from) {
    from.next = span + 1 < reach.spans() ? &piece : next;
    if (from.next) from.next_key = span + 1 < reach.spans() ? reach.begin(span + 1) : Reach(w, *next).first;
  };
  look_ahead(0, state);
  attend_span<Dtype, Cache>(w, piece, reach.begin(0), reach.end(0), state);
  if (reach.spans() > 1) {
    static thread_local State more;
    for (int64_t span = 1; span < reach.spans(); ++span) {
      look_ahead(span, more);
      attend_span<Dtype, Cache>(w, piece, reach.begin(span), reach.end(span), more);
      for (int r = 0; r < piece.rows(); ++r)
        join(state.most[r], state.total[r], state.out + r * state.width, more.most[r], more.total[r],
             more.out + r * more.width, w.size);
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
    state.next = nullptr;
    attend_span<Dtype, Cache>(w, piece, reach.begin(all[item].span), reach.end(all[item].span), state);
    for (int r = 0; r < piece.rows(); ++r) {
      float* to = kept + item * room + r * entry;
      to[0] = state.most[r], to[1] = state.total[r];
      memcpy(to + 2, state.out + r * state.width, size_t(w.size) * 4);
    }
  };
  each(int(parts.size()), work);
  static thread_local State state;
  for (size_t i = 0; i < parts.size();) {
    const Piece& piece = pieces[size_t(parts[i].piece)];
    state.resize(w, piece);
    for (size_t begin = i; i < parts.size() && parts[i].piece == parts[begin].piece; ++i)
      for (int r = 0; r < piece.rows(); ++r) {
        const float* from = kept + int64_t(i) * room + r * entry;
        if (i > begin) {
          join(state.most[r], state.total[r], state.out + r * state.width, from[0], from[1], from + 2, w.size);
        } else {
          state.most[r] = from[0], state.total[r] = from[1];
          memcpy(state.out + r * state.width, from + 2, size_t(w.size) * 4);
        }
      }
    write_piece<Dtype>(w, piece, state);
  }
}

// Rows whose spans are worth a piece of work each.
inline bool has_long_row(const qc_attention& w) {
  for (int64_t row = 0; row < w.rows; ++row)
    if (w.contexts[row] > 2 * kSpan) return true;
  return false;
}

// How many kv heads of a row with so many queries tiles take together, of which each has `rows` queries: as many as there
// are columns for, and as near memory has room for, but fewer where that would leave threads without work.
inline int heads_together(const qc_attention& w, int rows) {
  int64_t together = std::min<int64_t>(w.kv_heads, std::max(1, std::min(kFewQueries / rows, 1024 / w.size)));
  int64_t work = 0;
  const bool spans = has_long_row(w);
  for (int64_t row = 0; row < w.rows; ++row) work += spans ? (w.contexts[row] + kSpan - 1) / kSpan : 1;
  while (together > 1 && work * ((w.kv_heads + together - 1) / together) < 4 * threads()) together = (together + 1) / 2;
  return int(together);
}

inline void cut(const qc_attention& w, std::vector<Piece>& pieces, bool tiles) {
  const int per = w.heads / w.kv_heads;
  int queries = per >= kMaxRows ? 1 : kMaxRows / per;
  while (queries > 1 && queries * per > 2 * kFewRows && w.tokens * w.kv_heads < 4 * threads() * queries) queries /= 2;
  for (int fewer = queries; fewer > queries / 2; --fewer)
    if (fewer * per % kTileOfRows == 0) {  // no row is left over
      queries = fewer;
      break;
    }
  pieces.clear();
  int32_t before = -1, together = 1;  // kv heads for rows with so many queries
  for (int32_t row = 0; row < w.rows; ++row) {
    const int32_t count = w.query_starts[row + 1] - w.query_starts[row];
    if (tiles && count > 0 && count * per <= kFewQueries) {
      if (count != before) before = count, together = heads_together(w, count * per);
      for (int kv = 0; kv < w.kv_heads; kv += together)
        pieces.push_back({row, 0, count, kv * per, std::min(together, w.kv_heads - kv) * per});
      continue;
    }
    for (int32_t first = count > 0 ? (count - 1) / queries * queries : -1; first >= 0; first -= queries)  // longest first
      for (int head = 0; head < w.heads; head += per)
        for (int part = 0; part < per; part += kMaxRows)
          pieces.push_back({row, first, first + queries < count ? queries : count - first, head + part,
                            part + kMaxRows < per ? kMaxRows : per - part});
  }
}

// Where runs of pieces begin that one thread takes one after another, and the end: pieces of a few queries by about as
// many keys as make eight runs for each thread, so that what comes next is known; others alone.
inline void cut_runs(const qc_attention& w, const std::vector<Piece>& pieces, bool tiles, std::vector<int>& runs) {
  auto keys = [&](const Piece& piece) {
    const Reach reach(w, piece);
    return reach.last - reach.first;
  };
  auto few = [&](const Piece& piece) { return tiles && piece.rows() <= kFewQueries; };
  int64_t all = 0, here = 0;
  for (const Piece& piece : pieces) all += few(piece) ? keys(piece) : 0;
  runs.clear();
  bool open = false;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!open || !few(pieces[i])) runs.push_back(int(i)), here = 0;
    here += keys(pieces[i]);
    open = few(pieces[i]) && here < all / (8 * threads());
  }
  runs.push_back(int(pieces.size()));
}

template <int Dtype, int Cache>
void attend(const qc_attention& w) {
  auto prepare = [&](int64_t token) { prepare_token<Dtype, Cache>(w, token); };
  each_row(w.tokens, int64_t(w.heads + 2 * w.kv_heads) * w.size, prepare);
  static thread_local std::vector<Piece> pieces;
  static thread_local std::vector<int> runs;
  cut(w, pieces, by_tiles<Cache>(w));
  if (has_long_row(w) && threads() > 1 && pieces.size() < size_t(8 * threads())) return attend_by_spans<Dtype, Cache>(w, pieces);
  cut_runs(w, pieces, by_tiles<Cache>(w), runs);
  const Piece* all = pieces.data();
  const int *begin = runs.data(), items = int(runs.size()) - 1;
  auto work = [&, all, begin, items](int item) {
    static thread_local State state;
    const int after = item + threads() < items ? begin[item + threads()] : -1;  // others take the runs between
    for (int i = begin[item]; i < begin[item + 1]; ++i) {
      const int next = i + 1 < begin[item + 1] ? i + 1 : after;
      attend_piece<Dtype, Cache>(w, all[i], next < 0 ? nullptr : all + next, state);
    }
  };
  each(items, work);
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
