// From logits to tokens: the best one, or a draw after temperature, min-p, top-k and top-p, without sorting a
// vocabulary; log probabilities and the largest of them. One row is one piece of work.
//
// Thresholds are found with a histogram of distances from the best logit: the bucket that holds the edge is known after
// one pass, and only its members are put in order. The draw takes the largest of logit + noise; an upper bound of the
// noise, two instructions instead of two logarithms, leaves a few tokens whose noise must be known exactly.
#pragma once
#include <math.h>

#include <algorithm>
#include <vector>

#include "rows.h"

namespace quire {
namespace QC_ISA {

constexpr int kBuckets = 2048, kPerNat = 64;  // up to 32 nats below the best; the last bucket holds the rest

struct Scratch {
  std::vector<float> scaled, part;
  int32_t counts[kBuckets];
  double mass[kBuckets];
};

inline void buckets_of(const float* x, float top, int32_t (&out)[kLanes]) {
  vf far = (fill(top) - load(x)) * fill(float(kPerNat));
  vi whole = __builtin_convertvector(-larger(-far, fill(-float(kBuckets - 1))), vi);
  memcpy(out, &whole, sizeof whole);
}

// Members of one bucket, largest first. `width` is a multiple of kLanes here and below.
inline void members(const float* x, int64_t width, float top, float floor, int bucket, std::vector<float>& out) {
  out.clear();
  for (int64_t i = 0; i < width; i += kLanes) {
    int32_t own[kLanes];
    buckets_of(x + i, top, own);
    for (int j = 0; j < kLanes; ++j)
      if (own[j] == bucket && x[i + j] >= floor) out.push_back(x[i + j]);
  }
  std::sort(out.begin(), out.end(), [](float a, float b) { return a > b; });
}

// The k-th largest of a row whose largest is `top`; k is at most the numbers there are.
inline float kth_largest(const float* x, int64_t width, float top, int64_t k, Scratch& scratch) {
  memset(scratch.counts, 0, sizeof scratch.counts);
  for (int64_t i = 0; i < width; i += kLanes) {
    int32_t own[kLanes];
    buckets_of(x + i, top, own);
    for (int j = 0; j < kLanes; ++j) ++scratch.counts[own[j]];
  }
  int bucket = 0;
  for (; k > scratch.counts[bucket]; ++bucket) k -= scratch.counts[bucket];
  members(x, width, top, -INFINITY, bucket, scratch.part);
  return scratch.part[size_t(k - 1)];
}

// The smallest number that top-p keeps among those not below `floor`: a token stays while those before it sum to less
// than p.
inline float nucleus(const float* x, int64_t width, float top, float floor, double p, Scratch& scratch) {
  memset(scratch.mass, 0, sizeof scratch.mass);
  for (int64_t i = 0; i < width; i += kLanes) {
    float share[kLanes];
    int32_t own[kLanes];
    store(share, exp_of(load(x + i) - fill(top)));
    buckets_of(x + i, top, own);
    for (int j = 0; j < kLanes; ++j)
      if (x[i + j] >= floor) scratch.mass[own[j]] += share[j];
  }
  double all = 0, before = 0;
  for (double part : scratch.mass) all += part;
  int bucket = 0;
  while (bucket < kBuckets - 1 && before + scratch.mass[bucket] < p * all) before += scratch.mass[bucket++];
  members(x, width, top, floor, bucket, scratch.part);
  float edge = top;
  for (float value : scratch.part) {
    if (before >= p * all) break;
    edge = value;
    before += expf(value - top);
  }
  return edge;
}

inline uint64_t mix(uint64_t z) {  // the finaliser of splitmix64
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

template <class U>
inline U noise_bits(U ids, U low, U high) {  // 31 bits; U is one number or a vector of them
  U x = ids * 0x9E3779B1u + low;
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= high;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  x ^= x >> 16;
  return x >> 1;
}

inline float gumbel(uint32_t bits) {
  const float u = fminf((float(int32_t(bits)) + 0.5f) * 4.656612873077393e-10f, 1.0f - 5.9604644775390625e-8f);
  return -logf(-log1pf(-u));
}

struct Choice {
  int64_t token;
  float score;
};

// The largest of x + noise among numbers not below `floor`; `first` is the index of the largest.
inline Choice noisy_best(const float* x, int64_t width, float floor, int64_t first, uint64_t seed, uint64_t position) {
  const uint64_t key = mix(mix(seed) + position * 0x9E3779B97F4A7C15u);
  const uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
  Choice best = {first, x[first] + gumbel(noise_bits(uint32_t(first), low, high))};
  // -log(-log(1 - u)) <= -log(u), and the bits of a float read as a number are below its logarithm to base 2
  constexpr float kStep = -0.6931471805599453f / 8388608.0f, kBegin = 0.6931471805599453f * (31 + 127) + 1e-3f;
  vu ids;
  for (int j = 0; j < kLanes; ++j) ids[j] = uint32_t(j);
  const vu lows = (vu)fill_int(int32_t(low)), highs = (vu)fill_int(int32_t(high));
  for (int64_t i = 0; i < width; i += kLanes, ids += uint32_t(kLanes)) {
    const vu bits = noise_bits(ids, lows, highs);
    const vf number = __builtin_convertvector((vi)bits, vf) + fill(0.5f);
    const vf most = fma(__builtin_convertvector((vi)number, vf), fill(kStep), fill(kBegin)) + load(x + i);
    if (!(largest(most) >= best.score)) continue;
    for (int j = 0; j < kLanes; ++j) {
      if (!(most[j] >= best.score) || !(x[i + j] >= floor)) continue;
      const float score = x[i + j] + gumbel(bits[j]);
      if (score > best.score || (score == best.score && i + j < best.token)) best = {i + j, score};
    }
  }
  return best;
}

template <int Dtype>
Choice draw_row(const qc_draw& w, int64_t row, Scratch& scratch) {
  typedef Numbers<Dtype> N;
  const typename N::Type* from = static_cast<const typename N::Type*>(w.logits) + row * w.stride;
  int64_t best = best_of<Dtype>(from, w.width);
  const float heat = w.temperature[row];
  if (!(heat > 0)) return {best, N::one(from + best)};
  const int64_t width = (w.width + kLanes - 1) / kLanes * kLanes;
  scratch.scaled.resize(size_t(width));
  float* x = scratch.scaled.data();
  int64_t i = 0;
  for (; i + kLanes <= w.width; i += kLanes) store(x + i, N::read(from + i) / fill(heat));
  for (; i < w.width; ++i) x[i] = N::one(from + i) / heat;
  for (; i < width; ++i) x[i] = -INFINITY;
  const float top = x[best];
  if (!(fabsf(top) < INFINITY)) {  // nothing to draw: no number, none allowed, or beyond all others
    for (int64_t j = best; j-- > 0;) best = x[j] == top ? j : best;
    return {best, top};
  }
  float floor = w.floors[row] + top;
  if (w.top_k[row] > 0 && w.top_k[row] < w.width) floor = fmaxf(floor, kth_largest(x, width, top, w.top_k[row], scratch));
  if (w.top_p[row] < 1) floor = fmaxf(floor, nucleus(x, width, top, floor, w.top_p[row], scratch));
  return noisy_best(x, width, floor, best, uint64_t(w.seeds[row]), uint64_t(w.positions[row]));
}

template <int Dtype>
void draw(const qc_draw& w) {
  auto work = [&](int64_t row) {
    static thread_local Scratch scratch;
    const Choice found = draw_row<Dtype>(w, row, scratch);
    w.tokens[row] = found.token, w.scores[row] = found.score;
  };
  each_row(w.rows, w.width, work);
}

template <int Dtype>
void log_softmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, float* out) {
  typedef Numbers<Dtype> N;
  auto work = [=](int64_t row) {
    const typename N::Type* from = static_cast<const typename N::Type*>(x) + row * x_stride;
    float* to = out + row * width;
    const float top = N::one(from + best_of<Dtype>(from, width));
    double all = 0;
    int64_t i = 0;
    while (i + kLanes <= width) {
      vf some = fill(0);
      for (const int64_t stop = std::min(width, i + 64 * kLanes); i + kLanes <= stop; i += kLanes)
        some = some + exp_of(N::read(from + i) - fill(top));
      all += sum(some);
    }
    for (; i < width; ++i) all += expf(N::one(from + i) - top);
    const float rest = float(log(all));
    for (i = 0; i + kLanes <= width; i += kLanes) store(to + i, N::read(from + i) - fill(top) - fill(rest));
    for (; i < width; ++i) to[i] = N::one(from + i) - top - rest;
  };
  each_row(rows, width, work);
}

struct Entry {
  float value;
  int64_t id;
  bool operator<(const Entry& other) const {  // what comes first
    return value > other.value || (value == other.value && id < other.id);
  }
};

// Of each row: the entry `chosen`, then the k largest (equals by rising id); and how many are larger than the chosen, plus 1.
inline void top_of(const float* x, int64_t rows, int64_t width, const int64_t* chosen, int64_t k, float* values,
                   int64_t* ids, int64_t* ranks) {
  auto work = [=](int64_t row) {
    static thread_local std::vector<Entry> kept;
    const float *from = x + row * width, mine = from[chosen[row]];
    const size_t most = size_t(std::max<int64_t>(2 * k, 256)), wanted = size_t(k);
    float least = -INFINITY;
    bool full = k == 0;
    int64_t larger_ones = 0;
    kept.clear();
    auto look = [&](int64_t i) {
      const float v = from[i] == from[i] ? from[i] : -INFINITY;
      if (k == 0 || (full && !(v > least))) return;
      kept.push_back({v, i});
      if (kept.size() < most) return;
      std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end());
      kept.resize(wanted);
      least = kept[wanted - 1].value, full = true;
    };
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      vf v = load(from + i);
      vi above = (vi)(v > fill(mine));
      for (int j = 0; j < kLanes; ++j) larger_ones -= above[j];
      if (full && !(largest(v) > least)) continue;
      for (int j = 0; j < kLanes; ++j) look(i + j);
    }
    for (; i < width; ++i) larger_ones += from[i] > mine, look(i);
    std::sort(kept.begin(), kept.end());
    values[row * (k + 1)] = mine, ids[row * (k + 1)] = chosen[row], ranks[row] = larger_ones + 1;
    for (int64_t j = 0; j < k; ++j) values[row * (k + 1) + 1 + j] = kept[size_t(j)].value, ids[row * (k + 1) + 1 + j] = kept[size_t(j)].id;
  };
  each_row(rows, width, work);
}

// In these rows, what the bits do not name becomes -inf; neither does what lies beyond the last word.
inline void allow(float* x, int64_t x_stride, int64_t width, const int64_t* rows, int64_t count, const uint32_t* bits,
                  int64_t num_words) {
  auto work = [=](int64_t i) {
    float* row = x + rows[i] * x_stride;
    const uint32_t* own = bits + i * num_words;
    for (int64_t word = 0; word * 32 < width; ++word) {
      const uint32_t now = word < num_words ? own[word] : 0;
      if (now == 0xffffffffu) continue;
      float* to = row + word * 32;
      const int64_t many = std::min<int64_t>(32, width - word * 32);
      for (int64_t j = 0; j < many; ++j) to[j] = now >> j & 1 ? to[j] : -INFINITY;
    }
  };
  each_row(count, width, work);
}

}  // namespace QC_ISA
}  // namespace quire
