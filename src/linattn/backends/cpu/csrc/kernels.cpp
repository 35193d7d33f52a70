// The recurrence with a tile of the state in registers, for one instruction set; compiled once for each.
//
//     S_t = d_t S_{t-1} + b_t w_t^T + k_t v_t^T      o_t = scale S_t^T q_t  (or S_{t-1} and the bonus)
//
//   d = e^g      additive: no b w^T      low rank: w_t = S_{t-1}^T a_t
//   delta: k_t w_t^T instead of both, w_t = beta_t e_t, e_t = v_t + S_{t-1}^T a_t, a_t = -d_t k_t
//   X_t          gradient of S_t, all later uses included; P what later tokens give it (X_t as seen by the write of t)
//
// Plainly the recurrence, walked over blocks of BLOCK tokens: every product of decays appears as it is, so no gate is
// too strong. A block's rows are first copied into packed float32 rows (q scaled, decays exponentiated, tails zero).
//
//   sweep_tile      R rows x W vectors of a state stay in registers for a whole block: the output of an additive write
//                   and each of its gradients, with other letters in the parts of q, k and v
//   low_rank_tile   all keys x W vectors in L1; one pass a token writes, reads o, and reads w of the next token
//   adjoint_tile    the same backwards in time: X, reading dw_t = X_t^T b_t (k_t for delta)
//   gradient_tile   S forwards from a kept state, then X backwards; here vectors run over keys and rows over values,
//                   so that dq_t = S do, dk_t = X v, dg_t = S . X ... are sums over rows, which need no reduction
//
// The gradients of an additive write are three sweeps, and that of its gate a running sum within the block, from S . X
// at its end on: what a token reads is decayed by the gates up to its own, what it writes by those after it,
// dg_t - dg_{t+1} = q_t dq_t - k_t dk_t. Where a gate is strong, its gradient is too small to be had as a difference, and
// where gates are fixed, they sum over all tokens: there gradient_tile sums S . X token by token.
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "problem.h"

namespace linattn {
namespace {

#include "vector.h"
// after it
#include "scratch.h"

#if LINATTN_LANES == 16 || defined(__aarch64__)
constexpr int R = 8;  // keys of the forward's register tile, which is 2 vectors wide
#else
constexpr int R = 4;
#endif
constexpr int GR = 8, GW = 1;  // values, and vectors of keys, of the backward's
constexpr int64_t SHORT = 16;   // tokens that the gate's gradient sums differences over
constexpr float MILD = 0.25f;    // the strongest decay whose gradient may be had by differences

// An odd number of cache lines, so that successive rows fall into different sets.
int64_t stride_of(int64_t n) { return LINE * (ceil_to(n, LINE) / LINE | 1); }

// Sizes and packed rows of a block. Rows of q, d_o and the keys have a zero row before the first and after the last.
struct Block {
  int64_t K, V, Kp, Vp, ks, vs;  // Kp, Vp: padded to whole vectors; ks, vs: distance of rows
  float *q, *k, *d, *a, *b, *v, *o, *w, *e, *beta, *S;
  // backward only
  double *fixed = nullptr, *across = nullptr;  // sums over tokens; S . X at the end of a block
  float *d_o = nullptr, *dw = nullptr, *d_e = nullptr, *dv = nullptr, *dq = nullptr, *dk = nullptr, *dg = nullptr,
        *da = nullptr, *db = nullptr, *X = nullptr, *ST = nullptr, *XT = nullptr, *kept = nullptr, *sums = nullptr,
        *ends = nullptr;

  Block(const Matrix& p, int64_t columns, Arena& arena, bool backward) {
    K = p.K, V = columns;
    Kp = ceil_to(K, L > R ? L : R), Vp = ceil_to(V, backward && GR > L ? GR : L);
    ks = stride_of(Kp), vs = stride_of(Vp);
    auto rows = [&](int64_t stride) { return arena.take((BLOCK + 2) * stride) + stride; };
    const bool low = p.write != ADDITIVE, both = p.write == LOW_RANK;
    q = rows(ks), k = rows(ks), v = rows(vs), o = rows(vs);
    d = p.decay ? rows(ks) : nullptr;
    a = low ? rows(ks) : nullptr, w = low ? rows(vs) : nullptr, e = low ? rows(vs) : nullptr;
    b = both ? rows(ks) : nullptr;
    beta = arena.take(BLOCK);
    S = arena.take(Kp * vs);
    if (!backward) return;
    d_o = rows(vs), dv = rows(vs), dq = rows(ks), dk = rows(ks);
    dg = p.dg || (p.decay && low) ? rows(ks) : nullptr;
    dw = low ? rows(vs) : nullptr, d_e = low ? rows(vs) : nullptr, da = low ? rows(ks) : nullptr;
    db = both ? rows(ks) : nullptr;
    X = arena.take(Kp * vs);
    fixed = reinterpret_cast<double*>(arena.take(4 * Kp)), across = reinterpret_cast<double*>(arena.take(2 * Kp));
    ends = low || !p.dg ? nullptr : arena.take(BLOCK / SHORT * Vp * ks);
    ST = arena.take(Vp * ks), XT = arena.take(Vp * ks);
    kept = arena.take(BLOCK * GR * GW * L), sums = arena.take(BLOCK * GR * L);
  }
};

// A (sequence, head, part of the value columns).
struct Task {
  int64_t n, h, part, first, length, slot, v0, columns;
};

Task task_of(const Matrix& p, int64_t i) {
  Task t;
  t.part = i % p.parts, t.h = i / p.parts % p.H, t.n = i / p.parts / p.H;
  if (p.ends) {
    t.first = p.ends[t.n], t.length = p.ends[t.n + 1] - t.first;
    t.slot = t.first / BLOCK + t.n;
  } else {
    t.first = t.n * p.T, t.length = p.T;
    t.slot = t.n * (ceil_to(p.T, BLOCK) / BLOCK);
  }
  const int64_t step = ceil_to((p.V + p.parts - 1) / p.parts, 2 * L);
  t.v0 = least(t.part * step, p.V);
  t.columns = least(step, p.V - t.v0);
  return t;
}

int64_t columns_of(const Matrix& p) { return least(p.V, ceil_to((p.V + p.parts - 1) / p.parts, 2 * L)); }

// [tokens, heads, size] -> n packed rows, from `at` of head h on, zero beyond `size`; scaled.
void read_rows(float* y, int64_t stride, const void* x, int64_t type, int64_t first, int64_t n, int64_t heads,
               int64_t h, int64_t width, int64_t at, int64_t size, int64_t padded, float scale = 1) {
  for (int64_t t = 0; t < n; t++, y += stride) {
    read_row(y, x, type, ((first + t) * heads + h) * width + at, size);
    if (scale != 1)
      for (int64_t i = 0; i < size; i++) y[i] *= scale;
    for (int64_t i = size; i < padded; i++) y[i] = 0;
  }
}

void write_rows(void* y, int64_t type, const float* x, int64_t stride, int64_t first, int64_t n, int64_t heads,
                int64_t h, int64_t width, int64_t at, int64_t size) {
  for (int64_t t = 0; t < n; t++) write_row(y, x + t * stride, type, ((first + t) * heads + h) * width + at, size);
}

// A packed row of `n` gates, exponentiated. False if one is positive or NaN.
bool exponentiate(float* x, int64_t n) {
  Ints good = Ints{} - 1;
  for (int64_t i = 0; i < n; i += L) {
    const Vec y = load(x + i);
    good &= y <= Vec{};
    store(x + i, exponential(y));
  }
  int32_t every = -1;
  for (int i = 0; i < L; i++) every &= good[i];
  return every != 0;
}

bool scalar_decay(const Matrix& p) { return p.decay == HEAD || p.decay == TOKEN_HEAD; }

// Decays that don't depend on the token: packed once a task.
bool fixed_decays(const Matrix& p, const Task& t, const Block& m) {
  if (p.decay != HEAD && p.decay != CHANNEL) return true;
  bool good = true;
  const int64_t D = p.decay == HEAD ? 1 : p.K, Dp = ceil_to(D, L);
  for (int64_t i = 0; i < least(BLOCK, t.length); i++) {
    read_rows(m.d + i * m.ks, m.ks, p.g, p.g_type, 0, 1, p.H, t.h, D, 0, D, Dp);
    good &= exponentiate(m.d + i * m.ks, Dp);
  }
  return good;
}

// The inputs of n tokens from `first` on. False if a gate is positive or NaN.
bool read_block(const Matrix& p, const Task& t, const Block& m, int64_t first, int64_t n) {
  bool good = true;
  const int64_t g = t.h / (p.H / p.G);
  read_rows(m.q, m.ks, p.q, p.type, first, n, p.G, g, p.K, 0, p.K, m.Kp, static_cast<float>(p.scale));
  read_rows(m.k, m.ks, p.k, p.type, first, n, p.G, g, p.K, 0, p.K, m.Kp);
  read_rows(m.v, m.vs, p.v, p.type, first, n, p.H, t.h, p.V, t.v0, t.columns, m.Vp);
  if (p.decay == TOKEN_HEAD || p.decay == TOKEN_CHANNEL) {
    const int64_t D = p.decay == TOKEN_HEAD ? 1 : p.K, Dp = ceil_to(D, L);
    read_rows(m.d, m.ks, p.g, p.g_type, first, n, p.H, t.h, D, 0, D, Dp);
    for (int64_t i = 0; i < n; i++) good &= exponentiate(m.d + i * m.ks, Dp);
  }
  if (p.decay == CHANNEL || p.decay == TOKEN_CHANNEL)  // channels beyond K: kept, they are zero
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = p.K; j < m.Kp; j++) m.d[i * m.ks + j] = 1;
  if (p.write == DELTA) {
    for (int64_t i = 0; i < n; i++) {
      read_row(m.beta + i, p.beta, p.beta_type, (first + i) * p.H + t.h, 1);
      float *a = m.a + i * m.ks, *k = m.k + i * m.ks;
      const float* d = p.decay ? m.d + i * m.ks : nullptr;
      const bool channels = p.decay == CHANNEL || p.decay == TOKEN_CHANNEL;
      const float same = d ? -d[0] : -1;
      if (channels)
        for (int64_t j = 0; j < m.Kp; j++) a[j] = -k[j] * d[j];
      else
        for (int64_t j = 0; j < m.Kp; j++) a[j] = k[j] * same;
    }
  } else if (p.write == LOW_RANK) {
    read_rows(m.a, m.ks, p.a, p.low_type, first, n, p.H, t.h, p.K, 0, p.K, m.Kp);
    read_rows(m.b, m.ks, p.b, p.low_type, first, n, p.H, t.h, p.K, 0, p.K, m.Kp);
  }
  if (p.write != ADDITIVE) zero(m.a + n * m.ks, m.ks);
  return good;
}

void read_state(const Matrix& p, const Task& t, const Block& m, float* S, const float* from) {
  zero(S, m.Kp * m.vs);
  if (from)
    for (int64_t r = 0; r < m.K; r++) read_row(S + r * m.vs, from, FLOAT32, r * p.V + t.v0, t.columns);
}

void write_state(const Matrix& p, const Task& t, const Block& m, const float* S, float* to) {
  for (int64_t r = 0; r < m.K; r++) write_row(to, S + r * m.vs, FLOAT32, r * p.V + t.v0, t.columns);
}

// ---- forward

// The recurrence with other letters. x, y: broadcast along the vectors; z, out: along the rows of S. All point at their
// rows of the first token; `broadcast`, `along`, `gates` lead to the next one, backwards in time where negative.
struct Sweep {
  const float *x, *y, *z, *d;
  float *out, *S;
  int64_t rows, lanes;  // of S
  int64_t broadcast, along, gates, stride;
};

// FORWARD: S = d S + y z, out += x S. LATE reads first. BACKWARD: S = S + y z, out += x S, and the decay comes last.
enum Order { FORWARD, LATE, BACKWARD };
// Decays: of the whole state, of its rows, of its vectors' lanes.
enum Gates { UNGATED, WHOLE, ROWS, LANES };

template <int D, int O, int W>
void sweep_tile(const Sweep& s, int64_t n, int64_t r0, int64_t c0) {
  const float *x = s.x + r0, *y = s.y + r0, *z = s.z + c0, *d = s.d + (D == ROWS ? r0 : D == LANES ? c0 : 0);
  float *out = s.out + c0, *S = s.S + r0 * s.stride + c0;
  Vec state[R][W];
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) state[r][w] = load(S + r * s.stride + w * L);
  for (int64_t t = 0; t < n; t++) {
    Vec value[W], even[W], odd[W], decay[W];
    for (int w = 0; w < W; w++) {
      value[w] = load(z + w * L), even[w] = load(out + w * L), odd[w] = Vec{};
      decay[w] = D == WHOLE ? all(d[0]) : D == LANES ? load(d + w * L) : Vec{};
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec yr = all(y[r]), xr = all(x[r]), dr = D == ROWS ? all(d[r]) : Vec{};
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) {
        Vec &sum = r & 1 ? odd[w] : even[w], &v = state[r][w];
        const Vec by = D == ROWS ? dr : decay[w];
        if (O == LATE) sum += xr * v;
        v = D && O != BACKWARD ? by * v + yr * value[w] : v + yr * value[w];
        if (O != LATE) sum += xr * v;
        if (D && O == BACKWARD) v *= by;
      }
    }
    for (int w = 0; w < W; w++) store(out + w * L, even[w] + odd[w]);
    x += s.broadcast, y += s.broadcast, z += s.along, out += s.along, d += D ? s.gates : 0;
  }
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) store(S + r * s.stride + w * L, state[r][w]);
}

// `out` is added to.
template <int D, int O>
void sweep(const Sweep& s, int64_t n) {
  for (int64_t c0 = 0; c0 < s.lanes; c0 += 2 * L)
    for (int64_t r0 = 0; r0 < s.rows; r0 += R) {
      if (c0 + 2 * L <= s.lanes)
        sweep_tile<D, O, 2>(s, n, r0, c0);
      else
        sweep_tile<D, O, 1>(s, n, r0, c0);
    }
}

template <int D, bool Before>
void additive(const Block& m, int64_t n) {
  zero(m.o, n * m.vs);
  sweep<D, Before ? LATE : FORWARD>({m.q, m.k, m.v, m.d, m.o, m.S, m.K, m.Vp, m.ks, m.vs, m.ks, m.vs}, n);
}

// `next` becomes S^T a of the token after t.
template <int D, bool Both, bool Before, int W>
void low_rank_tile(const Block& m, int64_t n, int64_t v0) {
  const int64_t K = m.K, ks = m.ks, vs = m.vs;
  const float *q = m.q, *k = m.k, *a = m.a, *b = Both ? m.b : m.k, *d = D ? m.d : nullptr, *values = m.v + v0;
  float *const S0 = m.S + v0, *e = m.e + v0, *wrote = m.w + v0, *out = m.o + v0;
  Vec next[2][W] = {};
  for (int64_t r = 0; r < K; r++)
    for (int w = 0; w < W; w++) next[0][w] += a[r] * load(S0 + r * vs + w * L);
  for (int64_t t = 0; t < n; t++, values += vs, e += vs, wrote += vs, out += vs) {
    a += ks;  // of the next token
    Vec v[W], x[W], o[2][W] = {}, decay = D == 1 ? all(d[0]) : Vec{};
    for (int w = 0; w < W; w++) {
      v[w] = load(values + w * L);
      x[w] = next[0][w] + next[1][w];
      if (!Both) {
        x[w] += v[w];
        store(e + w * L, x[w]);
        x[w] *= m.beta[t];
      }
      store(wrote + w * L, x[w]);
      next[0][w] = next[1][w] = Vec{};
    }
    auto row = [&](int64_t r, int side) __attribute__((always_inline)) {
      float* S = S0 + r * vs;
      const Vec qr = all(q[r]), ar = all(a[r]), br = all(b[r]), kr = all(k[r]);
      if (D == 2) decay = all(d[r]);
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) {
        Vec s = load(S + w * L);
        if (Before) o[side][w] += qr * s;
        s = D ? decay * s + br * x[w] : s + br * x[w];
        if (Both) s += kr * v[w];
        if (!Before) o[side][w] += qr * s;
        next[side][w] += ar * s;
        store(S + w * L, s);
      }
    };
    int64_t r = 0;
    for (; r + 1 < K; r += 2) row(r, 0), row(r + 1, 1);
    if (r < K) row(r, 0);
    for (int w = 0; w < W; w++) store(out + w * L, o[0][w] + o[1][w]);
    q += ks, k += ks, b += ks, d += D ? ks : 0;
  }
}

template <int D, bool Both, bool Before>
void low_rank(const Block& m, int64_t n) {
  int64_t v0 = 0;
  for (; v0 + 2 * L <= m.Vp; v0 += 2 * L) low_rank_tile<D, Both, Before, 2>(m, n, v0);
  if (v0 < m.Vp) low_rank_tile<D, Both, Before, 1>(m, n, v0);
}

using Walk = void (*)(const Block&, int64_t);

template <int D>
Walk forward_walk_of(const Matrix& p) {
  if (p.write == ADDITIVE) return p.before ? additive<D, true> : additive<D, false>;
  if (p.write == DELTA) return p.before ? low_rank<D, false, true> : low_rank<D, false, false>;
  return p.before ? low_rank<D, true, true> : low_rank<D, true, false>;
}

Walk forward_walk(const Matrix& p) {
  return p.decay == NONE ? forward_walk_of<0>(p) : scalar_decay(p) ? forward_walk_of<1>(p) : forward_walk_of<2>(p);
}

// What the token's own write carries into its output when it is read before: row v (w for delta), q . u . k of it.
float bonus_weight(const Matrix& p, const Task& t, const Block& m, int64_t i) {
  const float *q = m.q + i * m.ks, *k = m.k + i * m.ks, *u = p.u + t.h * p.K;
  float c = 0;
  for (int64_t j = 0; j < p.K; j++) c += q[j] * u[j] * k[j];
  return c;
}

// One token: the state is read where it lies and written where it goes. W vectors of columns, the last cut to n floats.
template <int Kind, bool Before, int W>
void step_tile(const Matrix& p, const Block& m, const float* from, float* to, int64_t v0, int64_t n) {
  const auto read = [&](const float* row, int w) __attribute__((always_inline)) {
    if (W > 1 || n == L) return load(row + w * L);
    Vec x = {};
    __builtin_memcpy(&x, row, n * sizeof(float));
    return x;
  };
  const float one = 1, *d = p.decay == NONE ? &one : m.d;
  const int64_t channel = p.decay == CHANNEL || p.decay == TOKEN_CHANNEL;
  Vec x[W] = {}, v[W], o[W] = {};
  if (Kind != ADDITIVE)
    for (int64_t r = 0; r < p.K; r++)
      for (int w = 0; w < W; w++) x[w] += m.a[r] * read(from + r * p.V, w);
  for (int w = 0; w < W; w++) {
    v[w] = load(m.v + v0 + w * L);
    if (Kind == DELTA) v[w] = m.beta[0] * (v[w] + x[w]), store(m.w + v0 + w * L, v[w]);
  }
  for (int64_t r = 0; r < p.K; r++) {
    const Vec kr = all(m.k[r]), qr = all(m.q[r]), dr = all(d[r * channel]);
    for (int w = 0; w < W; w++) {
      Vec s = read(from + r * p.V, w);
      if (Before) o[w] += qr * s;
      s = dr * s + kr * v[w];
      if (Kind == LOW_RANK) s += m.b[r] * x[w];
      if (!Before) o[w] += qr * s;
      float* row = to + r * p.V + w * L;
      if (W > 1 || n == L)
        store(row, s);
      else
        __builtin_memcpy(row, &s, n * sizeof(float));
    }
  }
  for (int w = 0; w < W; w++) store(m.o + v0 + w * L, o[w]);
}

template <int Kind, bool Before>
void step(const Matrix& p, const Block& m, const float* from, float* to) {
  int64_t v0 = 0;
  for (; v0 + 4 * L <= m.V; v0 += 4 * L) step_tile<Kind, Before, 4>(p, m, from + v0, to + v0, v0, L);
  for (; v0 < m.V; v0 += L) step_tile<Kind, Before, 1>(p, m, from + v0, to + v0, v0, least(L, m.V - v0));
}

void step_of(const Matrix& p, const Block& m, const float* from, float* to) {
  const auto one = p.write == ADDITIVE ? (p.before ? step<ADDITIVE, true> : step<ADDITIVE, false>)
                   : p.write == DELTA  ? (p.before ? step<DELTA, true> : step<DELTA, false>)
                                       : (p.before ? step<LOW_RANK, true> : step<LOW_RANK, false>);
  one(p, m, from, to);
}

bool forward_task(const Matrix& p, const Task& t, const Block& m, Walk walk) {
  const int64_t at = (t.n * p.H + t.h) * p.K * p.V;
  const bool one = t.length == 1 && p.state && !p.states;
  if (!one) read_state(p, t, m, m.S, p.state ? p.state + at : nullptr);
  bool good = fixed_decays(p, t, m);
  for (int64_t begin = 0; begin < t.length; begin += BLOCK) {
    const int64_t n = least(BLOCK, t.length - begin), first = t.first + begin;
    if (p.states) write_state(p, t, m, m.S, p.states + ((t.slot + begin / BLOCK) * p.H + t.h) * p.K * p.V);
    good &= read_block(p, t, m, first, n);
    if (one)
      step_of(p, m, p.state + at + t.v0, p.final + at + t.v0);
    else
      walk(m, n);
    if (p.u)
      for (int64_t i = 0; i < n; i++) {
        const float c = bonus_weight(p, t, m, i), *wrote = (p.write == DELTA ? m.w : m.v) + i * m.vs;
        for (int64_t j = 0; j < m.Vp; j++) m.o[i * m.vs + j] += c * wrote[j];
      }
    write_rows(p.o, p.type, m.o, m.vs, first, n, p.H, t.h, p.V, t.v0, t.columns);
    if (p.writes)
      write_rows(p.writes, FLOAT32, p.write == DELTA ? m.e : m.w, m.vs, first, n, p.H, t.h, p.V, t.v0, t.columns);
  }
  if (!one) write_state(p, t, m, m.S, p.final + at);
  return good;
}

int64_t scratch(const Matrix& p) {
  Arena arena{nullptr};
  Block(p, columns_of(p), arena, p.d_o != nullptr);
  return arena.used;
}

template <class Each>
void for_each_task(const Matrix& p, Each each) {
  const int64_t tasks = p.N * p.H * p.parts, size = scratch(p);
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads) if (p.threads > 1)
  for (int64_t i = 0; i < tasks; i++) {
    const Task t = task_of(p, i);
    if (t.columns <= 0) continue;
    Arena arena{p.scratch + thread() * size};
    const Block m(p, t.columns, arena, p.d_o != nullptr);
    each(t, m);
  }
}

int64_t forward(const Matrix& p) {
  const Walk walk = forward_walk(p);
  int64_t bad = 0;
  for_each_task(p, [&](const Task& t, const Block& m) {
    if (!forward_task(p, t, m, walk)) {
#pragma omp atomic write
      bad = 1;
    }
  });
  return bad;
}

// ---- backward

// X_t -> X_{t-1}: the low-rank term cancels a part of X, so it comes first, and for delta (a = -d k, here a is k)
// before the decay.
template <int D, bool Both, class Y, class Z>
inline Vec passed(Vec x, Vec d, Y a, Z d_e, Vec read) {
  if (!Both) {
    x -= a * d_e;
    return D ? d * x + read : x + read;
  }
  return (D ? d * x + a * d_e : x + a * d_e) + read;
}

// Walks X from the block's end to its start. Row `s` of q and d_o joins X of the token before t: its own read if it
// reads after its write, else that of t.
template <int D, bool Both, int W>
void adjoint_tile(const Block& m, int64_t n, int64_t v0, int64_t shift) {
  Vec read[2][W] = {}, write[2][W] = {};
  {
    const float *q = m.q + (n - 1 + shift) * m.ks, *k = (Both ? m.b : m.k) + (n - 1) * m.ks, *y = m.k + (n - 1) * m.ks;
    const float* d_o = m.d_o + (n - 1 + shift) * m.vs + v0;
    for (int64_t r = 0; r < m.K; r++)
      for (int w = 0; w < W; w++) {
        float* X = m.X + r * m.vs + v0 + w * L;
        const Vec x = load(X) + q[r] * load(d_o + w * L);
        store(X, x);
        read[0][w] += k[r] * x;
        if (Both) write[0][w] += y[r] * x;
      }
  }
  for (int64_t t = n - 1; t >= 0; t--) {
    const int64_t s = t - 1 + shift;
    const float *q = m.q + s * m.ks, *k = (Both ? m.b : m.k) + (t - 1) * m.ks, *y = m.k + (t - 1) * m.ks;
    const float *a = (Both ? m.a : m.k) + t * m.ks, *d = D == 0 ? nullptr : m.d + t * m.ks;
    Vec d_o[W], dx[W], decay = D == 1 ? all(d[0]) : Vec{};
    for (int w = 0; w < W; w++) {
      const int64_t at = t * m.vs + v0 + w * L;
      d_o[w] = load(m.d_o + s * m.vs + v0 + w * L);
      dx[w] = load(m.dw + at) + (read[0][w] + read[1][w]);
      store(m.dw + at, dx[w]);
      if (!Both) dx[w] *= m.beta[t];
      store(m.d_e + at, dx[w]);
      store(m.dv + at, Both ? write[0][w] + write[1][w] : dx[w]);
      read[0][w] = read[1][w] = write[0][w] = write[1][w] = Vec{};
    }
    auto row = [&](int64_t r, int side) __attribute__((always_inline)) {
      float* X = m.X + r * m.vs + v0;
      const Vec qr = all(q[r]), kr = all(k[r]), ar = all(a[r]), yr = all(y[r]);
      if (D == 2) decay = all(d[r]);
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) {
        const Vec x = passed<D, Both>(load(X + w * L), decay, ar, dx[w], qr * d_o[w]);
        read[side][w] += kr * x;
        if (Both) write[side][w] += yr * x;
        store(X + w * L, x);
      }
    };
    int64_t r = 0;
    for (; r + 1 < m.K; r += 2) row(r, 0), row(r + 1, 1);
    if (r < m.K) row(r, 0);
  }
}

template <int D, bool Both>
void adjoint(const Block& m, int64_t n, int64_t shift) {
  int64_t v0 = 0;
  for (; v0 + 2 * L <= m.Vp; v0 += 2 * L) adjoint_tile<D, Both, 2>(m, n, v0, shift);
  if (v0 < m.Vp) adjoint_tile<D, Both, 1>(m, n, v0, shift);
}

// GR values x GW vectors of keys of S^T, then of X^T. wrote: the values that k writes (w for delta).
template <int D, int Kind, bool Before>
void gradient_tile(const Block& m, int64_t n, int64_t k0, int64_t v0) {
  constexpr bool Low = Kind != ADDITIVE, Both = Kind == LOW_RANK, Gate = D != 0;
  constexpr int64_t shift = Before ? 0 : 1, tile = GR * GW * L;
  const int64_t ks = m.ks, vs = m.vs;
  const float *q = m.q + k0, *k = m.k + k0, *d = D ? m.d + (D == 2 ? k0 : 0) : nullptr;
  const float *a = Both ? m.a + k0 : k, *b = Both ? m.b + k0 : k;
  const float *d_o = m.d_o + v0, *d_e = Low ? m.d_e + v0 : d_o, *w_row = Low ? m.w + v0 : d_o;
  const float* wrote = (Kind == DELTA ? m.w : m.v) + v0;
  float *dq = m.dq + k0, *dk = m.dk + k0, *dg = Gate ? m.dg + k0 : dk, *da = Low ? m.da + k0 : dk;
  float *db = Both ? m.db + k0 : dk, *kept = m.kept, *sums = m.sums;
  const float* ST = m.ST + v0 * ks + k0;
  float* XT = m.XT + v0 * ks + k0;
  Vec s[GR][GW];
  for (int r = 0; r < GR; r++)
    for (int w = 0; w < GW; w++) s[r][w] = load(ST + r * ks + w * L);
  for (int64_t t = 0; t < n; t++) {
    Vec kw[GW], bw[GW], dw[GW], dq_sum[GW], da_sum[GW];
    for (int w = 0; w < GW; w++) {
      kw[w] = load(k + w * L);
      if (Both) bw[w] = load(b + w * L);
      if (D) dw[w] = D == 1 ? all(d[0]) : load(d + w * L);
      dq_sum[w] = load(dq + w * L);
      if (Low) da_sum[w] = load(da + w * L);
    }
#pragma GCC unroll 8
    for (int r = 0; r < GR; r++) {
      const Vec y = all(wrote[r]), d_or = all(d_o[r]);
#pragma GCC unroll 2
      for (int w = 0; w < GW; w++) {
        Vec& x = s[r][w];
        if (Gate) store(kept + (r * GW + w) * L, x);
        if (Before) dq_sum[w] += d_or * x;
        if (Low) da_sum[w] += d_e[r] * x;
        x = D ? dw[w] * x + kw[w] * y : x + kw[w] * y;
        if (Both) x += bw[w] * w_row[r];
        if (!Before) dq_sum[w] += d_or * x;
      }
    }
    for (int w = 0; w < GW; w++) {
      store(dq + w * L, dq_sum[w]);
      if (Low) store(da + w * L, da_sum[w]);
    }
    k += ks, b += ks, d += D ? ks : 0, wrote += vs, d_o += vs, d_e += vs, w_row += vs;
    kept += tile, dq += ks, da += ks;
  }
  // q and d_o of the read that joins next: this token's own, or that of the one before
  q += (n - shift) * ks, d_o -= shift * vs, a += n * ks, sums += n * GR * L, dk += n * ks, db += n * ks, dg += n * ks;
  for (int r = 0; r < GR; r++)
    for (int w = 0; w < GW; w++) s[r][w] = load(XT + r * ks + w * L) + d_o[r] * load(q + w * L);
  for (int64_t t = n - 1; t >= 0; t--) {
    q -= ks, k -= ks, a -= ks, d -= D ? ks : 0, wrote -= vs, d_o -= vs, d_e -= vs, w_row -= vs;
    kept -= tile, sums -= GR * L, dk -= ks, db -= ks, dg -= ks;
    Vec kw[GW], qw[GW], aw[GW], dw[GW], dk_sum[GW], db_sum[GW], dg_sum[GW];
    for (int w = 0; w < GW; w++) {
      if (!Low) kw[w] = load(k + w * L);
      qw[w] = load(q + w * L);
      if (Low) aw[w] = load(a + w * L);
      if (D) dw[w] = D == 1 ? all(d[0]) : load(d + w * L);
      dk_sum[w] = load(dk + w * L);
      if (Both) db_sum[w] = load(db + w * L);
      if (Gate) dg_sum[w] = load(dg + w * L);
    }
#pragma GCC unroll 8
    for (int r = 0; r < GR; r++) {
      const Vec y = all(wrote[r]), d_or = all(d_o[r]);
      Vec column = {};
      if (!Low && k0) column = load(sums + r * L);
#pragma GCC unroll 2
      for (int w = 0; w < GW; w++) {
        Vec& x = s[r][w];
        dk_sum[w] += y * x;
        if (Both) db_sum[w] += w_row[r] * x;
        if (Gate) dg_sum[w] += load(kept + (r * GW + w) * L) * x;
        if (!Low) column += kw[w] * x;
        if (Low)
          x = passed<D, Both>(x, dw[w], aw[w], d_e[r], qw[w] * d_or);
        else
          x = D ? dw[w] * x + qw[w] * d_or : x + qw[w] * d_or;
      }
      if (!Low) store(sums + r * L, column);
    }
    for (int w = 0; w < GW; w++) {
      store(dk + w * L, dk_sum[w]);
      if (Both) store(db + w * L, db_sum[w]);
      if (Gate) store(dg + w * L, dg_sum[w]);
    }
  }
  for (int r = 0; r < GR; r++)
    for (int w = 0; w < GW; w++) store(XT + r * ks + w * L, s[r][w]);
}

template <int D, int Kind, bool Before>
void gradients(const Block& m, int64_t n) {
  for (int64_t v0 = 0; v0 < m.V; v0 += GR) {
    for (int64_t k0 = 0; k0 < m.K; k0 += GW * L) gradient_tile<D, Kind, Before>(m, n, k0, v0);
    if (Kind == ADDITIVE)
      for (int64_t t = 0; t < n; t++)
        for (int r = 0; r < GR; r++) m.dv[t * m.vs + v0 + r] = sum(load(m.sums + (t * GR + r) * L));
  }
}

template <int D, int Kind>
Walk gradient_walk_of(const Matrix& p) {
  return p.before ? gradients<D, Kind, true> : gradients<D, Kind, false>;
}

// An additive write without a decay never comes here: it is swept.
template <int D>
Walk gradient_walk_of(const Matrix& p) {
  if constexpr (D != 0)
    if (p.write == ADDITIVE) return gradient_walk_of<D, ADDITIVE>(p);
  return p.write == LOW_RANK ? gradient_walk_of<D, LOW_RANK>(p) : gradient_walk_of<D, DELTA>(p);
}

Walk gradient_walk(const Matrix& p) {
  return p.decay == NONE ? gradient_walk_of<0>(p) : scalar_decay(p) ? gradient_walk_of<1>(p) : gradient_walk_of<2>(p);
}

// dg of n tokens from the i0-th on, by differences of q dq and k dk from S . X behind them (S^T given, X^T in
// the place of S^T).
template <bool Scalar, bool Before>
void gates_by_differences(const Block& m, int64_t i0, int64_t n, const float* ST) {
  double *later = m.across, whole = 0;
  for (int64_t j = 0; j < m.Kp; j++) later[j] = 0;
  for (int64_t r = 0; r < m.V; r++)
    for (int64_t j = 0; j < m.Kp; j++) later[j] += ST[r * m.ks + j] * m.ST[r * m.ks + j];
  for (int64_t j = 0; j < m.Kp; j++) whole += later[j];
  for (int64_t i = i0 + n - 1; i >= i0; i--) {
    const float *q = m.q + i * m.ks, *k = m.k + i * m.ks, *dq = m.dq + i * m.ks, *dk = m.dk + i * m.ks;
    float* dg = m.dg + i * m.ks;
    double read = 0, written = 0;
    for (int64_t j = 0; j < m.Kp; j++) {
      const double r = static_cast<double>(q[j]) * dq[j], w = static_cast<double>(k[j]) * dk[j];
      read += r, written += w;
      if (Scalar) continue;
      const double here = later[j] - w + (Before ? 0 : r);
      dg[j] = static_cast<float>(here);
      later[j] = here + (Before ? r : 0);
    }
    if (!Scalar) continue;
    const double here = whole - written + (Before ? 0 : read);
    dg[0] = static_cast<float>(here);
    whole = here + (Before ? read : 0);
  }
}

// Three sweeps: dq, dk and dv; S^T, X^T and X move on. The gate's gradient starts anew every SHORT tokens, as rounding
// adds up in what it sums.
template <int D, bool Before>
void additive_gradients(const Block& m, int64_t n) {
  constexpr int lanes = D == ROWS ? LANES : D, forth = Before ? LATE : FORWARD, back = Before ? LATE : BACKWARD;
  const int64_t ks = m.ks, vs = m.vs, length = m.dg ? SHORT : BLOCK;
  zero(m.dv, n * vs);
  for (int64_t i = 0; i < n; i += length) {
    const int64_t k = i * ks, v = i * vs;
    const float* d = D ? m.d + k : nullptr;
    const Sweep dq = {m.d_o + v, m.v + v, m.k + k, d, m.dq + k, m.ST, m.V, m.Kp, vs, ks, ks, ks};
    sweep<lanes, forth>(dq, least(length, n - i));
    if (m.dg) __builtin_memcpy(m.ends + i / length * m.Vp * ks, m.ST, m.Vp * ks * sizeof(float));
  }
  for (int64_t i = (n - 1) / length * length; i >= 0; i -= length) {
    const int64_t part = least(length, n - i), k = (i + part - 1) * ks, v = (i + part - 1) * vs;
    const float* d = D ? m.d + k : nullptr;
    const Sweep dk = {m.v + v, m.d_o + v, m.q + k, d, m.dk + k, m.XT, m.V, m.Kp, -vs, -ks, -ks, ks};
    const Sweep dv = {m.k + k, m.q + k, m.d_o + v, d, m.dv + v, m.X, m.K, m.Vp, -ks, -vs, -ks, vs};
    if (m.dg) __builtin_memcpy(m.ST, m.XT, m.Vp * ks * sizeof(float));  // X behind these tokens
    sweep<lanes, back>(dk, part);
    sweep<D, back>(dv, part);
    if (D && m.dg) gates_by_differences<D == WHOLE, Before>(m, i, part, m.ends + i / length * m.Vp * ks);
  }
}

Walk additive_walk(const Matrix& p) {
  if (p.decay == NONE) return p.before ? additive_gradients<0, true> : additive_gradients<0, false>;
  if (scalar_decay(p)) return p.before ? additive_gradients<1, true> : additive_gradients<1, false>;
  return p.before ? additive_gradients<2, true> : additive_gradients<2, false>;
}

// Whether every decay of the block is mild. A strong one's gradient is as small as it, and is often multiplied by its
// logarithm on the way to a parameter: rounding of differences would stand out.
bool mild(const Matrix& p, const Block& m, int64_t n) {
  const int64_t D = scalar_decay(p) ? 1 : p.K;
  bool every = true;
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < D; j++) every &= m.d[i * m.ks + j] >= MILD;
  return every;
}

using AdjointWalk = void (*)(const Block&, int64_t, int64_t);

AdjointWalk adjoint_walk(const Matrix& p) {
  const bool both = p.write == LOW_RANK;
  if (p.decay == NONE) return both ? adjoint<0, true> : adjoint<0, false>;
  if (scalar_decay(p)) return both ? adjoint<1, true> : adjoint<1, false>;
  return both ? adjoint<2, true> : adjoint<2, false>;
}

// [K, columns] -> [columns, K], the rest of [Vp, Kp] zero; a few cache lines at a time.
void transpose(const Block& m, float* ST, const float* S, int64_t stride) {
  zero(ST, m.Vp * m.ks);
  for (int64_t r0 = 0; r0 < m.K; r0 += 16) {
    const int64_t n = least(16, m.K - r0);
    for (int64_t c = 0; c < m.V; c++)
      for (int64_t r = 0; r < n; r++) ST[c * m.ks + r0 + r] = S[(r0 + r) * stride + c];
  }
}

// The way back: [columns, K] -> [K, columns].
void transpose_back(const Block& m, float* S, const float* ST) {
  for (int64_t c0 = 0; c0 < m.V; c0 += 16) {
    const int64_t n = least(16, m.V - c0);
    for (int64_t r = 0; r < m.K; r++)
      for (int64_t c = 0; c < n; c++) S[r * m.vs + c0 + c] = ST[(c0 + c) * m.ks + r];
  }
}

void write_transposed(const Matrix& p, const Task& t, const Block& m, const float* ST, float* to) {
  for (int64_t r = 0; r < m.K; r++)
    for (int64_t c = 0; c < t.columns; c++) to[r * p.V + t.v0 + c] = ST[c * m.ks + r];
}

void backward_task(const Matrix& p, const Task& t, const Block& m, Walk walk, AdjointWalk adjoint_walk) {
  const int64_t state_at = (t.n * p.H + t.h) * p.K * p.V, shift = p.before ? 1 : 0;
  const bool low = p.write != ADDITIVE, scalar = scalar_decay(p), fixed = p.decay == HEAD || p.decay == CHANNEL;
  const int64_t D = p.decay == NONE ? 0 : scalar ? 1 : p.K, HK = p.H * p.K;
  const float scale = static_cast<float>(p.scale);
  transpose(m, m.XT, p.d_final + state_at + t.v0, p.V);
  read_state(p, t, m, m.X, p.d_final + state_at);
  bool follows = true;  // X is as far as XT
  fixed_decays(p, t, m);
  float* du = p.du ? p.du + (t.part * p.N + t.n) * HK + t.h * p.K : nullptr;
  float* fixed_dg = p.dg && fixed ? p.dg + ((t.part * p.N + t.n) * p.H + t.h) * D : nullptr;
  double *fixed_sum = m.fixed, *u_sum = m.fixed + m.Kp;
  for (int64_t j = 0; j < 2 * m.Kp; j++) m.fixed[j] = 0;
  // rows that lie outside of the block: no token reads, writes or is read there
  zero(m.q - m.ks, m.ks);
  zero(m.k - m.ks, m.ks);
  zero(m.d_o - m.vs, m.vs);
  if (m.b) zero(m.b - m.ks, m.ks);

  for (int64_t begin = (t.length - 1) / BLOCK * BLOCK; begin >= 0 && t.length; begin -= BLOCK) {
    const int64_t n = least(BLOCK, t.length - begin), first = t.first + begin;
    read_block(p, t, m, first, n);
    transpose(m, m.ST, p.states + ((t.slot + begin / BLOCK) * p.H + t.h) * p.K * p.V + t.v0, p.V);
    read_rows(m.d_o, m.vs, p.d_o, p.type, first, n, p.H, t.h, p.V, t.v0, t.columns, m.Vp);
    zero(m.q + n * m.ks, m.ks);
    zero(m.d_o + n * m.vs, m.vs);
    float* const key_sums[] = {m.dq, m.dk, m.dg, m.da, m.db};
    for (float* sums : key_sums)
      if (sums) zero(sums, n * m.ks);
    if (low) {
      read_rows(m.e, m.vs, p.writes, FLOAT32, first, n, p.H, t.h, p.V, t.v0, t.columns, m.Vp);
      for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < m.Vp; j++)
          m.w[i * m.vs + j] = m.e[i * m.vs + j] * (p.write == DELTA ? m.beta[i] : 1.f);
      for (int64_t i = 0; i < n; i++) {  // what the adjoint walk starts from: the bonus reads w
        const float weight = p.u && p.write == DELTA ? bonus_weight(p, t, m, i) : 0;
        for (int64_t j = 0; j < m.Vp; j++) m.dw[i * m.vs + j] = weight * m.d_o[i * m.vs + j];
      }
      // XT takes its low-rank terms from X, so its errors don't contract as X's do: it follows X a block at a time
      if (begin + n < t.length) transpose(m, m.XT, m.X, m.vs);
      adjoint_walk(m, n, shift);
    }
    const bool swept = !low && (!p.dg || (!fixed && mild(p, m, n)));
    if (swept) {
      if (!follows) transpose_back(m, m.X, m.XT);
      additive_walk(p)(m, n);
      if (p.dg && !begin && !p.state) zero(m.dg, m.ks);  // nothing lies before the first token
    } else {
      walk(m, n);
    }
    follows = swept;
    // what remains costs K + V a token
    for (int64_t i = 0; i < n; i++) {
      const int64_t token = first + i;
      float *q = m.q + i * m.ks, *k = m.k + i * m.ks, *dq = m.dq + i * m.ks, *dk = m.dk + i * m.ks;
      for (int64_t j = 0; j < p.K; j++) dq[j] *= scale;
      if (p.write == DELTA) {
        float c = 0;
        for (int64_t j = 0; j < t.columns; j++) c += m.dw[i * m.vs + j] * m.e[i * m.vs + j];
        p.dbeta[(t.part * p.tokens + token) * p.H + t.h] = c;
        const float *da = m.da + i * m.ks, *d = m.d + i * m.ks;
        if (p.decay == CHANNEL || p.decay == TOKEN_CHANNEL)
          for (int64_t j = 0; j < m.Kp; j++) dk[j] -= da[j] * d[j];
        else {
          const float same = p.decay == NONE ? 1 : d[0];
          for (int64_t j = 0; j < m.Kp; j++) dk[j] -= da[j] * same;
        }
      }
      if (p.dg) {
        float *dg = m.dg + i * m.ks, *a = m.a + i * m.ks, *da = m.da + i * m.ks;
        const float* d = m.d + i * m.ks;
        double total = 0;
        if (!swept)
          for (int64_t j = 0; j < m.Kp; j++) dg[j] *= d[scalar ? 0 : j];
        if (p.write == DELTA)
          for (int64_t j = 0; j < m.Kp; j++) dg[j] += a[j] * da[j];
        if (scalar) {
          double lanes[4] = {};
          for (int64_t j = 0; j < m.Kp; j += 4)
            for (int l = 0; l < 4; l++) lanes[l] += dg[j + l];
          total = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
        }
        if (fixed)
          for (int64_t j = 0; j < D; j++) fixed_sum[j] += scalar ? total : dg[j];
        else {
          float* to = p.dg + ((t.part * p.tokens + token) * p.H + t.h) * D;
          for (int64_t j = 0; j < D; j++) to[j] = scalar ? static_cast<float>(total) : dg[j];
        }
      }
      if (p.u) {
        const float *u = p.u + t.h * p.K, *d_o = m.d_o + i * m.vs;
        const float* wrote = (p.write == DELTA ? m.w : m.v) + i * m.vs;
        float c = 0;
        for (int64_t j = 0; j < t.columns; j++) c += wrote[j] * d_o[j];
        if (p.write != DELTA) {
          const float weight = bonus_weight(p, t, m, i);
          for (int64_t j = 0; j < t.columns; j++) m.dv[i * m.vs + j] += weight * d_o[j];
        }
        for (int64_t j = 0; j < p.K; j++) {
          dq[j] += scale * c * u[j] * k[j];
          dk[j] += c * u[j] * q[j];
          u_sum[j] += c * q[j] * k[j];
        }
      }
    }
    const int64_t part_first = t.part * p.tokens + first;
    write_rows(p.dq, p.key_type, m.dq, m.ks, part_first, n, p.H, t.h, p.K, 0, p.K);
    write_rows(p.dk, p.key_type, m.dk, m.ks, part_first, n, p.H, t.h, p.K, 0, p.K);
    write_rows(p.dv, p.type, m.dv, m.vs, first, n, p.H, t.h, p.V, t.v0, t.columns);
    if (p.write == LOW_RANK) {
      write_rows(p.da, FLOAT32, m.da, m.ks, part_first, n, p.H, t.h, p.K, 0, p.K);
      write_rows(p.db, FLOAT32, m.db, m.ks, part_first, n, p.H, t.h, p.K, 0, p.K);
    }
  }
  if (fixed_dg)
    for (int64_t j = 0; j < D; j++) fixed_dg[j] = static_cast<float>(fixed_sum[j]);
  if (du)
    for (int64_t j = 0; j < p.K; j++) du[j] = static_cast<float>(u_sum[j]);
  if (low)
    write_state(p, t, m, m.X, p.dstate + state_at);
  else
    write_transposed(p, t, m, m.XT, p.dstate + state_at);
}

void backward(const Matrix& p) {
  const Walk walk = gradient_walk(p);
  const AdjointWalk back = adjoint_walk(p);
  for_each_task(p, [&](const Task& t, const Block& m) { backward_task(p, t, m, walk, back); });
}

// ---- scan

void scan(const Scan& p) {
  constexpr int64_t COLUMNS = 64;
  const int64_t parts = ceil_to(p.D, COLUMNS) / COLUMNS;
#pragma omp parallel for schedule(static) num_threads(p.threads) if (p.threads > 1)
  for (int64_t i = 0; i < p.B * parts; i++) {
    const int64_t row = i / parts, at = i % parts * COLUMNS, n = least(COLUMNS, p.D - at);
    alignas(64) float h[COLUMNS];
    read_row(h, p.state, FLOAT32, row * p.D + at, n);
    for (int64_t t = 0; t < p.T; t++) {
      const int64_t from = (row * p.T + t) * p.D + at;
      const float *x = p.x + from, *decay = p.decay + from;
      float* to = p.h + from;
      int64_t j = 0;
      for (; j + L <= n; j += L) {
        const Vec y = load(decay + j) * load(h + j) + load(x + j);
        store(h + j, y);
        store(to + j, y);
      }
      for (; j < n; j++) to[j] = h[j] = decay[j] * h[j] + x[j];
    }
  }
}

int64_t part() { return 2 * L; }

}  // namespace

extern const Kernels LINATTN_KERNELS;
const Kernels LINATTN_KERNELS = {scratch, part, forward, backward, scan};

}  // namespace linattn
