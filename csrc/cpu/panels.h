// Products with plain bfloat16 weights that lie in panels (B16 of blocks.h): a chunk is a pair of inputs of 16 columns.
//
// Rows of bfloat16 go through tile registers where there are some (opened.h). Else a panel stays near while rows pass, up to
// eight at a time, each summed in two chains, of even and of odd pairs, whatever stands beside it.
#pragma once
#include "opened.h"
#include "packed.h"
#include "turn.h"

namespace quire {
namespace QC_ISA {

// Two inputs of a row, as a chunk is multiplied with them.
template <int Dtype>
struct PairOf {
  float first, second;
  PairOf(const typename Numbers<Dtype>::Type* at) : first(Numbers<Dtype>::one(at)), second(Numbers<Dtype>::one(at + 1)) {}
  Floats add(Floats sum, Words chunk) const {
    sum += (Floats)(chunk << 16) * first;
    sum += (Floats)(chunk & 0xffff0000u) * second;
    return sum;
  }
};
#if QC_PAIRS
template <>
struct PairOf<QC_BF16> {
  uint32_t both;
  PairOf(const uint16_t* at) { memcpy(&both, at, 4); }
  Floats add(Floats sum, Words chunk) const { return add_pairs(sum, chunk, both); }
};
#endif

// R rows times one panel; to [R, 16].
template <int Dtype, int R>
void rows_of_panel(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const char* panel, int64_t chunks, float* to) {
  Floats sums[R][2];
  QC_UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Floats{};
  for (int64_t p = 0; p < chunks; p += 2)
    QC_UNROLL for (int odd = 0; odd < 2; ++odd) {
      const char* at = panel + 64 * (p + odd);
      if constexpr (kAheadBytes > 0) __builtin_prefetch(at + kAheadBytes);
      const Words chunk = load_words(at);
      QC_UNROLL for (int r = 0; r < R; ++r)
        sums[r][odd] = PairOf<Dtype>(x + r * x_stride + 2 * (p + odd)).add(sums[r][odd], chunk);
    }
  QC_UNROLL for (int r = 0; r < R; ++r) store_words(to + 16 * r, (Words)(sums[r][0] + sums[r][1]));
}

template <int Dtype>
void panel_for_rows(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const Product& job, const char* panel,
                    int64_t column, int64_t count, int64_t row, int64_t last) {
  float found[8 * kPanel];
  const int64_t chunks = job.x.k / 2;
  for (int64_t many; row < last; row += many) {
    const int64_t left = last - row;
    const typename Numbers<Dtype>::Type* from = x + row * x_stride;
    if (left >= 8) rows_of_panel<Dtype, 8>(from, x_stride, panel, chunks, found), many = 8;
    else if (left >= 4) rows_of_panel<Dtype, 4>(from, x_stride, panel, chunks, found), many = 4;
    else if (left >= 2) rows_of_panel<Dtype, 2>(from, x_stride, panel, chunks, found), many = 2;
    else rows_of_panel<Dtype, 1>(from, x_stride, panel, chunks, found), many = 1;
    write_columns<Dtype>(job, row, many, column, count, found, kPanel);
  }
}

template <int Dtype>
void linear_in_panels(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const Product& job, int64_t panels) {
#if QC_TILES
  if (Dtype == QC_BF16) return packed_by_opening<Dtype>(x, x_stride, job, panels);
#endif
  int64_t tall = kRowBytes / job.x.k / 8 * 8;
  if (tall < 64) tall = 64;
  const int64_t floors = (job.m + tall - 1) / tall, parts = panels < 4 * threads() ? panels : 4 * threads();
  auto work = [&](int item) {
    const int64_t part = item % parts, row = item / parts * tall, last = row + tall < job.m ? row + tall : job.m;
    over_panels(job, panels * part / parts, panels * (part + 1) / parts,
                [&](int64_t, const uint8_t* panel, int64_t column, int64_t count) {
                  panel_for_rows<Dtype>(x, x_stride, job, reinterpret_cast<const char*>(panel), column,
                                        count < kPanel ? count : kPanel, row, last);
                });
  };
  each(int(floors * parts), work);
}

}  // namespace QC_ISA
}  // namespace quire
