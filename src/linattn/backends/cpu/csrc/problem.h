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

struct Scan {
  // h_t = decay_t * h_{t-1} + x_t; x, decay, h [B, T, D], state [B, D], all float32
  const float *x, *decay, *state;
  float* h;
  int64_t B, T, D, threads;
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

constexpr int64_t BLOCK = 64;  // tokens worked on together; a state is kept every BLOCK tokens for the backward

// What every instruction set offers.
struct Kernels {
  int64_t (*scratch)(const Matrix&);  // floats a thread needs
  int64_t (*part)();                  // value columns that a part must be a multiple of
  int64_t (*forward)(const Matrix&);  // 0, or 1: a gate is positive or NaN
  void (*backward)(const Matrix&);
  void (*scan)(const Scan&);
};

struct SelectiveKernels {
  int64_t (*scratch)(const Selective&);
  int64_t (*lanes)();                    // channels that are worked on together
  int64_t (*forward)(const Selective&);  // 0, or 1: a step or a rate is out of range
  void (*backward)(const Selective&);
};

}  // namespace linattn
