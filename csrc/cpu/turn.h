// Words of 32 bits in vectors of 64 bytes, whatever the instruction set, and the turning of small matrices of them.
#pragma once
#include "simd.h"

namespace quire {
namespace QC_ISA {

typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(64)));

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define QC_MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef QC_MIX
#define QC_MIX(a, b, ...) __builtin_shuffle(a, b, (Words){__VA_ARGS__})
#endif

inline Words load_words(const void* at) {
  Words v;
  memcpy(&v, at, sizeof v);
  return v;
}
inline void store_words(void* at, Words v) { memcpy(at, &v, sizeof v); }

inline Words low_words(Words a, Words b) { return QC_MIX(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29); }
inline Words high_words(Words a, Words b) { return QC_MIX(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31); }
inline Words low_pairs(Words a, Words b) { return QC_MIX(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29); }
inline Words high_pairs(Words a, Words b) { return QC_MIX(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31); }
inline Words even_fours(Words a, Words b) { return QC_MIX(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27); }
inline Words odd_fours(Words a, Words b) { return QC_MIX(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31); }
inline Words low_fours(Words a, Words b) { return QC_MIX(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23); }
inline Words high_fours(Words a, Words b) { return QC_MIX(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31); }

// Four rows: t[q] then holds, in its fours, words q, 4 + q, 8 + q, 12 + q of all four.
inline void turn_four(const Words* rows, Words* t) {
  Words a = low_words(rows[0], rows[1]), b = high_words(rows[0], rows[1]);
  Words c = low_words(rows[2], rows[3]), d = high_words(rows[2], rows[3]);
  t[0] = low_pairs(a, c), t[1] = high_pairs(a, c), t[2] = low_pairs(b, d), t[3] = high_pairs(b, d);
}

// 16 rows of 16 words, `stride` bytes apart, to 16 columns one after another.
inline void turn_16(const void* from, int64_t stride, void* to) {
  Words rows[16], t[16];
  for (int i = 0; i < 16; ++i) rows[i] = load_words(static_cast<const char*>(from) + i * stride);
  for (int i = 0; i < 16; i += 4) turn_four(rows + i, t + i);
  char* out = static_cast<char*>(to);
  for (int q = 0; q < 4; ++q) {
    Words a = even_fours(t[q], t[4 + q]), b = odd_fours(t[q], t[4 + q]);
    Words c = even_fours(t[8 + q], t[12 + q]), d = odd_fours(t[8 + q], t[12 + q]);
    store_words(out + 64 * q, even_fours(a, c)), store_words(out + 64 * (8 + q), odd_fours(a, c));
    store_words(out + 64 * (4 + q), even_fours(b, d)), store_words(out + 64 * (12 + q), odd_fours(b, d));
  }
}

// 32 floats rounded to bfloat16. Where that is an instruction, numbers too small to be normal become zero.
inline Words side_by_side(Floats a, Floats b) {
#if defined(__AVX512BF16__)
  return (Words)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
  uint16_t to[32];
  for (int i = 0; i < 16; ++i) to[i] = float_to_bfloat(a[i]), to[16 + i] = float_to_bfloat(b[i]);
  return load_words(to);
#endif
}

// Two rows of floats, rounded to bfloat16 and put side by side in words: `a` in the low halves.
inline Words join_bfloats(Floats a, Floats b) {
#if defined(__AVX512BF16__)
  const Shorts order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  return (Words)_mm512_permutexvar_epi16((__m512i)order, both);
#else
  auto rounded = [](Floats v) {
    Words bits = (Words)v, up = bits + 0x7fff + (bits >> 16 & 1);
    Words odd = (Words)((bits & 0x7fffffff) > 0x7f800000);  // not a number
    return (up & ~odd) | ((bits | 0x400000) & odd);
  };
  return rounded(a) >> 16 | (rounded(b) & 0xffff0000u);
#endif
}

// rows of joined words [8][16] to columns of 8 words: 32 bytes to each of the first `count` of 16 places.
inline void turn_8_to(const Words (&rows)[8], char* to, int64_t stride, int count) {
  Words t[8];
  turn_four(rows, t), turn_four(rows + 4, t + 4);
  for (int q = 0; q < 4; ++q) {
    Words low = low_fours(t[q], t[4 + q]), high = high_fours(t[q], t[4 + q]);
    if (q < count) memcpy(to + q * stride, &low, 32);
    if (4 + q < count) memcpy(to + (4 + q) * stride, reinterpret_cast<char*>(&low) + 32, 32);
    if (8 + q < count) memcpy(to + (8 + q) * stride, &high, 32);
    if (12 + q < count) memcpy(to + (12 + q) * stride, reinterpret_cast<char*>(&high) + 32, 32);
  }
}

// The instruction that multiplies pairs of bfloat16 (AVX512-BF16). With QC_EMULATE_BF16 a plain loop does its work, for tests.
#if defined(__AVX512BF16__) || defined(QC_EMULATE_BF16)
#define QC_PAIRS 1
#if defined(QC_EMULATE_BF16)
inline Floats add_pairs(Floats sum, Words weight, uint32_t pair) {
  for (int i = 0; i < 16; ++i) {
    sum[i] += bfloat_to_float(uint16_t(weight[i])) * bfloat_to_float(uint16_t(pair));
    sum[i] += bfloat_to_float(uint16_t(weight[i] >> 16)) * bfloat_to_float(uint16_t(pair >> 16));
  }
  return sum;
}
#else
inline Floats add_pairs(Floats sum, Words weight, uint32_t pair) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)_mm512_set1_epi32(int(pair)));
}
#endif
#else
#define QC_PAIRS 0
#endif

}  // namespace QC_ISA
}  // namespace quire
