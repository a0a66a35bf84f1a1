// Products and attention by tile registers, and products by pairs of bfloat16, with the instructions emulated, as a library: see test_cpu_tiles.py.
#include "amx.h"
#include "attention_tiles.h"
#include "bfloats.h"
#include "block.h"
#include "float_panels.h"
#include "opened.h"
#include "panels.h"
#include "texts.h"

using namespace quire;
using namespace quire::QC_ISA;

QC_API void tiles_packed(const void* x, int64_t x_stride, int64_t m, int64_t k, const qc_segment* segments, int64_t num,
                         const void* bias, void* out, int64_t out_stride, int dtype) {
  if (dtype == QC_BF16) linear_packed<QC_BF16>(static_cast<const uint16_t*>(x), x_stride, m, k, segments, num, bias, out, out_stride);
  else linear_packed<QC_F32>(static_cast<const float*>(x), x_stride, m, k, segments, num, bias, out, out_stride);
}

QC_API void tiles_texts(const qc_texts* work) { attend_texts(work); }

QC_API void tiles_plain(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                        void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  linear<QC_BF16>(static_cast<const uint16_t*>(x), x_stride, weight, weight_stride, bias, out, out_stride, m, n, k);
}

QC_API void pairs_plain(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                        void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k) {
  linear_by_pairs(static_cast<const uint16_t*>(x), x_stride, weight, weight_stride, bias, out, out_stride, m, n, k);
}

QC_API void tiles_attend(const qc_attention* work) {
  if (work->dtype == QC_BF16) attend_over<QC_BF16>(*work);
  else if (work->dtype == QC_F16) attend_over<QC_F16>(*work);
  else attend_over<QC_F32>(*work);
}

QC_API void tiles_block(const qc_block* block, const qc_turn* turn, const void* x, const void* delta, void* stream, void* out, int tiles) {
  if (block->dtype == QC_BF16 && tiles) run_block<QC_BF16>(*block, *turn, nullptr, x, delta, stream, out);
  else if (block->dtype == QC_BF16) run_block<QC_BF16, false>(*block, *turn, nullptr, x, delta, stream, out);
  else if (tiles) run_block<QC_F32>(*block, *turn, nullptr, x, delta, stream, out);
  else run_block<QC_F32, false>(*block, *turn, nullptr, x, delta, stream, out);
}
QC_API int tiles_in_use(const qc_block* block) {
  return block->dtype == QC_BF16 ? goes_by_tiles<QC_BF16>(*block) : goes_by_tiles<QC_F32>(*block);
}
QC_API void tiles_open(int kind, const uint8_t* block, char* tile) { opening_of(kind)(block, tile); }

QC_API void tiles_threads(int count) { set_threads(count); }
