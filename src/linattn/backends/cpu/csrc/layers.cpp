// What the layers do beside the recurrence, for one instruction set; compiled once for each.
//
//   convolution   p_t = bias + sum_j w_j x_{t-W+1+j}, y_t = p_t or silu(p_t), each channel on its own
//   norm          y = r c weight + bias, r = (mean * |c|^2 + eps)^-1/2, c = u or u - average(u); with a gate z, u is
//                 x silu(z), or y is multiplied by silu(z)
//   glu           y = silu(a) b
//   mix           y_k = x_t + w_k (x_{t-1} - x_t)
//   softplus      y = log(1 + e^(x + bias))
//   skip          y = (x + weight u) silu(z)
//
// Each number is read and each result written once; the backward computes again what lies between. Gradients of weights,
// which are sums over tokens, are summed in double precision over pieces of fixed size: they do not depend on the number
// of threads.
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "problem.h"

namespace linattn {
namespace {

#include "vector.h"
// after it
#include "functions.h"

typedef double Doubles __attribute__((vector_size(8 * LINATTN_LANES), aligned(8), may_alias));

// Sums of n numbers over pieces.
inline void collect(float* to, const double* partial, int64_t pieces, int64_t n, int64_t stride) {
  for (int64_t i = 0; i < n; i++) {
    double total = 0;
    for (int64_t piece = 0; piece < pieces; piece++) total += partial[piece * stride + i];
    to[i] = static_cast<float>(total);
  }
}

inline void add(double* total, Vec x) {
  *reinterpret_cast<Doubles*>(total) += __builtin_convertvector(x, Doubles);
}

// x clipped from below, where silu(x) and its slope are 0 in single precision, and its sigmoid.
struct Gate {
  Vec z, s;
  explicit Gate(Vec x) {
    const Vec low = all(-88.f), high = all(88.f);
    z = low > x ? low : x;
    Ints n;
    const Vec p = exponential(-(high < z ? high : z), n);
    s = 1.f / (p * bits<Vec>((n + 127) << 23) + 1.f);
  }
  Vec silu() const { return z * s; }
  Vec slope() const { return s * (1.f + z * (1.f - s)); }
};

// Numbers at .. at + n where they lie, or in `room`, converted and filled up to whole vectors with zeros.
inline const float* vectors(float* room, const void* x, int64_t type, int64_t at, int64_t n) {
  if (type == FLOAT32 && n % L == 0) return static_cast<const float*>(x) + at;
  read_row(room, x, type, at, n);
  for (int64_t i = n; i % L; i++) room[i] = 0;
  return room;
}

// Where results at .. at + n are written: in place, or in `room`, from which close() takes them there.
struct Result {
  float *room, *to;
  void* y;
  int64_t type, at, n;
  Result(float* room, void* y, int64_t type, int64_t at, int64_t n)
      : room(room), to(type == FLOAT32 && n % L == 0 ? static_cast<float*>(y) + at : room), y(y), type(type), at(at), n(n) {}
  void close() const {
    if (to == room) write_row(y, room, type, at, n);
  }
};

template <class Each>
void parallel(int64_t tasks, int64_t threads, Each each) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < tasks; i++) each(i);
}

// ---- sequences of tokens, worked on by pieces of tokens and tiles of channels

constexpr int64_t TILE = 128, ROWS = 64;
constexpr int64_t SUMMED = 16;  // tokens whose gradients of a weight are summed in single precision

struct Segment {
  int64_t sequence, first, end;  // tokens first .. end of the sequence
  int64_t low, high;             // of them, low .. high belong to the piece
};

int64_t first_of(const Tokens& p, int64_t sequence) { return p.ends ? p.ends[sequence] : sequence * p.T; }
int64_t row_of(const Tokens& p, int64_t token) { return p.index ? p.index[token] : token; }
Segment whole(const Tokens& p, int64_t sequence) {
  const int64_t first = first_of(p, sequence), end = first_of(p, sequence + 1);
  return {sequence, first, end, first, end};
}

// The last that begins at or before the token: the one that has it.
int64_t sequence_of(const Tokens& p, int64_t token) {
  if (!p.ends) return token / p.T;
  int64_t low = 0, high = p.N;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.ends[middle] <= token ? low : high) = middle;
  }
  return low;
}

// Pieces of `piece` tokens.
int64_t pieces_of(const Tokens& p, int64_t piece) { return ceil_to(p.count, piece) / piece; }

// Every piece with every tile: each(piece's number, first channel, channels).
template <class Each>
void for_each_piece(const Tokens& p, int64_t C, int64_t piece, int64_t threads, Each each) {
  const int64_t tiles = ceil_to(C, TILE) / TILE;
  parallel(pieces_of(p, piece) * tiles, threads, [&](int64_t i) {
    const int64_t c0 = i % tiles * TILE;
    each(i / tiles, c0, least(TILE, C - c0));
  });
}

// The sequences, as far as they lie in a piece.
template <class Each>
void for_each_segment(const Tokens& p, int64_t piece, int64_t number, Each each) {
  const int64_t high = least((number + 1) * piece, p.count);
  for (int64_t low = number * piece; low < high;) {
    Segment s = whole(p, sequence_of(p, low));
    s.low = low, s.high = least(s.end, high);
    each(s);
    low = s.high;
  }
}

// Every sequence with every tile.
template <class Each>
void for_each_sequence(const Tokens& p, int64_t C, int64_t threads, Each each) {
  const int64_t tiles = ceil_to(C, TILE) / TILE;
  parallel(p.N * tiles, threads, [&](int64_t i) {
    const int64_t c0 = i % tiles * TILE;
    each(whole(p, i / tiles), c0, least(TILE, C - c0));
  });
}

// ---- convolution

constexpr int64_t WIDEST = CONVOLUTION_WIDTH;

// A tile's weights, and the inputs that some tokens see.
struct Window {
  const Convolution& p;
  const int64_t W, c0, C, lanes;
  const float* x[ROWS];
  float weight[WIDEST][TILE], bias[TILE], room[ROWS][TILE];

  Window(const Convolution& p, int64_t c0, int64_t C) : p(p), W(p.W), c0(c0), C(C), lanes(ceil_to(C, L)) {
    for (int64_t c = 0; c < lanes; c++) {
      for (int64_t j = 0; j < W; j++) weight[j][c] = c < C ? p.weight[(c0 + c) * W + j] : 0;
      bias[c] = c < C && p.bias ? p.bias[c0 + c] : 0;
    }
  }

  // The input of a token of the sequence, or of the W - 1 before its first, into row i.
  void read(const Segment& s, int64_t token, int64_t i) {
    if (token >= s.first) {
      x[i] = vectors(room[i], p.x, p.type, row_of(p.tokens, token) * p.x_row + c0, C);
    } else if (p.tail) {
      x[i] = vectors(room[i], p.tail, p.type, (s.sequence * (W - 1) + token - s.first + W - 1) * p.C + c0, C);
    } else {
      for (int64_t c = 0; c < lanes; c++) room[i][c] = 0;
      x[i] = room[i];
    }
  }

  // What tokens low .. high see: that of token low + i are the rows i .. i + W.
  void open(const Segment& s, int64_t low, int64_t high) {
    for (int64_t i = 0; i < high - low + W - 1; i++) read(s, low - W + 1 + i, i);
  }

  // each(c, p_t) for the token of rows i .. i + W
  template <int WIDTH, class Each>
  void sums(int64_t i, Each each) const {
    const float* row[WIDTH ? WIDTH : WIDEST];  // not read anew after each store
    for (int64_t j = 0; j < (WIDTH ? WIDTH : W); j++) row[j] = x[i + j];
    for (int64_t c = 0; c < C; c += L) {
      Vec y = load(bias + c);
      for (int64_t j = 0; j < (WIDTH ? WIDTH : W); j++) y += load(weight[j] + c) * load(row[j] + c);
      each(c, y);
    }
  }
};

template <int WIDTH>
void convolve(Window& w, const Segment& s) {
  const Convolution& p = w.p;
  float room[TILE];
  w.open(s, s.low, s.high);
  for (int64_t i = 0; i < s.high - s.low; i++) {
    const Result y(room, p.y, p.type, row_of(p.tokens, s.low + i) * p.C + w.c0, w.C);
    if (p.activation)
      w.sums<WIDTH>(i, [&](int64_t c, Vec z) { store(y.to + c, Gate(z).silu()); });
    else
      w.sums<WIDTH>(i, [&](int64_t c, Vec z) { store(y.to + c, z); });
    y.close();
  }
}

void convolution(const Convolution& p) {
  const int64_t piece = ROWS - (p.W - 1);
  for_each_piece(p.tokens, p.C, piece, p.threads, [&](int64_t number, int64_t c0, int64_t C) {
    Window w(p, c0, C);
    for_each_segment(p.tokens, piece, number,
                     [&](const Segment& s) { p.W == 4 ? convolve<4>(w, s) : convolve<0>(w, s); });
  });
  for_each_sequence(p.tokens, p.C, p.threads, [&](const Segment& s, int64_t c0, int64_t C) {
    Window w(p, c0, C);
    for (int64_t i = 0; i < p.W - 1; i++) {
      w.read(s, s.end - (p.W - 1) + i, 0);
      write_row(p.new_tail, w.x[0], p.type, (s.sequence * (p.W - 1) + i) * p.C + c0, C);
    }
  });
}

// Gradients of p_t, for tokens low .. high.
template <int WIDTH>
void inner(Window& w, const Segment& s, int64_t low, int64_t high, float (*dp)[TILE]) {
  const Convolution& p = w.p;
  float room[TILE];
  w.open(s, low, high);
  for (int64_t i = 0; i < high - low; i++) {
    const float* dy = vectors(room, p.dy, p.type, row_of(p.tokens, low + i) * p.dy_row + w.c0, w.C);
    float* d = dp[i];
    if (p.activation)
      w.sums<WIDTH>(i, [&](int64_t c, Vec z) { store(d + c, load(dy + c) * Gate(z).slope()); });
    else
      for (int64_t c = 0; c < w.C; c += L) store(d + c, load(dy + c));
  }
}

// dw_j and the bias's gradient, of n tokens.
template <int WIDTH>
void gather(const Window& w, const float (*dp)[TILE], int64_t n, double* total) {
  const int64_t W = WIDTH ? WIDTH : w.W;
  for (int64_t from = 0; from < n; from += SUMMED)
    for (int64_t c = 0; c < w.C; c += L) {
      Vec dw[WIDTH ? WIDTH : WIDEST] = {}, db = {}, seen[WIDTH ? WIDTH : WIDEST];
      for (int64_t j = 0; j < W - 1; j++) seen[j] = load(w.x[from + j] + c);
      for (int64_t i = from; i < least(n, from + SUMMED); i++) {
        const Vec d = load(dp[i] + c);
        db += d;
        seen[W - 1] = load(w.x[i + W - 1] + c);
        for (int64_t j = 0; j < W; j++) dw[j] += d * seen[j];
        for (int64_t j = 0; j < W - 1; j++) seen[j] = seen[j + 1];
      }
      for (int64_t j = 0; j < W; j++) add(total + j * TILE + c, dw[j]);
      add(total + W * TILE + c, db);
    }
}

template <int WIDTH>
void convolve_back(Window& w, const Segment& s, double* total) {
  const Convolution& p = w.p;
  const int64_t c0 = w.c0, C = w.C;
  const int64_t past = w.W - 1, step = ROWS - past;
  float dp[ROWS][TILE], room[TILE], extra[TILE];
  // dp[n ..] are those of the tokens behind the block, as far as they see it
  const int64_t seen = least(past, s.end - s.high);
  inner<WIDTH>(w, s, s.high, s.high + seen, dp);
  for (int64_t i = seen; i < past; i++) __builtin_memset(dp[i], 0, sizeof dp[i]);
  for (int64_t high = s.high; high > s.low;) {
    const int64_t n = least(step, high - s.low), low = high - n;
    __builtin_memmove(dp[n], dp[0], past * sizeof dp[0]);
    inner<WIDTH>(w, s, low, high, dp);
    gather<WIDTH>(w, dp, n, total);
    for (int64_t i = 0; i < n; i++) {
      const int64_t kept = low + i - (s.end - past);  // its row in the new tail
      const float* later = nullptr;
      if (kept >= 0 && p.d_new_tail)
        later = vectors(extra, p.d_new_tail, p.type, (s.sequence * past + kept) * p.C + c0, C);
      const Result dx(room, p.dx, p.type, row_of(p.tokens, low + i) * p.C + c0, C);
      for (int64_t c = 0; c < C; c += L) {
        Vec d = later ? load(later + c) : Vec{};
        for (int64_t j = 0; j < (WIDTH ? WIDTH : w.W); j++) d += load(w.weight[j] + c) * load(dp[i + past - j] + c);
        store(dx.to + c, d);
      }
      dx.close();
    }
    high = low;
  }
}

void convolution_backward(const Convolution& p) {
  const int64_t past = p.W - 1;
  for_each_piece(p.tokens, p.C, p.piece, p.threads, [&](int64_t number, int64_t c0, int64_t C) {
    Window w(p, c0, C);
    double total[(WIDEST + 1) * TILE];
    __builtin_memset(total, 0, (p.W + 1) * TILE * sizeof(double));
    for_each_segment(p.tokens, p.piece, number, [&](const Segment& s) {
      p.W == 4 ? convolve_back<4>(w, s, total) : convolve_back<0>(w, s, total);
    });
    double* partial = p.partial + number * (p.W + 1) * p.C + c0;
    for (int64_t j = 0; j <= p.W; j++, partial += p.C) __builtin_memcpy(partial, total + j * TILE, C * sizeof(double));
  });
  const int64_t pieces = pieces_of(p.tokens, p.piece), stride = (p.W + 1) * p.C;
  for (int64_t c = 0; c < p.C; c++)
    for (int64_t j = 0; j < p.W; j++) collect(p.dweight + c * p.W + j, p.partial + j * p.C + c, pieces, 1, stride);
  if (p.dbias) collect(p.dbias, p.partial + p.W * p.C, pieces, p.C, stride);
  if (!p.dtail) return;
  for_each_sequence(p.tokens, p.C, p.threads, [&](const Segment& s, int64_t c0, int64_t C) {
    Window w(p, c0, C);
    float dp[ROWS][TILE], room[TILE];
    const int64_t length = s.end - s.first, seen = least(past, length);
    inner<0>(w, s, s.first, s.first + seen, dp);
    for (int64_t i = 0; i < past; i++) {
      float d[TILE] = {};
      for (int64_t j = 0; j <= i; j++)
        if (i - j < seen)
          for (int64_t c = 0; c < C; c++) d[c] += w.weight[j][c] * dp[i - j][c];
      if (i >= length && p.d_new_tail) {
        read_row(room, p.d_new_tail, p.type, (s.sequence * past + i - length) * p.C + c0, C);
        for (int64_t c = 0; c < C; c++) d[c] += room[c];
      }
      write_row(p.dtail, d, p.type, (s.sequence * past + i) * p.C + c0, C);
    }
  });
}

// ---- norm

constexpr int64_t CHUNK = 2048;  // numbers of a row held at once

// What is normalised together, N numbers of a row, in chunks. One alone is read once, however often it is passed over.
struct Unit {
  const Norm& p;
  int64_t x_at = 0, gate_at = 0, dy_at = 0, y_at = 0, weight_at = 0, n = 0;
  float average = 0;
  bool held = false;
  const float *x = nullptr, *u = nullptr, *dy = nullptr, *weight = nullptr, *bias = nullptr;
  float x_room[CHUNK], u_room[CHUNK], z_room[CHUNK], silu[CHUNK], slope[CHUNK], dy_room[CHUNK], weight_room[CHUNK], bias_room[CHUNK];
  float y_room[CHUNK], dz_room[CHUNK];

  explicit Unit(const Norm& p) : p(p) {
    for (int64_t i = 0; i < CHUNK; i++) weight_room[i] = 1, bias_room[i] = 0;
  }

  void open(int64_t row, int64_t m) {
    x_at = row * p.x_row + m * p.N, gate_at = row * p.gate_row + m * p.N, dy_at = row * p.dy_row + m * p.N;
    y_at = (row * p.M + m) * p.N, weight_at = p.weights > p.N ? m * p.N : 0;
    average = 0, held = false;
    if (!p.centred) return;
    Vec total = {};
    chunks([&](int64_t) {
      for (int64_t i = 0; i < n; i += L) total += load(u + i);
    });
    average = sum(total) / static_cast<float>(p.N);
    held = false;
  }
  void read(int64_t at) {
    n = least(CHUNK, p.N - at);
    x = u = vectors(x_room, p.x, p.type, x_at + at, n);
    if (p.gated) {
      const float* z = vectors(z_room, p.gate, p.gate_type, gate_at + at, n);
      for (int64_t i = 0; i < n; i += L) {
        const Gate gate(load(z + i));
        store(silu + i, gate.silu());
        if (p.dy) store(slope + i, gate.slope());
      }
    }
    if (p.gated == GATE_BEFORE) {
      for (int64_t i = 0; i < n; i += L) store(u_room + i, load(x + i) * load(silu + i));
      u = u_room;
    }
    if (average != 0) {
      for (int64_t i = 0; i < n; i += L) store(u_room + i, load(u + i) - average);
      for (int64_t i = n; i % L; i++) u_room[i] = 0;
      u = u_room;
    }
    if (p.dy) dy = vectors(dy_room, p.dy, p.type, dy_at + at, n);
    weight = p.weight ? vectors(weight_room, p.weight, FLOAT32, weight_at + at, n) : weight_room;
    bias = p.bias ? vectors(bias_room, p.bias, FLOAT32, weight_at + at, n) : bias_room;
  }
  template <class Each>
  void chunks(Each each) {
    for (int64_t at = 0; at < p.N; at += CHUNK) {
      if (!held) read(at);
      each(at);
    }
    held = p.N <= CHUNK;
  }
  float scale(float squares) const {
    return static_cast<float>(1 / __builtin_sqrt(p.mean * static_cast<double>(squares) + p.eps));
  }
};

template <class Each>
void for_each_unit(const Norm& p, Each each) {
  parallel(ceil_to(p.R, p.piece) / p.piece, p.threads, [&](int64_t piece) {
    Unit u(p);
    double* const partials[] = {p.partial, p.bias_partial};
    for (double* partial : partials)
      if (partial) __builtin_memset(partial + piece * p.weights, 0, p.weights * sizeof(double));
    for (int64_t row = piece * p.piece; row < least(p.R, (piece + 1) * p.piece); row++)
      for (int64_t m = 0; m < p.M; m++) {
        u.open(row, m);
        each(u, piece);
      }
  });
}

void norm(const Norm& p) {
  for_each_unit(p, [&](Unit& u, int64_t) {
    Vec even = {}, odd = {};
    u.chunks([&](int64_t) {
      int64_t i = 0;
      for (; i + L < u.n; i += 2 * L) {
        const Vec a = load(u.u + i), b = load(u.u + i + L);
        even += a * a, odd += b * b;
      }
      if (i < u.n) even += load(u.u + i) * load(u.u + i);
    });
    const float r = u.scale(sum(even + odd));
    u.chunks([&](int64_t at) {
      const Result y(u.y_room, p.y, p.type, u.y_at + at, u.n);
      for (int64_t i = 0; i < u.n; i += L) {
        Vec out = load(u.u + i) * r * load(u.weight + i) + load(u.bias + i);
        if (p.gated == GATE_AFTER) out *= load(u.silu + i);
        store(y.to + i, out);
      }
      y.close();
    });
  });
}

void norm_backward(const Norm& p) {
  for_each_unit(p, [&](Unit& u, int64_t piece) {
    const bool before = p.gated == GATE_BEFORE, after = p.gated == GATE_AFTER;
    // of what the weight made, before the gate
    auto gradient = [&](int64_t i) {
      const Vec d = load(u.dy + i);
      return after ? d * load(u.silu + i) : d;
    };
    Vec squares = {}, dot = {}, plain = {};
    u.chunks([&](int64_t) {
      for (int64_t i = 0; i < u.n; i += L) {
        const Vec c = load(u.u + i), d = gradient(i) * load(u.weight + i);
        squares += c * c, dot += c * d, plain += d;
      }
    });
    const float r = u.scale(sum(squares)), share = static_cast<float>(p.mean) * r * r * sum(dot);
    const float shift = p.centred ? sum(plain) / static_cast<float>(p.N) : 0;
    double* totals[] = {p.partial, p.bias_partial};
    for (double*& total : totals)
      if (total) total += piece * p.weights + u.weight_at;
    u.chunks([&](int64_t at) {
      const Result dx(u.y_room, p.dx, p.type, u.y_at + at, u.n);
      const Result dz(u.dz_room, p.dgate, p.gate_type, u.y_at + at, u.n);
      for (int64_t i = 0; i < u.n; i += L) {
        const Vec c = load(u.u + i), d = gradient(i), w = load(u.weight + i);
        const Vec du = r * (d * w - shift - c * share);
        if (p.gated) {
          const Vec from = before ? du * load(u.x + i) : load(u.dy + i) * (c * r * w + load(u.bias + i));
          store(dz.to + i, from * load(u.slope + i));
          store(dx.to + i, before ? du * load(u.silu + i) : du);
        } else {
          store(dx.to + i, du);
        }
      }
      dx.close();
      if (p.gated) dz.close();
      auto gather = [&](double* total, auto value) {
        int64_t i = 0;
        for (; i + L <= u.n; i += L) add(total + at + i, value(i));
        if (i == u.n) return;
        float rest[L];
        store(rest, value(i));
        for (int64_t j = 0; i + j < u.n; j++) total[at + i + j] += static_cast<double>(rest[j]);
      };
      if (totals[0]) gather(totals[0], [&](int64_t i) { return gradient(i) * (load(u.u + i) * r); });
      if (totals[1]) gather(totals[1], gradient);
    });
  });
  const int64_t pieces = ceil_to(p.R, p.piece) / p.piece;
  if (p.partial) collect(p.dweight, p.partial, pieces, p.weights, p.weights);
  if (p.bias_partial) collect(p.dbias, p.bias_partial, pieces, p.weights, p.weights);
}

// ---- rows whose numbers are on their own

constexpr int64_t PART = 1024;

// Every row in chunks: each(row, first number, numbers).
template <class Problem, class Each>
void for_each_chunk(const Problem& p, Each each) {
  const int64_t rows = 16 * PART / least(p.N, 16 * PART);  // of a task
  parallel(ceil_to(p.R, rows) / rows, p.threads, [&](int64_t i) {
    for (int64_t row = i * rows; row < least(p.R, (i + 1) * rows); row++)
      for (int64_t at = 0; at < p.N; at += PART) each(row, at, least(PART, p.N - at));
  });
}

// The same by tiles, for a sum over the rows: each(row, first number, numbers, near) adds to it.
template <class Problem, class Each>
void for_each_summed(const Problem& p, float* to, Each each) {
  const Tokens rows{nullptr, nullptr, 1, p.R, p.R};
  for_each_piece(rows, p.N, p.piece, p.threads, [&](int64_t number, int64_t at, int64_t n) {
    double total[TILE] = {};
    const int64_t end = least((number + 1) * p.piece, p.R);
    for (int64_t from = number * p.piece; from < end; from += SUMMED) {
      float near[TILE] = {};
      for (int64_t row = from; row < least(from + SUMMED, end); row++) each(row, at, n, near);
      for (int64_t i = 0; i < n; i += L) add(total + i, load(near + i));
    }
    if (p.partial) __builtin_memcpy(p.partial + number * p.N + at, total, n * sizeof(double));
  });
  if (p.partial) collect(to, p.partial, pieces_of(rows, p.piece), p.N, p.N);
}

// ---- glu

void glu(const Glu& p) {
  for_each_chunk(p, [&](int64_t row, int64_t at, int64_t n) {
    float a_room[PART], b_room[PART], y_room[PART];
    const float* a = vectors(a_room, p.x, p.type, row * p.x_row + at, n);
    const float* b = vectors(b_room, p.x, p.type, row * p.x_row + p.N + at, n);
    const Result y(y_room, p.y, p.type, row * p.N + at, n);
    for (int64_t i = 0; i < n; i += L) store(y.to + i, Gate(load(a + i)).silu() * load(b + i));
    y.close();
  });
}

void glu_backward(const Glu& p) {
  for_each_chunk(p, [&](int64_t row, int64_t at, int64_t n) {
    float a_room[PART], b_room[PART], y_room[PART], da_room[PART], db_room[PART];
    const float* a = vectors(a_room, p.x, p.type, row * p.x_row + at, n);
    const float* b = vectors(b_room, p.x, p.type, row * p.x_row + p.N + at, n);
    const float* dy = vectors(y_room, p.dy, p.type, row * p.dy_row + at, n);
    const Result da(da_room, p.dx, p.type, row * 2 * p.N + at, n);
    const Result db(db_room, p.dx, p.type, row * 2 * p.N + p.N + at, n);
    for (int64_t i = 0; i < n; i += L) {
      const Gate gate(load(a + i));
      const Vec d = load(dy + i);
      store(da.to + i, d * load(b + i) * gate.slope());
      store(db.to + i, d * gate.silu());
    }
    da.close();
    db.close();
  });
}

// ---- softplus

void softplus(const Softplus& p) {
  for_each_chunk(p, [&](int64_t row, int64_t at, int64_t n) {
    float x_room[PART], bias_room[PART], y_room[PART];
    const float* x = vectors(x_room, p.x, p.type, row * p.x_row + at, n);
    const float* bias = vectors(bias_room, p.bias, FLOAT32, at, n);
    const Result y(y_room, p.y, FLOAT32, row * p.N + at, n);
    for (int64_t i = 0; i < n; i += L) store(y.to + i, softplus(load(x + i) + load(bias + i)));
    y.close();
  });
}

void softplus_backward(const Softplus& p) {
  for_each_summed(p, p.dbias, [&](int64_t row, int64_t at, int64_t n, float* near) {
    float x_room[TILE], bias_room[TILE], dy_room[TILE], dx_room[TILE];
    const float* x = vectors(x_room, p.x, p.type, row * p.x_row + at, n);
    const float* bias = vectors(bias_room, p.bias, FLOAT32, at, n);
    const float* dy = vectors(dy_room, p.dy, FLOAT32, row * p.N + at, n);
    const Result dx(dx_room, p.dx, p.type, row * p.N + at, n);
    for (int64_t i = 0; i < n; i += L) {
      const Vec d = load(dy + i) * Gate(load(x + i) + load(bias + i)).s;
      store(dx.to + i, d);
      store(near + i, load(near + i) + d);
    }
    dx.close();
  });
}

// ---- skip

void skip(const Skip& p) {
  for_each_chunk(p, [&](int64_t row, int64_t at, int64_t n) {
    float x_room[PART], u_room[PART], z_room[PART], weight_room[PART], y_room[PART];
    const float* x = vectors(x_room, p.x, p.type, row * p.x_row + at, n);
    const float* u = vectors(u_room, p.u, p.type, row * p.u_row + at, n);
    const float* z = vectors(z_room, p.z, p.type, row * p.z_row + at, n);
    const float* weight = vectors(weight_room, p.weight, FLOAT32, at, n);
    const Result y(y_room, p.y, p.type, row * p.N + at, n);
    for (int64_t i = 0; i < n; i += L)
      store(y.to + i, (load(x + i) + load(weight + i) * load(u + i)) * Gate(load(z + i)).silu());
    y.close();
  });
}

void skip_backward(const Skip& p) {
  for_each_summed(p, p.dweight, [&](int64_t row, int64_t at, int64_t n, float* near) {
    float x_room[TILE], u_room[TILE], z_room[TILE], weight_room[TILE], dy_room[TILE];
    float dx_room[TILE], du_room[TILE], dz_room[TILE];
    const float* x = vectors(x_room, p.x, p.type, row * p.x_row + at, n);
    const float* u = vectors(u_room, p.u, p.type, row * p.u_row + at, n);
    const float* z = vectors(z_room, p.z, p.type, row * p.z_row + at, n);
    const float* dy = vectors(dy_room, p.dy, p.type, row * p.dy_row + at, n);
    const float* weight = vectors(weight_room, p.weight, FLOAT32, at, n);
    const Result dx(dx_room, p.dx, p.type, row * p.N + at, n);
    const Result du(du_room, p.du, p.type, row * p.N + at, n);
    const Result dz(dz_room, p.dz, p.type, row * p.N + at, n);
    for (int64_t i = 0; i < n; i += L) {
      const Gate gate(load(z + i));
      const Vec w = load(weight + i), seen = load(u + i), d = load(dy + i), inner = d * gate.silu();
      store(dx.to + i, inner);
      store(du.to + i, w * inner);
      store(dz.to + i, d * (load(x + i) + w * seen) * gate.slope());
      store(near + i, load(near + i) + inner * seen);
    }
    dx.close();
    du.close();
    dz.close();
  });
}

// ---- mix

// A tile's weights and the token before.
struct Mixing {
  const Mix& p;
  const int64_t c0, C;
  float weight[MIXES][TILE], x_room[TILE], before_room[TILE];

  Mixing(const Mix& p, int64_t c0, int64_t C) : p(p), c0(c0), C(C) {
    for (int64_t k = 0; k < p.K; k++) {
      for (int64_t c = 0; c < C; c++) weight[k][c] = p.weight[k * p.C + c0 + c];
      for (int64_t c = C; c % L; c++) weight[k][c] = 0;
    }
  }
  const float* at(float* room, const Segment& s, int64_t token) const {
    if (token >= s.first) return vectors(room, p.x, p.type, row_of(p.tokens, token) * p.x_row + c0, C);
    if (p.state) return vectors(room, p.state, p.type, s.sequence * p.C + c0, C);
    for (int64_t c = 0; c < C; c += L) store(room + c, Vec{});
    return room;
  }
  const float* gradient(float* room, int64_t k, int64_t token) const {
    return vectors(room, p.dy[k], p.type, row_of(p.tokens, token) * p.C + c0, C);
  }
  // of what the token says of the one before it
  void backwards(int64_t token, float* e) const {
    float room[TILE];
    for (int64_t c = 0; c < C; c += L) store(e + c, Vec{});
    for (int64_t k = 0; k < p.K; k++) {
      const float* d = gradient(room, k, token);
      for (int64_t c = 0; c < C; c += L) store(e + c, load(e + c) + load(weight[k] + c) * load(d + c));
    }
  }
  void last(const Segment& s, float* e) const {
    for (int64_t c = 0; c < C; c += L) store(e + c, Vec{});
    if (p.d_last) read_row(e, p.d_last, p.type, s.sequence * p.C + c0, C);
  }
};

void mix(const Mix& p) {
  for_each_piece(p.tokens, p.C, ROWS, p.threads, [&](int64_t number, int64_t c0, int64_t C) {
    Mixing m(p, c0, C);
    float room[TILE];
    for_each_segment(p.tokens, ROWS, number, [&](const Segment& s) {
      for (int64_t t = s.low; t < s.high; t++) {
        const float *x = m.at(m.x_room, s, t), *before = m.at(m.before_room, s, t - 1);
        for (int64_t k = 0; k < p.K; k++) {
          const Result y(room, p.y[k], p.type, row_of(p.tokens, t) * p.C + c0, C);
          for (int64_t c = 0; c < C; c += L) {
            const Vec now = load(x + c);
            store(y.to + c, now + load(m.weight[k] + c) * (load(before + c) - now));
          }
          y.close();
        }
      }
    });
  });
  for_each_sequence(p.tokens, p.C, p.threads, [&](const Segment& s, int64_t c0, int64_t C) {
    const Mixing m(p, c0, C);
    float room[TILE];
    write_row(p.last, m.at(room, s, s.end - 1), p.type, s.sequence * p.C + c0, C);
  });
}

void mix_back(Mixing& m, const Segment& s, double (*total)[TILE]) {
  const Mix& p = m.p;
  const int64_t c0 = m.c0, C = m.C;
  float later[TILE], e[TILE], room[TILE], d_room[TILE], near[MIXES][TILE] = {};
  s.high < s.end ? m.backwards(s.high, later) : m.last(s, later);
  for (int64_t t = s.high - 1, left = SUMMED; t >= s.low; t--) {
    const float *x = m.at(m.x_room, s, t), *before = m.at(m.before_room, s, t - 1);
    const Result dx(room, p.dx, p.type, row_of(p.tokens, t) * p.C + c0, C);
    for (int64_t c = 0; c < C; c += L) store(e + c, Vec{});
    for (int64_t k = 0; k < p.K; k++) {
      const float* dy = m.gradient(d_room, k, t);
      for (int64_t c = 0; c < C; c += L) {
        const Vec d = load(dy + c), pulled = load(m.weight[k] + c) * d;
        store(near[k] + c, load(near[k] + c) + d * (load(before + c) - load(x + c)));
        store(e + c, load(e + c) + pulled);
        store(later + c, load(later + c) + d - pulled);
      }
    }
    for (int64_t c = 0; c < C; c += L) store(dx.to + c, load(later + c)), store(later + c, load(e + c));
    dx.close();
    if (--left && t > s.low) continue;
    left = SUMMED;
    for (int64_t k = 0; k < p.K; k++)
      for (int64_t c = 0; c < C; c += L) add(total[k] + c, load(near[k] + c)), store(near[k] + c, Vec{});
  }
}

void mix_backward(const Mix& p) {
  for_each_piece(p.tokens, p.C, p.piece, p.threads, [&](int64_t number, int64_t c0, int64_t C) {
    Mixing m(p, c0, C);
    double total[MIXES][TILE] = {};
    for_each_segment(p.tokens, p.piece, number, [&](const Segment& s) { mix_back(m, s, total); });
    for (int64_t k = 0; k < p.K; k++)
      __builtin_memcpy(p.partial + (number * p.K + k) * p.C + c0, total[k], C * sizeof(double));
  });
  collect(p.dweight, p.partial, pieces_of(p.tokens, p.piece), p.K * p.C, p.K * p.C);
  if (!p.dstate) return;
  for_each_sequence(p.tokens, p.C, p.threads, [&](const Segment& s, int64_t c0, int64_t C) {
    const Mixing m(p, c0, C);
    float e[TILE];
    s.first < s.end ? m.backwards(s.first, e) : m.last(s, e);
    write_row(p.dstate, e, p.type, s.sequence * p.C + c0, C);
  });
}

}  // namespace

extern const LayerKernels LINATTN_LAYERS;
const LayerKernels LINATTN_LAYERS = {convolution, convolution_backward, norm, norm_backward,
                                     glu,         glu_backward,         mix,  mix_backward,
                                     softplus,    softplus_backward,    skip, skip_backward};

}  // namespace linattn
