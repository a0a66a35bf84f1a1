// Eight rows times four columns of a panel, for ARM cores with sdot, by hand: compilers move and spill what fits exactly
// into 32 registers. Included by packed.h; computes bit for bit what tile<P, 8, 1> there does.
//
// v0-v7 sums of the rows, v8-v11 bytes of the panel, v12-v19 quantized rows and then scales times steps, v20 scales, v21 and v22 steps
// or totals of the rows, v23 kMagic, v24-v31 results. Constants come by loads, which the units that multiply have no part in.
#pragma once
#if defined(__ARM_FEATURE_DOTPROD) && !QC_TILES

#define QC_BEGIN                                                                                             \
  "ldr q0, [%[begin]]\nldr q1, [%[begin]]\nldr q2, [%[begin]]\nldr q3, [%[begin]]\n"                         \
  "ldr q4, [%[begin]]\nldr q5, [%[begin]]\nldr q6, [%[begin]]\nldr q7, [%[begin]]\n"
#define QC_ROWS0                                                                                             \
  "ldr q12, [%[q]]\nldr q13, [%[q], #32]\nldr q14, [%[q], #64]\nldr q15, [%[q], #96]\n"                      \
  "ldr q16, [%[q], #128]\nldr q17, [%[q], #160]\nldr q18, [%[q], #192]\nldr q19, [%[q], #224]\n"
#define QC_ROWS1                                                                                             \
  "ldr q12, [%[q], #16]\nldr q13, [%[q], #48]\nldr q14, [%[q], #80]\nldr q15, [%[q], #112]\n"                \
  "ldr q16, [%[q], #144]\nldr q17, [%[q], #176]\nldr q18, [%[q], #208]\nldr q19, [%[q], #240]\n"
#define QC_BYTES0 "ldr q8, [%[w]]\nldr q9, [%[w], #64]\nldr q10, [%[w], #128]\nldr q11, [%[w], #192]\n"
#define QC_BYTES1 "ldr q8, [%[w], #256]\nldr q9, [%[w], #320]\nldr q10, [%[w], #384]\nldr q11, [%[w], #448]\n"
#define QC_LOW                                                                                               \
  "movi v20.16b, #15\n" QC_BYTES0                                                                            \
  "and v8.16b, v8.16b, v20.16b\nand v9.16b, v9.16b, v20.16b\n"                                               \
  "and v10.16b, v10.16b, v20.16b\nand v11.16b, v11.16b, v20.16b\n"
#define QC_HIGH                                                                                              \
  QC_BYTES0 "ushr v8.16b, v8.16b, #4\nushr v9.16b, v9.16b, #4\nushr v10.16b, v10.16b, #4\nushr v11.16b, v11.16b, #4\n"
#define QC_DOT(w, lane)                                                                                      \
  "sdot v0.4s, " w ".16b, v12.4b[" lane "]\nsdot v1.4s, " w ".16b, v13.4b[" lane "]\n"                       \
  "sdot v2.4s, " w ".16b, v14.4b[" lane "]\nsdot v3.4s, " w ".16b, v15.4b[" lane "]\n"                       \
  "sdot v4.4s, " w ".16b, v16.4b[" lane "]\nsdot v5.4s, " w ".16b, v17.4b[" lane "]\n"                       \
  "sdot v6.4s, " w ".16b, v18.4b[" lane "]\nsdot v7.4s, " w ".16b, v19.4b[" lane "]\n"
#define QC_DOTS QC_DOT("v8", "0") QC_DOT("v9", "1") QC_DOT("v10", "2") QC_DOT("v11", "3")
#define QC_TIMES(to, steps, lane) "fmul " to ".4s, v20.4s, " steps ".s[" lane "]\n"
#define QC_WHOLE(sum) "fsub " sum ".4s, " sum ".4s, v23.4s\n"
#define QC_ADD(out, sum, by) "fmla " out ".4s, " sum ".4s, " by ".4s\n"
#define QC_SUMS                                                                                              \
  "ldp q21, q22, [%[step]]\n" QC_TIMES("v12", "v21", "0") QC_TIMES("v13", "v21", "1")                        \
  QC_TIMES("v14", "v21", "2") QC_TIMES("v15", "v21", "3") QC_TIMES("v16", "v22", "0")                        \
  QC_TIMES("v17", "v22", "1") QC_TIMES("v18", "v22", "2") QC_TIMES("v19", "v22", "3")                        \
  QC_WHOLE("v0") QC_WHOLE("v1") QC_WHOLE("v2") QC_WHOLE("v3") QC_WHOLE("v4") QC_WHOLE("v5") QC_WHOLE("v6")   \
  QC_WHOLE("v7") QC_ADD("v24", "v0", "v12") QC_ADD("v25", "v1", "v13") QC_ADD("v26", "v2", "v14")            \
  QC_ADD("v27", "v3", "v15") QC_ADD("v28", "v4", "v16") QC_ADD("v29", "v5", "v17") QC_ADD("v30", "v6", "v18")\
  QC_ADD("v31", "v7", "v19")
#define QC_TOTALS                                                                                            \
  "ldp q21, q22, [%[total]]\n"                                                                               \
  "fmla v24.4s, v20.4s, v21.s[0]\nfmla v25.4s, v20.4s, v21.s[1]\nfmla v26.4s, v20.4s, v21.s[2]\n"            \
  "fmla v27.4s, v20.4s, v21.s[3]\nfmla v28.4s, v20.4s, v22.s[0]\nfmla v29.4s, v20.4s, v22.s[1]\n"            \
  "fmla v30.4s, v20.4s, v22.s[2]\nfmla v31.4s, v20.4s, v22.s[3]\n"
#define QC_FLOAT_SCALE "ldr q20, [%[scale]]\n"
#define QC_FLOAT_SECOND "ldr q20, [%[scale], #64]\n"
#define QC_HALF_SCALE "ldr d20, [%[scale]]\nfcvtl v20.4s, v20.4h\n"
#define QC_HALF_SECOND "ldr d20, [%[scale], #32]\nfcvtl v20.4s, v20.4h\n"

#define QC_EIGHT_ROWS(body)                                                                                  \
  asm volatile(                                                                                              \
      "movi v24.4s, #0\nmovi v25.4s, #0\nmovi v26.4s, #0\nmovi v27.4s, #0\n"                                 \
      "movi v28.4s, #0\nmovi v29.4s, #0\nmovi v30.4s, #0\nmovi v31.4s, #0\nldr q23, [%[begin]]\n"            \
      "0:\n" body                                                                                            \
      "add %[q], %[q], #256\nadd %[w], %[w], %[bytes]\nadd %[scale], %[scale], %[bytes]\n"                   \
      "add %[step], %[step], #32\nadd %[total], %[total], #32\nsubs %[blocks], %[blocks], #1\nbne 0b\n"      \
      "str q24, [%[to]]\nstr q25, [%[to], #64]\nstr q26, [%[to], #128]\nstr q27, [%[to], #192]\n"            \
      "str q28, [%[to], #256]\nstr q29, [%[to], #320]\nstr q30, [%[to], #384]\nstr q31, [%[to], #448]\n"     \
      : [q] "+r"(q), [w] "+r"(w), [scale] "+r"(scale), [step] "+r"(step), [total] "+r"(total),               \
        [blocks] "+r"(blocks)                                                                                \
      : [begin] "r"(kBegin), [bytes] "r"(P::bytes), [to] "r"(to)                                             \
      : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12",     \
        "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26",    \
        "v27", "v28", "v29", "v30", "v31")

// Which panels there is a form for.
template <class P>
constexpr bool kByHand = P::open || P::bits == 8 || (P::bits == 4 && P::added);

template <class P>
inline void tile_by_hand(const uint8_t* block, int first, const Quantized& x, int64_t row, float* to) {
  int64_t blocks = x.k / kBlock;
  const int64_t at = row * blocks;  // tiles of eight rows: nothing lies between them
  const int8_t* q = x.coarse.q + at * kBlock;
  const float *step = x.coarse.scale + at, *total = x.coarse.total + at;
  const uint8_t *w = block + P::planes + 4 * first, *scale = block + (P::open ? 4 : 2) * first;
  if constexpr (P::open && P::halves) {
    QC_EIGHT_ROWS(QC_BEGIN QC_ROWS0 QC_BYTES0 QC_DOTS QC_FLOAT_SCALE QC_SUMS
                  QC_BEGIN QC_ROWS1 QC_BYTES1 QC_DOTS QC_FLOAT_SECOND QC_SUMS);
  } else if constexpr (P::open && P::added) {
    QC_EIGHT_ROWS(QC_BEGIN QC_ROWS0 QC_BYTES0 QC_DOTS QC_ROWS1 QC_BYTES1 QC_DOTS QC_FLOAT_SCALE QC_SUMS
                  QC_FLOAT_SECOND QC_TOTALS);
  } else if constexpr (P::open) {
    QC_EIGHT_ROWS(QC_BEGIN QC_ROWS0 QC_BYTES0 QC_DOTS QC_ROWS1 QC_BYTES1 QC_DOTS QC_FLOAT_SCALE QC_SUMS);
  } else if constexpr (P::bits == 8) {
    QC_EIGHT_ROWS(QC_BEGIN QC_ROWS0 QC_BYTES0 QC_DOTS QC_ROWS1 QC_BYTES1 QC_DOTS QC_HALF_SCALE QC_SUMS);
  } else {
    QC_EIGHT_ROWS(QC_BEGIN QC_ROWS0 QC_LOW QC_DOTS QC_ROWS1 QC_HIGH QC_DOTS QC_HALF_SCALE QC_SUMS
                  QC_HALF_SECOND QC_TOTALS);
  }
}

#else
template <class P>
constexpr bool kByHand = false;
template <class P>
inline void tile_by_hand(const uint8_t*, int, const Quantized&, int64_t, float*) {}
#endif
