// The ABI: which instruction sets there are, which one is used, and the way into it.
#include <string.h>

#include <atomic>

#include "checks.h"
#include "isa.h"
#include "pool.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace quire {

#if defined(__aarch64__)
extern const Kernels kernels_neon, kernels_dotprod;
static bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Apple core since 2019
#endif
}
#elif defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16, kernels_amx;
static bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
static bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// The processor has tiles, and the system lets this process use them: asked once, before the first tile instruction.
static bool has_amx() {
#if defined(__linux__)
  static const bool found = [] {
    unsigned a, b, c, d;
    if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned tile = 1u << 24, bytes = 1u << 25, bfloats = 1u << 22, all = tile | bytes | bfloats;
    constexpr int kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return (d & all) == all && syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  }();
  return found;
#else
  return false;
#endif
}
#endif

static bool always() { return true; }

struct Isa {
  const Kernels* kernels;
  bool (*usable)();
};

// The build may leave some out (setup.py, QUIRE_BUILD_ISAS).
static const Isa kIsas[] = {
#if defined(__aarch64__)
#ifndef QC_WITHOUT_neon
    {&kernels_neon, always},
#endif
#ifndef QC_WITHOUT_dotprod
    {&kernels_dotprod, has_dotprod},
#endif
#elif defined(__x86_64__)
#ifndef QC_WITHOUT_avx2
    {&kernels_avx2, has_avx2},
#endif
#ifndef QC_WITHOUT_avx512
    {&kernels_avx512, has_avx512},
#endif
#ifndef QC_WITHOUT_avx512bf16
    {&kernels_avx512bf16, has_avx512bf16},
#endif
#ifndef QC_WITHOUT_amx
    {&kernels_amx, has_amx},
#endif
#endif
};
constexpr int kNumIsas = int(sizeof kIsas / sizeof kIsas[0]);
static std::atomic<const Kernels*> active{nullptr};

static const Kernels* find(const char* name) {
  for (int i = kNumIsas - 1; i >= 0; --i)
    if (kIsas[i].usable() && (name == nullptr || !strcmp(name, kIsas[i].kernels->name))) return kIsas[i].kernels;
  return nullptr;
}

constexpr int kMaxTurns = 256;  // rotations and KV groups of one model

template <class F>
int compute(const F& work) {
  const Kernels* used = active.load();
  return used ? done([&] { work(*used); }) : int(QC_WRONG_ISA);
}

}  // namespace quire

using namespace quire;

QC_API int qc_abi(void) { return QC_ABI; }
QC_API int qc_num_isas(void) { return kNumIsas; }
QC_API const char* qc_isa_name(int index) { return index >= 0 && index < kNumIsas ? kIsas[index].kernels->name : nullptr; }
QC_API int qc_isa_usable(int index) { return index >= 0 && index < kNumIsas && kIsas[index].usable(); }

QC_API int qc_use_isa(const char* name) {
  const Kernels* found = find(name);
  if (found == nullptr) return -1;
  active.store(found);
  return 0;
}

QC_API const char* qc_isa(void) {
  const Kernels* used = active.load();
  return used ? used->name : nullptr;
}

// Eight sums side by side, so that no multiplication waits for the one before; each step is invertible.
QC_API uint64_t qc_checksum(const void* from, int64_t bytes) {
  constexpr uint64_t kPrime = 0x9e3779b97f4a7c15u;
  constexpr int kSums = 8;
  uint64_t sums[kSums], total = uint64_t(bytes);
  if (!from) bytes = 0;
  for (int i = 0; i < kSums; ++i) sums[i] = uint64_t(i) * kPrime;
  const char* at = static_cast<const char*>(from);
  for (; bytes >= 8 * kSums; bytes -= 8 * kSums, at += 8 * kSums)
    for (int i = 0; i < kSums; ++i) {
      uint64_t word;
      memcpy(&word, at + 8 * i, 8);
      sums[i] = (sums[i] ^ word) * kPrime;
      sums[i] ^= sums[i] >> 29;
    }
  for (int i = 0; bytes > 0; ++i, bytes -= 8, at += 8) {
    uint64_t word = 0;
    memcpy(&word, at, size_t(bytes < 8 ? bytes : 8));
    sums[i] = (sums[i] ^ word) * kPrime;
  }
  for (uint64_t sum : sums) {
    total = (total ^ sum) * kPrime;
    total ^= total >> 32;
  }
  return total;
}

QC_API int qc_set_threads(int count) {
  if (count > QC_MAX_THREADS) return QC_WRONG_MEMORY;
  return done([&] { set_threads(count); });
}
QC_API int qc_threads(void) { return threads(); }

QC_API int qc_linear_packed(const void* x, int64_t x_stride, int64_t m, int64_t k, const qc_segment* segments,
                            int64_t num_segments, const void* bias, void* out, int64_t out_stride, int dtype) {
  int64_t columns;
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (int wrong = check_segments(segments, num_segments, k, columns)) return wrong;
  if (!is_read(m, x_stride, k) || (columns && !is_written(m, out_stride, columns))) return QC_WRONG_ROWS;
  if (!m || !columns) return 0;
  if (!all_given(x, out)) return QC_WRONG_POINTER;
  return compute([&](const Kernels& to) {
    to.linear_packed(x, x_stride, m, k, segments, num_segments, bias, out, out_stride, dtype);
  });
}

QC_API int qc_linear(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                     void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (!is_read(n, weight_stride, k)) return QC_WRONG_MATRIX;
  if (!is_read(m, x_stride, k) || (n && !is_written(m, out_stride, n))) return QC_WRONG_ROWS;
  if (!m || !n) return 0;
  if (!all_given(x, weight, out)) return QC_WRONG_POINTER;
  return compute([&](const Kernels& to) {
    to.linear(x, x_stride, weight, weight_stride, bias, out, out_stride, m, n, k, dtype);
  });
}

QC_API int qc_rms_norm(const void* x, int64_t x_stride, const void* delta, const void* weight, void* sum, void* out,
                       int64_t rows, int64_t width, float eps, float offset, int wide, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (!is_read(rows, x_stride, width)) return QC_WRONG_ROWS;
  if (!rows) return 0;
  if (!all_given(x, weight, out) || (delta && !sum)) return QC_WRONG_POINTER;
  return compute([&](const Kernels& to) {
    to.rms_norm(x, x_stride, delta, weight, sum, out, rows, width, eps, offset, wide, dtype);
  });
}

QC_API int qc_gated(int act, const void* x, int64_t x_stride, void* out, int64_t rows, int64_t width, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (act < 0 || act >= QC_ACTS) return QC_WRONG_ACT;
  if (!is_count(width) || (width && !is_read(rows, x_stride, 2 * width))) return QC_WRONG_ROWS;
  if (!rows || !width) return 0;
  if (!all_given(x, out)) return QC_WRONG_POINTER;
  return compute([&](const Kernels& to) { to.gated(act, x, x_stride, out, rows, width, dtype); });
}

QC_API int qc_attend_texts(const qc_texts* work) {
  if (!work) return QC_WRONG_POINTER;
  if (int wrong = check_texts(*work)) return wrong;
  return work->queries ? compute([&](const Kernels& to) { to.attend_texts(work); }) : 0;
}

QC_API int qc_attend(const qc_attention* work) {
  if (!work) return QC_WRONG_POINTER;
  if (int wrong = check_attention(*work)) return wrong;
  return work->tokens ? compute([&](const Kernels& to) { to.attend(work); }) : 0;
}

QC_API int qc_run_blocks(const qc_block* const* blocks, const int32_t* which, int64_t count, const qc_turn* turns,
                         int64_t num_turns, const int32_t* adapters, int64_t num_slots, const void* x, const void* delta,
                         void* stream, void* out, const qc_ranks* ranks) {
  if (!is_size(count) || !is_size(num_turns) || num_turns > kMaxTurns || !is_count(num_slots)) return QC_WRONG_STEP;
  if (ranks)
    if (int wrong = check_ranks(*ranks)) return wrong;
  if (!all_given(blocks, which, turns)) return QC_WRONG_POINTER;
  Extent extents[kMaxTurns];
  for (int64_t i = 0; i < num_turns; ++i) {
    if (!turns[i].step) return QC_WRONG_POINTER;
    if (turns[i].step->tokens != turns[0].step->tokens) return QC_WRONG_STEP;
    extents[i] = check_step(*turns[i].step);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (which[i] < 0 || which[i] >= num_turns) return QC_WRONG_INDEX;
    if (!blocks[i]) return QC_WRONG_POINTER;
    if (int wrong = check_block(*blocks[i], turns[which[i]], extents[which[i]], adapters ? num_slots : 0, blocks[0]->qkv.width,
                                blocks[0]->dtype))
      return wrong;
  }
  if (!turns[0].step->tokens) return 0;
  if (adapters)
    if (int wrong = check_slots(adapters, turns[0].step->tokens, num_slots)) return wrong;
  if (!all_given(x, stream, out)) return QC_WRONG_POINTER;
  return compute([&](const Kernels& to) {
    to.run_blocks(blocks, which, count, turns, adapters, x, delta, stream, out, ranks);
  });
}

QC_API int qc_sum_ranks(const qc_ranks* ranks, void* x, int64_t count, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (!ranks) return QC_WRONG_POINTER;
  if (int wrong = check_ranks(*ranks)) return wrong;
  if (count < 0 || count > QC_MAX_ROOM) return QC_WRONG_ROWS;
  if (!count) return 0;
  if (!x) return QC_WRONG_POINTER;
  return compute([&](const Kernels& to) { to.sum_ranks(ranks, x, count, dtype); });
}

QC_API int qc_add_low_rank(const void* x, int64_t x_stride, const int32_t* slots, const qc_low_rank* low, int64_t num_slots,
                           void* y, int64_t y_stride, int64_t m, int64_t n, int64_t k, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (!is_read(m, x_stride, k) || !is_written(m, y_stride, n) || !is_count(num_slots)) return QC_WRONG_ROWS;
  if (!m) return 0;
  if (!all_given(x, slots, y) || (num_slots && !low)) return QC_WRONG_POINTER;
  if (int wrong = check_low_rank(low, num_slots, n, k, m)) return wrong;
  if (int wrong = check_slots(slots, m, num_slots)) return wrong;
  return compute([&](const Kernels& to) { to.add_low_rank(low, slots, x, x_stride, y, y_stride, m, k, dtype); });
}

QC_API int qc_argmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* index, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (!is_read(rows, x_stride, width)) return QC_WRONG_ROWS;
  if (!rows) return 0;
  if (!all_given(x, index)) return QC_WRONG_POINTER;
  return compute([&](const Kernels& to) { to.argmax(x, x_stride, rows, width, index, dtype); });
}

QC_API int qc_draw_tokens(const qc_draw* work) {
  if (!work) return QC_WRONG_POINTER;
  if (int wrong = check_draw(*work)) return wrong;
  return work->rows ? compute([&](const Kernels& to) { to.draw(work); }) : 0;
}

QC_API int qc_log_softmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, float* out, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (!is_read(rows, x_stride, width)) return QC_WRONG_ROWS;
  if (!rows) return 0;
  if (!all_given(x, out)) return QC_WRONG_POINTER;
  return compute([&](const Kernels& to) { to.log_softmax(x, x_stride, rows, width, out, dtype); });
}

QC_API int qc_top(const float* x, int64_t rows, int64_t width, const int64_t* chosen, int64_t k, float* values,
                  int64_t* ids, int64_t* ranks) {
  if (!is_read(rows, width, width) || k < 0 || k > width) return QC_WRONG_ROWS;
  if (!rows) return 0;
  if (!all_given(x, chosen, values, ids, ranks)) return QC_WRONG_POINTER;
  if (!all_below(chosen, rows, width)) return QC_WRONG_INDEX;
  return compute([&](const Kernels& to) { to.top(x, rows, width, chosen, k, values, ids, ranks); });
}

QC_API int qc_allow(float* x, int64_t x_stride, int64_t num_rows, int64_t width, const int64_t* rows, int64_t count,
                    const uint32_t* bits, int64_t num_words) {
  if (!is_written(num_rows, x_stride, width) || !is_count(count) || !is_count(num_words)) return QC_WRONG_ROWS;
  if (!has_room(count, num_words) || !has_room(count, width)) return QC_WRONG_ROWS;
  if (!count) return 0;
  if (!all_given(x, rows) || (num_words && !bits)) return QC_WRONG_POINTER;
  if (!all_below(rows, count, num_rows)) return QC_WRONG_INDEX;
  return compute([&](const Kernels& to) { to.allow(x, x_stride, width, rows, count, bits, num_words); });
}

QC_API int qc_run_moe(const qc_moe* work) {
  if (!work) return QC_WRONG_POINTER;
  if (int wrong = check_experts(*work)) return wrong;
  return work->tokens ? compute([&](const Kernels& to) { to.run_moe(work); }) : 0;
}
