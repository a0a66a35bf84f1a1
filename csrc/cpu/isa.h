// One table of functions per instruction set: the ABI's work, compiled once for each.
#pragma once
#include "quire_cpu.h"

namespace quire {

struct Kernels {
  const char* name;
  void (*linear_packed)(const void*, int64_t, int64_t, int64_t, const qc_segment*, int64_t, const void*, void*, int64_t, int);
  void (*linear)(const void*, int64_t, const void*, int64_t, const void*, void*, int64_t, int64_t, int64_t, int64_t, int);
  void (*rms_norm)(const void*, int64_t, const void*, const void*, void*, void*, int64_t, int64_t, float, float, int, int);
  void (*gated)(int, const void*, int64_t, void*, int64_t, int64_t, int);
  void (*attend)(const qc_attention*);
  void (*attend_texts)(const qc_texts*);
  void (*run_blocks)(const qc_block* const*, const int32_t*, int64_t, const qc_turn*, const int32_t*, const void*, const void*,
                     void*, void*, const qc_ranks*);
  void (*add_low_rank)(const qc_low_rank*, const int32_t*, const void*, int64_t, void*, int64_t, int64_t, int64_t, int);
  void (*argmax)(const void*, int64_t, int64_t, int64_t, int64_t*, int);
  void (*draw)(const qc_draw*);
  void (*run_moe)(const qc_moe*);
  void (*log_softmax)(const void*, int64_t, int64_t, int64_t, float*, int);
  void (*top)(const float*, int64_t, int64_t, const int64_t*, int64_t, float*, int64_t*, int64_t*);
  void (*allow)(float*, int64_t, int64_t, const int64_t*, int64_t, const uint32_t*, int64_t);
  void (*sum_ranks)(const qc_ranks*, void*, int64_t, int);
};

}  // namespace quire
