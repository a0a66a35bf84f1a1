// Compiled once per instruction set, with QC_ISA its name and the compiler's flags for it.
#include "amx.h"
#include "attention.h"
#include "attention_tiles.h"
#include "bfloats.h"
#include "block.h"
#include "dense.h"
#include "float_panels.h"
#include "isa.h"
#include "low_rank.h"
#include "moe.h"
#include "opened.h"
#include "packed.h"
#include "panels.h"
#include "rows.h"
#include "sample.h"
#include "sums.h"
#include "texts.h"

#define QC_JOIN(a, b) a##b
#define QC_TABLE(isa) QC_JOIN(kernels_, isa)

// Calls `function<dtype>` for a dtype known at run time.
#define QC_BY_DTYPE(dtype, function, ...)                       \
  switch (dtype) {                                              \
    case QC_F32: return function<QC_F32>(__VA_ARGS__);          \
    case QC_BF16: return function<QC_BF16>(__VA_ARGS__);        \
    case QC_F16: return function<QC_F16>(__VA_ARGS__);          \
  }

namespace quire {
namespace QC_ISA {
namespace {

template <int Dtype>
void packed_of(const void* x, int64_t x_stride, int64_t m, int64_t k, const qc_segment* segments, int64_t num,
               const void* bias, void* out, int64_t out_stride) {
  linear_packed<Dtype>(static_cast<const typename Numbers<Dtype>::Type*>(x), x_stride, m, k, segments, num, bias, out, out_stride);
}

template <int Dtype>
void dense_of(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias, void* out,
              int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  linear<Dtype>(static_cast<const typename Numbers<Dtype>::Type*>(x), x_stride, weight, weight_stride, bias, out, out_stride, m, n, k);
}

void do_packed(const void* x, int64_t x_stride, int64_t m, int64_t k, const qc_segment* segments, int64_t num,
               const void* bias, void* out, int64_t out_stride, int dtype) {
  QC_BY_DTYPE(dtype, packed_of, x, x_stride, m, k, segments, num, bias, out, out_stride)
}

void do_linear(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias, void* out,
               int64_t out_stride, int64_t m, int64_t n, int64_t k, int dtype) {
  QC_BY_DTYPE(dtype, dense_of, x, x_stride, weight, weight_stride, bias, out, out_stride, m, n, k)
}

void do_norm(const void* x, int64_t x_stride, const void* delta, const void* weight, void* sum, void* out, int64_t rows,
             int64_t width, float eps, float offset, int wide, int dtype) {
  QC_BY_DTYPE(dtype, rms_norm, x, x_stride, delta, weight, sum, out, rows, width, eps, offset, wide)
}

void do_gated(int act, const void* x, int64_t x_stride, void* out, int64_t rows, int64_t width, int dtype) {
  QC_BY_DTYPE(dtype, gated_by, act, x, x_stride, out, rows, width)
}

void do_attend(const qc_attention* work) { QC_BY_DTYPE(work->dtype, attend_over, *work) }

void do_blocks(const qc_block* const* blocks, const int32_t* which, int64_t count, const qc_turn* turns,
               const int32_t* adapters, const void* x, const void* delta, void* stream, void* out,
               const qc_ranks* ranks) {
  QC_BY_DTYPE(blocks[0]->dtype, run_blocks, blocks, which, count, turns, adapters, x, delta, stream, out, ranks)
}

void do_low_rank(const qc_low_rank* low, const int32_t* slots, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                 int64_t m, int64_t width, int dtype) {
  QC_BY_DTYPE(dtype, add_low_rank, low, slots, x, x_stride, y, y_stride, m, width)
}

void do_argmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* index, int dtype) {
  QC_BY_DTYPE(dtype, argmax, x, x_stride, rows, width, index)
}

void do_moe(const qc_moe* work) { QC_BY_DTYPE(work->dtype, run_moe, *work) }

void do_draw(const qc_draw* work) { QC_BY_DTYPE(work->dtype, draw, *work) }

void do_log_softmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, float* out, int dtype) {
  QC_BY_DTYPE(dtype, log_softmax, x, x_stride, rows, width, out)
}

void do_sum(const qc_ranks* ranks, void* x, int64_t count, int dtype) { QC_BY_DTYPE(dtype, sum_ranks, *ranks, x, count) }

#define QC_TEXT2(x) #x
#define QC_TEXT(x) QC_TEXT2(x)

}  // namespace
}  // namespace QC_ISA

extern const Kernels QC_TABLE(QC_ISA);
const Kernels QC_TABLE(QC_ISA) = {QC_TEXT(QC_ISA),    QC_ISA::do_packed, QC_ISA::do_linear, QC_ISA::do_norm,
                                  QC_ISA::do_gated,  QC_ISA::do_attend, QC_ISA::attend_texts,
                                  QC_ISA::do_blocks, QC_ISA::do_low_rank, QC_ISA::do_argmax,
                                  QC_ISA::do_draw,   QC_ISA::do_moe,   QC_ISA::do_log_softmax, QC_ISA::top_of, QC_ISA::allow,
                                  QC_ISA::do_sum};

}  // namespace quire
