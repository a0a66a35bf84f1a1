// Attention over a cache of bfloat16 with tile registers. Scores and sums are floats; queries and weights are rounded to
// bfloat16.
//
// 16 keys are a tile as they lie in the cache, and queries are turned once, 16 of them to a group: their scores come out
// with keys down and queries across, so that maxima, weights and totals need no sums across a vector. Where a piece is
// one group (a decode), it may hold queries of several kv heads side by side: those of another kv head are zero in a
// tile of queries, and one tile of scores collects them all.
//
// Values are paired: a word of a tile holds the same number of two neighbouring keys, beside which their weights stand in
// one word, too. So every query is summed up by the same instructions in the same order, 32 keys at a time from a multiple
// of 32 on, whether it is one of a prompt or a decode. Keys that a query does not see have weight 0, which adds nothing.
#pragma once
#include "amx.h"
#include "attention.h"

#if QC_TILES
namespace quire {
namespace QC_ISA {

static_assert(kKeys == 64 && kMaxRows % 16 == 0 && kFewQueries == 16);
typedef int32_t Whole __attribute__((vector_size(64)));

// Two rows of 32 numbers to pairs: of the first 16, or of the last 16.
inline Words pairs_of(Words a, Words b, bool last) {
#if defined(__AVX512BW__)
  const Shorts low = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const Shorts order = last ? low + (uint16_t)16 : low;
  return (Words)_mm512_permutex2var_epi16((__m512i)a, (__m512i)order, (__m512i)b);
#else
  Shorts x = (Shorts)a, y = (Shorts)b, to;
  for (int i = 0; i < 16; ++i) to[2 * i] = x[16 * last + i], to[2 * i + 1] = y[16 * last + i];
  return (Words)to;
#endif
}

inline Floats load_floats(const float* at) { return (Floats)load_words(at); }
inline void store_floats(float* at, Floats v) { store_words(at, (Words)v); }

inline Floats larger_of(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// 2^x of numbers that are not above 0, with an error below 2^-18 of it, which is far below that of a weight's rounding; 0
// below -126, and for -inf.
inline Floats weight_of(Floats x) {
  const Floats magic = Floats{} + 12582912.0f;
  const Floats shifted = x + magic, rest = x - (shifted - magic);
  Floats y = rest * 9.570101653e-3f + 5.591786210e-2f;
  y = y * rest + 2.402474485e-1f;
  y = y * rest + 6.931218145e-1f;
  y = y * rest + 9.999992614e-1f;
#if defined(__AVX512F__)
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_add_epi32(kept, (__m512i)y, _mm512_slli_epi32((__m512i)shifted, 23));
#else
  return (Floats)(((Words)y + ((Words)shifted << 23)) & ~(Words)(x < -126.0f));
#endif
}

inline Floats exp_of_floats(Floats x) {
  float all[16];
  store_floats(all, x);
  for (int i = 0; i < 16; i += kLanes) store(all + i, exp_of(load(all + i)));
  return load_floats(all);
}

// Whose keys a piece reads.
struct KvHeads {
  int first, count;
  KvHeads(const qc_attention& w, const Piece& piece) {
    const int per = w.heads / w.kv_heads;
    first = piece.head / per, count = (piece.heads + per - 1) / per;
  }
};

// Keys and values that are read next, brought into the second cache a few lines at a time.
class Ahead {
 public:
  // Keys [from, to) of a piece's row, at most kKeys of them.
  void find(const qc_attention& w, const Piece& piece, int64_t from, int64_t to) {
    const KvHeads kv(w, piece);
    const int64_t row = 2 * w.cache_stride, head = 2 * w.size, bytes = kv.count * head;
    const bool whole = kv.count == w.kv_heads && row == 2 * bytes;
    const int32_t* table = w.tables + piece.row * w.table_stride;
    runs_ = next_ = 0, by_four_ = (whole ? row : bytes) % 256 == 0;
    int64_t block = from / w.block_size, offset = from % w.block_size;
    for (int64_t many; from < to; from += many, ++block, offset = 0) {
      many = std::min(to - from, w.block_size - offset);
      const char* at = static_cast<const char*>(w.cache) + (int64_t(table[block]) * w.block_size + offset) * row;
      if (whole) add(at, many * row);
      for (int64_t i = 0; i < many && !whole; ++i, at += row)
        add(at + kv.first * head, bytes), add(at + (w.kv_heads + kv.first) * head, bytes);
    }
    take();
  }
  void nothing() { runs_ = next_ = 0, take(); }

  QC_INLINE void some(int lines) {
    if (by_four_) {
      for (; lines > 0 && at_ < end_; lines -= 4) bring<4>();
    } else {
      for (; lines > 0 && at_ < end_; lines -= 2) bring<2>();
    }
  }
  void rest() {
    while (at_ < end_) some(64);
  }

 private:
  void add(const char* at, int64_t bytes) { begin_[runs_] = at, ends_[runs_++] = at + bytes; }
  void take() {
    if (next_ < runs_) at_ = begin_[next_], end_ = ends_[next_++];
    else at_ = end_ = nullptr;
  }
  template <int Lines>
  QC_INLINE void bring() {
    QC_UNROLL for (int i = 0; i < Lines; ++i) __builtin_prefetch(at_ + 64 * i, 0, 2);
    at_ += 64 * Lines;
    if (at_ >= end_) take();
  }

  const char *begin_[2 * kKeys], *ends_[2 * kKeys], *at_ = nullptr, *end_ = nullptr;
  int runs_ = 0, next_ = 0;
  bool by_four_ = false;
};

class TiledSpan {
 public:
  TiledSpan(const qc_attention& w, const Piece& piece, State& state)
      : w_(w), piece_(piece), state_(state), kv_(w, piece), deep_(w.size / 32), wide_(w.size / 16),
        groups_((piece.rows() + 15) / 16), scale_(w.softcap > 0 ? w.scale : w.scale * kLog2e) {
    static thread_local std::vector<char> memory;
    const int64_t row = 2 * kv_.count * w.size;
    each_ = piece.rows() / kv_.count;
    const int64_t bytes = 1024 * (groups_ * kv_.count * deep_ + kv_.count * wide_ + 8) + 2 * kKeys * row;
    char* at = aligned(memory, std::max(bytes, int64_t(memory.size()) - 64));  // never less, or more would be cleared again
    auto take = [&](int64_t bytes) { return (at += bytes) - bytes; };
    queries_ = take(groups_ * kv_.count * deep_ * 1024);
    scores_ = reinterpret_cast<float*>(take(4096)), joined_ = take(1024), weights_ = take(2048);
    sums_ = reinterpret_cast<float*>(take(kv_.count * wide_ * 1024));
    keys_ = take(kKeys * row), values_ = take(kKeys * row);
  }

  static TileShapes shapes() {
    TileShapes all;
    for (int i = 0; i < 8; ++i) all.set(i, 16, 64);
    return all;
  }

  // Queries sorted by kv head, query, head: one after another they are columns of the groups.
  template <int Dtype>
  void bring_queries() {
    typedef typename Numbers<Dtype>::Type T;
    const T* first = static_cast<const T*>(w_.qkv) + (w_.query_starts[piece_.row] + piece_.first) * w_.qkv_stride;
    const int heads = piece_.heads / kv_.count;
    alignas(64) uint16_t some[16][kMaxSize];
    int column = 0;
    for (int kv = 0; kv < kv_.count; ++kv)
      for (int query = 0; query < piece_.count; ++query)
        for (int h = kv * heads; h < (kv + 1) * heads; ++h) {
          const int group = column / 16, c = column % 16;
          copy_numbers<Dtype, QC_BF16>(first + query * w_.qkv_stride + int64_t(piece_.head + h) * w_.size, some[c], w_.size);
          query_[group][c] = query, slope_[group][c] = w_.alibi ? kLog2e * w_.alibi[piece_.head + h] : 0;
          const int row = query * piece_.heads + h;
          if (groups_ == 1) row_[c] = row;
          if (++column % 16 == 0) turn_queries(some, group);
        }
    for (int c = column % 16; c && c < 16; ++c) {
      memset(some[c], 0, size_t(2 * w_.size)), query_[column / 16][c] = 0, slope_[column / 16][c] = 0;
      if (c == 15) turn_queries(some, column / 16);
    }
    if (groups_ > 1) std::fill(state_.out, state_.out + state_.rows * state_.width, 0.0f);
  }

  // Keys [from, to) of the block from `base` on, and what is wanted after them. Keys outside are zero where they are
  // copied; their scores are hidden in any case, but values must be zero, since numbers that are none stay so times 0.
  void bring_keys(int64_t base, int from, int to, int64_t last) {
    base_ = base, from_ = from, to_ = to, begin_ = from / 16, end_ = (to + 15) / 16;
    if (base + kKeys < last) ahead_.find(w_, piece_, base + kKeys, std::min(last, base + 2 * kKeys));
    else find_next();
    const int32_t* table = w_.tables + piece_.row * w_.table_stride;
    const char* cache = static_cast<const char*>(w_.cache) + int64_t(2) * kv_.first * w_.size;
    const int64_t stride = 2 * w_.cache_stride, width = 2 * kv_.count * w_.size, to_value = int64_t(2) * w_.kv_heads * w_.size;
    const bool as_they_lie = w_.block_size % 16 == 0 && groups_ == 1;
    int64_t block = (base + 16 * begin_) / w_.block_size, offset = (base + 16 * begin_) % w_.block_size;
    for (int t = begin_; t < end_; ++t) {
      const char *first = cache + (int64_t(table[block]) * w_.block_size + offset) * stride, *row[16];
      key_tiles_[t] = {first, stride};
      for (int k = 16 * t; k < 16 * t + 16; ++k) {
        row[k % 16] = inside(k) ? cache + (int64_t(table[block]) * w_.block_size + offset) * stride : nullptr;
        if (++offset == w_.block_size) offset = 0, ++block;
      }
      char* keys = keys_ + 16 * t * width;
      if (!as_they_lie) copy(row, keys, width), key_tiles_[t] = {keys, width};
      pair_values(row, to_value, t);
    }
    const char* none[16] = {};  // the other half of a tile of pairs
    if (begin_ % 2) pair_values(none, 0, begin_ - 1);
    if (end_ % 2) pair_values(none, 0, end_);
  }

  void attend_block() {
    for (int64_t group = 0; group < groups_; ++group) {
      if (groups_ > 1 && base_ > state_.start + query_[group][columns(group) - 1]) continue;  // all keys come later
      score(group);
      soften(group);
      weigh(group);
    }
    ahead_.rest();
    fresh_ = false;
  }

  void finish() {
    for (int c = 0; c < piece_.rows(); ++c) {
      const int row = groups_ > 1 ? c : row_[c];
      state_.most[row] = most_[c / 16][c % 16], state_.total[row] = total_[c / 16][c % 16];
      for (int64_t d = 0; d < wide_ && groups_ == 1; ++d)
        memcpy(state_.out + row * state_.width + 16 * d, sums_of(c, d), 64);
    }
  }

 private:
  struct Lying {
    const char* at;
    int64_t stride;
  };

  int columns(int64_t group) const { return int(std::min<int64_t>(16, piece_.rows() - 16 * group)); }

  // Sums of one group lie as tiles, for each kv head those of all queries, of which its own count.
  float* sums_of(int column, int64_t d) const { return sums_ + (column / each_ * wide_ + d) * 256 + 16 * column; }

  void find_next() {
    if (!state_.next) return ahead_.nothing();
    const Reach reach(w_, *state_.next);
    ahead_.find(w_, *state_.next, state_.next_key, std::min(reach.last, state_.next_key / kKeys * kKeys + kKeys));
  }

  // Tiles of 16 pairs of numbers x 16 queries, for each kv head those of its own.
  void turn_queries(const uint16_t (&some)[16][kMaxSize], int64_t group) {
    most_[group] = Floats{} - INFINITY, total_[group] = Floats{};
    for (int64_t d = 0; d < deep_; ++d) {
      char* to = queries_ + (group * kv_.count * deep_ + d) * 1024;
      turn_16(some[0] + 32 * d, sizeof some[0], to);
      for (int kv = kv_.count - 1; kv >= 0 && kv_.count > 1; --kv) {
        const Whole lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Words mine = (Words)((lane >= kv * each_) & (lane < (kv + 1) * each_));
        for (int i = 0; i < 16; ++i) store_words(to + kv * deep_ * 1024 + 64 * i, load_words(to + 64 * i) & mine);
      }
    }
  }

  bool inside(int key) const { return key >= from_ && key < to_; }

  void copy(const char* const (&row)[16], char* to, int64_t width) const {
    for (int i = 0; i < 16; ++i, to += width) {
      if (row[i]) memcpy(to, row[i], size_t(width));
      else memset(to, 0, size_t(width));
    }
  }

  // Values of 16 keys, of all kv heads, as 8 lines of tiles of pairs of keys: [32 keys][16 numbers].
  void pair_values(const char* const (&row)[16], int64_t offset, int t) const {
    for (int i = 0; i < 16; i += 2)
      for (int64_t d = 0; d < kv_.count * deep_; ++d) {
        auto value = [&](int k) { return row[k] ? load_words(row[k] + offset + 64 * d) : Words{}; };
        const Words a = value(i), b = value(i + 1);
        char* at = values_ + (t / 2 * kv_.count * wide_ + 2 * d) * 1024 + (t % 2 * 8 + i / 2) * 64;
        store_words(at, pairs_of(a, b, false)), store_words(at + 1024, pairs_of(a, b, true));
      }
  }

  // Scores [keys][queries] of a group; those of keys outside are -inf, up to whole pairs of tiles.
  void score(int64_t group) {
    const char* query = queries_ + group * kv_.count * deep_ * 1024;
    const int lines = groups_ > 1 ? 4 : 12;
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t d = 0; d < kv_.count * deep_; ++d, query += 1024) {
      tile_load<5>(query, 64);
      constant_times<4>([&](auto t) QC_INLINE {
        if (t < begin_ || t >= end_) return;
        tile_load<t % 2 ? 6 : 4>(key_tiles_[t].at + 64 * d, key_tiles_[t].stride);
        tile_dot_bfloats<t, t % 2 ? 6 : 4, 5>();
        ahead_.some(lines);
      });
    }
    tile_store<0>(scores_, 64), tile_store<1>(scores_ + 256, 64);
    tile_store<2>(scores_ + 512, 64), tile_store<3>(scores_ + 768, 64);
    for (int k = begin_ / 2 * 32; k < from_; ++k) store_floats(scores_ + 16 * k, Floats{} - INFINITY);
    for (int k = to_; k < (end_ + 1) / 2 * 32; ++k) store_floats(scores_ + 16 * k, Floats{} - INFINITY);
  }

  // Scores hidden, and those that are capped or shifted scaled before; false: they are still to be scaled. Which of both does
  // not depend on who sees what: a product that is rounded before it is subtracted from has other bits.
  bool shape(int64_t group) {
    const int64_t earliest = state_.start + (groups_ > 1 ? query_[group][0] : 0);
    const int64_t latest = state_.start + (groups_ > 1 ? query_[group][columns(group) - 1] : piece_.count - 1);
    const bool all_seen = base_ + to_ <= earliest + 1 && first_key(w_, latest) <= base_ + from_;
    const bool plain = !(w_.softcap > 0) && !w_.alibi && scale_ > 0;
    if (all_seen && plain) return false;
    const Whole seen = query_[group] + int32_t(state_.start + 1 - base_);
    Whole first = Whole{};
    for (int c = 0; c < 16 && (w_.window || w_.chunk); ++c)
      first[c] = int32_t(first_key(w_, state_.start + query_[group][c]) - base_);
    const Floats cap = Floats{} + w_.softcap * kLog2e, none = Floats{} - INFINITY;
    for (int k = from_; k < to_; ++k) {
      Floats v = load_floats(scores_ + 16 * k);
      if (!plain) v *= scale_;
      if (w_.softcap > 0) v = cap - (cap + cap) / (exp_of_floats(v * (2 / w_.softcap)) + 1.0f);  // cap * tanh(score / cap)
      if (w_.alibi) v -= slope_[group] * __builtin_convertvector(seen - (k + 1), Floats);
      store_floats(scores_ + 16 * k, (seen > k) & (first <= k) ? v : none);
    }
    return !plain;
  }

  // Scores become weights; what was summed so far shrinks where a larger score came.
  void soften(int64_t group) {
    const Floats by = Floats{} + (shape(group) ? 1.0f : scale_);
    const int first = begin_ / 2, last = (end_ + 1) / 2;
    Floats found[4];
    QC_UNROLL for (int i = 0; i < 4; ++i) found[i] = load_floats(scores_ + 512 * first + 16 * i);
    for (const float* at = scores_ + 512 * first + 64; at < scores_ + 512 * last; at += 64)
      QC_UNROLL for (int i = 0; i < 4; ++i) found[i] = larger_of(found[i], load_floats(at + 16 * i));
    const Floats old = most_[group];
    const Floats most = larger_of(old, larger_of(larger_of(found[0], found[1]), larger_of(found[2], found[3])) * by);
    const Floats top = most == -INFINITY ? Floats{} : most;  // nothing seen yet: all weights 0
    if (memcmp(&old, &most, sizeof old)) {
      const Floats shrink = old == most ? Floats{} + 1.0f : weight_of(old - top);  // exactly 1 where nothing came
      most_[group] = most, total_[group] *= shrink;
      if (!fresh_) shrink_sums(group, shrink);
    }
    for (int half = first; half < last; ++half) {
      if (groups_ == 1) ahead_.some(int(kv_.count * deep_) * 16);
      total_[group] += weights(half, by, top);
      turn_16(joined_, 64, weights_ + half * 1024);
    }
  }

  void shrink_sums(int64_t group, Floats shrink) {
    for (int c = 0; c < columns(group); ++c) {
      float* many = state_.out + (16 * group + c) * state_.width;
      for (int64_t d = 0; d < wide_; ++d) {
        float* at = groups_ > 1 ? many + 16 * d : sums_of(c, d);
        store_floats(at, load_floats(at) * shrink[c]);
      }
    }
  }

  // Weights of 32 keys, neighbours joined. Their sums.
  Floats weights(int half, Floats by, Floats top) const {
    const float* at = scores_ + 512 * half;
    Floats first = Floats{}, second = Floats{};
    for (int i = 0; i < 16; ++i, at += 32) {
      const Floats a = weight_of(load_floats(at) * by - top), b = weight_of(load_floats(at + 16) * by - top);
      first += a, second += b;
      store_words(joined_ + 64 * i, join_bfloats(a, b));
    }
    return first + second;
  }

  // Sums of a group grow by the values times their weights, two tiles at a time: of one group those of all kv heads.
  void weigh(int64_t group) {
    const int64_t stride = groups_ > 1 ? 4 * state_.width : 64;
    for (int64_t d = 0; d < kv_.count * wide_; d += 2) {
      float* sums = groups_ > 1 ? state_.out + group * 16 * state_.width + 16 * d : sums_ + 256 * d;
      float* next = sums + (groups_ > 1 ? 16 : 256);
      if (fresh_ && groups_ == 1) tile_zero<0>(), tile_zero<1>();
      else tile_load<0>(sums, stride), tile_load<1>(next, stride);
      for (int half = begin_ / 2; half < (end_ + 1) / 2; ++half) {
        const char* value = values_ + (half * kv_.count * wide_ + d) * 1024;
        tile_load<4>(weights_ + half * 1024, 64);
        tile_load<6>(value, 64), tile_dot_bfloats<0, 4, 6>();
        tile_load<7>(value + 1024, 64), tile_dot_bfloats<1, 4, 7>();
        if (groups_ == 1) ahead_.some(24);
      }
      tile_store<0>(sums, stride), tile_store<1>(next, stride);
    }
  }

  const qc_attention& w_;
  const Piece& piece_;
  State& state_;
  const KvHeads kv_;
  const int64_t deep_, wide_, groups_;  // tiles of a head, as a factor and as a result; groups of queries
  const float scale_;
  int each_;  // queries of a kv head
  int64_t base_;
  int from_, to_, begin_, end_;  // keys of the block, tiles of keys
  bool fresh_ = true;  // nothing summed up yet
  char *queries_, *joined_, *weights_, *keys_, *values_;
  float *scores_, *sums_;
  Lying key_tiles_[4];
  int row_[kFewQueries];  // of the piece, for each column, where there is one group
  Floats most_[kMaxRows / 16], total_[kMaxRows / 16], slope_[kMaxRows / 16];
  Whole query_[kMaxRows / 16];  // number of each column's query in the piece
  Ahead ahead_;
};

// Keys [first, last) for all queries of a piece, into an empty state.
template <int Dtype>
void attend_span_by_tiles(const qc_attention& w, const Piece& piece, int64_t first, int64_t last, State& state) {
  state.resize(w, piece, 16);
  TiledSpan span(w, piece, state);
  span.bring_queries<Dtype>();
  Tiles tiles(TiledSpan::shapes());
  for (int64_t base = first / kKeys * kKeys; base < last; base += kKeys) {
    const int from = first > base ? int(first - base) : 0, to = last - base < kKeys ? int(last - base) : kKeys;
    span.bring_keys(base, from, to, last);
    span.attend_block();
  }
  span.finish();
}

}  // namespace QC_ISA
}  // namespace quire
#endif
