// The C interface: which instruction sets this build and this machine have, and calls into them.
#include "problem.h"

namespace linattn {
extern const Kernels plain_kernels;
extern const ElementwiseKernels plain_elementwise;
extern const SelectiveKernels plain_selective;
extern const DecodeKernels plain_decode;
extern const LayerKernels plain_layers;
#ifdef LINATTN_X86
extern const Kernels avx2_kernels, avx512_kernels;
extern const ElementwiseKernels avx2_elementwise, avx512_elementwise;
extern const SelectiveKernels avx2_selective, avx512_selective;
extern const DecodeKernels avx2_decode, avx512_decode;
extern const LayerKernels avx2_layers, avx512_layers;
#endif

static const Kernels* const LEVELS[] = {
    &plain_kernels,
#ifdef LINATTN_X86
    &avx2_kernels,
    &avx512_kernels,
#endif
};

static const ElementwiseKernels* const ELEMENTWISE[] = {
    &plain_elementwise,
#ifdef LINATTN_X86
    &avx2_elementwise,
    &avx512_elementwise,
#endif
};

static const SelectiveKernels* const SELECTIVE[] = {
    &plain_selective,
#ifdef LINATTN_X86
    &avx2_selective,
    &avx512_selective,
#endif
};

static const DecodeKernels* const DECODE[] = {
    &plain_decode,
#ifdef LINATTN_X86
    &avx2_decode,
    &avx512_decode,
#endif
};

static const LayerKernels* const LAYERS[] = {
    &plain_layers,
#ifdef LINATTN_X86
    &avx2_layers,
    &avx512_layers,
#endif
};
}  // namespace linattn

using namespace linattn;

extern "C" {
// Version of problem.h; a library of another version is refused.
int64_t linattn_version() { return 6; }

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

int64_t linattn_elementwise_forward(int64_t level, const Elementwise* p) { return ELEMENTWISE[level]->forward(*p); }
void linattn_elementwise_backward(int64_t level, const Elementwise* p) { ELEMENTWISE[level]->backward(*p); }

int64_t linattn_selective_lanes(int64_t level) { return SELECTIVE[level]->lanes(); }
int64_t linattn_selective_scratch(int64_t level, const Selective* p) { return SELECTIVE[level]->scratch(*p); }
int64_t linattn_selective_forward(int64_t level, const Selective* p) { return SELECTIVE[level]->forward(*p); }
void linattn_selective_backward(int64_t level, const Selective* p) { SELECTIVE[level]->backward(*p); }

int64_t linattn_decode_run(int64_t level, const Program* p) { return DECODE[level]->run(*p); }
int64_t linattn_decode_operation(int64_t level, const char* name, int64_t type) {
  return DECODE[level]->operation(name, type);
}
int64_t linattn_decode_unit(int64_t level) { return DECODE[level]->unit(); }

void linattn_convolution(int64_t level, const Convolution* p) { LAYERS[level]->convolution(*p); }
void linattn_convolution_backward(int64_t level, const Convolution* p) { LAYERS[level]->convolution_backward(*p); }
void linattn_norm(int64_t level, const Norm* p) { LAYERS[level]->norm(*p); }
void linattn_norm_backward(int64_t level, const Norm* p) { LAYERS[level]->norm_backward(*p); }
void linattn_glu(int64_t level, const Glu* p) { LAYERS[level]->glu(*p); }
void linattn_glu_backward(int64_t level, const Glu* p) { LAYERS[level]->glu_backward(*p); }
void linattn_mix(int64_t level, const Mix* p) { LAYERS[level]->mix(*p); }
void linattn_mix_backward(int64_t level, const Mix* p) { LAYERS[level]->mix_backward(*p); }
void linattn_softplus(int64_t level, const Softplus* p) { LAYERS[level]->softplus(*p); }
void linattn_softplus_backward(int64_t level, const Softplus* p) { LAYERS[level]->softplus_backward(*p); }
void linattn_skip(int64_t level, const Skip* p) { LAYERS[level]->skip(*p); }
void linattn_skip_backward(int64_t level, const Skip* p) { LAYERS[level]->skip_backward(*p); }
}
