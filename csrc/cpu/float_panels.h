// Products with plain float32 weights that lie in panels (B32 of blocks.h): a chunk is one input of 16 columns. Where there
// are tile registers, they go another way (float_tiles.h).
//
// Some rows are multiplied with some panels at once, so many that all their sums stay in registers. A sum is one chain over
// the inputs of a part, from the first on, and parts are added in order: the same whatever stands beside it.
#pragma once
#include <vector>

#include "float_tiles.h"
#include "packed.h"

namespace quire {
namespace QC_ISA {

constexpr int kPerPanel = kPanel / kLanes;  // vectors of a chunk
constexpr int64_t kPartInputs = 512;  // of a chain: longer ones lose more to rounding
#if defined(__aarch64__)
constexpr int kFloatRows = 5, kFloatPanels = 1;
#elif defined(__AVX512F__)
constexpr int kFloatRows = 12, kFloatPanels = 2;
#else
constexpr int kFloatRows = 6, kFloatPanels = 1;
#endif
constexpr int kAlonePanels = 8 / kPerPanel;  // for a single row: as many chains as keep the units busy

// R rows x times P neighbouring panels of k inputs; to [R, P * 16], rows to_stride apart.
template <int R, int P>
__attribute__((noinline)) void rows_of_floats(const float* x, int64_t x_stride, const float* panels, int64_t k, float* to,
                                              int64_t to_stride) {
  constexpr int V = P * kPerPanel;
  for (int64_t at = 0; at < k; at += kPartInputs) {
    const int64_t end = at + kPartInputs < k ? at + kPartInputs : k;
    vf sums[R][V];
    QC_UNROLL for (int r = 0; r < R; ++r)
      QC_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = fill(0);
    for (int64_t i = at; i < end; i += 4) {
      Four four[R];
      QC_UNROLL for (int r = 0; r < R; ++r) four[r] = load_four(x + r * x_stride + i);
      unroll(std::make_integer_sequence<int, 4>(), [&](auto place) {
        vf chunk[V];
        QC_UNROLL for (int v = 0; v < V; ++v)
          chunk[v] = load(panels + v / kPerPanel * kPanel * k + (i + place) * kPanel + v % kPerPanel * kLanes);
        QC_UNROLL for (int r = 0; r < R; ++r)
          QC_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = fma_one<place>(chunk[v], four[r], sums[r][v]);
      });
    }
    QC_UNROLL for (int r = 0; r < R; ++r)
      QC_UNROLL for (int v = 0; v < V; ++v) {
        float* sum = to + r * to_stride + v * kLanes;
        store(sum, at ? load(sum) + sums[r][v] : sums[r][v]);
      }
  }
}

// As many of `left` rows as fit into registers; returns how many.
template <int P>
int64_t some_rows_of_floats(int64_t left, const float* x, int64_t x_stride, const float* panels, int64_t k, float* to,
                            int64_t to_stride) {
  if (left >= kFloatRows) return rows_of_floats<kFloatRows, P>(x, x_stride, panels, k, to, to_stride), kFloatRows;
  if (left >= 4) return rows_of_floats<4, P>(x, x_stride, panels, k, to, to_stride), 4;
  if (left >= 2) return rows_of_floats<2, P>(x, x_stride, panels, k, to, to_stride), 2;
  return rows_of_floats<1, P>(x, x_stride, panels, k, to, to_stride), 1;
}

// Rows [row, last) of x times P panels; count: columns from `column` on that there are.
template <int P>
void panels_for_rows(const float* x, int64_t x_stride, const Product& job, const float* panels, int64_t column, int64_t count,
                     int64_t row, int64_t last) {
  alignas(64) float found[kFloatRows * kFloatPanels * kPanel + kAlonePanels * kPanel];
  const int64_t k = job.x.k;
  if (count > P * kPanel) count = P * kPanel;
  for (int64_t many; row < last; row += many) {
    const int64_t left = last - row;
    const float* from = x + row * x_stride;
    if constexpr (P > kFloatPanels) rows_of_floats<1, P>(from, x_stride, panels, k, found, P * kPanel), many = 1;
    else many = some_rows_of_floats<P>(left, from, x_stride, panels, k, found, P * kPanel);
    job.write(job, row, many, column, count, found, P * kPanel);
  }
}

// Panels [from, to) of all segments, counted through, for rows [row, last).
inline void some_float_panels(const float* x, int64_t x_stride, const Product& job, int64_t from, int64_t to, int64_t row,
                              int64_t last) {
  const int64_t size = kPanel * job.x.k;
  int64_t column = 0, before = 0;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    const qc_segment& segment = job.segments[i];
    const int64_t panels = panels_of(segment), end = to - before < panels ? to - before : panels;
    int64_t many;
    for (int64_t p = from > before ? from - before : 0; p < end; p += many) {
      const float* data = static_cast<const float*>(segment.data) + p * size;
      const int64_t first = column + p * kPanel, count = segment.rows - p * kPanel;
      if (last - row == 1 && end - p >= kAlonePanels)
        panels_for_rows<kAlonePanels>(x, x_stride, job, data, first, count, row, last), many = kAlonePanels;
      else if (end - p >= kFloatPanels)
        panels_for_rows<kFloatPanels>(x, x_stride, job, data, first, count, row, last), many = kFloatPanels;
      else panels_for_rows<1>(x, x_stride, job, data, first, count, row, last), many = 1;
    }
    column += segment.rows, before += panels;
  }
}

template <int Dtype>
void linear_in_float_panels(const typename Numbers<Dtype>::Type* x, int64_t x_stride, const Product& job, int64_t panels) {
#if QC_TILES
  return floats_by_tiles<Dtype>(x, x_stride, job, panels);
#endif
  const int64_t k = job.x.k;
  const float* rows;
  if constexpr (Dtype == QC_F32) {
    rows = x;
  } else {
    static thread_local std::vector<float> memory;
    memory.resize(size_t(job.m * k));
    for (int64_t row = 0; row < job.m; ++row)
      for (int64_t i = 0; i < k; i += kLanes) store(memory.data() + row * k + i, Numbers<Dtype>::read(x + row * x_stride + i));
    rows = memory.data(), x_stride = k;
  }
  int64_t tall = (1 << 16) / k / kFloatRows * kFloatRows;  // rows that stay in a second cache while panels pass
  if (tall < 4 * kFloatRows) tall = 4 * kFloatRows;
  const int64_t floors = (job.m + tall - 1) / tall, groups = (panels + kFloatPanels - 1) / kFloatPanels;
  const int64_t parts = groups < 4 * threads() ? groups : 4 * threads();
  auto work = [&](int item) {
    const int64_t part = item % parts, row = item / parts * tall, last = groups * (part + 1) / parts * kFloatPanels;
    some_float_panels(rows, x_stride, job, groups * part / parts * kFloatPanels, last < panels ? last : panels, row,
                      row + tall < job.m ? row + tall : job.m);
  };
  each(int(floors * parts), work);
}

}  // namespace QC_ISA
}  // namespace quire
