// The small layer under the kernels, once per instruction set. AVX-512 serves avx512, avx512bf16 and amx.
//
// `Four` are neighbouring floats, of which times<I> and fma_one<I> take one for all lanes. `Sums` are the sums of four
// vectors, each over its lanes.
// vf is a vector of kLanes floats, vi of as many 32-bit integers, vb of four times as many bytes. Arithmetic operators
// work on all of them (compilers' vector extensions); what has no operator is a function here. `Quads` are 16 bytes of
// one row's quantized numbers; dot<Q>(sums, bytes, quads) adds to each lane the product of its 4 bytes and quad Q.
#pragma once
#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include "blocks.h"

#if defined(__AMX_INT8__) || defined(QC_EMULATE_AMX)
#define QC_TILES 1
#else
#define QC_TILES 0
#endif

// Before loops over arrays of vectors: what the compiler does not unroll, it keeps in memory.
#define QC_UNROLL _Pragma("GCC unroll 16")

namespace quire {
namespace QC_ISA {

typedef float Sums __attribute__((vector_size(16)));

#if defined(__aarch64__)

constexpr int kLanes = 4, kTall = 8, kDotRows = 4, kTileOfRows = 8;
typedef float32x4_t vf;
typedef int32x4_t vi;
typedef uint32x4_t vu;
typedef uint8x16_t vb;
inline vi plus(vi a, vi b) { return (vi)((vu)a + (vu)b); }  // wraps, where numbers are none

inline vf load(const float* at) { return vld1q_f32(at); }
inline void store(float* at, vf v) { vst1q_f32(at, v); }
inline vf fill(float v) { return vdupq_n_f32(v); }
inline vi fill_int(int v) { return vdupq_n_s32(v); }
inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }  // a * b + c
inline vf larger(vf a, vf b) { return vmaxq_f32(a, b); }
inline vi larger_whole(vi a, vi b) { return vmaxq_s32(a, b); }
inline int32_t largest_whole(vi v) { return vmaxvq_s32(v); }
inline vf load_half(const uint16_t* at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }
inline vf load_bfloat(const uint16_t* at) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at), 16)); }
inline float sum(vf v) { return vaddvq_f32(v); }
inline vf quotient(vf a, vf b) { return a / b; }
inline float largest(vf v) { return vmaxvq_f32(v); }
inline Sums sum_each(vf a, vf b, vf c, vf d) { return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)); }
inline uint16x4_t to_halves(vf v) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); }
inline uint16x4_t to_bfloats(vf v) {  // as float_to_bfloat
  vi bits = (vi)v, up = (vi)((vu)bits + 0x7fff + (((vu)bits >> 16) & 1)), odd = (vi)(v != v);
  return vshrn_n_u32((uint32x4_t)((up & ~odd) | ((bits | 0x400000) & odd)), 16);
}

inline vb load_bytes(const uint8_t* at) { return vld1q_u8(at); }
typedef int8x16_t Quads;
inline Quads load_quads(const int8_t* at) { return vld1q_s8(at); }

template <int Q, int Bits>
inline vi dot(vi sums, vb bytes, Quads quads) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_laneq_s32(sums, vreinterpretq_s8_u8(bytes), quads, Q);
#else
  int8x16_t mine = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(quads), Q));
  int8x16_t w = vreinterpretq_s8_u8(bytes);
  int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(mine)), high = vmull_high_s8(w, mine);
  return plus(sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
constexpr int kSignedZero = 0;  // what dot() adds to signed bytes: nothing here
inline vb signed_bytes(vb v) { return v; }
constexpr bool kSignedDot = true;  // dot() takes bytes as signed numbers

// A constant through a load, which costs no time of the units that multiply.
inline vi fixed(const int32_t* at) {
  vi v;
  asm volatile("ldr %q0, %1" : "=w"(v) : "m"(*reinterpret_cast<const int32_t(*)[4]>(at)));
  return v;
}
typedef float32x4_t Four;
inline Four load_four(const float* at) { return vld1q_f32(at); }
template <int I>
inline vf times(vf a, Four b) { return vmulq_laneq_f32(a, b, I); }
template <int I>
inline vf fma_one(vf a, Four b, vf c) { return vfmaq_laneq_f32(c, a, b, I); }

// 32 whole numbers as bytes, and their sums by halves.
inline void narrow(int8_t* to, const vi (&v)[8], int32_t (&sums)[2]) {
  for (int h = 0; h < 2; ++h) {
    int16x8_t low = vcombine_s16(vmovn_s32(v[4 * h]), vmovn_s32(v[4 * h + 1]));
    int16x8_t high = vcombine_s16(vmovn_s32(v[4 * h + 2]), vmovn_s32(v[4 * h + 3]));
    vst1q_s8(to + 16 * h, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    sums[h] = vaddvq_s32(plus(plus(v[4 * h], v[4 * h + 1]), plus(v[4 * h + 2], v[4 * h + 3])));
  }
}

#elif defined(__AVX512F__)

constexpr int kLanes = 16, kTall = 8, kDotRows = 4, kTileOfRows = 8;
typedef __m512 vf;
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint8_t vb __attribute__((vector_size(64)));
inline vi plus(vi a, vi b) { return (vi)((vu)a + (vu)b); }

inline vf load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, vf v) { _mm512_storeu_ps(at, v); }
inline vf fill(float v) { return _mm512_set1_ps(v); }
inline vi fill_int(int v) { return (vi)_mm512_set1_epi32(v); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vi larger_whole(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline int32_t largest_whole(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
inline vf load_half(const uint16_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
inline vf load_bfloat(const uint16_t* at) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline __m256i to_bfloats(vf v) {  // as float_to_bfloat
  vi bits = (vi)v, up = (vi)((vu)bits + 0x7fff + (((vu)bits >> 16) & 1));
  __m512i chosen = _mm512_mask_mov_epi32((__m512i)up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), (__m512i)(bits | 0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
}
inline __m256i to_halves(vf v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline float sum(vf v) { return _mm512_reduce_add_ps(v); }
inline vf quotient(vf a, vf b) {  // b from 1 on; a division takes four times as long
  vf part = _mm512_rcp14_ps(b);
  return a * part * (fill(2) - b * part);
}
inline Sums sum_each(vf a, vf b, vf c, vf d) {
  vf ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b), cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  vf all = (vf)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd) + (vf)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
  return (Sums)(_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
}
inline float largest(vf v) { return _mm512_reduce_max_ps(v); }

inline vb load_bytes(const uint8_t* at) { return (vb)_mm512_loadu_si512(at); }
typedef const int8_t* Quads;
inline Quads load_quads(const int8_t* at) { return at; }

template <int Q, int Bits>
inline vi dot(vi sums, vb bytes, Quads quads) {
  // By hand, because compilers load the quad by an instruction of its own.
  typedef struct { char four[4]; } Quad;
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(bytes), "m"(*reinterpret_cast<const Quad*>(quads + 4 * Q)));
  return sums;
}
constexpr int kSignedZero = 128;  // signed bytes are multiplied as unsigned ones, 128 larger
inline vb signed_bytes(vb v) { return v ^ (uint8_t)128; }

#else  // AVX2

constexpr int kLanes = 8, kTall = 4, kDotRows = 2, kTileOfRows = 4;
typedef __m256 vf;
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));
typedef uint8_t vb __attribute__((vector_size(32)));
inline vi plus(vi a, vi b) { return (vi)((vu)a + (vu)b); }

inline vf load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, vf v) { _mm256_storeu_ps(at, v); }
inline vf fill(float v) { return _mm256_set1_ps(v); }
inline vi fill_int(int v) { return (vi)_mm256_set1_epi32(v); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf larger(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vi larger_whole(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
inline int32_t largest_whole(vi v) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
inline vf load_half(const uint16_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
inline vf load_bfloat(const uint16_t* at) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline __m128i to_halves(vf v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline __m128i to_bfloats(vf v) {  // as float_to_bfloat
  vi bits = (vi)v, up = (vi)((vu)bits + 0x7fff + (((vu)bits >> 16) & 1)), odd = (vi)(v != v);
  __m256i chosen = _mm256_srli_epi32((__m256i)((up & ~odd) | ((bits | 0x400000) & odd)), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}
inline Sums sum_each(vf a, vf b, vf c, vf d) {
  vf all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return (Sums)(_mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
}
inline vf quotient(vf a, vf b) { return a / b; }
inline float sum(vf v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(vf v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline vb load_bytes(const uint8_t* at) { return (vb)_mm256_loadu_si256((const __m256i*)at); }
typedef const int8_t* Quads;
inline Quads load_quads(const int8_t* at) { return at; }

// Pairs are summed in 16 bits: 127 * 63 * 2 fits for up to 6 bits; signed bytes give their sign to the other side.
template <int Q, int Bits>
inline vi dot(vi sums, vb bytes, Quads quads) {
  int32_t quad;
  memcpy(&quad, quads + 4 * Q, 4);
  __m256i mine = _mm256_set1_epi32(quad), w = (__m256i)bytes;
  if (Bits == 8) mine = _mm256_sign_epi8(mine, w), w = _mm256_abs_epi8(w);
  __m256i pairs = _mm256_maddubs_epi16(w, mine);
  return plus(sums, (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
constexpr int kSignedZero = 0;
inline vb signed_bytes(vb v) { return v; }

#endif

#if defined(__aarch64__)
constexpr int kAheadBytes = 0;
#else
constexpr int kAheadBytes = 4096;  // of weights, asked for before they are read: a core asks for too little by itself
#endif
constexpr int kTileRows = kTall;  // quantized rows that lie together, and are multiplied at once

#if !defined(__aarch64__)
constexpr bool kSignedDot = false;
inline vi fixed(const int32_t* at) { return fill_int(*at); }
typedef const float* Four;  // four neighbouring floats
inline Four load_four(const float* at) { return at; }
template <int I>
inline vf times(vf a, Four b) { return a * fill(b[I]); }
template <int I>
inline vf fma_one(vf a, Four b, vf c) { return fma(a, fill(b[I]), c); }
#if defined(__AVX512F__)
inline void narrow(int8_t* to, const vi (&v)[2], int32_t (&sums)[2]) {
  for (int h = 0; h < 2; ++h) {
    _mm_storeu_si128((__m128i*)(to + 16 * h), _mm512_cvtepi32_epi8((__m512i)v[h]));
    __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)v[h]), _mm512_extracti64x4_epi64((__m512i)v[h], 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    sums[h] = _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
}
#else
inline void narrow(int8_t* to, const vi (&v)[kBlock / kLanes], int32_t (&sums)[2]) {
  int32_t whole[kBlock];
  memcpy(whole, v, sizeof whole);
  uint32_t all[2] = {0, 0};
  for (int i = 0; i < kBlock; ++i) to[i] = int8_t(whole[i]), all[i / 16] += uint32_t(whole[i]);
  sums[0] = int32_t(all[0]), sums[1] = int32_t(all[1]);
}
#endif
#endif

// body(integral_constant 0), body(integral_constant 1) ...
template <class F, int... I>
inline void unroll(std::integer_sequence<int, I...>, F&& body) {
  (body(std::integral_constant<int, I>()), ...);
}

// The largest size (absolute value) of numbers, step by step, as bits: what is not a number is larger than all others.
inline vi larger_size(vi most, vf v) { return larger_whole(most, (vi)v & fill_int(0x7fffffff)); }
inline float largest_size(vi most) {
  const int32_t bits = largest_whole(most);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Numbers of a dtype, read and written as floats.
template <int Dtype>
struct Numbers {
  typedef uint16_t Type;
  static vf read(const Type* at) { return Dtype == QC_BF16 ? load_bfloat(at) : load_half(at); }
  static float one(const Type* at) { return Dtype == QC_BF16 ? bfloat_to_float(*at) : half_to_float(*at); }
  static void put_one(Type* at, float v) { *at = Dtype == QC_BF16 ? float_to_bfloat(v) : float_to_half(v); }
  static void write(Type* at, vf v) {
    auto numbers = Dtype == QC_BF16 ? to_bfloats(v) : to_halves(v);
    memcpy(at, &numbers, sizeof numbers);
  }
  static vf some(const Type* at, int64_t count) {  // and zeros
    Type numbers[kLanes] = {};
    memcpy(numbers, at, size_t(count) * sizeof(Type));
    return read(numbers);
  }
  static float rounded(float v) { return Dtype == QC_BF16 ? bfloat_to_float(float_to_bfloat(v)) : half_to_float(float_to_half(v)); }
  static vf all_rounded(vf v) {
    if constexpr (Dtype == QC_BF16) {  // as float_to_bfloat
      vi bits = (vi)v, odd = (vi)(v != v), up = (vi)((vu)bits + 0x7fff + (((vu)bits >> 16) & 1));
      return (vf)(((up & ~odd) | ((bits | 0x400000) & odd)) & int32_t(0xffff0000));
    }
    Type numbers[kLanes];
    write(numbers, v);
    return read(numbers);
  }
};
template <>
struct Numbers<QC_F32> {
  typedef float Type;
  static vf read(const float* at) { return load(at); }
  static float one(const float* at) { return *at; }
  static void put_one(float* at, float v) { *at = v; }
  static void write(float* at, vf v) { store(at, v); }
  static vf some(const float* at, int64_t count) {
    float numbers[kLanes] = {};
    memcpy(numbers, at, size_t(count) * sizeof(float));
    return load(numbers);
  }
  static float rounded(float v) { return v; }
  static vf all_rounded(vf v) { return v; }
};

// exp with an error below 2 units in the last place; 0 below -87.3, and for -inf.
inline vf exp_of(vf x) {
  const vf magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  vf least = fill(-87.3f), most = fill(88.3f);
  vi under = (vi)(x < least);
  x = larger(least, x);  // in this order one that is not a number stays so on every machine
  x = -larger(-most, -x);
  vf shifted = fma(x, fill(1.44269504f), magic);
  vf whole = shifted - magic;
  vf rest = fma(whole, fill(-0.693359375f), x);
  rest = fma(whole, fill(2.12194440e-4f), rest);
  vf y = fill(1.9875691500e-4f);
  y = fma(y, rest, fill(1.3981999507e-3f));
  y = fma(y, rest, fill(8.3334519073e-3f));
  y = fma(y, rest, fill(4.1665795894e-2f));
  y = fma(y, rest, fill(1.6666665459e-1f));
  y = fma(y, rest, fill(5.0000001201e-1f));
  y = fma(y, rest * rest, rest) + fill(1.0f);
  vu power = (vu)shifted << 23;  // the low bits of `shifted` are the whole number
  return (vf)((vi)((vu)y + power) & ~under);
}

// 2^x of numbers that are not above 0, with an error below 2 units in the last place; 0 below -126, and for -inf.
inline vf power_of_two(vf x) {
  const vf magic = fill(12582912.0f);
  vi under = (vi)(x < fill(-126));
  x = larger(fill(-126), x);
  vf shifted = x + magic, rest = x - (shifted - magic);
  vf y = fma(fill(1.326472731e-3f), rest, fill(9.671512991e-3f));
  y = fma(y, rest, fill(5.550733581e-2f));
  y = fma(y, rest, fill(2.402224243e-1f));
  y = fma(y, rest, fill(6.931470037e-1f));
  y = fma(y, rest, fill(1));
  return (vf)((vi)((vu)y + ((vu)shifted << 23)) & ~under);
}

}  // namespace QC_ISA
}  // namespace quire
