// The ABI: which instruction sets there are, which one is used, and the way into it.
#include <string.h>

#include <atomic>

#include "isa.h"
#include "pool.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
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
extern const Kernels kernels_avx2, kernels_avx512;
static bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#endif

static bool always() { return true; }

struct Isa {
  const Kernels* kernels;
  bool (*usable)();
};

static const Isa kIsas[] = {
#if defined(__aarch64__)
    {&kernels_neon, always}, {&kernels_dotprod, has_dotprod},
#elif defined(__x86_64__)
    {&kernels_avx2, has_avx2}, {&kernels_avx512, has_avx512},
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

QC_API void qc_set_threads(int count) { set_threads(count); }
QC_API int qc_threads(void) { return threads(); }

// Whoever calls these has chosen an instruction set before.
QC_API void qc_linear_packed(const void* x, int64_t x_stride, int64_t m, int64_t k, const qc_segment* segments,
                             int64_t num_segments, const void* bias, void* out, int64_t out_stride, int dtype) {
  active.load()->linear_packed(x, x_stride, m, k, segments, num_segments, bias, out, out_stride, dtype);
}

QC_API void qc_linear(const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, const void* bias,
                      void* out, int64_t out_stride, int64_t m, int64_t n, int64_t k, int dtype) {
  active.load()->linear(x, x_stride, weight, weight_stride, bias, out, out_stride, m, n, k, dtype);
}

QC_API void qc_rms_norm(const void* x, int64_t x_stride, const void* delta, const void* weight, void* sum, void* out,
                        int64_t rows, int64_t width, float eps, float offset, int wide, int dtype) {
  active.load()->rms_norm(x, x_stride, delta, weight, sum, out, rows, width, eps, offset, wide, dtype);
}

QC_API void qc_gated(int act, const void* x, int64_t x_stride, void* out, int64_t rows, int64_t width, int dtype) {
  active.load()->gated(act, x, x_stride, out, rows, width, dtype);
}

QC_API void qc_attend(const qc_attention* work) { active.load()->attend(work); }

QC_API void qc_run_block(const qc_block* block, const qc_attention* step, const void* x, const void* delta,
                         const void* cos, const void* sin, void* stream, void* out) {
  active.load()->run_block(block, step, x, delta, cos, sin, stream, out);
}

QC_API void qc_argmax(const void* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* index, int dtype) {
  active.load()->argmax(x, x_stride, rows, width, index, dtype);
}
