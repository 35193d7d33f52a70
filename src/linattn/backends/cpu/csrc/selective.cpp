// The selective scan with the states of a few channels in registers, for one instruction set; compiled once for each.
//
//     h_t = e^{dt_t A} * h_{t-1} + u_t B_t^T,  y_t = h_t C_t,  u_t = dt_t x_t      (h [channels, N])
//
//   X_t   gradient of h_t, all later uses included; E_t = X_t * e^{dt_t A} * h_{t-1} that of the exponent
//
// Vectors run over channels, so that a token's dt, x and y are vectors and its B and C numbers; only dB and dC are sums
// over lanes, kept as vectors until all channels of the task have joined. One token alone: vectors run over a channel's
// N numbers, which lie side by side in memory.
//
//   forward_tile    NT numbers of each of L channels stay in registers for a block of BLOCK tokens
//   backward_tile   the same, keeping every decay and decayed state of the block, then X backwards over them
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
constexpr int NT = 8;
#else
constexpr int NT = 4;
#endif

// A (sequence, group, part of its channels): channels d0 .. d0 + channels, as `blocks` of L.
struct Task {
  int64_t s, g, part, first, length, slot, d0, channels, blocks;
};

int64_t blocks_of(const Selective& p) { return (ceil_to(p.D / p.G, L) / L + p.parts - 1) / p.parts; }

Task task_of(const Selective& p, int64_t i) {
  Task t;
  t.part = i % p.parts, t.g = i / p.parts % p.G, t.s = i / p.parts / p.G;
  if (p.ends) {
    t.first = p.ends[t.s], t.length = p.ends[t.s + 1] - t.first;
    t.slot = t.first / BLOCK + t.s;
  } else {
    t.first = t.s * p.T, t.length = p.T;
    t.slot = t.s * (ceil_to(p.T, BLOCK) / BLOCK);
  }
  const int64_t size = p.D / p.G, step = blocks_of(p) * L, from = least(t.part * step, size);
  t.d0 = t.g * size + from;
  t.channels = least(step, size - from);
  t.blocks = ceil_to(t.channels, L) / L;
  return t;
}

// Packed numbers of a task: a channel block's are [Np, L], a block of tokens' rows [BLOCK, L] or [BLOCK, Np].
struct Work {
  int64_t Np, tile;  // tile: of one channel block
  float *A, *h, *B, *C, *dt, *x, *u, *y;
  // backward only
  float *X = nullptr, *dy = nullptr, *du = nullptr, *ddt = nullptr, *kept = nullptr, *dB = nullptr, *dC = nullptr;
  double* dA = nullptr;

  Work(const Selective& p, Arena& arena) {
    Np = ceil_to(p.N, L > NT ? L : NT), tile = Np * L;
    const int64_t blocks = blocks_of(p);
    auto rows = [&] { return arena.take(BLOCK * L); };
    A = arena.take(blocks * tile), h = arena.take(blocks * tile);
    B = arena.take(BLOCK * Np), C = arena.take(BLOCK * Np);
    dt = rows(), x = rows(), u = rows(), y = rows();
    if (!p.dy) return;
    X = arena.take(blocks * tile);
    dA = reinterpret_cast<double*>(arena.take(2 * blocks * tile));
    dy = rows(), du = rows(), ddt = rows();
    kept = arena.take(BLOCK * NT * 2 * L);
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
  for (int64_t i = 0; i < t.blocks * m.tile; i += L) good &= rate(load(m.A + i));
  return all_of(good);
}

void read_maps(const Selective& p, const Task& t, const Work& m, int64_t first, int64_t n) {
  const int64_t at = (first * p.G + t.g) * p.N, stride = p.G * p.N;
  read_padded(m.B, m.Np, p.B, p.type, at, stride, n, p.N);
  read_padded(m.C, m.Np, p.C, p.type, at, stride, n, p.N);
}

// dt, x and u of a channel block. False if a step is negative or NaN.
bool read_tokens(const Selective& p, const Task& t, const Work& m, int64_t block, int64_t first, int64_t n) {
  const int64_t at = first * p.D + t.d0 + block * L, lanes = least(L, t.channels - block * L);
  read_padded(m.dt, L, p.dt, p.dt_type, at, p.D, n, lanes);
  read_padded(m.x, L, p.x, p.type, at, p.D, n, lanes);
  Ints good = Ints{} - 1;
  for (int64_t i = 0; i < n * L; i += L) {
    const Vec dt = load(m.dt + i);
    good &= dt >= Vec{};
    store(m.u + i, dt * load(m.x + i));
  }
  return all_of(good);
}

void write_tokens(const Selective& p, const Task& t, void* to, int64_t type, const float* from, int64_t block,
                  int64_t first, int64_t n) {
  const int64_t at = first * p.D + t.d0 + block * L, lanes = least(L, t.channels - block * L);
  for (int64_t i = 0; i < n; i++) write_row(to, from + i * L, type, at + i * p.D, lanes);
}

// ---- forward

void forward_tile(const Work& m, const float* A, float* h, int64_t n, int64_t n0) {
  const float *B = m.B + n0, *C = m.C + n0;
  Vec s[NT], a[NT];
  for (int r = 0; r < NT; r++) s[r] = load(h + r * L), a[r] = load(A + r * L);
  for (int64_t t = 0; t < n; t++, B += m.Np, C += m.Np) {
    const Vec dt = load(m.dt + t * L), u = load(m.u + t * L);
    Vec even = load(m.y + t * L), odd = {};
#pragma GCC unroll 8
    for (int r = 0; r < NT; r++) {
      s[r] = exponential(dt * a[r]) * s[r] + u * B[r];
      (r & 1 ? odd : even) += s[r] * C[r];
    }
    store(m.y + t * L, even + odd);
  }
  for (int r = 0; r < NT; r++) store(h + r * L, s[r]);
}

// One token: the state is read where it lies and written where it goes.
bool step(const Selective& p, const Task& t, const Work& m) {
  Ints good = Ints{} - 1;
  read_maps(p, t, m, t.first, 1);
  for (int64_t from = 0; from < t.channels; from += L) {
    if (!read_tokens(p, t, m, from / L, t.first, 1)) return false;
    for (int64_t c = 0; c < least(L, t.channels - from); c++) {
      const float dt = m.dt[c], u = m.u[c];
      const int64_t at = (t.d0 + from + c) * p.N;
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
        good &= rate(a);
        s = exponential(dt * a) * s + u * load(m.B + n);
        y += s * load(m.C + n);
        if (rest >= L)
          store(after + n, s);
        else
          __builtin_memcpy(after + n, &s, rest * sizeof(float));
      }
      m.y[c] = sum(y);
    }
    write_tokens(p, t, p.y, p.type, m.y, from / L, t.first, 1);
  }
  return all_of(good);
}

bool forward_task(const Selective& p, const Task& t, const Work& m) {
  if (t.length == 1 && !p.states) return step(p, t, m);
  const int64_t all_channels = p.D * p.N;
  bool good = read_rates(p, t, m);
  spread(p, t, m, m.h, p.state ? p.state + t.s * all_channels : nullptr);
  for (int64_t begin = 0; begin < t.length; begin += BLOCK) {
    const int64_t n = least(BLOCK, t.length - begin), first = t.first + begin;
    if (p.states) gather(p, t, m, p.states + (t.slot + begin / BLOCK) * all_channels, m.h);
    read_maps(p, t, m, first, n);
    for (int64_t block = 0; block < t.blocks; block++) {
      good &= read_tokens(p, t, m, block, first, n);
      zero(m.y, n * L);
      for (int64_t n0 = 0; n0 < p.N; n0 += NT) {
        const int64_t at = block * m.tile + n0 * L;
        forward_tile(m, m.A + at, m.h + at, n, n0);
      }
      write_tokens(p, t, p.y, p.type, m.y, block, first, n);
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

void backward_tile(const Work& m, const float* A, const float* h, float* X, double* dA, int64_t n, int64_t n0) {
  const float *B = m.B + n0, *C = m.C + n0;
  float *kept = m.kept, *dB = m.dB + n0 * L, *dC = m.dC + n0 * L;
  Vec s[NT], a[NT], x[NT], da[NT] = {};
  for (int r = 0; r < NT; r++) s[r] = load(h + r * L), a[r] = load(A + r * L), x[r] = load(X + r * L);
  for (int64_t t = 0; t < n; t++, B += m.Np, kept += NT * 2 * L) {
    const Vec dt = load(m.dt + t * L), u = load(m.u + t * L);
#pragma GCC unroll 8
    for (int r = 0; r < NT; r++) {
      const Vec decay = exponential(dt * a[r]), decayed = decay * s[r];
      store(kept + r * 2 * L, decay);
      store(kept + r * 2 * L + L, decayed);
      s[r] = decayed + u * B[r];
    }
  }
  C += n * m.Np, dB += n * m.tile, dC += n * m.tile;
  for (int64_t t = n - 1; t >= 0; t--) {
    B -= m.Np, C -= m.Np, kept -= NT * 2 * L, dB -= m.tile, dC -= m.tile;
    const Vec dt = load(m.dt + t * L), u = load(m.u + t * L), dy = load(m.dy + t * L);
    Vec du = load(m.du + t * L), ddt = load(m.ddt + t * L);
#pragma GCC unroll 8
    for (int r = 0; r < NT; r++) {
      const Vec decay = load(kept + r * 2 * L), decayed = load(kept + r * 2 * L + L);
      const Vec g = x[r] + dy * C[r], e = g * decayed;
      store(dB + r * L, load(dB + r * L) + g * u);
      store(dC + r * L, load(dC + r * L) + dy * (decayed + u * B[r]));
      du += g * B[r];
      ddt += e * a[r];
      da[r] += e * dt;
      x[r] = g * decay;
    }
    store(m.du + t * L, du);
    store(m.ddt + t * L, ddt);
  }
  for (int r = 0; r < NT; r++) {
    store(X + r * L, x[r]);
    for (int i = 0; i < L; i++) dA[r * L + i] += da[r][i];
  }
}

void backward_task(const Selective& p, const Task& t, const Work& m) {
  const int64_t all_channels = p.D * p.N;
  read_rates(p, t, m);
  spread(p, t, m, m.X, p.d_final + t.s * all_channels);
  for (int64_t i = 0; i < t.blocks * m.tile; i++) m.dA[i] = 0;
  for (int64_t begin = (t.length - 1) / BLOCK * BLOCK; begin >= 0 && t.length; begin -= BLOCK) {
    const int64_t n = least(BLOCK, t.length - begin), first = t.first + begin;
    spread(p, t, m, m.h, p.states + (t.slot + begin / BLOCK) * all_channels);
    read_maps(p, t, m, first, n);
    zero(m.dB, n * m.tile);
    zero(m.dC, n * m.tile);
    for (int64_t block = 0; block < t.blocks; block++) {
      read_tokens(p, t, m, block, first, n);
      read_padded(m.dy, L, p.dy, p.type, first * p.D + t.d0 + block * L, p.D, n, least(L, t.channels - block * L));
      zero(m.du, n * L);
      zero(m.ddt, n * L);
      for (int64_t n0 = 0; n0 < p.N; n0 += NT) {
        const int64_t at = block * m.tile + n0 * L;
        backward_tile(m, m.A + at, m.h + at, m.X + at, m.dA + at, n, n0);
      }
      for (int64_t i = 0; i < n * L; i += L) {
        const Vec du = load(m.du + i);
        store(m.ddt + i, load(m.ddt + i) + load(m.x + i) * du);
        store(m.du + i, load(m.dt + i) * du);
      }
      write_tokens(p, t, p.dx, p.type, m.du, block, first, n);
      write_tokens(p, t, p.ddt, p.dt_type, m.ddt, block, first, n);
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
