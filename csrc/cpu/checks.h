// Whether what an entry point is given fits together: before anything is divided by it or addressed with it. Sizes are
// compared with one another, every number that names a place (slot, block, row, token, expert) with how many there are.
// How much memory an address has behind it is the caller's business. 0, or one of qc_wrong.
#pragma once
#include "blocks.h"
#include "keys.h"
#include "quire_cpu.h"
#include "ranks.h"

namespace quire {

// No exception leaves the library: whoever calls knows no C++.
template <class F>
int done(const F& work) {
  try {
    work();
  } catch (const Refused& refused) {
    return refused.code;
  } catch (...) {  // no memory, or no thread
    return QC_WRONG_MEMORY;
  }
  return 0;
}

inline bool is_dtype(int32_t dtype) { return dtype >= QC_F32 && dtype <= QC_F16; }
inline bool is_count(int64_t count) { return count >= 0 && count <= QC_MAX_COUNT; }
inline bool is_size(int64_t size) { return size >= 1 && size <= QC_MAX_COUNT; }

// Rows so far apart end where an address still can: they lie within 2^46 numbers.
inline bool has_room(int64_t rows, int64_t stride) {
  int64_t all;
  return rows < 2 || (stride >= 0 && !__builtin_mul_overflow(rows, stride, &all) && all <= QC_MAX_ROOM);
}

// Rows that are read; one may be read several times (stride 0).
inline bool is_read(int64_t rows, int64_t stride, int64_t width) {
  return is_count(rows) && is_size(width) && has_room(rows, stride) && has_room(rows, width);
}

// Rows that are written: none overlaps the next.
inline bool is_written(int64_t rows, int64_t stride, int64_t width) {
  return is_read(rows, stride, width) && (rows < 2 || stride >= width);
}

template <class... Pointers>
bool all_given(const Pointers*... pointers) {
  return (... && (pointers != nullptr));
}

inline bool all_below(const int64_t* index, int64_t count, int64_t limit) {
  bool below = true;
  for (int64_t i = 0; i < count; ++i) below &= uint64_t(index[i]) < uint64_t(limit);
  return below;
}

inline int check_turn(const void* cos, const void* sin, int32_t turned, int32_t turn_dtype, const qc_attention& w) {
  if (!cos) return 0;
  if (!sin || turned < 2 || turned % 2 || turned > w.size) return QC_WRONG_TURN;
  return turn_dtype == QC_F32 || turn_dtype == w.dtype ? 0 : QC_WRONG_DTYPE;
}

inline int check_heads(const qc_attention& w) {
  if (!is_dtype(w.dtype) || !(is_dtype(w.cache_dtype) || w.cache_dtype == QC_I8)) return QC_WRONG_DTYPE;
  if (w.heads < 1 || w.heads > QC_MAX_HEADS || w.kv_heads < 1 || w.heads % w.kv_heads) return QC_WRONG_HEADS;
  if (w.size < 1 || w.size > QC_MAX_SIZE) return QC_WRONG_SIZE;
  const int64_t kept = int64_t(2) * w.kv_heads * w.size, scales = w.cache_dtype == QC_I8 ? int64_t(8) * w.kv_heads : 0;
  if (w.cache_stride < kept + scales || !has_room(w.cache_slots, w.cache_stride)) return QC_WRONG_ROOM;
  return (w.q_weight == nullptr) == (w.k_weight == nullptr) ? 0 : QC_WRONG_POINTER;
}

// What a step writes and reads of caches: below these slots, below these blocks.
struct Extent {
  int wrong;
  int64_t slots, blocks;
};

// One row's keys: its queries are its last tokens, and its table names a block for each key that they see.
inline int check_row(const qc_attention& w, int64_t row, int64_t& blocks) {
  const int64_t queries = int64_t(w.query_starts[row + 1]) - w.query_starts[row], context = w.contexts[row];
  if (queries < 0 || context < queries) return QC_WRONG_STEP;
  if (queries == 0) return 0;
  const int64_t last = (context + w.block_size - 1) / w.block_size;
  if (last > w.table_stride) return QC_WRONG_STEP;
  const int32_t* table = w.tables + row * w.table_stride;
  for (int64_t block = first_key(w, context - queries) / w.block_size; block < last; ++block) {
    if (table[block] < 0) return QC_WRONG_INDEX;
    blocks = table[block] >= blocks ? int64_t(table[block]) + 1 : blocks;
  }
  return 0;
}

inline Extent check_step(const qc_attention& w) {
  const bool counts = is_count(w.tokens) && is_count(w.rows) && is_size(w.block_size) && is_count(w.table_stride);
  if (!counts || w.window < 0 || w.chunk < 0 || !has_room(w.rows, w.table_stride)) return {QC_WRONG_STEP, 0, 0};
  if (!w.tokens) return {0, 0, 0};
  if (!all_given(w.slots, w.query_starts, w.contexts) || (w.rows && !w.tables)) return {QC_WRONG_POINTER, 0, 0};
  if (w.query_starts[0] < 0 || w.query_starts[w.rows] > w.tokens) return {QC_WRONG_STEP, 0, 0};
  Extent found = {0, 0, 0};
  for (int64_t token = 0; token < w.tokens; ++token)
    found.slots = w.slots[token] >= found.slots ? w.slots[token] + 1 : found.slots;
  for (int64_t row = 0; row < w.rows && !found.wrong; ++row) found.wrong = check_row(w, row, found.blocks);
  return found;
}

// Whether a layer's cache has what a step reads and writes.
inline int check_reach(const Extent& extent, const qc_attention& w, int64_t block_size, int64_t tokens) {
  if (extent.wrong) return extent.wrong;
  if (!is_count(tokens * w.heads)) return QC_WRONG_STEP;
  if (extent.slots > w.cache_slots || extent.blocks > w.cache_slots / block_size) return QC_WRONG_INDEX;
  return extent.slots + extent.blocks == 0 || w.cache ? 0 : QC_WRONG_POINTER;
}

inline int check_attention(const qc_attention& w) {
  if (int wrong = check_heads(w)) return wrong;
  if (int wrong = check_reach(check_step(w), w, w.block_size, w.tokens)) return wrong;
  const int64_t width = (int64_t(w.heads) + int64_t(2) * w.kv_heads) * w.size;
  if (!is_written(w.tokens, w.qkv_stride, width)) return QC_WRONG_ROOM;
  if (w.tokens && !all_given(w.qkv, w.out)) return QC_WRONG_POINTER;
  return check_turn(w.cos, w.sin, w.turned, w.turn_dtype, w);
}

inline int check_texts(const qc_texts& w) {
  if (w.heads < 1 || w.kv_heads < 1 || w.heads > QC_MAX_HEADS || w.heads % w.kv_heads) return QC_WRONG_HEADS;
  if (w.size < kPanel || w.size > QC_MAX_SIZE || w.size % kPanel || w.window < 0 || !(w.scale > 0)) return QC_WRONG_SIZE;
  const int64_t width = int64_t(w.heads) * w.size, kv_width = int64_t(w.kv_heads) * w.size;
  if (!is_read(w.queries, w.q_stride, width) || !is_written(w.queries, width, width)) return QC_WRONG_ROWS;
  if (!is_read(w.keys, w.k_stride, kv_width) || !is_read(w.keys, w.v_stride, kv_width)) return QC_WRONG_ROWS;
  if (!is_count(w.texts) || !is_count(w.texts * w.heads)) return QC_WRONG_STEP;
  if (w.texts && !all_given(w.query_lens, w.key_lens)) return QC_WRONG_POINTER;
  int64_t queries = 0, keys = 0;
  for (int64_t i = 0; i < w.texts; ++i) {
    if (!is_count(w.query_lens[i]) || !is_count(w.key_lens[i]) || (w.query_lens[i] && !w.key_lens[i])) return QC_WRONG_STEP;
    queries += w.query_lens[i], keys += w.key_lens[i];
  }
  if (queries != w.queries || keys != w.keys) return QC_WRONG_STEP;
  return !queries || all_given(w.q, w.k, w.v, w.out) ? 0 : QC_WRONG_POINTER;
}

// rows: of all segments together.
inline int check_segments(const qc_segment* segments, int64_t count, int64_t width, int64_t& rows) {
  if (!segments || !is_size(count) || !is_size(width) || width % kBlock) return QC_WRONG_MATRIX;
  rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    const qc_segment& segment = segments[i];
    if (segment.kind < 0 || segment.kind >= QC_KINDS || !is_count(segment.rows)) return QC_WRONG_MATRIX;
    if ((segment.kind >= QC_B16 || segments[0].kind >= QC_B16) && segment.kind != segments[0].kind) return QC_WRONG_MATRIX;
    if (segment.rows && !segment.data) return QC_WRONG_POINTER;
    rows += segment.rows;
  }
  return is_count(rows) && has_room(rows, width) ? 0 : QC_WRONG_MATRIX;
}

inline int check_matrix(const qc_matrix& m, int64_t rows, int64_t width) {
  if (m.rows != rows || m.width != width || !is_size(rows) || !is_size(width)) return QC_WRONG_MATRIX;
  if (!m.segments) return m.weight && is_written(rows, m.weight_stride, width) ? 0 : QC_WRONG_MATRIX;
  int64_t all = 0;
  if (int wrong = check_segments(m.segments, m.num_segments, width, all)) return wrong;
  return all == rows ? 0 : QC_WRONG_MATRIX;
}

// What adapters in num_slots slots add to a product of so many results and inputs, for m rows at once.
inline int check_low_rank(const qc_low_rank* low, int64_t num_slots, int64_t rows, int64_t width, int64_t m) {
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (!is_count(low[slot].count)) return QC_WRONG_MATRIX;
    if (low[slot].count && !low[slot].pieces) return QC_WRONG_POINTER;
    int64_t ranks = 0;
    for (int64_t i = 0; i < low[slot].count; ++i) {
      const qc_piece& piece = low[slot].pieces[i];
      if (piece.start < 0 || piece.stop <= piece.start || piece.stop > rows || !is_size(piece.rank)) return QC_WRONG_MATRIX;
      if (!has_room(piece.rank, width) || !has_room(rows, piece.rank)) return QC_WRONG_MATRIX;
      if (!is_dtype(piece.dtype)) return QC_WRONG_DTYPE;
      if (!all_given(piece.a, piece.b)) return QC_WRONG_POINTER;
      ranks += piece.rank;
    }
    if (!is_count(ranks) || !has_room(m + 16, ranks + width + 16)) return QC_WRONG_MATRIX;
  }
  return 0;
}

inline int check_slots(const int32_t* slots, int64_t count, int64_t num_slots) {
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < 0 || slots[i] > num_slots) return QC_WRONG_INDEX;
  return 0;
}

// extent: what check_step found of the turn's step. num_slots: of adapters that are used, or 0.
inline int check_block(const qc_block& b, const qc_turn& turn, const Extent& extent, int64_t num_slots, int64_t width,
                       int32_t dtype) {
  if (!is_dtype(b.dtype) || b.dtype != dtype || b.attention.dtype != dtype) return QC_WRONG_DTYPE;
  if (b.act < 0 || b.act >= QC_ACTS) return QC_WRONG_ACT;
  if (!all_given(b.norm_weight[0], b.norm_weight[1])) return QC_WRONG_POINTER;
  const qc_attention& w = b.attention;
  if (int wrong = check_heads(w)) return wrong;
  if (int wrong = check_reach(extent, w, turn.step->block_size, turn.step->tokens)) return wrong;
  if (int wrong = check_turn(turn.cos, turn.sin, turn.turned, turn.dtype, w)) return wrong;
  const int64_t inner = int64_t(w.heads) * w.size, ffn = b.down.width;
  if (!is_size(ffn)) return QC_WRONG_MATRIX;
  if (int wrong = check_matrix(b.qkv, inner + int64_t(2) * w.kv_heads * w.size, width)) return wrong;
  if (int wrong = check_matrix(b.o, width, inner)) return wrong;
  if (int wrong = check_matrix(b.up, 2 * ffn, width)) return wrong;
  if (int wrong = check_matrix(b.down, width, ffn)) return wrong;
  const qc_matrix* matrices[4] = {&b.qkv, &b.o, &b.up, &b.down};
  for (int i = 0; i < 4; ++i) {
    if (!b.low[i] || !num_slots) continue;
    if (int wrong = check_low_rank(b.low[i], num_slots, matrices[i]->rows, matrices[i]->width, turn.step->tokens)) return wrong;
  }
  const int64_t widest = b.qkv.rows > b.up.rows ? b.qkv.rows : b.up.rows;
  return has_room(turn.step->tokens, widest) ? 0 : QC_WRONG_STEP;
}

inline int check_experts(const qc_moe& w) {
  if (!is_dtype(w.dtype)) return QC_WRONG_DTYPE;
  if (w.act >= QC_ACTS) return QC_WRONG_ACT;
  if (!is_count(w.tokens) || !is_size(w.experts) || w.top_k < 1 || w.top_k > w.experts) return QC_WRONG_EXPERTS;
  if (!is_count(w.tokens * w.top_k)) return QC_WRONG_EXPERTS;
  if (!all_given(w.up, w.down)) return QC_WRONG_POINTER;
  const int64_t width = w.up[0].width, ffn = w.down[0].width, wide = w.down[0].rows;
  if (!is_size(ffn)) return QC_WRONG_MATRIX;
  for (int64_t e = 0; e < w.experts; ++e) {
    if (int wrong = check_matrix(w.up[e], 2 * ffn, width)) return wrong;
    if (int wrong = check_matrix(w.down[e], wide, ffn)) return wrong;
  }
  if (!w.tokens) return 0;
  if (!all_given(w.x, w.weights, w.index, w.out)) return QC_WRONG_POINTER;
  if (!has_room(w.tokens * w.top_k, width + wide + 3 * ffn)) return QC_WRONG_EXPERTS;
  return all_below(w.index, w.tokens * w.top_k, w.experts) ? 0 : QC_WRONG_EXPERTS;
}

inline int check_ranks(const qc_ranks& group) {
  if (group.ranks < 1 || group.ranks > QC_MAX_RANKS || group.rank < 0 || group.rank >= group.ranks) return QC_WRONG_RANKS;
  if (group.spin_us < 0 || group.patience_ms < 0) return QC_WRONG_RANKS;
  if (!group.memory || reinterpret_cast<uintptr_t>(group.memory) % alignof(RankLine)) return QC_WRONG_POINTER;
  return group.bytes >= 0 && group.bytes <= QC_MAX_ROOM && RankMemory::room_of(group) >= 64 ? 0 : QC_WRONG_ROOM;
}

inline int check_draw(const qc_draw& w) {
  if (!is_dtype(w.dtype)) return QC_WRONG_DTYPE;
  if (!is_read(w.rows, w.stride, w.width)) return QC_WRONG_ROWS;
  if (!w.rows) return 0;
  const bool given = all_given(w.logits, w.temperature, w.floors, w.top_p, w.tokens, w.scores);
  return given && all_given(w.top_k, w.seeds, w.positions) ? 0 : QC_WRONG_POINTER;
}

}  // namespace quire
