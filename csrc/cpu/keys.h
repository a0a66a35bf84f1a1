// Which keys a query sees: what kernels read, and what is checked before.
#pragma once
#include "quire_cpu.h"

namespace quire {

// Static, because every instruction set must have its own.
static inline int64_t first_key(const qc_attention& w, int64_t query) {
  int64_t first = 0;
  if (w.window && query - w.window + 1 > first) first = query - w.window + 1;
  if (w.chunk && query / w.chunk * w.chunk > first) first = query / w.chunk * w.chunk;
  return first;
}

}  // namespace quire
