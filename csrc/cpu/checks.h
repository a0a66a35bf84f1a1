// Whether the sizes that an entry point is given fit one another: before anything is divided by them or addressed with
// them. What tensors hold is the caller's business. 0, or one of qc_wrong.
#pragma once
#include "quire_cpu.h"

namespace quire {

inline bool is_dtype(int32_t dtype) { return dtype >= QC_F32 && dtype <= QC_F16; }

inline int check_turn(const void* cos, const void* sin, int32_t turned, int32_t turn_dtype, const qc_attention& w) {
  if (!cos) return 0;
  if (!sin || turned < 2 || turned % 2 || turned > w.size) return QC_WRONG_TURN;
  return turn_dtype == QC_F32 || turn_dtype == w.dtype ? 0 : QC_WRONG_DTYPE;
}

inline int check_heads(const qc_attention& w) {
  if (!is_dtype(w.dtype) || !(is_dtype(w.cache_dtype) || w.cache_dtype == QC_I8)) return QC_WRONG_DTYPE;
  if (w.heads < 1 || w.kv_heads < 1 || w.heads % w.kv_heads) return QC_WRONG_HEADS;
  if (w.size < 1 || w.size > QC_MAX_SIZE) return QC_WRONG_SIZE;
  const int64_t kept = int64_t(2) * w.kv_heads * w.size, scales = w.cache_dtype == QC_I8 ? int64_t(8) * w.kv_heads : 0;
  return w.cache_stride < kept + scales ? QC_WRONG_ROOM : 0;
}

inline int check_step(const qc_attention& w) {
  const bool counts = w.tokens >= 0 && w.rows >= 0 && w.block_size > 0 && w.table_stride >= 0;
  return counts && w.window >= 0 && w.chunk >= 0 ? 0 : QC_WRONG_STEP;
}

inline int check_attention(const qc_attention& w) {
  if (int wrong = check_heads(w)) return wrong;
  if (int wrong = check_step(w)) return wrong;
  if (w.tokens > 1 && w.qkv_stride < (int64_t(w.heads) + int64_t(2) * w.kv_heads) * w.size) return QC_WRONG_ROOM;
  return check_turn(w.cos, w.sin, w.turned, w.turn_dtype, w);
}

inline int check_segments(const qc_segment* segments, int64_t count, int64_t width) {
  if (count < 1 || width < 1 || width % 32) return QC_WRONG_MATRIX;
  for (int64_t i = 0; i < count; ++i)
    if (segments[i].kind < 0 || segments[i].kind >= QC_KINDS || segments[i].rows < 0) return QC_WRONG_MATRIX;
  return 0;
}

inline int check_matrix(const qc_matrix& m, int64_t rows, int64_t width) {
  if (m.rows != rows || m.width != width || rows < 1 || width < 1) return QC_WRONG_MATRIX;
  if (!m.segments) return m.weight && m.weight_stride >= width ? 0 : QC_WRONG_MATRIX;
  if (int wrong = check_segments(m.segments, m.num_segments, width)) return wrong;
  int64_t all = 0;
  for (int64_t i = 0; i < m.num_segments; ++i) all += m.segments[i].rows;
  return all == rows ? 0 : QC_WRONG_MATRIX;
}

inline int check_block(const qc_block& b, const qc_turn& turn, int64_t width, int32_t dtype) {
  if (!is_dtype(b.dtype) || b.dtype != dtype || b.attention.dtype != dtype) return QC_WRONG_DTYPE;
  if (b.act < 0 || b.act >= QC_ACTS) return QC_WRONG_ACT;
  const qc_attention& w = b.attention;
  if (int wrong = check_heads(w)) return wrong;
  if (int wrong = check_step(*turn.step)) return wrong;
  if (int wrong = check_turn(turn.cos, turn.sin, turn.turned, turn.dtype, w)) return wrong;
  const int64_t inner = int64_t(w.heads) * w.size, ffn = b.down.width;
  if (int wrong = check_matrix(b.qkv, inner + int64_t(2) * w.kv_heads * w.size, width)) return wrong;
  if (int wrong = check_matrix(b.o, width, inner)) return wrong;
  if (int wrong = check_matrix(b.up, 2 * ffn, width)) return wrong;
  return check_matrix(b.down, width, ffn);
}

inline int check_experts(const qc_moe& w) {
  if (!is_dtype(w.dtype)) return QC_WRONG_DTYPE;
  if (w.act >= QC_ACTS) return QC_WRONG_ACT;
  if (w.tokens < 0 || w.experts < 1 || w.top_k < 1 || w.top_k > w.experts) return QC_WRONG_EXPERTS;
  const int64_t width = w.up[0].width, ffn = w.down[0].width, wide = w.down[0].rows;
  for (int64_t e = 0; e < w.experts; ++e) {
    if (int wrong = check_matrix(w.up[e], 2 * ffn, width)) return wrong;
    if (int wrong = check_matrix(w.down[e], wide, ffn)) return wrong;
  }
  for (int64_t i = 0; i < w.tokens * w.top_k; ++i)
    if (w.index[i] < 0 || w.index[i] >= w.experts) return QC_WRONG_EXPERTS;
  return 0;
}

}  // namespace quire
