// Attention of many queries over a cache of bfloat16 with tile registers: a block of keys and its values are laid out as
// tiles once, and serve all queries of a piece. Scores and sums are floats; queries and weights are rounded to bfloat16.
//
// Bits are others than those of a few queries (attention.h), so this is left alone where they must not depend on how
// many there are.
#pragma once
#include "amx.h"
#include "attention.h"

#if QC_TILES
namespace quire {
namespace QC_ISA {

static_assert(kKeys == 64 && kMaxRows % 16 == 0);
typedef uint16_t Shorts __attribute__((vector_size(64)));

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

class TiledSpan {
 public:
  TiledSpan(const qc_attention& w, const Piece& piece, State& state)
      : w_(w), piece_(piece), state_(state), deep_(w.size / 32), wide_(w.size / 16), tall_(state.rows / 16) {
    static thread_local std::vector<char> memory;
    const int64_t tiles = tall_ * deep_ + kKeys / 16 * deep_ + kKeys / 32 * wide_ + kKeys / 32;
    queries_ = aligned(memory, tiles * 1024 + 2 * kKeys * w.size);
    keys_ = queries_ + tall_ * deep_ * 1024, values_ = keys_ + kKeys / 16 * deep_ * 1024;
    weights_ = values_ + kKeys / 32 * wide_ * 1024, gathered_ = weights_ + kKeys / 32 * 1024;
  }

  static TileShapes shapes() {
    TileShapes all;
    for (int i = 0; i < 8; ++i) all.set(i, 16, 64);
    return all;
  }

  // Tiles of 16 queries x 32 numbers, one after another.
  template <int Dtype>
  void bring_queries() {
    typedef typename Numbers<Dtype>::Type T;
    const T* first = static_cast<const T*>(w_.qkv) + (w_.query_starts[piece_.row] + piece_.first) * w_.qkv_stride;
    memset(queries_, 0, size_t(tall_ * deep_ * 1024));
    for (int r = 0; r < piece_.rows(); ++r) {
      const T* from = first + r / piece_.heads * w_.qkv_stride + int64_t(piece_.head + r % piece_.heads) * w_.size;
      for (int64_t d = 0; d < deep_; ++d)
        copy_numbers<Dtype, QC_BF16>(from + 32 * d, reinterpret_cast<uint16_t*>(queries_ + (r / 16 * deep_ + d) * 1024 + r % 16 * 64), 32);
    }
    std::fill(state_.out, state_.out + state_.rows * state_.width, 0.0f);
    std::fill(state_.most, state_.most + piece_.rows(), -INFINITY);
    std::fill(state_.total, state_.total + piece_.rows(), 0.0f);
  }

  // Keys [from, to) of the block from `base` on; what is not among them is zero.
  void bring_keys(int64_t base, int from, int to) {
    const int kv_head = piece_.head / (w_.heads / w_.kv_heads);
    const int32_t* table = w_.tables + piece_.row * w_.table_stride;
    const uint16_t* cache = static_cast<const uint16_t*>(w_.cache) + int64_t(kv_head) * w_.size;
    const int64_t to_value = int64_t(w_.kv_heads) * w_.size;
    auto token = [&](int k) { return int64_t(table[(base + k) / w_.block_size]) * w_.block_size + (base + k) % w_.block_size; };
    const char* row[kKeys];
    for (int k = 0; k < kKeys; ++k)
      row[k] = k < from || k >= to ? nullptr : reinterpret_cast<const char*>(cache + token(k) * w_.cache_stride);
    for (int k = 0; k < kKeys; k += 16) {
      if (k + 16 <= from || k >= to) continue;
      const char* first = row[k];
      int64_t stride = 2 * w_.cache_stride;
      if (k < from || k + 16 > to || w_.block_size % 16) {
        first = gathered_, stride = 2 * w_.size;
        for (int i = 0; i < 16; ++i) {
          if (row[k + i]) memcpy(gathered_ + i * stride, row[k + i], size_t(stride));
          else memset(gathered_ + i * stride, 0, size_t(stride));
        }
      }
      for (int64_t d = 0; d < deep_; ++d) turn_16(first + 64 * d, stride, keys_ + (k / 16 * deep_ + d) * 1024);
    }
    for (int k = 0; k < kKeys; k += 2)
      for (int64_t d = 0; d < deep_; ++d) {
        auto value = [&](int at) { return row[at] ? load_words(row[at] + 2 * to_value + 64 * d) : Words{}; };
        const Words a = value(k), b = value(k + 1);
        char* at = values_ + (k / 32 * wide_ + 2 * d) * 1024 + k % 32 / 2 * 64;
        store_words(at, pairs_of(a, b, false)), store_words(at + 1024, pairs_of(a, b, true));
      }
  }

  void score(float scale) {
    for (int64_t tile = 0; tile < tall_; ++tile) {
      float* to = state_.scores + tile * 16 * kKeys;
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      for (int64_t d = 0; d < deep_; ++d) {
        const char* key = keys_ + d * 1024;
        tile_load<4>(queries_ + (tile * deep_ + d) * 1024, 64);
        tile_load<5>(key, 64), tile_dot_bfloats<0, 4, 5>();
        tile_load<6>(key + deep_ * 1024, 64), tile_dot_bfloats<1, 4, 6>();
        tile_load<7>(key + 2 * deep_ * 1024, 64), tile_dot_bfloats<2, 4, 7>();
        tile_load<5>(key + 3 * deep_ * 1024, 64), tile_dot_bfloats<3, 4, 5>();
      }
      tile_store<0>(to, 4 * kKeys), tile_store<1>(to + 16, 4 * kKeys);
      tile_store<2>(to + 32, 4 * kKeys), tile_store<3>(to + 48, 4 * kKeys);
      for (int i = 0; i < 16 * kKeys; i += kLanes) store(to + i, load(to + i) * fill(scale));
    }
  }

  // Keys [from, to) have weights, and others of the same run, which are 0.
  void weigh(int from, int to) {
    const int begin = from / kRun * kRun, end = (to + kRun - 1) / kRun * kRun;
    for (int64_t tile = 0; tile < tall_; ++tile) {
      memset(weights_, 0, kKeys / 32 * 1024);
      for (int64_t r = 0; r < 16 && tile * 16 + r < piece_.rows(); ++r)
        for (int k = begin; k < end; k += kLanes)
          Numbers<QC_BF16>::write(reinterpret_cast<uint16_t*>(weights_ + k / 32 * 1024 + r * 64) + k % 32,
                                  load(state_.scores + (tile * 16 + r) * kKeys + k));
      for (int64_t d = 0; d < wide_; d += 2) {
        float* out = state_.out + tile * 16 * state_.width + 16 * d;
        tile_load<0>(out, 4 * state_.width), tile_load<1>(out + 16, 4 * state_.width);
        for (int64_t half = 0; half < kKeys / 32; ++half) {
          const char* value = values_ + (half * wide_ + d) * 1024;
          tile_load<4>(weights_ + half * 1024, 64);
          tile_load<6>(value, 64), tile_dot_bfloats<0, 4, 6>();
          tile_load<7>(value + 1024, 64), tile_dot_bfloats<1, 4, 7>();
        }
        tile_store<0>(out, 4 * state_.width), tile_store<1>(out + 16, 4 * state_.width);
      }
    }
  }

 private:
  const qc_attention& w_;
  const Piece& piece_;
  State& state_;
  const int64_t deep_, wide_, tall_;  // tiles of a head, as a factor and as a result; tiles of queries
  char *queries_, *keys_, *values_, *weights_, *gathered_;
};

template <int Dtype>
void attend_span_by_tiles(const qc_attention& w, const Piece& piece, int64_t first, int64_t last, State& state) {
  state.resize(w, piece, 16);
  TiledSpan span(w, piece, state);
  span.bring_queries<Dtype>();
  Tiles tiles(TiledSpan::shapes());
  for (int64_t base = first / kKeys * kKeys; base < last; base += kKeys) {
    const int from = first > base ? int(first - base) : 0, to = last - base < kKeys ? int(last - base) : kKeys;
    span.bring_keys(base, from, to);
    span.score(w.softcap > 0 ? w.scale : w.scale * kLog2e);
    shape(w, piece, base, from, to, state);
    soften(from, to, piece.rows(), state);
    span.weigh(from, to);
  }
}

}  // namespace QC_ISA
}  // namespace quire
#endif
