// The C interface: which instruction sets this build and this machine have, and calls into them.
#include "problem.h"

namespace linattn {
extern const Kernels plain_kernels;
extern const SelectiveKernels plain_selective;
#ifdef LINATTN_X86
extern const Kernels avx2_kernels, avx512_kernels;
extern const SelectiveKernels avx2_selective, avx512_selective;
#endif

static const Kernels* const LEVELS[] = {
    &plain_kernels,
#ifdef LINATTN_X86
    &avx2_kernels,
    &avx512_kernels,
#endif
};

static const SelectiveKernels* const SELECTIVE[] = {
    &plain_selective,
#ifdef LINATTN_X86
    &avx2_selective,
    &avx512_selective,
#endif
};
}  // namespace linattn

using namespace linattn;

extern "C" {
// Version of problem.h; a library of another version is refused.
int64_t linattn_version() { return 2; }

// The highest level that this machine runs: 0 plain (SSE2 or NEON), 1 AVX2, 2 AVX-512.
int64_t linattn_best_level() {
#ifdef LINATTN_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

int64_t linattn_part(int64_t level) { return LEVELS[level]->part(); }
int64_t linattn_scratch(int64_t level, const Matrix* p) { return LEVELS[level]->scratch(*p); }
int64_t linattn_forward(int64_t level, const Matrix* p) { return LEVELS[level]->forward(*p); }
void linattn_backward(int64_t level, const Matrix* p) { LEVELS[level]->backward(*p); }
void linattn_scan(int64_t level, const Scan* p) { LEVELS[level]->scan(*p); }

int64_t linattn_selective_lanes(int64_t level) { return SELECTIVE[level]->lanes(); }
int64_t linattn_selective_scratch(int64_t level, const Selective* p) { return SELECTIVE[level]->scratch(*p); }
int64_t linattn_selective_forward(int64_t level, const Selective* p) { return SELECTIVE[level]->forward(*p); }
void linattn_selective_backward(int64_t level, const Selective* p) { SELECTIVE[level]->backward(*p); }
}
