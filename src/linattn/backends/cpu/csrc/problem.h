// What one call of the library is given: a plain struct of 8-byte fields, packed by linattn/backends/cpu/library.py in
// this order. Absent tensors are null. Tensors are contiguous: [tokens, heads, size], tokens counted over all rows.
#pragma once
#include <cstdint>

namespace linattn {

enum Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Decay : int64_t { NONE = 0, HEAD = 1, CHANNEL = 2, TOKEN_HEAD = 3, TOKEN_CHANNEL = 4 };
enum Write : int64_t { ADDITIVE = 0, DELTA = 1, LOW_RANK = 2 };

struct Matrix {
  // inputs: q, k [.., G, K]; v [.., H, V]; g as its decay says; beta [.., H]; a, b [.., H, K]; u [H, K];
  // state [N, H, K, V]; ends [N + 1] of packed sequences
  const void *q, *k, *v, *g, *beta, *a, *b;
  const float *u, *state;
  const int64_t* ends;
  // forward: output [.., H, V], last state; for the backward: writes [.., H, V], states [slots, H, K, V]
  void* o;
  float *final, *writes, *states;
  // backward: given d_o, d_final; every gradient has H heads. dq, dk in `key_type`, dv in `type`, the others float32.
  // Those summed over value columns have a leading axis of `parts`; dg of a fixed decay and du also one of N.
  const void* d_o;
  const float* d_final;
  void *dq, *dk, *dv;
  float *dg, *dbeta, *da, *db, *du, *dstate;
  float* scratch;
  int64_t N, T, tokens, G, H, K, V;
  int64_t write, before, decay;
  int64_t type, g_type, beta_type, low_type, key_type;
  int64_t parts, threads;  // value columns are split into `parts`
  double scale;
};

struct Elementwise {
  // A scan: h_t = e^{g_t} h_{t-1} + x_t; or, with u, the average of values weighed by e^x (elementwise.cpp). x, v [.., D]
  // of `type`, g [.., D] of `g_type`, or `fixed`: float32 [D]; u [D]; state: h and, of an average, d and m, [S, D] each;
  // ends [S + 1] of packed sequences
  const void *x, *v, *g;
  const float *u, *before[3];
  const int64_t* ends;
  // forward: output [.., D], last state; for the backward: states [slots, 1 or 4, D]
  void* y;
  float *after[3], *states;
  // backward: given dy, d_after; dx, dv in `type`, dg in `g_type`; du and dg of a fixed gate float32 [S, D]
  const void* dy;
  const float* d_after[3];
  void *dx, *dv, *dg;
  float *du, *d_before[3];
  int64_t S, T, D, type, g_type, fixed, threads;
};

struct Selective {
  // h_t = e^{dt_t A} * h_{t-1} + (dt_t x_t) B_t^T, y_t = h_t C_t; inputs: x [.., D] and B, C [.., G, N] of `type`,
  // dt [.., D]; A [D, N], state [S, D, N]; ends [S + 1] of packed sequences
  const void *x, *dt, *B, *C;
  const float *A, *state;
  const int64_t* ends;
  // forward: output [.., D], last state; for the backward: states [slots, D, N]
  void* y;
  float *final, *states;
  // backward: given dy, d_final; dx in `type`, ddt in `dt_type`, dA [S, D, N], dB, dC [parts, .., G, N]
  const void* dy;
  const float* d_final;
  void *dx, *ddt;
  float *dA, *dB, *dC, *dstate;
  float* scratch;
  int64_t S, T, tokens, D, G, N;
  int64_t type, dt_type;
  int64_t parts, threads;  // the channels of a group are split into `parts`
};

// A token of a whole model (decode.cpp) is a tape of instructions. Kinds of numbers: 0 float32, 1 float64, 2 int64,
// 3 bool; of weights: FLOAT32, BFLOAT16, or 3, int8 with a scale a row.
constexpr int64_t AXES = 6;

struct Operand {
  char* at;
  int64_t bytes;          // of an element
  int64_t strides[AXES];  // in bytes
};

struct Instruction {
  enum Kind : int64_t { MAP, FOLD, PICK, PRODUCT, LINEAR, MATRIX, SELECTIVE };
  int64_t kind, code, type;
  int64_t parallel, wait;  // whether all threads share it; whether they meet before it
  int64_t rank, axes;      // of a FOLD, the leading `axes` are those of its result
  int64_t sizes[AXES];     // of the result and what is folded; LINEAR: rows, outputs, inputs
  Operand x[4];            // the result first; a recurrence: its problem
  int64_t picked[2][2];    // PICK: length and stride of the axes that x[2] and x[3] count along
  double number;           // FOLD: what the result is multiplied by; int8 weights: the largest int16
};

struct Program {
  const Instruction* tape;
  char* scratch;
  int64_t length, bytes, threads;  // bytes of scratch, a thread
};

// Tokens of N sequences, `count` in all: tokens ends[n] .. ends[n + 1] belong to sequence n (without ends: T to each);
// token i is row index[i] of a tensor (without index: row i).
struct Tokens {
  const int64_t *ends, *index;
  int64_t N, T, count;
};

constexpr int64_t CONVOLUTION_WIDTH = 32;  // the widest that there is a kernel for

struct Convolution {
  // depthwise and causal, then silu if `activation`; weight [C, W], bias [C]; x, y [rows, C], tails [N, W - 1, C] of
  // `type`; the rows of x and dy are x_row and dy_row numbers apart, all others C
  Tokens tokens;
  const void *x, *tail;
  const float *weight, *bias;
  void *y, *new_tail;
  // backward; partial [pieces of `piece` tokens, W + 1, C] is scratch
  const void *dy, *d_new_tail;
  void *dx, *dtail;
  float *dweight, *dbias;
  double* partial;
  int64_t C, W, x_row, dy_row, activation, type;
  int64_t piece, threads;
};

enum Gated : int64_t { UNGATED = 0, GATE_BEFORE = 1, GATE_AFTER = 2 };

struct Norm {
  // R rows of M parts of N numbers, each part normalised on its own: r = (mean * sum of squares + eps)^-1/2; the average
  // is subtracted first if `centred`. weight, bias [weights], which is N or M * N.
  const void *x, *gate;
  const float *weight, *bias;
  void* y;
  // backward; partial, bias_partial [pieces of `piece` rows, weights] are scratch
  const void* dy;
  void *dx, *dgate;
  float *dweight, *dbias;
  double *partial, *bias_partial;
  int64_t R, M, N, x_row, gate_row, dy_row, weights, gated, centred, type, gate_type;
  int64_t piece, threads;
  double mean, eps;
};

struct Glu {
  // y = silu(a) b with x [R, (a, b)], of N numbers each; dx as x
  const void* x;
  void* y;
  const void* dy;
  void* dx;
  int64_t R, N, x_row, dy_row, type, threads;
};

struct Softplus {
  // y = log(1 + e^(x + bias)): x, dx [R, N] of `type`, bias [N]; y, dy float32; the rows of x are x_row numbers apart
  const void* x;
  const float* bias;
  float* y;
  // backward; partial [pieces of `piece` rows, N] is scratch
  const float* dy;
  void* dx;
  float* dbias;
  double* partial;
  int64_t R, N, x_row, type;
  int64_t piece, threads;
};

struct Skip {
  // y = (x + weight u) silu(z): all [R, N] of `type`, weight [N]; rows of x, u, z and dy are so many numbers apart
  const void *x, *u, *z;
  const float* weight;
  void* y;
  // backward; partial [pieces of `piece` rows, N] is scratch
  const void* dy;
  void *dx, *du, *dz;
  float* dweight;
  double* partial;
  int64_t R, N, x_row, u_row, z_row, dy_row, type;
  int64_t piece, threads;
};

constexpr int64_t MIXES = 8;  // the most that there is a kernel for

struct Mix {
  // y_k = x_t + weight_k (x_{t-1} - x_t), weight [K, C]; x, dx [rows, C], y_k, dy_k [rows, C], state, last [N, C] of
  // `type`; the rows of x are x_row numbers apart
  Tokens tokens;
  const void *x, *state;
  const float* weight;
  void* const* y;
  void* last;
  // backward; partial [pieces of `piece` tokens, K, C] is scratch
  const void* const* dy;
  const void* d_last;
  void *dx, *dstate;
  float* dweight;
  double* partial;
  int64_t K, C, x_row, type;
  int64_t piece, threads;
};

constexpr int64_t BLOCK = 64;  // tokens worked on together; a state is kept every BLOCK tokens for the backward

// What every instruction set offers.
struct Kernels {
  int64_t (*scratch)(const Matrix&);  // floats a thread needs
  int64_t (*part)();                  // value columns that a part must be a multiple of
  int64_t (*forward)(const Matrix&);  // 0, or 1: a gate is positive or NaN
  void (*backward)(const Matrix&);
};

struct ElementwiseKernels {
  int64_t (*forward)(const Elementwise&);  // 0, or 1: a gate is positive or NaN
  void (*backward)(const Elementwise&);
};

struct SelectiveKernels {
  int64_t (*scratch)(const Selective&);
  int64_t (*lanes)();                    // channels that are worked on together
  int64_t (*forward)(const Selective&);  // 0, or 1: a step or a rate is out of range
  void (*backward)(const Selective&);
};

struct DecodeKernels {
  int64_t (*run)(const Program&);                  // the place of the instruction that failed, or -1
  int64_t (*operation)(const char*, int64_t type);  // its number, or -1
  int64_t (*unit)();                               // numbers that rows of bfloat16 weights are a multiple of
};

struct LayerKernels {
  void (*convolution)(const Convolution&);
  void (*convolution_backward)(const Convolution&);
  void (*norm)(const Norm&);
  void (*norm_backward)(const Norm&);
  void (*glu)(const Glu&);
  void (*glu_backward)(const Glu&);
  void (*mix)(const Mix&);
  void (*mix_backward)(const Mix&);
  void (*softplus)(const Softplus&);
  void (*softplus_backward)(const Softplus&);
  void (*skip)(const Skip&);
  void (*skip_backward)(const Skip&);
};

}  // namespace linattn
