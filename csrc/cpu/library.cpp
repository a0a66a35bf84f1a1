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

QC_API void qc_set_threads(int count) { set_threads(count); }
QC_API int qc_threads(void) { return threads(); }

// Whoever calls these has chosen an instruction set before.
QC_API int qc_linear_packed(const void* x, int64_t x_stride, int64_t m, int64_t k, const qc_segment* segments,
                            int64_t num_segments, const void* bias, void* out, int64_t out_stride, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (int wrong = m < 0 ? int(QC_WRONG_MATRIX) : check_segments(segments, num_segments, k)) return wrong;
  active.load()->linear_packed(x, x_stride, m, k, segments, num_segments, bias, out, out_stride, dtype);
  return 0;
}

QC_API void qc_linear(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                      void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k, int dtype) {
  active.load()->linear(x, x_stride, weight, weight_stride, bias, out, out_stride, m, n, k, dtype);
}

QC_API void qc_rms_norm(const void* x, int64_t x_stride, const void* delta, const void* weight, void* sum, void* out,
                        int64_t rows, int64_t width, float eps, float offset, int wide, int dtype) {
  active.load()->rms_norm(x, x_stride, delta, weight, sum, out, rows, width, eps, offset, wide, dtype);
}

QC_API int qc_gated(int act, const void* x, int64_t x_stride, void* out, int64_t rows, int64_t width, int dtype) {
  if (!is_dtype(dtype)) return QC_WRONG_DTYPE;
  if (act < 0 || act >= QC_ACTS) return QC_WRONG_ACT;
  active.load()->gated(act, x, x_stride, out, rows, width, dtype);
  return 0;
}

QC_API int qc_attend(const qc_attention* work) {
  if (int wrong = check_attention(*work)) return wrong;
  active.load()->attend(work);
  return 0;
}

QC_API int qc_run_blocks(const qc_block* const* blocks, const int32_t* which, int64_t count, const qc_turn* turns,
                         const void* x, const void* delta, void* stream, void* out) {
  if (count < 1) return QC_WRONG_STEP;
  for (int64_t i = 0; i < count; ++i)
    if (int wrong = check_block(*blocks[i], turns[which[i]], blocks[0]->qkv.width, blocks[0]->dtype)) return wrong;
  active.load()->run_blocks(blocks, which, count, turns, x, delta, stream, out);
  return 0;
}

QC_API void qc_argmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* index, int dtype) {
  active.load()->argmax(x, x_stride, rows, width, index, dtype);
}

QC_API void qc_draw_tokens(const qc_draw* work) { active.load()->draw(work); }

QC_API void qc_log_softmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, float* out, int dtype) {
  active.load()->log_softmax(x, x_stride, rows, width, out, dtype);
}

QC_API void qc_top(const float* x, int64_t rows, int64_t width, const int64_t* chosen, int64_t k, float* values,
                   int64_t* ids, int64_t* ranks) {
  active.load()->top(x, rows, width, chosen, k, values, ids, ranks);
}

QC_API void qc_allow(float* x, int64_t x_stride, int64_t width, const int64_t* rows, int64_t count, const uint32_t* bits,
                     int64_t num_words) {
  active.load()->allow(x, x_stride, width, rows, count, bits, num_words);
}

QC_API int qc_run_moe(const qc_moe* work) {
  if (int wrong = check_experts(*work)) return wrong;
  active.load()->run_moe(work);
  return 0;
}
