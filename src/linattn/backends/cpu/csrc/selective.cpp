// The selective scan with the states of a few channels in registers, for one instruction set; compiled once for each.
//
//     h_t = e^{dt_t A} * h_{t-1} + u_t B_t^T,  y_t = h_t C_t,  u_t = dt_t x_t      (h [channels, N])
//
//   X_t   gradient of h_t, all later uses included; E_t = X_t * e^{dt_t A} * h_{t-1} that of the exponent
//
// Vectors run over channels, so that a token's dt, x and y are vectors and its B and C numbers; only dB and dC are sums
// over lanes, kept as vectors until all channels of the task have joined. One token alone: vectors run over a channel's
// N numbers, which lie side by side in memory. Rates are held times log2(e): decays are powers of 2.
//
//   forward_tile    NT numbers of each of L channels stay in registers for a block of BLOCK tokens
//   backward_tile   the same, keeping every decay and state of the block, then X backwards over them
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
#include "sequences.h"

// Numbers of a channel worked on at once: forwards their states are in registers, backwards their states' gradients and
// those of their rates.
#if LINATTN_LANES == 16 || defined(__aarch64__)
constexpr int FORWARD = 16, BACKWARD = 8;
#else
constexpr int FORWARD = 8, BACKWARD = 4;
#endif
constexpr int PAD = 4;  // numbers of a channel are filled up to a multiple of it
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// A (sequence, group, part of its channels): channels d0 .. d0 + channels, as `blocks` of L.
struct Task : Sequence {
  int64_t s, g, part, d0, channels, blocks;
};

int64_t blocks_of_group(const Selective& p) { return ceil_to(p.D / p.G, L) / L; }
int64_t blocks_of(const Selective& p) { return (blocks_of_group(p) + p.parts - 1) / p.parts; }

Task task_of(const Selective& p, int64_t i) {
  Task t{sequence_of(p.ends, p.T, i / p.parts / p.G)};
  t.part = i % p.parts, t.g = i / p.parts % p.G, t.s = i / p.parts / p.G;
  const int64_t size = p.D / p.G, step = blocks_of(p) * L, from = least(t.part * step, size);
  t.d0 = t.g * size + from;
  t.channels = least(step, size - from);
  t.blocks = ceil_to(t.channels, L) / L;
  return t;
}

// Rows of L channels, one a token, where they lie: in a tensor, or converted in scratch.
template <class Number>
struct Rows {
  Number* at;
  int64_t stride;
  Vec operator[](int64_t t) const { return load(at + t * stride); }
  void set(int64_t t, Vec x) const { store(at + t * stride, x); }
};
using In = Rows<const float>;
using Out = Rows<float>;

// Packed numbers of a task: a channel block's are [Np, L], a block of tokens' rows [BLOCK, L] or [BLOCK, Np].
struct Work {
  int64_t Np, tile;  // tile: of one channel block
  float *A, *steepest, *h, *B, *C, *dt, *x, *y;
  // backward only
  float *X = nullptr, *dy = nullptr, *du = nullptr, *ddt = nullptr, *kept = nullptr, *dB = nullptr, *dC = nullptr;
  double* dA = nullptr;

  Work(const Selective& p, Arena& arena) {
    Np = ceil_to(p.N, PAD), tile = Np * L;
    const int64_t blocks = blocks_of(p);
    auto rows = [&] { return arena.take(BLOCK * L); };
    A = arena.take(blocks * tile), steepest = arena.take(blocks * L), h = arena.take(blocks * tile);
    B = arena.take(BLOCK * ceil_to(Np, L)), C = arena.take(BLOCK * ceil_to(Np, L));
    dt = rows(), x = rows(), y = rows();
    if (!p.dy) return;
    X = arena.take(blocks * tile);
    dA = reinterpret_cast<double*>(arena.take(2 * blocks * tile));
    dy = rows(), du = rows(), ddt = rows();
    kept = arena.take((BLOCK + 1) * BACKWARD * 2 * L);
    dB = arena.take(BLOCK * tile), dC = arena.take(BLOCK * tile);
  }
};

// Rows of n numbers -> rows of `size`, the rest zero.
void read_padded(float* y, int64_t size, const void* x, int64_t type, int64_t at, int64_t stride, int64_t rows,
                 int64_t n) {
  for (int64_t t = 0; t < rows; t++, y += size, at += stride) {
    read_row(y, x, type, at, n);
    for (int64_t i = n; i < size; i++) y[i] = 0;
  }
}

// [channels, N] -> [blocks][Np, L], the rest zero, and back.
void spread(const Selective& p, const Task& t, const Work& m, float* to, const float* from) {
  zero(to, t.blocks * m.tile);
  if (!from) return;
  for (int64_t c = 0; c < t.channels; c++) {
    float* lane = to + c / L * m.tile + c % L;
    for (int64_t n = 0; n < p.N; n++) lane[n * L] = from[(t.d0 + c) * p.N + n];
  }
}

template <class From>
void gather(const Selective& p, const Task& t, const Work& m, float* to, const From* from) {
  for (int64_t c = 0; c < t.channels; c++) {
    const From* lane = from + c / L * m.tile + c % L;
    for (int64_t n = 0; n < p.N; n++) to[(t.d0 + c) * p.N + n] = static_cast<float>(lane[n * L]);
  }
}

// A kept state of the task, as it lies in scratch: only the backward reads it.
float* kept_state(const Selective& p, const Task& t, const Work& m, int64_t begin) {
  const int64_t group = (t.slot + begin / BLOCK) * p.G + t.g;
  return p.states + (group * blocks_of_group(p) + t.part * blocks_of(p)) * m.tile;
}

bool all_of(Ints good) {
  int32_t every = -1;
  for (int i = 0; i < L; i++) every &= good[i];
  return every != 0;
}

// Finite and not positive.
Ints rate(Vec A) { return (A <= Vec{}) & (A >= all(-3.402823466e38f)); }

bool read_rates(const Selective& p, const Task& t, const Work& m) {
  spread(p, t, m, m.A, p.A);
  Ints good = Ints{} - 1;
  for (int64_t block = 0; block < t.blocks; block++) {
    Vec lowest = {};
    for (float* A = m.A + block * m.tile; A < m.A + (block + 1) * m.tile; A += L) {
      const Vec a = load(A);
      good &= rate(a);
      store(A, a * LOG2E);
      lowest = a < lowest ? a : lowest;
    }
    store(m.steepest + block * L, lowest * LOG2E);
  }
  return all_of(good);
}

void read_maps(const Selective& p, const Task& t, const Work& m, int64_t first, int64_t n, int64_t size) {
  const int64_t at = (first * p.G + t.g) * p.N, stride = p.G * p.N;
  read_padded(m.B, size, p.B, p.type, at, stride, n, p.N);
  read_padded(m.C, size, p.C, p.type, at, stride, n, p.N);
}

// A channel block's part of a tensor [tokens, D]: where it starts, and its channels. Whole vectors of float32 are read
// and written where they lie, all else through `room` in scratch.
struct Piece {
  int64_t at, lanes;
  bool direct(int64_t type) const { return type == FLOAT32 && lanes == L; }
};

Piece piece_of(const Selective& p, const Task& t, int64_t block, int64_t first) {
  return {first * p.D + t.d0 + block * L, least(L, t.channels - block * L)};
}

In read(const Selective& p, Piece piece, const void* x, int64_t type, int64_t n, float* room) {
  if (piece.direct(type)) return {static_cast<const float*>(x) + piece.at, p.D};
  read_padded(room, L, x, type, piece.at, p.D, n, piece.lanes);
  return {room, L};
}

Out open(const Selective& p, Piece piece, void* x, int64_t type, float* room) {
  if (piece.direct(type)) return {static_cast<float*>(x) + piece.at, p.D};
  return {room, L};
}

void close(const Selective& p, Piece piece, void* x, int64_t type, int64_t n, const float* room) {
  if (piece.direct(type)) return;
  for (int64_t i = 0; i < n; i++) write_row(x, room + i * L, type, piece.at + i * p.D, piece.lanes);
}

// The cache lines behind a piece, of all tensors that a walk reads and writes: rows lie too far apart for processors to
// fetch them unasked. One of each while a token is worked on.
struct Ahead {
  const char* at[5];
  int64_t stride[5], n = 0;
  void add(const Selective& p, Piece piece, const void* x, int64_t type) {
    const int64_t size = type == FLOAT32 ? 4 : 2;
    at[n] = static_cast<const char*>(x) + piece.at * size + 64;
    stride[n++] = p.D * size;
  }
  void fetch(int64_t t) const {
    for (int64_t i = 0; i < n; i++) __builtin_prefetch(at[i] + t * stride[i], 0, 2);
  }
};

// 2^(dt a) for dt a <= 0, to 2e-7: n + r with |r| <= 1/2, a polynomial of r that is 1 at 0, n added to its exponent.
// DEEP: exactly 0 below 2^-126; without it no product may be below.
template <bool DEEP>
inline Vec decay_of(Vec dt, Vec a) {
  const Vec shift = all(12582912.f);  // 1.5 * 2^23: adding it rounds to integer
  Vec y = dt * a;
  if (DEEP) y = y < -126.f ? all(-126.f) : y;
  const Vec shifted = y + shift;
  const Vec r = y - (shifted - shift);
  Vec q = all(0.00132647273f);
  q = q * r + 0.00967151299f;
  q = q * r + 0.0555073358f;
  q = q * r + 0.240222424f;
  q = q * r + 0.693147004f;
  q = q * r + 1.f;
  const Vec e = bits<Vec>(bits<Ints>(q) + (bits<Ints>(shifted) << 23));
  return DEEP ? (dt * a < -126.f ? Vec{} : e) : e;
}

// Whether a step is so long that a decay might be below 2^-126; `good` turns false if one is negative or NaN.
bool deep(In dt, int64_t n, const float* steepest, bool& good) {
  Ints fine = Ints{} - 1;
  Vec longest = {};
  for (int64_t t = 0; t < n; t++) {
    const Vec x = dt[t];
    fine &= x >= Vec{};
    longest = x > longest ? x : longest;
  }
  good &= all_of(fine);
  return !all_of(longest * load(steepest) >= all(-126.f));
}

// ---- forward

template <int NT, bool DEEP>
void forward_tile(const Work& m, const Ahead& next, In dts, In xs, Out y, const float* A, float* h, int64_t n,
                  int64_t n0) {
  const float *B = m.B + n0, *C = m.C + n0;
  Vec s[NT];
  for (int r = 0; r < NT; r++) s[r] = load(h + r * L);
  for (int64_t t = 0; t < n; t++, B += m.Np, C += m.Np) {
    const Vec dt = dts[t], u = dt * xs[t];
    if (!n0) next.fetch(t);
    Vec even = n0 ? y[t] : Vec{}, odd = {};
#pragma GCC unroll 16
    for (int r = 0; r < NT; r++) {
      s[r] = decay_of<DEEP>(dt, load(A + r * L)) * s[r] + u * B[r];
      (r & 1 ? odd : even) += s[r] * C[r];
    }
    y.set(t, even + odd);
  }
  for (int r = 0; r < NT; r++) store(h + r * L, s[r]);
}

template <bool DEEP>
void forward_block(const Work& m, const Ahead& next, In dt, In x, Out y, const float* A, float* h, int64_t n) {
  int64_t n0 = 0;
  for (; n0 + FORWARD <= m.Np; n0 += FORWARD)
    forward_tile<FORWARD, DEEP>(m, next, dt, x, y, A + n0 * L, h + n0 * L, n, n0);
  for (; n0 < m.Np; n0 += PAD) forward_tile<PAD, DEEP>(m, next, dt, x, y, A + n0 * L, h + n0 * L, n, n0);
}

// One token: the state is read where it lies and written where it goes.
bool step(const Selective& p, const Task& t, const Work& m) {
  bool good = true;
  Ints rates = Ints{} - 1;
  read_maps(p, t, m, t.first, 1, ceil_to(p.N, L));
  for (int64_t block = 0; block < t.blocks; block++) {
    const Piece piece = piece_of(p, t, block, t.first);
    const In dts = read(p, piece, p.dt, p.dt_type, 1, m.dt), xs = read(p, piece, p.x, p.type, 1, m.x);
    good &= all_of(dts[0] >= Vec{});
    for (int64_t c = 0; c < piece.lanes; c++) {
      const float dt = dts.at[c], u = dt * xs.at[c];
      const int64_t at = (t.d0 + block * L + c) * p.N;
      const float *A = p.A + at, *before = p.state ? p.state + t.s * p.D * p.N + at : nullptr;
      float* after = p.final + t.s * p.D * p.N + at;
      Vec y = {};
      for (int64_t n = 0; n < p.N; n += L) {
        const int64_t rest = p.N - n;
        Vec a = {}, s = {};
        if (rest >= L) {
          a = load(A + n);
          if (before) s = load(before + n);
        } else {
          __builtin_memcpy(&a, A + n, rest * sizeof(float));
          if (before) __builtin_memcpy(&s, before + n, rest * sizeof(float));
        }
        rates &= rate(a);
        s = decay_of<true>(all(dt), a * LOG2E) * s + u * load(m.B + n);
        y += s * load(m.C + n);
        if (rest >= L)
          store(after + n, s);
        else
          __builtin_memcpy(after + n, &s, rest * sizeof(float));
      }
      m.y[c] = sum(y);
    }
    write_row(p.y, m.y, p.type, piece.at, piece.lanes);
  }
  return good && all_of(rates);
}

bool forward_task(const Selective& p, const Task& t, const Work& m) {
  if (t.length == 1 && !p.states) return step(p, t, m);
  const int64_t all_channels = p.D * p.N;
  bool good = read_rates(p, t, m);
  spread(p, t, m, m.h, p.state ? p.state + t.s * all_channels : nullptr);
  for (int64_t begin = 0; begin < t.length; begin += BLOCK) {
    const int64_t n = least(BLOCK, t.length - begin), first = t.first + begin;
    if (p.states) __builtin_memcpy(kept_state(p, t, m, begin), m.h, t.blocks * m.tile * sizeof(float));
    read_maps(p, t, m, first, n, m.Np);
    for (int64_t block = 0; block < t.blocks; block++) {
      const Piece piece = piece_of(p, t, block, first);
      const In dt = read(p, piece, p.dt, p.dt_type, n, m.dt), x = read(p, piece, p.x, p.type, n, m.x);
      const Out y = open(p, piece, p.y, p.type, m.y);
      const auto run = deep(dt, n, m.steepest + block * L, good) ? forward_block<true> : forward_block<false>;
      Ahead next;
      next.add(p, piece, p.dt, p.dt_type), next.add(p, piece, p.x, p.type), next.add(p, piece, p.y, p.type);
      run(m, next, dt, x, y, m.A + block * m.tile, m.h + block * m.tile, n);
      close(p, piece, p.y, p.type, n, m.y);
    }
  }
  gather(p, t, m, p.final + t.s * all_channels, m.h);
  return good;
}

int64_t scratch(const Selective& p) {
  Arena arena{nullptr};
  Work(p, arena);
  return arena.used;
}

template <class Each>
void for_each_task(const Selective& p, Each each) {
  const int64_t tasks = p.S * p.G * p.parts, size = scratch(p);
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads) if (p.threads > 1)
  for (int64_t i = 0; i < tasks; i++) {
    const Task t = task_of(p, i);
    Arena arena{p.scratch + thread() * size};
    each(t, Work(p, arena));
  }
}

int64_t forward(const Selective& p) {
  int64_t bad = 0;
  for_each_task(p, [&](const Task& t, const Work& m) {
    if (!forward_task(p, t, m)) {
#pragma omp atomic write
      bad = 1;
    }
  });
  return bad;
}

// ---- backward

template <int NT, bool DEEP>
void backward_tile(const Work& m, const Ahead& next, In dts, In xs, In dys, const float* A, const float* h, float* X,
                   double* dA, int64_t n, int64_t n0) {
  const float *B = m.B + n0, *C = m.C + n0;
  float *kept = m.kept, *dB = m.dB + n0 * L, *dC = m.dC + n0 * L;
  constexpr int64_t STEP = NT * 2 * L;  // of each number the state before a token, and the token's decay
  {
    Vec s[NT];
    for (int r = 0; r < NT; r++) s[r] = load(h + r * L);
    for (int64_t t = 0; t < n; t++, B += m.Np, kept += STEP) {
      const Vec dt = dts[t], u = dt * xs[t];
      if (!n0) next.fetch(t);
#pragma GCC unroll 16
      for (int r = 0; r < NT; r++) {
        const Vec decay = decay_of<DEEP>(dt, load(A + r * L));
        store(kept + r * 2 * L, s[r]);
        store(kept + r * 2 * L + L, decay);
        s[r] = decay * s[r] + u * B[r];
      }
    }
    for (int r = 0; r < NT; r++) store(kept + r * 2 * L, s[r]);
  }
  C += n * m.Np, dB += n * m.tile, dC += n * m.tile;
  Vec x[NT], da[NT] = {};
  for (int r = 0; r < NT; r++) x[r] = load(X + r * L);
  for (int64_t t = n - 1; t >= 0; t--) {
    B -= m.Np, C -= m.Np, kept -= STEP, dB -= m.tile, dC -= m.tile;
    const Vec dt = dts[t], u = dt * xs[t], dy = dys[t];
    Vec du = n0 ? load(m.du + t * L) : Vec{}, ddt = n0 ? load(m.ddt + t * L) : Vec{};
#pragma GCC unroll 16
    for (int r = 0; r < NT; r++) {
      const float* at = kept + r * 2 * L;
      const Vec g = x[r] + dy * C[r];
      store(dB + r * L, load(dB + r * L) + g * u);
      store(dC + r * L, load(dC + r * L) + dy * load(at + STEP));
      du += g * B[r];
      x[r] = g * load(at + L);
      const Vec e = x[r] * load(at);
      ddt += e * load(A + r * L);
      da[r] += e * dt;
    }
    store(m.du + t * L, du);
    store(m.ddt + t * L, ddt);
  }
  for (int r = 0; r < NT; r++) {
    store(X + r * L, x[r]);
    for (int i = 0; i < L; i++) dA[r * L + i] += da[r][i];
  }
}

template <bool DEEP>
void backward_block(const Work& m, const Ahead& next, In dt, In x, In dy, int64_t block, int64_t n) {
  auto at = [&](auto* from, int64_t n0) { return from + block * m.tile + n0 * L; };
  int64_t n0 = 0;
  for (; n0 + BACKWARD <= m.Np; n0 += BACKWARD)
    backward_tile<BACKWARD, DEEP>(m, next, dt, x, dy, at(m.A, n0), at(m.h, n0), at(m.X, n0), at(m.dA, n0), n, n0);
  for (; n0 < m.Np; n0 += PAD)
    backward_tile<PAD, DEEP>(m, next, dt, x, dy, at(m.A, n0), at(m.h, n0), at(m.X, n0), at(m.dA, n0), n, n0);
}

void backward_task(const Selective& p, const Task& t, const Work& m) {
  const int64_t all_channels = p.D * p.N;
  read_rates(p, t, m);
  spread(p, t, m, m.X, p.d_final + t.s * all_channels);
  for (int64_t i = 0; i < t.blocks * m.tile; i++) m.dA[i] = 0;
  for (int64_t begin = (t.length - 1) / BLOCK * BLOCK; begin >= 0 && t.length; begin -= BLOCK) {
    const int64_t n = least(BLOCK, t.length - begin), first = t.first + begin;
    __builtin_memcpy(m.h, kept_state(p, t, m, begin), t.blocks * m.tile * sizeof(float));
    read_maps(p, t, m, first, n, m.Np);
    zero(m.dB, n * m.tile);
    zero(m.dC, n * m.tile);
    for (int64_t block = 0; block < t.blocks; block++) {
      const Piece piece = piece_of(p, t, block, first);
      const In dt = read(p, piece, p.dt, p.dt_type, n, m.dt), x = read(p, piece, p.x, p.type, n, m.x);
      const In dy = read(p, piece, p.dy, p.type, n, m.dy);
      const Out dx = open(p, piece, p.dx, p.type, m.du), ddt = open(p, piece, p.ddt, p.dt_type, m.ddt);
      bool good = true;
      const auto run = deep(dt, n, m.steepest + block * L, good) ? backward_block<true> : backward_block<false>;
      Ahead next;
      next.add(p, piece, p.dt, p.dt_type), next.add(p, piece, p.x, p.type), next.add(p, piece, p.dy, p.type);
      next.add(p, piece, p.dx, p.type), next.add(p, piece, p.ddt, p.dt_type);
      run(m, next, dt, x, dy, block, n);
      for (int64_t i = 0; i < n; i++) {
        const Vec du = load(m.du + i * L), step = dt[i];
        ddt.set(i, LN2 * load(m.ddt + i * L) + x[i] * du);
        dx.set(i, step * du);
      }
      close(p, piece, p.dx, p.type, n, m.du);
      close(p, piece, p.ddt, p.dt_type, n, m.ddt);
    }
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < p.N; j++) {
        const int64_t to = ((t.part * p.tokens + first + i) * p.G + t.g) * p.N + j, from = i * m.tile + j * L;
        p.dB[to] = sum(load(m.dB + from));
        p.dC[to] = sum(load(m.dC + from));
      }
  }
  gather(p, t, m, p.dA + t.s * all_channels, m.dA);
  gather(p, t, m, p.dstate + t.s * all_channels, m.X);
}

void backward(const Selective& p) {
  for_each_task(p, [&](const Task& t, const Work& m) { backward_task(p, t, m); });
}

int64_t lanes() { return L; }

}  // namespace

extern const SelectiveKernels LINATTN_SELECTIVE;
const SelectiveKernels LINATTN_SELECTIVE = {scratch, lanes, forward, backward};

}  // namespace linattn
