// The C ABI of Quire's CPU kernels: plain pointers, sizes and strides. Nothing here knows Python or torch.
//
// Strides are in elements. Numbers of dtype QC_F32, QC_BF16 or QC_F16. Every result of a row depends on that row alone,
// bit for bit, however many rows a call has and however many threads share it.
#pragma once
#include <stdint.h>

#define QC_ABI 6
#define QC_MAX_SIZE 256  // numbers of a head
#define QC_MAX_HEADS 65536
#define QC_MAX_THREADS 1024
#define QC_MAX_RANKS 1024
#define QC_MAX_COUNT INT32_MAX  // rows, columns, tokens
#define QC_MAX_ROOM (INT64_C(1) << 46)  // numbers from the first to the last that a call reads or writes
#define QC_API extern "C" __attribute__((visibility("default")))

enum qc_dtype { QC_F32 = 0, QC_BF16 = 1, QC_F16 = 2, QC_I8 = 3 };  // QC_I8: caches only

// How packed numbers are stored; see blocks.h.
enum qc_kind { QC_Q4M = 0, QC_Q4Z = 1, QC_Q5M = 2, QC_Q5Z = 3, QC_Q6Z = 4, QC_Q8Z = 5,
               QC_B16 = 6, QC_B32 = 7, QC_KINDS = 8 };

enum qc_act { QC_SILU = 0, QC_GELU_TANH = 1, QC_RELU = 2, QC_RELU2 = 3, QC_QUICK_GELU = 4, QC_ACTS = 5 };

// Sizes that do not fit one another, or numbers that name what there is not: nothing was computed (with QC_WRONG_MEMORY,
// not all of it).
enum qc_wrong {
  QC_WRONG_DTYPE = -1,
  QC_WRONG_HEADS = -2,
  QC_WRONG_SIZE = -3,
  QC_WRONG_TURN = -4,
  QC_WRONG_ROOM = -5,
  QC_WRONG_STEP = -6,
  QC_WRONG_MATRIX = -7,
  QC_WRONG_ACT = -8,
  QC_WRONG_EXPERTS = -9,
  QC_WRONG_POINTER = -10,
  QC_WRONG_INDEX = -11,
  QC_WRONG_ROWS = -12,
  QC_WRONG_ISA = -13,
  QC_WRONG_MEMORY = -14,
  QC_WRONG_RANKS = -15,
  QC_WRONG_PEER = -16,  // a rank did not come to a sum in time
  QC_WRONG_SUM = -17,   // ranks came to a sum with other sizes or dtypes than each other
};

// Processes of one machine that sum together, as one of them sees it. Their memory is the same, all zeros at first; it
// is `bytes` long and begins at a multiple of 128. All call the same functions with the same sizes, in the same order.
struct qc_ranks {
  void* memory;
  int64_t bytes;
  int32_t rank, ranks;
  int32_t spin_us;  // how long a rank stays awake while it waits for another
  int32_t patience_ms;  // how long it waits
};

// Some rows of a fused matrix, all packed alike.
struct qc_segment {
  int64_t kind;
  int64_t rows;
  const void* data;
};

// One layer's attention in one step, from the fused product on.
struct qc_attention {
  void* qkv;  // [tokens, (heads + 2 kv_heads) * size]; queries and keys are normed and rotated in place
  void* out;  // [tokens, heads * size], contiguous
  void* cache;  // [cache_slots, cache_stride]: keys of all kv heads, then values; QC_I8: then a float for each of them
  const void* q_weight;  // [size], or [heads, size] with norm_each; null: no norm
  const void* k_weight;
  const void* cos;  // [tokens, turned]; null: no rotation
  const void* sin;
  const float* sinks;  // [heads] or null
  const float* alibi;  // [heads] or null
  const int64_t* slots;  // [tokens]; below 0: keys and values of this token go nowhere
  const int32_t* tables;  // [rows, table_stride] blocks; below 0: gone, which no key that is seen may be
  const int32_t* query_starts;  // [rows + 1]
  const int32_t* contexts;  // [rows] tokens once the step is done
  int64_t tokens, rows, qkv_stride, cache_stride, cache_slots, table_stride, block_size;
  int32_t dtype, cache_dtype, turn_dtype;
  int32_t heads, kv_heads, size, turned;
  int32_t window, chunk;  // 0: none
  int32_t pairs, norm_each, norm_wide;
  float eps, offset, scale, softcap;
};

// A matrix [rows, width]: packed segments, or (segments null) plain numbers. bias may be null.
struct qc_matrix {
  const qc_segment* segments;
  const void* weight;
  const void* bias;
  int64_t num_segments, rows, width, weight_stride;
};

// What an adapter adds to results [start, stop) of a product with inputs x [width]: scale * (x a') b.
struct qc_piece {
  const void *a, *b;  // [rank, width] and [rank, stop - start] in panels: see low_rank.h
  int64_t start, stop, rank;
  float scale;
  int32_t dtype;  // of a and b
};

// One adapter's part of a matrix; no pieces: it adds nothing.
struct qc_low_rank {
  const qc_piece* pieces;
  int64_t count;
};

// A block of a decoder: x + attention(norm(x)), then the same with a gated mlp. Of `attention`, what belongs to a step
// (tensors of tokens, tables, window) is not read here but from the step.
struct qc_block {
  qc_attention attention;
  qc_matrix qkv, o, up, down;
  const qc_low_rank* low[4];  // of qkv, o, up, down: what the adapter of each slot adds, from slot 1 on; null: none does
  const void* norm_weight[2];  // before attention, before the mlp
  float eps[2], offset[2];
  int32_t wide[2];
  int32_t act, dtype;
};

// What the blocks of one KV group and one rotation share in a step; cos and sin [tokens, turned], null: no rotation.
struct qc_turn {
  const qc_attention* step;
  const void *cos, *sin;
  int32_t turned, dtype;
};

// Experts of one layer and the tokens that go through some of them. Matrices of all experts have the same sizes.
struct qc_moe {
  const qc_matrix *up, *down;  // [experts]: gate rows and up rows; the way back
  const void* x;  // [tokens, up.width]
  const float* weights;  // [tokens, top_k]
  const int64_t* index;  // [tokens, top_k]
  const void* stream;  // [tokens, down.rows] or null: what the sum is added to
  void* out;  // [tokens, down.rows]
  int64_t tokens, experts, top_k;
  int32_t act, dtype;  // act below 0: the clamped swiglu of alpha and limit
  float alpha, limit;
};

// Texts one after another, each of which attends to itself alone: float32, heads of a multiple of 16 numbers.
struct qc_texts {
  const float *q, *k, *v;  // [queries, heads * size], [keys, kv_heads * size] twice: rows so many numbers apart
  float* out;  // [queries, heads * size], contiguous
  const int64_t *query_lens, *key_lens;  // [texts]; a text with queries has keys
  int64_t texts, queries, keys, q_stride, k_stride, v_stride;
  int32_t heads, kv_heads, size;
  int32_t window;  // keys at this distance or further, on either side, are not seen; 0: all are
  float scale;  // above 0
};

// Rows of logits, and for each how its token is chosen.
struct qc_draw {
  const void* logits;  // [rows, stride]
  const float* temperature;  // 0: the best token, and nothing below counts
  const float* floors;  // below 0: tokens so much below the best are dropped (the logarithm of min-p); -inf: none
  const float* top_p;  // 1: all
  const int64_t* top_k;  // 0: all
  const int64_t *seeds, *positions;
  int64_t* tokens;
  float* scores;  // what the token had in the end
  int64_t stride, rows, width;
  int32_t dtype;
};

QC_API int qc_abi(void);
QC_API int qc_num_isas(void);
QC_API const char* qc_isa_name(int index);  // from the plainest to the best; null: no such index
QC_API int qc_isa_usable(int index);  // whether this machine runs it
QC_API int qc_use_isa(const char* name);  // null: the best; 0: done, -1: not there or not usable
QC_API const char* qc_isa(void);
QC_API uint64_t qc_checksum(const void* from, int64_t bytes);  // any change of one 8-byte word changes it
QC_API int qc_set_threads(int threads);  // below 1: one
QC_API int qc_threads(void);

QC_API int qc_kind_of(int gguf_type);  // -1: no kernel multiplies this type
// What follows checks sizes and indices before it begins, and returns 0 or one of qc_wrong.
// Packing. Width is a multiple of 32 (of 256 for types whose blocks have 256).
QC_API int64_t qc_packed_bytes(int kind, int64_t rows, int64_t width);  // below 0: one of qc_wrong
QC_API int qc_pack(int gguf_type, const void* stored, int64_t rows, int64_t width, void* packed);
QC_API int qc_pack_float(int kind, const void* from, int dtype, int64_t rows, int64_t width, void* packed);
// A plain matrix becomes one of kind B16 or B32 where it lies, or (back) a plain one again; rows come in 16s.
QC_API int qc_lay_panels(int kind, void* weight, int64_t rows, int64_t width, int back);
// index [count]: rows of a packed matrix [rows, width].
QC_API int qc_unpack_rows(int kind, const void* packed, int64_t rows, int64_t width, const int64_t* index, int64_t count,
                          void* out, int dtype);

// out [m, n] = x [m, k] times the segments' rows, plus bias [n] (or null); n is the sum of the segments' rows.
QC_API int qc_linear_packed(const void* x, int64_t x_stride, int64_t m, int64_t k, const qc_segment* segments,
                            int64_t num_segments, const void* bias, void* out, int64_t out_stride, int dtype);
// out [m, n] = x [m, k] weight' [n, k] + bias, all of one dtype, summed in float32.
QC_API int qc_linear(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                     void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k, int dtype);
// sum = x + delta (delta null: x, and sum may be null); out = norm(sum) weight. wide: multiply before rounding.
QC_API int qc_rms_norm(const void* x, int64_t x_stride, const void* delta, const void* weight, void* sum, void* out,
                       int64_t rows, int64_t width, float eps, float offset, int wide, int dtype);
QC_API int qc_gated(int act, const void* x, int64_t x_stride, void* out, int64_t rows, int64_t width, int dtype);
QC_API int qc_attend(const qc_attention* work);
QC_API int qc_attend_texts(const qc_texts* work);
// Blocks one after another, all of one dtype and width; block i takes its part of the step from turns[which[i]], of
// num_turns that all have as many tokens. In: the stream x and what the layer before adds to it (delta, or null), [tokens,
// width] each. Out: the stream after the last attention, and what the last mlp adds to it. adapters [tokens]: the slot of
// each token's adapter, of num_slots that blocks have; 0: none. Null: no token has one. ranks: among which heads and the
// mlp are cut, so that what o and down give is summed over them; null: nothing is.
QC_API int qc_run_blocks(const qc_block* const* blocks, const int32_t* which, int64_t count, const qc_turn* turns,
                         int64_t num_turns, const int32_t* adapters, int64_t num_slots, const void* x, const void* delta,
                         void* stream, void* out, const qc_ranks* ranks);
// x [count] becomes the sum over ranks of what each has there: float32 sums in the order of ranks, rounded once.
QC_API int qc_sum_ranks(const qc_ranks* ranks, void* x, int64_t count, int dtype);
// y [m, n] grows by what the adapter of each row adds to a product with x [m, k]: slots [m] and low [num_slots] as above.
QC_API int qc_add_low_rank(const void* x, int64_t x_stride, const int32_t* slots, const qc_low_rank* low, int64_t num_slots,
                           void* y, int64_t y_stride, int64_t m, int64_t n, int64_t k, int dtype);
// Index of the largest of each row, the lowest among equals; NaN counts as largest.
QC_API int qc_argmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* index, int dtype);
QC_API int qc_draw_tokens(const qc_draw* work);
// out [rows, width] float32.
QC_API int qc_log_softmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, float* out, int dtype);
// values, ids [rows, 1 + k]: the chosen entry, then the k largest; ranks from 1. x is contiguous.
QC_API int qc_top(const float* x, int64_t rows, int64_t width, const int64_t* chosen, int64_t k, float* values,
                  int64_t* ids, int64_t* ranks);
// x [num_rows, width]: numbers of `rows` whose bit is 0, or that have none, become -inf. bits [count, num_words], lowest
// bit first.
QC_API int qc_allow(float* x, int64_t x_stride, int64_t num_rows, int64_t width, const int64_t* rows, int64_t count,
                    const uint32_t* bits, int64_t num_words);
QC_API int qc_run_moe(const qc_moe* work);
