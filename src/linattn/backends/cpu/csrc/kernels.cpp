// The recurrence with a tile of the state in registers, for one instruction set; compiled once for each.
//
//     S_t = d_t S_{t-1} + b_t w_t^T + k_t v_t^T      o_t = scale S_t^T q_t  (or S_{t-1} and the bonus)
//
//   d = e^g      additive: no b w^T      low rank: w_t = S_{t-1}^T a_t
//   delta: k_t w_t^T instead of both, w_t = beta_t e_t, e_t = v_t + S_{t-1}^T a_t, a_t = -d_t k_t
//   X_t          gradient of S_t, all later uses included; P what later tokens give it (X_t as seen by the write of t)
//
// Plainly the recurrence, walked over blocks of BLOCK tokens. A block's rows are first copied into packed float32 rows
// (q scaled, decays exponentiated, tails zero). Where the decays of a span of tokens leave a product D within RANGE,
// they are divided out of its rows first (q D, k / D), which costs no relative precision, and the span is walked
// undecayed; where not, every decay appears as it is. So no gate is too strong.
//
//   sweep_tile      R rows x W vectors of a state stay in registers for a whole span: the output of an additive write
//                   and gradients, with other letters in the parts of q, k and v
//   low_rank_tile   all keys x W vectors in L1; a pass for two tokens writes, reads o, and reads w of the next two.
//                   Backwards in time and with other letters it is X, reading dw_t = X_t^T b_t (k_t for delta)
//   gradient_tile   S forwards from a kept state, then X backwards; here vectors run over keys and rows over values,
//                   so that dq_t = S do, dk_t = X v, dg_t = S . X ... are sums over rows, which need no reduction
//
// Gradients are sweeps: of S^T forwards, which reads dq (and da), of X^T backwards, which reads dk (and db), and of X
// for dv; a low-rank write's X is walked before. That of a gate is a running sum within the span, from S . X at its end
// on: what a token reads is decayed by the gates up to its own, what it writes by those after it,
// dg_t - dg_{t+1} = q_t dq_t - k_t dk_t (- b_t db_t + a_{t+1} da_{t+1}). Where a gate is strong, its gradient is too
// small to be had as a difference, and where gates are fixed, they sum over all tokens: there gradient_tile sums S . X
// token by token.
//
// Where sequences, heads and parts of the value columns are fewer than the threads, an additive sequence is cut in
// segments: what each does to the state is summed up first, S -> D S + E, then all are walked from their own states.
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

#if LINATTN_LANES == 16 || defined(__aarch64__)
constexpr int R = 8;  // keys of the forward's register tile, which is 2 vectors wide
#else
constexpr int R = 4;
#endif
constexpr int GR = 8, GW = 1;  // values, and vectors of keys, of the backward's
constexpr int64_t SHORT = 16;    // tokens of the shortest span; the gate's gradient sums differences over two of them
constexpr float MILD = 0.25f;    // the strongest decay whose gradient may be had by differences
constexpr int64_t MANY = 32;     // keys, of which a low-rank write erases but a part; of fewer it may erase nearly all
constexpr int64_t SIDE_BY_SIDE = 1024;  // bytes of the rows of heads that are walked together
constexpr int64_t SEGMENT = 8;   // blocks, at least, of a segment
constexpr float RANGE = 8.67e-19f;  // 2^-60, the strongest product of decays that is divided out

// An odd number of cache lines, so that successive rows fall into different sets.
int64_t stride_of(int64_t n) { return LINE * (ceil_to(n, LINE) / LINE | 1); }

// Rows that the next block reads and writes. Rows of one head lie apart, which the machine does not foresee; they are
// called in while this block is worked on.
struct Ahead {
  static constexpr int64_t MOST = 15;
  const char* at[MOST];
  int64_t bytes[MOST], step[MOST], tensors = 0, rows = 0;
  void add(const void* x, int64_t type, int64_t first, int64_t heads, int64_t h, int64_t width, int64_t v0, int64_t n) {
    const int64_t size = type == FLOAT32 ? 4 : 2;
    if (!x) return;
    at[tensors] = static_cast<const char*>(x) + ((first * heads + h) * width + v0) * size;
    bytes[tensors] = n * size, step[tensors++] = heads * width * size;
  }
  // GCC takes it for a function without effect, and drops calls of it: it must be inlined.
  __attribute__((always_inline)) void fetch(int64_t from, int64_t to) const {
    for (int64_t t = from; t < least(to, rows); t++)
      for (int64_t i = 0; i < tensors; i++)
        for (int64_t c = 0; c < bytes[i]; c += 64) __builtin_prefetch(at[i] + t * step[i] + c, 0, 2);
  }
};

// Sizes and packed rows of a block. Rows of q, d_o and the keys have a zero row before the first and after the last.
struct Block {
  int64_t K, V, Kp, Vp, ks, vs;  // Kp, Vp: padded to whole vectors; ks, vs: distance of rows
  float *q, *k, *d, *a, *b, *v, *o, *w, *e, *beta, *bonus, *S, *seen;
  mutable Ahead ahead;
  float *since, *inverse;  // products of decays since the start of a span, and one over them
  // backward only
  double *fixed = nullptr, *across = nullptr;  // sums over tokens; S . X at the end of a block
  float *d_o = nullptr, *dw = nullptr, *d_e = nullptr, *dv = nullptr, *dq = nullptr, *dk = nullptr, *dg = nullptr,
        *da = nullptr, *db = nullptr, *X = nullptr, *ST = nullptr, *XT = nullptr, *kept = nullptr, *sums = nullptr,
        *ends = nullptr;

  // Of the `head`-th of `heads` that are walked together: what is carried from block to block is its own.
  Block(const Matrix& p, int64_t columns, Arena& arena, int64_t head, int64_t heads) {
    const bool backward = p.d_o;
    K = p.K, V = columns;
    Kp = ceil_to(K, L > R ? L : R), Vp = ceil_to(V, backward && GR > L ? GR : L);
    ks = stride_of(Kp), vs = stride_of(Vp);
    auto rows = [&](int64_t stride) { return arena.take((BLOCK + 2) * stride) + stride; };
    const bool low = p.write != ADDITIVE, both = p.write == LOW_RANK;
    q = rows(ks), k = rows(ks), v = rows(vs), o = rows(vs);
    d = p.decay ? rows(ks) : nullptr, since = p.decay ? rows(ks) : nullptr, inverse = p.decay ? rows(ks) : nullptr;
    a = low ? rows(ks) : nullptr, w = low ? rows(vs) : nullptr, e = low ? rows(vs) : nullptr;
    b = both ? rows(ks) : nullptr;
    beta = arena.take(BLOCK), bonus = arena.take(BLOCK);
    seen = low ? arena.take(3 * BLOCK) : nullptr;
    const int64_t own = Kp * vs + (backward ? Vp * ks + 4 * Kp : 0);
    Arena carried{arena.take(heads * own)};
    carried.take(head * own);
    S = carried.take(Kp * vs);
    if (!backward) return;
    X = S, XT = carried.take(Vp * ks), fixed = reinterpret_cast<double*>(carried.take(4 * Kp));
    d_o = rows(vs), dv = rows(vs), dq = rows(ks), dk = rows(ks);
    dg = p.dg || (p.decay && low) ? rows(ks) : nullptr;
    dw = low ? rows(vs) : nullptr, d_e = both ? rows(vs) : low ? dv : nullptr, da = low ? rows(ks) : nullptr;
    db = both ? rows(ks) : nullptr;
    across = reinterpret_cast<double*>(arena.take(2 * Kp));
    ends = dg ? arena.take(BLOCK / SHORT * Vp * ks) : nullptr;
    ST = arena.take(Vp * ks);
    kept = arena.take(BLOCK * GR * GW * L), sums = arena.take(BLOCK * GR * L);
  }
};

// Into how many segments a sequence is split, whose states are summed up first and joined: where sequences, heads and
// parts are fewer than the threads. A summary costs half of a walk, of a low-rank write (K x K numbers more) twice one.
int64_t segments_of(const Matrix& p) {
  const int64_t tasks = p.N * p.H * p.parts;
  const bool sums = p.d_o && (p.u || p.decay == HEAD || p.decay == CHANNEL);  // over tokens, in their order
  if (p.write != ADDITIVE || p.ends || sums || !tasks) return 1;
  const int64_t most = p.T / (SEGMENT * BLOCK), wanted = p.threads / tasks;
  return wanted < 1 || most < 1 ? 1 : least(wanted, most);
}

// Pairs of vectors of value columns, which a part takes whole; there are no more parts than pairs, so none is empty.
int64_t pairs_of(const Matrix& p) { return (p.V + 2 * L - 1) / (2 * L); }

// How many heads are walked together, a block of each in turn: their rows lie side by side in memory, which gives them
// faster than rows apart. No more than leave every thread as much to do.
int64_t heads_of(const Matrix& p, int64_t segments) {
  const int64_t row = p.K * (p.type == FLOAT32 ? 4 : 2);
  int64_t heads = segments > 1 || p.T == 1 ? 1 : p.H;
  while (heads > 1 && (heads * row > SIDE_BY_SIDE || p.H % heads || p.N * p.H / heads * p.parts % p.threads)) heads--;
  return heads > 1 ? heads : 1;
}

// A (sequence, head, part of the value columns, segment), which is tokens `begin` to `end` of the sequence; the head is
// one of `heads` from `lead` on, which are walked together.
struct Task : Sequence {
  int64_t n, h, lead, heads, part, segment, v0, columns, begin, end;
};

// The i-th, of the first of its heads.
Task task_of(const Matrix& p, int64_t i, int64_t segments, int64_t heads) {
  const int64_t segment = i % segments, H = p.H / heads;
  i /= segments;
  Task t{sequence_of(p.ends, p.T, i / p.parts / H)};
  t.segment = segment;
  t.part = i % p.parts, t.h = t.lead = i / p.parts % H * heads, t.n = i / p.parts / H, t.heads = heads;
  const int64_t pairs = pairs_of(p), v0 = t.part * pairs / p.parts * 2 * L;
  t.v0 = v0, t.columns = least((t.part + 1) * pairs / p.parts * 2 * L, p.V) - v0;
  const int64_t blocks = ceil_to(t.length, BLOCK) / BLOCK;
  t.begin = t.segment * blocks / segments * BLOCK, t.end = least(t.length, (t.segment + 1) * blocks / segments * BLOCK);
  return t;
}

int64_t columns_of(const Matrix& p) { return least(p.V, (pairs_of(p) + p.parts - 1) / p.parts * 2 * L); }

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

void read_queries(const Matrix& p, const Task& t, const Block& m, int64_t first, int64_t n) {
  const float scale = static_cast<float>(p.scale);
  read_rows(m.q, m.ks, p.q, p.type, first, n, p.G, t.h / (p.H / p.G), p.K, 0, p.K, m.Kp, scale);
}

void read_keys(const Matrix& p, const Task& t, const Block& m, int64_t first, int64_t n) {
  read_rows(m.k, m.ks, p.k, p.type, first, n, p.G, t.h / (p.H / p.G), p.K, 0, p.K, m.Kp);
}

void read_values(const Matrix& p, const Task& t, const Block& m, float* to, const void* from, int64_t first,
                 int64_t n) {
  read_rows(to, m.vs, from, p.type, first, n, p.H, t.h, p.V, t.v0, t.columns, m.Vp);
}

// False if a gate is positive or NaN.
bool read_decays(const Matrix& p, const Task& t, const Block& m, int64_t first, int64_t n) {
  if (p.decay == NONE) return true;
  const bool fixed = p.decay == HEAD || p.decay == CHANNEL;  // the same for every token
  const int64_t D = scalar_decay(p) ? 1 : p.K, Dp = ceil_to(D, L), rows = fixed ? least(n, 1) : n;
  bool good = true;
  read_rows(m.d, m.ks, p.g, p.g_type, fixed ? 0 : first, rows, p.H, t.h, D, 0, D, Dp);
  for (int64_t i = 0; i < rows; i++) {
    good &= exponentiate(m.d + i * m.ks, Dp);
    for (int64_t j = D; D > 1 && j < m.Kp; j++) m.d[i * m.ks + j] = 1;  // channels beyond K: kept, they are zero
  }
  for (int64_t i = rows; i < n; i++) __builtin_memcpy(m.d + i * m.ks, m.d, (D > 1 ? m.Kp : Dp) * sizeof(float));
  return good;
}

// The inputs of n tokens from `first` on. False if a gate is positive or NaN.
bool read_block(const Matrix& p, const Task& t, const Block& m, int64_t first, int64_t n) {
  read_queries(p, t, m, first, n);
  read_keys(p, t, m, first, n);
  read_values(p, t, m, m.v, p.v, first, n);
  const bool good = read_decays(p, t, m, first, n);
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
  return good;
}

// What Ahead calls in: the next head's block from `begin` on, or, after the last head, the first one's from `next` on.
void look_ahead(const Matrix& p, const Task& t, const Block& m, int64_t begin, int64_t next) {
  Ahead a;
  const bool other = t.h + 1 < t.lead + t.heads;
  const int64_t h = other ? t.h + 1 : t.lead, at = other ? begin : next, first = t.first + at;
  a.rows = at < t.begin ? 0 : least(BLOCK, t.end - at);
  const auto keys = [&](const void* x, int64_t type, int64_t heads, int64_t first) {
    a.add(x, type, first, heads, h / (p.H / heads), p.K, 0, p.K);
  };
  const auto values = [&](const void* x, int64_t type) { a.add(x, type, first, p.H, h, p.V, t.v0, t.columns); };
  keys(p.q, p.type, p.G, first);
  keys(p.k, p.type, p.G, first);
  keys(p.a, p.low_type, p.H, first);
  keys(p.b, p.low_type, p.H, first);
  values(p.v, p.type);
  values(p.o, p.type);
  values(p.writes, FLOAT32);
  values(p.d_o, p.type);
  values(p.dv, p.type);
  const int64_t written = t.part * p.tokens + first;
  keys(p.dq, p.key_type, p.H, written);
  keys(p.dk, p.key_type, p.H, written);
  keys(p.da, FLOAT32, p.H, written);
  keys(p.db, FLOAT32, p.H, written);
  if (p.decay == TOKEN_CHANNEL) {
    keys(p.g, p.g_type, p.H, first);
    keys(p.dg, FLOAT32, p.H, written);
  }
  m.ahead = a;
}

void read_state(const Matrix& p, const Task& t, const Block& m, float* S, const float* from) {
  zero(S, m.Kp * m.vs);
  if (from)
    for (int64_t r = 0; r < m.K; r++) read_row(S + r * m.vs, from, FLOAT32, r * p.V + t.v0, t.columns);
}

void write_state(const Matrix& p, const Task& t, const Block& m, const float* S, float* to) {
  for (int64_t r = 0; r < m.K; r++) write_row(to, S + r * m.vs, FLOAT32, r * p.V + t.v0, t.columns);
}

// ---- spans: decays divided out

// Whether decays are of the whole state, of its rows (keys), or of its vectors' lanes.
enum Gates { UNGATED, WHOLE, ROWS, LANES };

// How many tokens from the i-th on have a product of decays within RANGE: `most`, or less by halves; 0 if too few do.
template <int D>
int64_t even_span(const Block& m, int64_t i, int64_t most) {
  if (!D) return most;
  const int64_t size = D == WHOLE ? 1 : m.Kp;
  for (int64_t j = 0; j < size; j += L) {
    const float* d = m.d + i * m.ks + j;
    float* since = m.since + i * m.ks + j;
    Vec product = all(1.f);
    for (int64_t t = 0; t < most; t++, d += m.ks, since += m.ks) store(since, product *= load(d));
  }
  for (int64_t n = most; n; n = n > SHORT ? ceil_to(n / 2, SHORT) : 0) {
    const float* last = m.since + (i + n - 1) * m.ks;
    bool every = true;
    for (int64_t j = 0; j < size; j++) every &= last[j] >= RANGE;
    if (every) return n;
  }
  return 0;
}

// Stretches of a block that are swept at once.
struct Spans {
  int64_t count = 0, at[BLOCK / SHORT + 2] = {};
  void add(int64_t n) { at[count + 1] = at[count] + n, count++; }
};

// The spans of a block, at most `most` tokens each, or none where a decay is too strong for them.
template <int D>
Spans even_spans(const Block& m, int64_t n, int64_t most) {
  Spans spans;
  for (int64_t i = 0; i < n; i = spans.at[spans.count]) {
    const int64_t part = even_span<D>(m, i, least(most, n - i));
    if (!part) return {};
    spans.add(part);
  }
  return spans;
}

// x times y, which is one number for all or one for each.
template <int D>
void multiply(float* x, const float* y, int64_t n) {
  for (int64_t j = 0; j < n; j += L) store(x + j, load(x + j) * (D == WHOLE ? all(y[0]) : load(y + j)));
}

// Rows of n tokens, from the i-th on, so that the recurrence has no decay: what is read is multiplied by the decays
// since the span's start, what is written divided by them. The gradients of such rows need the same factors.
template <int D, bool Before>
void divide_out(const Block& m, int64_t i, int64_t n, float* read, float* written, float* a, float* b) {
  for (int64_t t = i; t < i + n; t++) {
    const int64_t at = t * m.ks;
    const float *since = m.since + at, *inverse = m.inverse + at;
    if (read && !Before) multiply<D>(read + at, since, m.Kp);
    if (written) multiply<D>(written + at, inverse, m.Kp);
    if (b) multiply<D>(b + at, inverse, m.Kp);
    if (t == i) continue;
    if (read && Before) multiply<D>(read + at, since - m.ks, m.Kp);
    if (a) multiply<D>(a + at, since - m.ks, m.Kp);
  }
}

template <int D>
void invert(const Block& m, int64_t i, int64_t n) {
  for (int64_t t = i; t < i + n; t++)
    for (int64_t j = 0; j < (D == WHOLE ? 1 : m.Kp); j += L)
      store(m.inverse + t * m.ks + j, 1 / load(m.since + t * m.ks + j));
}

// The state at the end of a span whose last token is t, or its gradient before it.
template <int D>
void decay_state(const Block& m, float* S, int64_t t) {
  for (int64_t r = 0; r < m.K; r++) multiply<WHOLE>(S + r * m.vs, m.since + t * m.ks + (D == WHOLE ? 0 : r), m.Vp);
}
template <int D>
void decay_transposed(const Block& m, float* ST, int64_t t) {
  for (int64_t r = 0; r < m.V; r++) multiply<D>(ST + r * m.ks, m.since + t * m.ks, m.Kp);
}

// ---- forward

// The recurrence with other letters. x, y: broadcast along the vectors; z, out: along the rows of S. All point at their
// rows of the first token; `broadcast`, `along`, `gates` lead to the next one, backwards in time where negative.
struct Sweep {
  const float *x, *y, *z, *d;
  float *out, *S;
  int64_t rows, lanes;  // of S
  int64_t broadcast, along, gates, stride;
  const float *x2 = nullptr, *y2 = nullptr, *z2 = nullptr;  // a second read, a second write
  float* out2 = nullptr;
};

// X, X2, Y2: whether there is a read, a second one, a second write.
// FORWARD: out2 += x2 S, S = d S + y z + y2 z2, out += x S. LATE reads both first.
// BACKWARD: S = S + y z, out += x S, out2 += x2 S, S = d (S + y2 z2).
enum Order { FORWARD, LATE, BACKWARD };

template <int D, int O, bool X, bool X2, bool Y2, int W>
void sweep_tile(const Sweep& s, int64_t n, int64_t r0, int64_t c0) {
  const float *x = s.x + r0, *y = s.y + r0, *z = s.z + c0, *d = s.d + (D == ROWS ? r0 : D == LANES ? c0 : 0);
  const float *x2 = X2 ? s.x2 + r0 : x, *y2 = Y2 ? s.y2 + r0 : y, *z2 = Y2 ? s.z2 + c0 : z;
  float *out = s.out + c0, *out2 = X2 ? s.out2 + c0 : out, *S = s.S + r0 * s.stride + c0;
  const int64_t broadcast = s.broadcast, along = s.along, gates = s.gates;  // stores might alias s
  Vec state[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) state[r][w] = load(S + r * s.stride + w * L);
  for (int64_t t = 0; t < n; t++) {
    Vec value[W], value2[W], even[W], odd[W], sum2[W], decay[W];
    for (int w = 0; w < W; w++) {
      value[w] = load(z + w * L), even[w] = X && r0 ? load(out + w * L) : Vec{}, odd[w] = Vec{};
      if (Y2) value2[w] = load(z2 + w * L);
      if (X2) sum2[w] = r0 ? load(out2 + w * L) : Vec{};
      decay[w] = D == WHOLE ? all(d[0]) : D == LANES ? load(d + w * L) : Vec{};
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec yr = all(y[r]), xr = all(x[r]), dr = D == ROWS ? all(d[r]) : Vec{}, x2r = all(x2[r]), y2r = all(y2[r]);
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) {
        Vec &sum = R > 4 && r & 1 ? odd[w] : even[w], &v = state[r][w];
        const Vec by = D == ROWS ? dr : decay[w];
        if (X2 && O != BACKWARD) sum2[w] += x2r * v;
        if (X && O == LATE) sum += xr * v;
        v = D && O != BACKWARD ? by * v + yr * value[w] : v + yr * value[w];
        if (Y2 && O != BACKWARD) v += y2r * value2[w];
        if (X && O != LATE) sum += xr * v;
        if (X2 && O == BACKWARD) sum2[w] += x2r * v;
        if (Y2 && O == BACKWARD) v += y2r * value2[w];
        if (D && O == BACKWARD) v *= by;
      }
    }
    for (int w = 0; w < W; w++) {
      if (X) store(out + w * L, R > 4 ? even[w] + odd[w] : even[w]);
      if (X2) store(out2 + w * L, sum2[w]);
    }
    x += broadcast, y += broadcast, z += along, out += along, d += D ? gates : 0;
    x2 += broadcast, y2 += broadcast, z2 += along, out2 += along;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int w = 0; w < W; w++) store(S + r * s.stride + w * L, state[r][w]);
}

// `out` is overwritten.
template <int D, int O, bool X2 = false, bool Y2 = false, bool X = true>
void sweep(const Sweep& s, int64_t n, const Ahead& ahead = {}, int64_t i = 0) {
  const int64_t tiles = (s.lanes + 2 * L - 1) / (2 * L) * ((s.rows + R - 1) / R);
  int64_t tile = 0;
  for (int64_t c0 = 0; c0 < s.lanes; c0 += 2 * L)
    for (int64_t r0 = 0; r0 < s.rows; r0 += R, tile++) {
      ahead.fetch(i + n * tile / tiles, i + n * (tile + 1) / tiles);
      if (c0 + 2 * L <= s.lanes)
        sweep_tile<D, O, X, X2, Y2, 2>(s, n, r0, c0);
      else
        sweep_tile<D, O, X, X2, Y2, 1>(s, n, r0, c0);
    }
}

template <int D, bool Before>
void additive(const Block& m, int64_t n) {
  constexpr int order = Before ? LATE : FORWARD;
  for (int64_t i = 0, part; i < n; i += part) {
    part = even_span<D>(m, i, n - i);
    const int64_t k = i * m.ks, v = i * m.vs;
    Sweep s = {m.q + k, m.k + k, m.v + v, m.d + (D ? k : 0), m.o + v, m.S, m.K, m.Vp, m.ks, m.vs, m.ks, m.vs};
    if (D && !part) {  // too strong to be divided out
      part = least(SHORT, n - i);
      sweep<D, order>(s, part, m.ahead, i);
      continue;
    }
    if (D) {
      invert<D>(m, i, part);
      divide_out<D, Before>(m, i, part, m.q, m.k, nullptr, nullptr);
    }
    sweep<UNGATED, order>(s, part, m.ahead, i);
    if (D) decay_state<D>(m, m.S, i + part - 1);
  }
}

// The low-rank recurrence with other letters: x = beta (given + S^T a), which b writes; `k v^T` is a plain write; q
// reads o. All point at their rows of the first token; `keys` and `values` lead to the next one, backwards in time
// where negative.
struct LowRank {
  const float *q, *k, *a, *b, *d, *v, *given, *beta;  // without `given` or `beta`: 0 or 1
  float *o, *sum, *x, *S;                              // `sum`, if not null: x before it is multiplied by beta
  int64_t K, keys, values, stride;
  float* seen;  // scratch: what the reads of a token see of writes within the pass, 3 numbers a token
  void advance(int64_t t) {
    const int64_t at = t * keys, to = t * values, step = keys < 0 ? -t : t;
    q += at, k += at, a += at, b += at, v += to, o += to, x += to, seen += 3 * t;
    if (given) given += to;
    if (beta) beta += step;
    if (sum) sum += to;
  }
};

// P tokens a pass over the state, which is read and written once: what the second reads of what the first wrote is a
// product of their keys. Order as of a sweep:
// FORWARD: S = d S + b x + k v, o = S q. LATE reads o first. BACKWARD: S = S + k v, o = S q, S = d S + b x, and x sees
// k v. Erase: S - b x is what decays.
template <int D, int O, bool Plain, bool Read, bool Erase, int P, int W>
void low_rank_tile(const LowRank& s, int64_t n, int64_t v0, const Ahead& ahead, int64_t i) {
  const int64_t K = s.K, keys = s.keys, values = s.values, stride = s.stride, step = keys < 0 ? -1 : 1;
  const float *q = s.q, *k = s.k, *a = s.a, *b = s.b, *d = s.d, *v_row = s.v + v0, *seen = s.seen, *beta = s.beta;
  const float* given = s.given ? s.given + v0 : nullptr;
  float *const S0 = s.S + v0, *sum = s.sum ? s.sum + v0 : nullptr, *x_row = s.x + v0, *out = s.o + v0;
  Vec next[P][W] = {};
  for (int64_t r = 0; r < K; r++)
    for (int p = 0; p < P; p++)
      for (int w = 0; w < W; w++) next[p][w] += a[p * keys + r] * load(S0 + r * stride + w * L);
  for (int64_t t = 0; t < n; t += P) {
    if (!v0) ahead.fetch(i + t, i + t + P);
    Vec x[P][W], v[P][W], o[P][W] = {}, decay = D == WHOLE ? all(d[0]) : Vec{};
    for (int p = 0; p < P; p++, seen += 3)
      for (int w = 0; w < W; w++) {
        const int64_t at = p * values + w * L;
        Vec y = next[p][w];
        if (given) y += load(given + at);
        if (Plain) v[p][w] = load(v_row + at);
        if (Plain && O == BACKWARD) y += seen[0] * v[p][w];
        if (p) y += seen[1] * x[0][w];
        if (p && Plain) y += seen[2] * v[0][w];
        if (sum) store(sum + at, y);
        if (beta) y *= beta[p * step];
        store(x_row + at, y);
        x[p][w] = y, next[p][w] = Vec{};
      }
    const float* after[P];  // a of the next tokens; of none if there is none
    for (int p = 0; p < P; p++) after[p] = t + P + p < n ? a + (P + p) * keys : a;
    for (int64_t r = 0; r < K; r++) {
      float* row = S0 + r * stride;
      Vec y[W];
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) y[w] = load(row + w * L);
      if (D == ROWS) decay = all(d[r]);
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const int64_t at = p * keys + r;
        const Vec br = all(b[at]), kr = Plain ? all(k[at]) : Vec{}, qr = Read ? all(q[at]) : Vec{};
#pragma GCC unroll 2
        for (int w = 0; w < W; w++) {
          if (Plain && O == BACKWARD) y[w] += kr * v[p][w];
          if (Read && O != FORWARD) o[p][w] += qr * y[w];
          if (Erase)
            y[w] = decay * (y[w] - br * x[p][w]);
          else
            y[w] = D ? decay * y[w] + br * x[p][w] : y[w] + br * x[p][w];
          if (Plain && O != BACKWARD) y[w] += kr * v[p][w];
          if (Read && O == FORWARD) o[p][w] += qr * y[w];
        }
      }
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const Vec ar = all(after[p][r]);
#pragma GCC unroll 2
        for (int w = 0; w < W; w++) next[p][w] += ar * y[w];
      }
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) store(row + w * L, y[w]);
    }
    for (int p = 0; Read && p < P; p++)
      for (int w = 0; w < W; w++) store(out + p * values + w * L, o[p][w]);
    q += P * keys, k += P * keys, a += P * keys, b += P * keys, d += D ? P * keys : 0;
    v_row += P * values, x_row += P * values, out += P * values, beta += beta ? P * step : 0;
    given += given ? P * values : 0, sum += sum ? P * values : 0;
  }
}

float dot(const float* x, const float* y, int64_t n) {
  Vec s = {};
  for (int64_t j = 0; j < n; j += L) s += load(x + j) * load(y + j);
  return sum(s);
}

template <int D, int O, bool Plain, bool Read, bool Erase = false>
void low_rank_walk(LowRank s, int64_t n, int64_t columns, const Ahead& ahead = {}, int64_t i = 0) {
  constexpr int P = D || (Plain && Read) ? 1 : 2;  // for more, registers are too few
  for (int64_t t = 0; t < n; t++) {
    const float *a = s.a + t * s.keys, *k = s.k + t * s.keys, *b = s.b + (t - 1) * s.keys;
    float* seen = s.seen + 3 * t;
    if (Plain && O == BACKWARD) seen[0] = dot(a, k, s.K);
    if (t % P) seen[1] = dot(a, b, s.K);
    if (t % P && Plain) seen[2] = dot(a, k - s.keys, s.K);
  }
  const auto walk = [&](auto wide, auto narrow, int64_t n, int64_t i) {
    int64_t v0 = 0;
    for (; v0 + 2 * L <= columns; v0 += 2 * L) wide(s, n, v0, ahead, i);
    if (v0 < columns) narrow(s, n, v0, ahead, i);
  };
  const int64_t whole = n / P * P;
  if (whole)
    walk(low_rank_tile<D, O, Plain, Read, Erase, P, 2>, low_rank_tile<D, O, Plain, Read, Erase, P, 1>, whole, i);
  if (whole == n) return;
  s.advance(whole);
  walk(low_rank_tile<D, O, Plain, Read, Erase, 1, 2>, low_rank_tile<D, O, Plain, Read, Erase, 1, 1>, 1, i + whole);
}

template <int D, bool Both, bool Before>
void low_rank(const Block& m, int64_t n) {
  constexpr int order = Before ? LATE : FORWARD;
  for (int64_t i = 0, part; i < n; i += part) {
    part = even_span<D>(m, i, n - i);
    const int64_t k = i * m.ks, v = i * m.vs;
    LowRank s = {m.q + k, m.k + k, m.a + k, (Both ? m.b : m.k) + k, m.d + (D ? k : 0), m.v + v};
    s.o = m.o + v, s.x = m.w + v, s.S = m.S, s.K = m.K, s.keys = m.ks, s.values = m.vs, s.stride = m.vs;
    s.seen = m.seen;
    if (!Both) s.given = m.v + v, s.beta = m.beta + i, s.sum = m.e + v;
    if (D && !part) {  // too strong to be divided out
      part = least(SHORT, n - i);
      low_rank_walk<D, order, Both, true>(s, part, m.Vp, m.ahead, i);
      continue;
    }
    if (D) {
      invert<D>(m, i, part);
      divide_out<D, Before>(m, i, part, m.q, m.k, m.a, Both ? m.b : nullptr);
    }
    low_rank_walk<UNGATED, order, Both, true>(s, part, m.Vp, m.ahead, i);
    if (D) decay_state<D>(m, m.S, i + part - 1);
  }
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
void bonus_weights(const Matrix& p, const Task& t, const Block& m, int64_t n) {
  if (!p.u) return;
  for (int64_t i = 0; i < n; i++) m.bonus[i] = bonus_weight(p, t, m, i);
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

// ---- segments

// What a segment does to the state, decay * S + added, or to the state's gradient: Kp and Kp x vs floats a segment.
struct Summary {
  float *decay, *added;
  Summary(const Block& m, float* slots, int64_t segment)
      : decay(slots + segment * (m.Kp + m.Kp * m.vs)), added(decay + m.Kp) {}
  static int64_t size(const Block& m) { return m.Kp + m.Kp * m.vs; }
  void apply(const Block& m, float* S) const {
    for (int64_t r = 0; r < m.K; r++)
      for (int64_t j = 0; j < m.Vp; j += L) {
        float* row = S + r * m.vs + j;
        store(row, decay[r] * load(row) + load(added + r * m.vs + j));
      }
  }
};

// The state that a segment leaves where none was (the walk without reads), or, from its end to its start, its gradient.
template <int D, bool Before, bool Backward>
void summarize(const Matrix& p, const Task& t, const Block& m, const Summary& sum) {
  constexpr int order = !Backward ? FORWARD : Before ? LATE : BACKWARD;
  const int64_t blocks = (t.end - t.begin + BLOCK - 1) / BLOCK;
  float *S = sum.added, *keys = Backward ? m.q : m.k, *values = Backward ? m.d_o : m.v;
  zero(S, m.Kp * m.vs);
  for (int64_t j = 0; j < m.Kp; j++) sum.decay[j] = 1;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t begin = t.begin + (Backward ? blocks - 1 - b : b) * BLOCK, n = least(BLOCK, t.end - begin);
    Backward ? read_queries(p, t, m, t.first + begin, n) : read_keys(p, t, m, t.first + begin, n);
    read_values(p, t, m, values, Backward ? p.d_o : p.v, t.first + begin, n);
    read_decays(p, t, m, t.first + begin, n);
    const Spans spans = even_spans<D>(m, n, BLOCK);
    for (int64_t c = 0; c < spans.count; c++) {
      const int64_t span = Backward ? spans.count - 1 - c : c, i = spans.at[span], end = spans.at[span + 1];
      if (D && !Backward) invert<D>(m, i, end - i);
      float *read = Backward ? keys : nullptr, *written = Backward ? nullptr : keys;
      if (D) divide_out<D, Before>(m, i, end - i, read, written, nullptr, nullptr);
      if (D && Backward) decay_state<D>(m, S, end - 1);
      const float *k = keys + i * m.ks, *v = values + i * m.vs;
      sweep<UNGATED, FORWARD, false, false, false>({k, k, v, k, S, S, m.K, m.Vp, m.ks, m.vs, m.ks, m.vs}, end - i);
      if (D && !Backward) decay_state<D>(m, S, end - 1);
    }
    if (!spans.count) {
      const int64_t at = Backward ? n - 1 : 0, sign = Backward ? -1 : 1;
      const float *k = keys + at * m.ks, *v = values + at * m.vs, *d = m.d + (D ? at * m.ks : 0);
      sweep<D, order, false, false, false>(
          {k, k, v, d, S, S, m.K, m.Vp, sign * m.ks, sign * m.vs, sign * m.ks, m.vs}, n);
    }
    for (int64_t i = 0; D && i < n; i++) multiply<D>(sum.decay, m.d + i * m.ks, m.Kp);
  }
}

using Summarize = void (*)(const Matrix&, const Task&, const Block&, const Summary&);

template <int D, bool Backward>
Summarize summarize_of(const Matrix& p) {
  return p.before ? summarize<D, true, Backward> : summarize<D, false, Backward>;
}

template <bool Backward>
Summarize summarize_of(const Matrix& p) {
  return p.decay == NONE     ? summarize_of<UNGATED, Backward>(p)
         : scalar_decay(p) ? summarize_of<WHOLE, Backward>(p)
                           : summarize_of<ROWS, Backward>(p);
}

// Floats of scratch: a thread's own, and a summary, which lie behind those of all threads.
struct Scratch {
  int64_t own, summary;
};

Scratch scratch_of(const Matrix& p, int64_t heads) {
  Arena arena{nullptr};
  const Block m(p, columns_of(p), arena, 0, heads);
  return {arena.used, Summary::size(m)};
}

int64_t scratch(const Matrix& p) {
  const int64_t segments = segments_of(p), tasks = p.N * p.H * p.parts * segments;
  const Scratch size = scratch_of(p, heads_of(p, segments));
  return size.own + (segments > 1 ? ceil_to((tasks + p.threads - 1) / p.threads * size.summary, LINE) : 0);
}

// Heads that a thread walks together.
struct Heads {
  const Matrix& p;
  Task first;
  float *scratch, *summaries;  // summaries of the sequence's segments
  // one(task, block) of every head
  template <class One>
  void each(One one) const {
    for (Task t = first; t.h < t.lead + t.heads; t.h++) {
      Arena arena{scratch};
      one(t, Block(p, t.columns, arena, t.h - t.lead, t.heads));
    }
  }
};

// each(heads), on all threads
template <class Each>
void for_all_heads(const Matrix& p, int64_t segments, Each each) {
  const int64_t heads = heads_of(p, segments), tasks = p.N * p.H / heads * p.parts * segments;
  const int64_t threads = least(p.threads, tasks);
  const Scratch size = scratch_of(p, heads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < tasks; i++) {
    const Task t = task_of(p, i, segments, heads);
    float* const summaries = p.scratch + p.threads * size.own + (i - t.segment) * size.summary;
    if (t.columns > 0) each(Heads{p, t, p.scratch + thread() * size.own, summaries});
  }
}

// Sums up every segment but the last (backwards: the first), which nothing follows.
template <bool Backward>
void summarize_segments(const Matrix& p, int64_t segments) {
  if (segments == 1) return;
  const Summarize one = summarize_of<Backward>(p);
  for_all_heads(p, segments, [&](const Heads& heads) {
    heads.each([&](const Task& t, const Block& m) {
      if (t.segment != (Backward ? 0 : segments - 1)) one(p, t, m, Summary(m, heads.summaries, t.segment));
    });
  });
}

int64_t state_at(const Matrix& p, const Task& t) { return (t.n * p.H + t.h) * p.K * p.V; }

// Whether the state of a single token is read and written where it lies.
bool in_place(const Matrix& p, const Task& t) { return t.length == 1 && p.state && !p.states; }

// The block from `begin` on. False if a gate is positive or NaN.
bool forward_block(const Matrix& p, const Task& t, const Block& m, int64_t begin, Walk walk) {
  const int64_t n = least(BLOCK, t.end - begin), first = t.first + begin, at = state_at(p, t) + t.v0;
  if (p.states) write_state(p, t, m, m.S, p.states + ((t.slot + begin / BLOCK) * p.H + t.h) * p.K * p.V);
  const bool good = read_block(p, t, m, first, n);
  look_ahead(p, t, m, begin, begin + BLOCK);
  bonus_weights(p, t, m, n);
  if (in_place(p, t))
    step_of(p, m, p.state + at, p.final + at);
  else
    walk(m, n);
  if (p.u)
    for (int64_t i = 0; i < n; i++) {
      const float c = m.bonus[i], *wrote = (p.write == DELTA ? m.w : m.v) + i * m.vs;
      for (int64_t j = 0; j < m.Vp; j++) m.o[i * m.vs + j] += c * wrote[j];
    }
  write_rows(p.o, p.type, m.o, m.vs, first, n, p.H, t.h, p.V, t.v0, t.columns);
  if (p.writes)
    write_rows(p.writes, FLOAT32, p.write == DELTA ? m.e : m.w, m.vs, first, n, p.H, t.h, p.V, t.v0, t.columns);
  return good;
}

int64_t forward(const Matrix& p) {
  const Walk walk = forward_walk(p);
  const int64_t segments = segments_of(p);
  int64_t bad = 0;
  summarize_segments<false>(p, segments);
  for_all_heads(p, segments, [&](const Heads& heads) {
    const Task& task = heads.first;
    bool good = true;
    if (!in_place(p, task))
      heads.each([&](const Task& t, const Block& m) {
        read_state(p, t, m, m.S, p.state ? p.state + state_at(p, t) : nullptr);
        for (int64_t s = 0; s < t.segment; s++) Summary(m, heads.summaries, s).apply(m, m.S);
      });
    for (int64_t begin = task.begin; begin < task.end; begin += BLOCK)
      heads.each([&](const Task& t, const Block& m) { good &= forward_block(p, t, m, begin, walk); });
    if (!in_place(p, task) && task.end == task.length)
      heads.each([&](const Task& t, const Block& m) { write_state(p, t, m, m.S, p.final + state_at(p, t)); });
    if (!good) {
#pragma omp atomic write
      bad = 1;
    }
  });
  return bad;
}

// ---- backward

// X_t -> X_{t-1}: the low-rank term cancels a part of X, so it comes first, and for delta with a decay (a = -d k, here
// a is k) before the decay.
template <int D, bool Both, class Y, class Z>
inline Vec passed(Vec x, Vec d, Y a, Z d_e, Vec read) {
  if (D && !Both) {
    x -= a * d_e;
    return d * x + read;
  }
  return (D ? d * x + a * d_e : x + a * d_e) + read;
}

// Walks X over the tokens from the i-th to before the n-th, backwards.
template <int D, bool Both>
void adjoint(const Block& m, int64_t i, int64_t n, bool before) {
  constexpr bool erase = D && !Both;
  const int64_t k = (n - 1) * m.ks, v = (n - 1) * m.vs;
  const float *a = (Both ? m.b : m.k) + k, *b = (erase ? m.k : m.a) + k;
  LowRank s = {m.k + k, m.q + k, a, b, m.d + (D ? k : 0), m.d_o + v, m.dw + v, Both ? nullptr : m.beta + n - 1};
  s.o = m.dv + v, s.sum = m.dw + v, s.x = m.d_e + v, s.S = m.X, s.seen = m.seen;
  s.K = m.K, s.keys = -m.ks, s.values = -m.vs, s.stride = m.vs;
  before ? low_rank_walk<D, LATE, true, Both, erase>(s, n - i, m.Vp)
         : low_rank_walk<D, BACKWARD, true, Both, erase>(s, n - i, m.Vp);
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
void walked_gradients(const Block& m, int64_t n, bool before) {
  float* const key_sums[] = {m.dq, m.dk, m.dg, m.da, m.db};
  for (float* sums : key_sums)
    if (sums) zero(sums, n * m.ks);
  if (Kind != ADDITIVE) adjoint<D, Kind == LOW_RANK>(m, 0, n, before);
  before ? gradients<D, Kind, true>(m, n) : gradients<D, Kind, false>(m, n);
}

// dg of n tokens from the i0-th on, by differences of what is read and written from S . X behind them (S^T given, X^T
// in the place of S^T). Divided decays cancel in every product. That of delta's a is of the same gate.
template <bool Scalar, int Kind, bool Before>
void gates_by_differences(const Block& m, int64_t i0, int64_t n, const float* ST) {
  double *later = m.across, whole = 0;
  for (int64_t j = 0; j < m.Kp; j++) later[j] = 0;
  for (int64_t r = 0; r < m.V; r++)
    for (int64_t j = 0; j < m.Kp; j++) later[j] += ST[r * m.ks + j] * m.ST[r * m.ks + j];
  for (int64_t j = 0; j < m.Kp; j++) whole += later[j];
  for (int64_t i = i0 + n - 1; i >= i0; i--) {
    const int64_t at = i * m.ks;
    const float *q = m.q + at, *k = m.k + at, *dq = m.dq + at, *dk = m.dk + at;
    const float *a = Kind ? m.a + at : q, *da = Kind ? m.da + at : q;
    const float *b = Kind == LOW_RANK ? m.b + at : q, *db = Kind == LOW_RANK ? m.db + at : q;
    float* dg = m.dg + at;
    double read = 0, written = 0, erased = 0;
    for (int64_t j = 0; j < m.Kp; j++) {
      const double r = static_cast<double>(q[j]) * dq[j], e = Kind ? static_cast<double>(a[j]) * da[j] : 0;
      double w = static_cast<double>(k[j]) * dk[j];
      if (Kind == LOW_RANK) w += static_cast<double>(b[j]) * db[j];
      read += r, written += w, erased += e;
      if (Scalar) continue;
      const double here = later[j] - w + (Before ? 0 : r);
      dg[j] = static_cast<float>(Kind == DELTA ? here + e : here);
      later[j] = here + e + (Before ? r : 0);
    }
    if (!Scalar) continue;
    const double here = whole - written + (Before ? 0 : read);
    dg[0] = static_cast<float>(Kind == DELTA ? here + erased : here);
    whole = here + erased + (Before ? read : 0);
  }
}

// Sweeps of S^T forwards, which reads dq (and da), and of X^T backwards, which reads dk (and db); for an additive write
// dv by a third, of X, which is walked before for the others. Divided: decays D were divided out of the rows; else they
// are swept as they are. The gate's gradient starts anew with every span, as rounding adds up in what it sums.
template <int D, int Kind, bool Before, bool Divided>
void swept_gradients(const Block& m, const Spans& spans) {
  constexpr bool Low = Kind != ADDITIVE, Both = Kind == LOW_RANK;
  constexpr int gates = Divided ? UNGATED : D, lanes = gates == ROWS ? LANES : gates;
  constexpr int forth = Before ? LATE : FORWARD, back = Before ? LATE : BACKWARD;
  const int64_t ks = m.ks, vs = m.vs;
  const float* wrote = Kind == DELTA ? m.w : m.v;
  for (int64_t c = 0; c < spans.count; c++) {
    const int64_t i = spans.at[c], n = spans.at[c + 1] - i, k = i * ks, v = i * vs;
    const float* d = m.d + (gates ? k : 0);
    Sweep s = {m.d_o + v, wrote + v, m.k + k, d, m.dq + k, m.ST, m.V, m.Kp, vs, ks, ks, ks};
    if (Low) s.x2 = m.d_e + v, s.out2 = m.da + k;
    if (Both) s.y2 = m.w + v, s.z2 = m.b + k;
    sweep<lanes, forth, Low, Both>(s, n, m.ahead, i);
    if (Divided && D) decay_transposed<D>(m, m.ST, i + n - 1);
    if (m.dg) __builtin_memcpy(m.ends + c * m.Vp * ks, m.ST, m.Vp * ks * sizeof(float));
  }
  for (int64_t c = spans.count - 1; c >= 0; c--) {
    const int64_t i = spans.at[c], last = spans.at[c + 1] - 1, n = last + 1 - i, k = last * ks, v = last * vs;
    const float* d = m.d + (gates ? k : 0);
    if (m.dg) __builtin_memcpy(m.ST, m.XT, m.Vp * ks * sizeof(float));  // X behind these tokens
    if (Divided && D) decay_transposed<D>(m, m.XT, last);
    Sweep s = {wrote + v, m.d_o + v, m.q + k, d, m.dk + k, m.XT, m.V, m.Kp, -vs, -ks, -ks, ks};
    if (Low) s.y2 = m.d_e + v, s.z2 = m.a + k;
    if (Both) s.x2 = m.w + v, s.out2 = m.db + k;
    sweep<lanes, back, Both, Low>(s, n);
    if (!Low) {
      if (Divided && D) decay_state<D>(m, m.X, last);
      sweep<gates, back>({m.k + k, m.q + k, m.d_o + v, d, m.dv + v, m.X, m.K, m.Vp, -ks, -vs, -ks, vs}, n);
    }
    if (D && m.dg) gates_by_differences<D == WHOLE, Kind, Before>(m, i, n, m.ends + c * m.Vp * ks);
    if (Divided && D) divide_out<D, Before>(m, i, n, m.dq, m.dk, m.da, m.db);
  }
}

// The gradients of a block whose spans can be divided: false, and nothing done, if they can't and must be walked.
template <int D, int Kind, bool Before>
bool divided_gradients(const Block& m, int64_t n, int64_t most) {
  const Spans spans = even_spans<D>(m, n, most);
  if (!spans.count) return false;
  for (int64_t c = spans.count - 1; c >= 0; c--) {
    const int64_t i = spans.at[c], end = spans.at[c + 1];
    if (D) {
      invert<D>(m, i, end - i);
      divide_out<D, Before>(m, i, end - i, m.q, m.k, m.a, m.b);
    }
  }
  if (Kind != ADDITIVE)
    for (int64_t c = spans.count - 1; c >= 0; c--) {
      if (D) decay_state<D>(m, m.X, spans.at[c + 1] - 1);
      adjoint<UNGATED, Kind == LOW_RANK>(m, spans.at[c], spans.at[c + 1], Before);
    }
  swept_gradients<D, Kind, Before, true>(m, spans);
  return true;
}

// The gradients of a block's rows; S^T, X^T and X (of an additive write) move on. Swept if `smooth`, else walked.
// Returns whether it swept.
template <int D, int Kind>
bool block_gradients(const Block& m, int64_t n, bool before, bool smooth) {
  const int64_t most = m.dg ? 2 * SHORT : BLOCK;
  if (smooth && (before ? divided_gradients<D, Kind, true>(m, n, most) : divided_gradients<D, Kind, false>(m, n, most)))
    return true;
  if constexpr (D != UNGATED) {
    if (smooth && Kind == ADDITIVE) {
      Spans whole;
      whole.add(n);
      const auto sweeps =
          before ? swept_gradients<D, ADDITIVE, true, false> : swept_gradients<D, ADDITIVE, false, false>;
      sweeps(m, whole);
      return true;
    }
    walked_gradients<D, Kind>(m, n, before);
  }
  return false;
}

using Gradients = bool (*)(const Block&, int64_t, bool, bool);

template <int D>
Gradients gradients_of(const Matrix& p) {
  return p.write == ADDITIVE ? block_gradients<D, ADDITIVE>
         : p.write == DELTA  ? block_gradients<D, DELTA>
                             : block_gradients<D, LOW_RANK>;
}

Gradients gradients_of(const Matrix& p) {
  return p.decay == NONE ? gradients_of<UNGATED>(p) : scalar_decay(p) ? gradients_of<WHOLE>(p) : gradients_of<ROWS>(p);
}

// Whether every decay of the block is mild, and writes too. A strong one's gradient is as small as it, and is often
// multiplied by its logarithm on the way to a parameter: rounding of differences would stand out.
bool mild(const Matrix& p, const Block& m, int64_t n) {
  if (p.write != ADDITIVE && p.K < MANY) return false;
  const int64_t D = scalar_decay(p) ? 1 : p.K;
  bool every = true;
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < D; j++) every &= m.d[i * m.ks + j] >= MILD;
  return every;
}

// [K, columns] -> [columns, K], the rest of [Vp, Kp] zero.
void read_transposed(const Block& m, float* ST, const float* S, int64_t stride) {
  transpose(ST, m.ks, S, stride, m.K, m.V);
  for (int64_t c = 0; c < m.V; c++) zero(ST + c * m.ks + m.K, m.Kp - m.K);
  zero(ST + m.V * m.ks, (m.Vp - m.V) * m.ks);
}

// What is carried from the last block of a head to its first one, and its end.
void start_backward(const Matrix& p, const Task& t, const Block& m, int64_t segments, float* summaries) {
  read_state(p, t, m, m.X, p.d_final + state_at(p, t));
  for (int64_t s = segments - 1; s > t.segment; s--) Summary(m, summaries, s).apply(m, m.X);
  read_transposed(m, m.XT, m.X, m.vs);
  for (int64_t j = 0; j < 2 * m.Kp; j++) m.fixed[j] = 0;
  // rows that lie outside of the block: no token reads there
  zero(m.q - m.ks, m.ks);
  zero(m.d_o - m.vs, m.vs);
}

void end_backward(const Matrix& p, const Task& t, const Block& m) {
  const bool scalar = scalar_decay(p), fixed = p.decay == HEAD || p.decay == CHANNEL;
  const int64_t D = scalar ? 1 : p.K, row = (t.part * p.N + t.n) * p.H + t.h;
  for (int64_t j = 0; p.dg && fixed && j < D; j++) p.dg[row * D + j] = static_cast<float>(m.fixed[j]);
  for (int64_t j = 0; p.du && j < p.K; j++) p.du[row * p.K + j] = static_cast<float>(m.fixed[m.Kp + j]);
  if (t.begin) return;
  if (p.write != ADDITIVE)
    write_state(p, t, m, m.X, p.dstate + state_at(p, t));
  else
    transpose(p.dstate + state_at(p, t) + t.v0, p.V, m.XT, m.ks, m.V, m.K);
}

// The block from `begin` on. `follows`: X is as far as XT. Returns whether it then is.
bool backward_block(const Matrix& p, const Task& t, const Block& m, int64_t begin, bool follows, Gradients gradients) {
  const bool low = p.write != ADDITIVE, scalar = scalar_decay(p), fixed = p.decay == HEAD || p.decay == CHANNEL;
  const int64_t D = p.decay == NONE ? 0 : scalar ? 1 : p.K;
  const float scale = static_cast<float>(p.scale);
  double *fixed_sum = m.fixed, *u_sum = m.fixed + m.Kp;
  const int64_t n = least(BLOCK, t.end - begin), first = t.first + begin;
  read_block(p, t, m, first, n);
  look_ahead(p, t, m, begin, begin - BLOCK);
  bonus_weights(p, t, m, n);
  read_transposed(m, m.ST, p.states + ((t.slot + begin / BLOCK) * p.H + t.h) * p.K * p.V + t.v0, p.V);
  read_values(p, t, m, m.d_o, p.d_o, first, n);
  zero(m.q + n * m.ks, m.ks);
  zero(m.d_o + n * m.vs, m.vs);
  if (low) {
    read_rows(m.e, m.vs, p.writes, FLOAT32, first, n, p.H, t.h, p.V, t.v0, t.columns, m.Vp);
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < m.Vp; j++)
        m.w[i * m.vs + j] = m.e[i * m.vs + j] * (p.write == DELTA ? m.beta[i] : 1.f);
    for (int64_t i = 0; i < n; i++) {  // what the adjoint walk starts from: the bonus reads w
      const float weight = p.u && p.write == DELTA ? m.bonus[i] : 0;
      for (int64_t j = 0; j < m.Vp; j++) m.dw[i * m.vs + j] = weight * m.d_o[i * m.vs + j];
    }
    // XT takes its low-rank terms from X, so its errors don't contract as X's do: it follows X a block at a time
    if (begin + n < t.length) read_transposed(m, m.XT, m.X, m.vs);
  } else if (!follows) {
    transpose(m.X, m.vs, m.XT, m.ks, m.V, m.K);
  }
  const bool swept = gradients(m, n, p.before, !p.dg || (!fixed && mild(p, m, n)));
  if (swept && p.dg && !begin && !p.state) zero(m.dg, m.ks);  // nothing lies before the first token
  if (p.u) {  // as they were
    read_queries(p, t, m, first, n);
    read_keys(p, t, m, first, n);
  }
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
      if (p.write == DELTA && !swept)
        for (int64_t j = 0; j < m.Kp; j++) dg[j] += a[j] * da[j];
      if (scalar && swept) {
        total = dg[0];
      } else if (scalar) {
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
        const float weight = m.bonus[i];
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
  return swept;
}

void backward(const Matrix& p) {
  const Gradients gradients = gradients_of(p);
  const int64_t segments = segments_of(p);
  summarize_segments<true>(p, segments);
  for_all_heads(p, segments, [&](const Heads& heads) {
    const Task& task = heads.first;
    bool follows[SIDE_BY_SIDE];
    heads.each([&](const Task& t, const Block& m) {
      start_backward(p, t, m, segments, heads.summaries);
      follows[t.h - t.lead] = true;
    });
    for (int64_t begin = (task.end - 1) / BLOCK * BLOCK; begin >= task.begin && task.length; begin -= BLOCK)
      heads.each([&](const Task& t, const Block& m) {
        bool& x = follows[t.h - t.lead];
        x = backward_block(p, t, m, begin, x, gradients);
      });
    heads.each([&](const Task& t, const Block& m) { end_backward(p, t, m); });
  });
}

int64_t part() { return 2 * L; }

}  // namespace

extern const Kernels LINATTN_KERNELS;
const Kernels LINATTN_KERNELS = {scratch, part, forward, backward};

}  // namespace linattn
