// Attention within texts that are read at once: every query of a text over all of its keys, in both directions, float32.
//
// One head of one text at a time. Keys are turned into panels (see float_panels.h) and values are laid into some, so that
// scores and sums are products like any other; the scores of the queries that a product takes at once stay near in between.
#pragma once
#include <math.h>

#include <vector>

#include "float_panels.h"
#include "turn.h"

namespace quire {
namespace QC_ISA {

constexpr float kLog2OfE = 1.44269504f;

class TextHead {
 public:
  TextHead(const qc_texts& work, int64_t text, int64_t head, int64_t first_query, int64_t first_key) : w_(work) {
    queries_ = work.query_lens[text], keys_ = work.key_lens[text], wide_ = (keys_ + kPanel - 1) / kPanel * kPanel;
    const int64_t kv_head = head / (work.heads / work.kv_heads);
    q_ = work.q + first_query * work.q_stride + head * work.size;
    k_ = work.k + first_key * work.k_stride + kv_head * work.size;
    v_ = work.v + first_key * work.v_stride + kv_head * work.size;
    out_ = work.out + (first_query * work.heads + head) * work.size;
  }

  void run() {
    if (!queries_) return;
    static thread_local std::vector<float> memory;
    const int64_t size = w_.size;
    memory.resize(size_t((2 * size + kFloatRows) * wide_ + kPanel * size));
    float *keys = memory.data(), *values = keys + wide_ * size, *scores = values + wide_ * size;
    turn_keys(keys, scores + kFloatRows * wide_);
    lay_values(values);
    for (int64_t row = 0, many; row < queries_; row += many) {
      many = score(row, keys, scores);
      float totals[kFloatRows];
      for (int64_t r = 0; r < many; ++r) totals[r] = weigh(row + r, scores + r * wide_);
      sum_up(row, many, scores, values, totals);
    }
  }

 protected:
  // Panels of 16 keys, input by input; keys that there are not are zero.
  void turn_keys(float* to, float* spare) const {
    const int64_t size = w_.size;
    for (int64_t key = 0; key < wide_; key += kPanel, to += kPanel * size) {
      const float* from = k_ + key * w_.k_stride;
      int64_t stride = w_.k_stride;
      if (keys_ - key < kPanel) {
        memset(spare, 0, size_t(kPanel * size) * sizeof(float));
        for (int64_t i = 0; i < keys_ - key; ++i) memcpy(spare + i * size, from + i * stride, size_t(size) * sizeof(float));
        from = spare, stride = size;
      }
      for (int64_t i = 0; i < size; i += kPanel) turn_16(from + i, stride * int64_t(sizeof(float)), to + i * kPanel);
    }
  }

  // Panels of 16 numbers of a head, key by key.
  void lay_values(float* to) const {
    for (int64_t i = 0; i < w_.size; i += kPanel, to += kPanel * wide_) {
      for (int64_t key = 0; key < keys_; ++key) memcpy(to + key * kPanel, v_ + key * w_.v_stride + i, kPanel * sizeof(float));
      memset(to + keys_ * kPanel, 0, size_t((wide_ - keys_) * kPanel) * sizeof(float));
    }
  }

  // Scores of some queries from `row` on, [many, wide_]; returns how many.
  int64_t score(int64_t row, const float* keys, float* scores) const {
    const float* from = q_ + row * w_.q_stride;
    int64_t many = 0, at = 0;
    for (; at + kFloatPanels * kPanel <= wide_; at += kFloatPanels * kPanel)
      many = some_rows_of_floats<kFloatPanels>(queries_ - row, from, w_.q_stride, keys + at * w_.size, w_.size, scores + at, wide_);
    for (; at < wide_; at += kPanel)
      many = some_rows_of_floats<1>(queries_ - row, from, w_.q_stride, keys + at * w_.size, w_.size, scores + at, wide_);
    return many;
  }

  // Scores of one query become weights; returns their sum. Keys that it does not see have weight 0.
  float weigh(int64_t query, float* scores) const {
    for (int64_t key = keys_; key < wide_; ++key) scores[key] = -INFINITY;
    if (w_.window) {
      for (int64_t key = 0; key < keys_; ++key)
        if (key <= query - w_.window || key >= query + w_.window) scores[key] = -INFINITY;
    }
    const vf scale = fill(w_.scale * kLog2OfE), top = fill(most_of(scores)) * scale;
    vf total = fill(0);
    for (int64_t i = 0; i < wide_; i += kLanes) {
      const vf weight = power_of_two(fma(load(scores + i), scale, -top));
      store(scores + i, weight);
      total += weight;
    }
    return sum(total);
  }

  float most_of(const float* scores) const {
    vf most = fill(-INFINITY);
    int64_t i = 0;
    if (wide_ >= 4 * kLanes) {  // four chains, as one waits for itself
      vf all[4] = {most, most, most, most};
      for (; i + 4 * kLanes <= wide_; i += 4 * kLanes)
        QC_UNROLL for (int c = 0; c < 4; ++c) all[c] = larger(all[c], load(scores + i + c * kLanes));
      most = larger(larger(all[0], all[1]), larger(all[2], all[3]));
    }
    for (; i < wide_; i += kLanes) most = larger(most, load(scores + i));
    return largest(most);
  }

  void sum_up(int64_t row, int64_t many, const float* weights, const float* values, const float* totals) const {
    const int64_t stride = int64_t(w_.heads) * w_.size;
    float* to = out_ + row * stride;
    int64_t i = 0;
    for (; i + kFloatPanels * kPanel <= w_.size; i += kFloatPanels * kPanel)
      some_rows_of_floats<kFloatPanels>(many, weights, wide_, values + i * wide_, wide_, to + i, stride);
    for (; i < w_.size; i += kPanel) some_rows_of_floats<1>(many, weights, wide_, values + i * wide_, wide_, to + i, stride);
    for (int64_t r = 0; r < many; ++r, to += stride)
      for (i = 0; i < w_.size; i += kLanes) store(to + i, load(to + i) / fill(totals[r]));
  }

  const qc_texts& w_;
  const float *q_, *k_, *v_;
  float* out_;
  int64_t queries_, keys_, wide_;
};

#if QC_TILES
// The same by tiles: keys, values, queries and weights are parted (see float_tiles.h), for 32 queries at a time. Weights are
// parted as they come, and divided by their sum at the end.
class TiledTextHead : TextHead {
 public:
  TiledTextHead(const qc_texts& work, int64_t text, int64_t head, int64_t first_query, int64_t first_key)
      : TextHead(work, text, head, first_query, first_key) {
    wide_ = (keys_ + kBlock - 1) / kBlock * kBlock, blocks_ = wide_ / kBlock;
  }

  // It is the text that decides, not what stands beside it.
  static bool serves(const qc_texts& work, int64_t text) { return work.size % kBlock == 0 && work.key_lens[text] >= 64; }

  void run() {
    if (!queries_) return;
    static thread_local std::vector<char> memory;
    const int64_t size = w_.size, parted = wide_ * size / (16 * kBlock) * kTiles, floats = 4 * wide_ * std::max<int64_t>(size, 32);
    char* keys = aligned(memory, 2 * parted + PartedRows::bytes(32, size) + PartedRows::bytes(32, wide_) + floats + 64 * size);
    char* values = keys + parted;
    const PartedRows queries = {values + parted, size / kBlock};
    const PartedRows weights = {queries.data + PartedRows::bytes(32, size), blocks_};
    float* scores = reinterpret_cast<float*>(weights.data + PartedRows::bytes(32, wide_));
    turn_keys(scores, scores + wide_ * size);
    put_panel(scores, kPanel, wide_ / kPanel * size, keys);
    lay_values(scores);
    put_panel(scores, kPanel, size / kPanel * wide_, values);
    Tiles tiles(shapes_of_parts(queries_));
    for (int64_t row = 0; row < queries_; row += 32) some(row, keys, values, queries, weights, scores);
  }

 private:
  void some(int64_t row, const char* keys, const char* values, const PartedRows& queries, const PartedRows& weights,
            float* scores) const {
    const int64_t many = queries_ - row < 32 ? queries_ - row : 32, size = w_.size, key_bytes = size / kBlock * kTiles;
    const float* from = q_ + row * w_.q_stride;
    for (int64_t r = 0; r < many; r += 16) queries.put_tile<QC_F32>(r, from, w_.q_stride, many);
    Nearer soon;
    for (int64_t at = 0; at < wide_; at += 32)
      multiply_parts(many > 16, true, queries.data, keys + at / kPanel * key_bytes, size / kBlock, scores + at, wide_, soon);
    float totals[32];
    for (int64_t r = 0; r < many; ++r) totals[r] = weigh(row + r, scores + r * wide_);
    for (int64_t r = 0; r < many; r += 16) weights.put_tile<QC_F32>(r, scores, wide_, many);
    sum_up(row, many, weights, values, totals);
  }

  void sum_up(int64_t row, int64_t many, const PartedRows& weights, const char* values, const float* totals) const {
    const int64_t stride = int64_t(w_.heads) * w_.size;
    alignas(64) float found[32 * 2 * kPanel];
    Nearer soon;
    for (int64_t i = 0; i < w_.size; i += 2 * kPanel) {
      multiply_parts(many > 16, true, weights.data, values + i / kPanel * blocks_ * kTiles, blocks_, found, 2 * kPanel, soon);
      float* to = out_ + row * stride + i;
      for (int64_t r = 0; r < many; ++r, to += stride)
        for (int c = 0; c < 2 * kPanel; c += kLanes) store(to + c, load(found + r * 2 * kPanel + c) / fill(totals[r]));
    }
  }

  int64_t blocks_;
};
#endif

inline void attend_texts(const qc_texts* work) {
  std::vector<int64_t> first_queries(size_t(work->texts)), first_keys(size_t(work->texts));
  for (int64_t i = 1; i < work->texts; ++i) {
    first_queries[i] = first_queries[i - 1] + work->query_lens[i - 1];
    first_keys[i] = first_keys[i - 1] + work->key_lens[i - 1];
  }
  auto one = [&](int item) {
    const int64_t text = item / work->heads;
#if QC_TILES
    if (TiledTextHead::serves(*work, text))
      return TiledTextHead(*work, text, item % work->heads, first_queries[text], first_keys[text]).run();
#endif
    TextHead(*work, text, item % work->heads, first_queries[text], first_keys[text]).run();
  };
  each(int(work->texts * work->heads), one);
}

}  // namespace QC_ISA
}  // namespace quire
