// Recurrences of single numbers, each channel on its own, for one instruction set; compiled once for each.
//
//   scan      h_t = e^{g_t} h_{t-1} + x_t
//   average   y_t = (H_{t-1} + e^{u + x_t} v_t) / (D_{t-1} + e^{u + x_t}),  H_t = e^{g_t} H_{t-1} + e^{x_t} v_t,
//             D_t likewise of ones. Kept are h = e^{-m} H and d = e^{-m} D, m_t = max(g_t + m_{t-1}, x_t), so that no
//             exponent is above 0. m is a sum of two floats: in one, many small decays would be lost.
//
// A task is a sequence and a strip of neighbouring channels, which it walks token by token: rows are read one after
// another as they lie in memory, the state stays in the first-level cache. The backward walks a block of BLOCK tokens
// forwards again from a kept state, keeping the state before every token, then backwards.
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "problem.h"

namespace linattn {
namespace {

#include "vector.h"
// after it
#include "sequences.h"

constexpr int64_t STRIP = 128;        // channels of a task at most
constexpr int64_t AHEAD = 8;          // tokens that rows are fetched before they are used
constexpr float STEEPEST = -1e5f;     // e to this is 0; clamped to it, sums of decays stay finite
constexpr float NOTHING = -0x1p100f;  // the maximum of no input: whatever is added leaves it as it is

// A (sequence, strip): channels d0 .. d0 + n, filled up to `size`.
struct Task : Sequence {
  int64_t s, d0, n, size;
};

int64_t strip_of(const Elementwise& p) {  // narrow enough that every thread has one
  return least(STRIP, ceil_to((p.S * p.D + p.threads - 1) / p.threads, 16));
}

Task task_of(const Elementwise& p, int64_t i) {
  const int64_t strip = strip_of(p), strips = (p.D + strip - 1) / strip;
  Task t{sequence_of(p.ends, p.T, i / strips)};
  t.s = i / strips, t.d0 = i % strips * strip;
  t.n = least(strip, p.D - t.d0), t.size = ceil_to(t.n, L);
  return t;
}

template <class Each>
void for_each_task(const Elementwise& p, Each each) {
  if (!p.S || !p.D) return;
  const int64_t strip = strip_of(p), tasks = p.S * ((p.D + strip - 1) / strip);
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads) if (p.threads > 1)
  for (int64_t i = 0; i < tasks; i++) each(task_of(p, i));
}

// Asks for a row of a tensor [.., D]: those of neighbouring tokens lie too far apart to be fetched unasked.
void fetch(const Elementwise& p, const Task& t, const void* x, int64_t type, int64_t row) {
  const int64_t size = type == FLOAT32 ? 4 : 2;
  const char* at = static_cast<const char*>(x) + (row * p.D + t.d0) * size;
  for (int64_t i = 0; i < t.n * size; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// A strip of numbers; rows of tensors [.., D] are read and written through it, or where they lie.
struct alignas(64) Strip {
  float x[STRIP] = {};

  static bool direct(const Task& t, int64_t type) { return type == FLOAT32 && t.n == t.size; }
  const float* read(const Elementwise& p, const Task& t, const void* from, int64_t type, int64_t row) {
    const int64_t at = row * p.D + t.d0;
    if (direct(t, type)) return static_cast<const float*>(from) + at;
    read_row(x, from, type, at, t.n);
    return x;
  }
  float* open(const Elementwise& p, const Task& t, void* to, int64_t type, int64_t row) {
    return direct(t, type) ? static_cast<float*>(to) + row * p.D + t.d0 : x;
  }
  void close(const Elementwise& p, const Task& t, void* to, int64_t type, int64_t row) const {
    if (!direct(t, type)) write_row(to, x, type, row * p.D + t.d0, t.n);
  }
  // A row of float32 numbers, if there is one.
  void take(const Elementwise& p, const Task& t, const float* from, int64_t row) {
    if (from) read_row(x, from, FLOAT32, row * p.D + t.d0, t.n);
  }
  void put(const Elementwise& p, const Task& t, float* to, int64_t row) const {
    write_row(to, x, FLOAT32, row * p.D + t.d0, t.n);
  }
  Vec operator[](int64_t j) const { return load(x + j); }
  void set(int64_t j, Vec y) { store(x + j, y); }
};

bool all_of(Ints good) {
  int32_t every = -1;
  for (int i = 0; i < L; i++) every &= good[i];
  return every != 0;
}

// e^{-|a + low - b|} and whether a + low >= b; what rounding takes from the difference is a factor near 1.
struct Distance {
  Vec less;
  Ints ahead;
};

inline Distance distance(Vec a, Vec low, Vec b) {
  const Vec d = a - b, back = d - a, rest = ((a - (d - back)) - (b + back)) + low;
  const Ints ahead = d + low >= Vec{};
  const Vec less = exponential(ahead ? -d : d);
  return {less == Vec{} ? Vec{} : less + less * (ahead ? -rest : rest), ahead};  // 0 where the difference is infinite
}

// x e^y, rounded once where y is as small as the second part of a sum of two.
inline Vec rescaled(Vec x, Vec y) {
  const Ints small = (y < all(0.002f)) & (y > all(-0.002f));
  return small ? x + x * (y + 0.5f * y * y) : x * exponential(y);
}

// An average's weights at a token: of the state and of v in what is read, and in the state after it; m after it.
struct Weights {
  Vec past, now, old, fresh, high, low;
  Ints newest;  // whether the token's own x is the maximum, the last of several
};

inline Weights weigh(Vec x, Vec g, Vec u, Vec high, Vec low) {
  Weights w;
  const Distance read = distance(high, low, u + x);
  w.past = read.ahead ? all(1) : read.less;
  w.now = read.ahead ? read.less : all(1);
  g = g < STEEPEST ? all(STEEPEST) : g;
  const Vec sum = high + g, added = sum - high;
  const Vec rest = low + ((high - (sum - added)) + (g - added));  // with what rounding took from the sum
  const Vec top = sum + rest, over = rest - (top - sum);
  const Distance write = distance(x, -over, top);
  w.newest = write.ahead;
  w.old = w.newest ? write.less : all(1);
  w.fresh = w.newest ? all(1) : write.less;
  w.high = w.newest ? x : top;
  w.low = w.newest ? Vec{} : over;
  return w;
}

// A strip's state; a scan has h alone.
template <bool AVERAGE>
struct State {
  static constexpr int PARTS = AVERAGE ? 4 : 1;
  Strip part[PARTS];  // h, d, m as a sum of two

  void start(const Elementwise& p, const Task& t) {
    part[0].take(p, t, p.before[0], t.s);
    if constexpr (AVERAGE) {
      for (float& m : part[2].x) m = NOTHING;
      part[1].take(p, t, p.before[1], t.s);
      part[2].take(p, t, p.before[2], t.s);
      for (float& m : part[2].x) m = m < NOTHING ? NOTHING : m;
    }
  }
  void finish(const Elementwise& p, const Task& t) {
    if constexpr (AVERAGE) {
      for (int64_t j = 0; j < t.size; j += L) {
        part[0].set(j, rescaled(part[0][j], part[3][j]));
        part[1].set(j, rescaled(part[1][j], part[3][j]));
      }
    }
    for (int i = 0; i < (AVERAGE ? 3 : 1); i++) part[i].put(p, t, p.after[i], t.s);
  }
  void keep(const Elementwise& p, const Task& t, int64_t begin) const {
    for (int i = 0; i < PARTS; i++) part[i].put(p, t, p.states, (t.slot + begin / BLOCK) * PARTS + i);
  }
  void take(const Elementwise& p, const Task& t, int64_t begin) {
    for (int i = 0; i < PARTS; i++) part[i].take(p, t, p.states, (t.slot + begin / BLOCK) * PARTS + i);
  }
};

// Rows of a token's inputs; a fixed gate is one row for all.
template <bool AVERAGE>
struct Inputs {
  Strip rooms[3], u;
  const float *x = nullptr, *v = nullptr, *g = rooms[2].x;

  Inputs(const Elementwise& p, const Task& t) {
    u.take(p, t, p.u, 0);
    if (p.fixed) rooms[2].take(p, t, static_cast<const float*>(p.g), 0);
  }
  void fetch_ahead(const Elementwise& p, const Task& t, int64_t token) const {
    fetch(p, t, p.x, p.type, token + AHEAD);
    if (AVERAGE) fetch(p, t, p.v, p.type, token + AHEAD);
    if (!p.fixed) fetch(p, t, p.g, p.g_type, token + AHEAD);
  }
  void read(const Elementwise& p, const Task& t, int64_t token) {
    x = rooms[0].read(p, t, p.x, p.type, token);
    if (AVERAGE) v = rooms[1].read(p, t, p.v, p.type, token);
    if (!p.fixed) g = rooms[2].read(p, t, p.g, p.g_type, token);
  }
  Weights weights(const State<AVERAGE>& s, int64_t j) const {
    return weigh(load(x + j), load(g + j), u[j], s.part[2][j], s.part[3][j]);
  }
};

// Moves the state over a token; returns what is read at it.
template <bool AVERAGE>
inline Vec advance(State<AVERAGE>& s, const Inputs<AVERAGE>& in, int64_t j) {
  const Vec h = s.part[0][j];
  if constexpr (AVERAGE) {
    const Weights w = in.weights(s, j);
    const Vec v = load(in.v + j), d = s.part[1][j], below = w.past * d + w.now;
    s.part[0].set(j, w.old * h + w.fresh * v);
    s.part[1].set(j, w.old * d + w.fresh);
    s.part[2].set(j, w.high);
    s.part[3].set(j, w.low);
    return (w.past * h + w.now * v) / (below == Vec{} ? all(1) : below);  // 0 where there is nothing to read
  } else {
    const Vec y = exponential(load(in.g + j)) * h + load(in.x + j);
    s.part[0].set(j, y);
    return y;
  }
}

// False if a gate is positive or NaN.
template <bool AVERAGE>
bool forward_task(const Elementwise& p, const Task& t) {
  State<AVERAGE> s;
  Inputs<AVERAGE> in(p, t);
  Strip room;
  Ints good = Ints{} - 1;
  s.start(p, t);
  for (int64_t i = 0; i < t.length; i++) {
    if (p.states && i % BLOCK == 0) s.keep(p, t, i);
    in.fetch_ahead(p, t, t.first + i);
    fetch(p, t, p.y, p.type, t.first + i + AHEAD);
    in.read(p, t, t.first + i);
    float* y = room.open(p, t, p.y, p.type, t.first + i);
    for (int64_t j = 0; j < t.size; j += L) {
      good &= load(in.g + j) <= Vec{};
      store(y + j, advance(s, in, j));
    }
    room.close(p, t, p.y, p.type, t.first + i);
  }
  s.finish(p, t);
  return all_of(good);
}

// Gradients of the state after a token, an average's times e^m; `m` is what h, d and m leave of the final gradients for
// the maximum itself. And sums over the tokens of a block, and of all.
template <bool AVERAGE>
struct Adjoint {
  Strip h, d, m, dg, du;
  double all_dg[STRIP] = {}, all_du[STRIP] = {};

  void start(const Elementwise& p, const Task& t, const State<AVERAGE>& end) {
    h.take(p, t, p.d_after[0], t.s);
    if constexpr (AVERAGE) {
      d.take(p, t, p.d_after[1], t.s);
      m.take(p, t, p.d_after[2], t.s);
      for (int64_t j = 0; j < t.size; j += L) {
        const Vec dh = rescaled(h[j], end.part[3][j]), dd = rescaled(d[j], end.part[3][j]);
        m.set(j, m[j] - (dh * end.part[0][j] + dd * end.part[1][j]));
        h.set(j, dh);
        d.set(j, dd);
      }
    }
  }
  void finish(const Elementwise& p, const Task& t, const State<AVERAGE>& begin) {
    if constexpr (AVERAGE) {
      for (int64_t j = 0; j < t.size; j += L)
        m.set(j, m[j] + h[j] * begin.part[0][j] + d[j] * begin.part[1][j]);
      d.put(p, t, p.d_before[1], t.s);
      m.put(p, t, p.d_before[2], t.s);
      for (int64_t j = 0; j < t.n; j++) p.du[t.s * p.D + t.d0 + j] = static_cast<float>(all_du[j]);
    }
    h.put(p, t, p.d_before[0], t.s);
    if (p.fixed)
      for (int64_t j = 0; j < t.n; j++)
        static_cast<float*>(p.dg)[t.s * p.D + t.d0 + j] = static_cast<float>(all_dg[j]);
  }
  void end_block() {
    for (int64_t j = 0; j < STRIP; j++) {
      all_dg[j] += dg.x[j], dg.x[j] = 0;
      all_du[j] += du.x[j], du.x[j] = 0;
    }
  }
};

// Gradients of a token's inputs.
struct Inward {
  Vec x, v, g;
};

template <bool AVERAGE>
inline Inward retreat(Adjoint<AVERAGE>& a, const State<AVERAGE>& before, const Inputs<AVERAGE>& in, Vec dy, int64_t j) {
  const Vec h = before.part[0][j], dh = a.h[j];
  if constexpr (AVERAGE) {
    const Weights w = in.weights(before, j);
    const Vec v = load(in.v + j), d = before.part[1][j], dd = a.d[j], dm = a.m[j];
    const Vec below = w.past * d + w.now, share = dy / (below == Vec{} ? all(1) : below);
    const Vec y = (w.past * h + w.now * v) / (below == Vec{} ? all(1) : below);
    const Vec lost = below == Vec{} ? Vec{} : -share * y;  // the gradient of what is divided by
    const Vec read = w.now * share * (v - y);
    Inward to;
    to.v = w.now * share + w.fresh * dh;
    to.x = read + w.fresh * (dh * v + dd) + (w.newest ? dm : Vec{});
    to.g = w.old * (dh * h + dd * d) + (w.newest ? Vec{} : dm);
    a.h.set(j, w.past * share + w.old * dh);
    a.d.set(j, w.past * lost + w.old * dd);
    a.m.set(j, w.newest ? Vec{} : dm);
    a.du.set(j, a.du[j] + read);
    return to;
  } else {
    const Vec dx = dh + dy, decayed = exponential(load(in.g + j)) * dx;
    a.h.set(j, decayed);
    return {dx, Vec{}, decayed * h};
  }
}

template <bool AVERAGE>
void backward_task(const Elementwise& p, const Task& t) {
  State<AVERAGE> s;
  State<AVERAGE> before[BLOCK];
  Inputs<AVERAGE> in(p, t);
  Adjoint<AVERAGE> a;
  Strip dys, dxs, dvs, dgs;
  s.start(p, t);
  if (!t.length) a.start(p, t, s);
  for (int64_t begin = (t.length - 1) / BLOCK * BLOCK; begin >= 0 && t.length; begin -= BLOCK) {
    const int64_t n = least(BLOCK, t.length - begin), first = t.first + begin;
    s.take(p, t, begin);
    for (int64_t i = 0; i < n; i++) {
      before[i] = s;
      in.fetch_ahead(p, t, first + i);
      fetch(p, t, p.dy, p.type, first + i);
      fetch(p, t, p.dx, p.type, first + i);
      if (AVERAGE) fetch(p, t, p.dv, p.type, first + i);
      if (!p.fixed) fetch(p, t, p.dg, p.g_type, first + i);
      in.read(p, t, first + i);
      for (int64_t j = 0; j < t.size; j += L) advance(s, in, j);
    }
    if (begin + n == t.length) a.start(p, t, s);
    for (int64_t i = n - 1; i >= 0; i--) {
      const int64_t token = first + i;
      in.read(p, t, token);
      const float* dy = dys.read(p, t, p.dy, p.type, token);
      float* dx = dxs.open(p, t, p.dx, p.type, token);
      float* dv = AVERAGE ? dvs.open(p, t, p.dv, p.type, token) : nullptr;
      float* dg = p.fixed ? nullptr : dgs.open(p, t, p.dg, p.g_type, token);
      for (int64_t j = 0; j < t.size; j += L) {
        const Inward to = retreat(a, before[i], in, load(dy + j), j);
        store(dx + j, to.x);
        if (AVERAGE) store(dv + j, to.v);
        if (p.fixed)
          a.dg.set(j, a.dg[j] + to.g);
        else
          store(dg + j, to.g);
      }
      dxs.close(p, t, p.dx, p.type, token);
      if (AVERAGE) dvs.close(p, t, p.dv, p.type, token);
      if (!p.fixed) dgs.close(p, t, p.dg, p.g_type, token);
    }
    a.end_block();
  }
  s.start(p, t);
  a.finish(p, t, s);
}

// An average has a bonus u, a scan none.
int64_t forward(const Elementwise& p) {
  int64_t bad = 0;
  for_each_task(p, [&](const Task& t) {
    if (!(p.u ? forward_task<true> : forward_task<false>)(p, t)) {
#pragma omp atomic write
      bad = 1;
    }
  });
  return bad;
}

void backward(const Elementwise& p) {
  for_each_task(p, [&](const Task& t) { (p.u ? backward_task<true> : backward_task<false>)(p, t); });
}

}  // namespace

extern const ElementwiseKernels LINATTN_ELEMENTWISE;
const ElementwiseKernels LINATTN_ELEMENTWISE = {forward, backward};

}  // namespace linattn
