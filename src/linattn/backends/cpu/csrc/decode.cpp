// One token of a whole model: a tape of small operations, walked by all threads together; compiled for each instruction
// set.
//
// The tape is laid out by linattn/backends/cpu/program.py: every operand has its address and strides, results never need
// room of their own. Products with weights and recurrences are shared by the threads, and so is what is large; the first
// thread does the rest alone, and a barrier stands only where an instruction needs what another thread did.
//
//   weights   rows as they lie in memory, read once for all rows of the batch. Float32; bfloat16 in pairs, of which a
//             vector of words holds the even and the odd ones (so rows of x are dealt out likewise); int8 against rows
//             of x rounded to int16, summed exactly in int32: the compiler has an instruction for sums of such products.
#include <cmath>
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "problem.h"

namespace linattn {
extern const Kernels LINATTN_KERNELS;
extern const SelectiveKernels LINATTN_SELECTIVE;

namespace {

#include "vector.h"
// after it
#include "functions.h"
#include "scratch.h"

// A thread's share of n things, in whole multiples of `unit`.
struct Share {
  int64_t from, to;
  Share(int64_t n, int64_t unit, int64_t i, int64_t threads) {
    const int64_t units = (n + unit - 1) / unit;
    from = least(units * i / threads * unit, n), to = least(units * (i + 1) / threads * unit, n);
  }
};

struct Crew {
  int64_t i, threads;  // of this thread; how many share an instruction
  char* scratch;
};

// ---- element by element

constexpr int64_t CHUNK = 256;  // elements gathered at a time

template <class F>
void vectors(int64_t n, void* y, const void* a, F f) {
  float* to = static_cast<float*>(y);
  const float* from = static_cast<const float*>(a);
  int64_t i = 0;
  for (; i + L <= n; i += L) store(to + i, f(load(from + i)));
  if (i < n) {
    Vec rest = {};
    __builtin_memcpy(&rest, from + i, (n - i) * sizeof(float));
    rest = f(rest);
    __builtin_memcpy(to + i, &rest, (n - i) * sizeof(float));
  }
}

template <class T, class Y, class F>
void one(int64_t n, void* y, const void* a, F f) {
  for (int64_t i = 0; i < n; i++) static_cast<Y*>(y)[i] = static_cast<Y>(f(static_cast<const T*>(a)[i]));
}
template <class T, class Y, class F>
void two(int64_t n, void* y, const void* a, const void* b, F f) {
  for (int64_t i = 0; i < n; i++)
    static_cast<Y*>(y)[i] = static_cast<Y>(f(static_cast<const T*>(a)[i], static_cast<const T*>(b)[i]));
}

// Infinite where e^x is no float32.
inline Vec full_exponential(Vec x) { return x > 88.722839f ? all(__builtin_inff()) : exponential(x); }
inline Vec sigmoid(Vec x) { return 1.f / (1.f + full_exponential(-x)); }

template <class T>
T larger(T x, T y) {
  return x > y || x != x ? x : y;
}
template <class T>
T smaller(T x, T y) {
  return x < y || x != x ? x : y;
}
template <class T>
T log_add(T x, T y) {
  const T top = larger(x, y);
  return x == y ? top + T(0.6931471805599453) : top + std::log1p(std::exp(-std::abs(x - y)));
}
// Towards minus infinity.
inline int64_t floor_divide(int64_t x, int64_t y) {
  const int64_t q = y ? x / y : 0;
  return q - (y && x % y && (x < 0) != (y < 0));
}

using Row = void (*)(int64_t n, void* y, const void* a, const void* b, const void* c);
constexpr int64_t NUMBERS = 4;  // kinds of numbers on the tape: float32, float64, int64, bool

struct Operation {
  const char* name;
  Row rows[NUMBERS];
};

#define ROW [](int64_t n, void* y, const void* a, const void* b, const void* c)
#define UNUSED (void)a, (void)b, (void)c
#define VECTOR(f) ROW { UNUSED; vectors(n, y, a, [](Vec x) { return f; }); }
#define ONE(T, f) ROW { UNUSED; one<T, T>(n, y, a, [](T x) { return f; }); }
#define TEST(T, f) ROW { UNUSED; two<T, uint8_t>(n, y, a, b, [](T x, T z) { return f; }); }
#define TWO(T, f) ROW { UNUSED; two<T, T>(n, y, a, b, [](T x, T z) { return f; }); }
#define CAST(From, To) ROW { UNUSED; one<From, To>(n, y, a, [](From x) { return x; }); }
#define SELECT(T) ROW { UNUSED; \
  for (int64_t i = 0; i < n; i++) static_cast<T*>(y)[i] = \
    static_cast<const uint8_t*>(a)[i] ? static_cast<const T*>(b)[i] : static_cast<const T*>(c)[i]; }
#define FUSED(T) ROW { UNUSED; \
  for (int64_t i = 0; i < n; i++) static_cast<T*>(y)[i] = static_cast<const T*>(a)[i] + \
    static_cast<const T*>(b)[i] * static_cast<const T*>(c)[i]; }
#define REAL(f) {ONE(float, f), ONE(double, f)}
#define ARITHMETIC(f) {TWO(float, f), TWO(double, f), TWO(int64_t, f)}
#define COMPARISON(f) {TEST(float, f), TEST(double, f), TEST(int64_t, f), TEST(uint8_t, f)}
#define BITS(f) {nullptr, nullptr, TWO(int64_t, f), TWO(uint8_t, f)}

// By the kind of the numbers read, conversions by that of the result.
const Operation OPERATIONS[] = {
    {"from_float32", {CAST(float, float), CAST(float, double), CAST(float, int64_t),
                      ROW { UNUSED; one<float, uint8_t>(n, y, a, [](float x) { return x != 0; }); }}},
    {"from_float64", {CAST(double, float), CAST(double, double), CAST(double, int64_t),
                      ROW { UNUSED; one<double, uint8_t>(n, y, a, [](double x) { return x != 0; }); }}},
    {"from_int64", {CAST(int64_t, float), CAST(int64_t, double), CAST(int64_t, int64_t),
                    ROW { UNUSED; one<int64_t, uint8_t>(n, y, a, [](int64_t x) { return x != 0; }); }}},
    {"from_bool", {CAST(uint8_t, float), CAST(uint8_t, double), CAST(uint8_t, int64_t), CAST(uint8_t, uint8_t)}},
    {"from_bfloat16", {ROW { UNUSED; read_row(static_cast<float*>(y), a, BFLOAT16, 0, n); }}},
    {"from_float16", {ROW { UNUSED; read_row(static_cast<float*>(y), a, FLOAT16, 0, n); }}},
    {"neg", {ONE(float, -x), ONE(double, -x), ONE(int64_t, -x)}},
    {"abs", {ONE(float, std::abs(x)), ONE(double, std::abs(x)), ONE(int64_t, x < 0 ? -x : x)}},
    {"exp", {VECTOR(full_exponential(x)), ONE(double, std::exp(x))}},
    {"sigmoid", {VECTOR(sigmoid(x)), ONE(double, 1 / (1 + std::exp(-x)))}},
    {"silu", {VECTOR(x * sigmoid(x)), ONE(double, x / (1 + std::exp(-x)))}},
    {"softplus", {VECTOR(softplus(x)), ONE(double, larger(x, 0.) + std::log1p(std::exp(-std::abs(x))))}},
    {"log_sigmoid", {VECTOR(-softplus(-x)), ONE(double, smaller(x, 0.) - std::log1p(std::exp(-std::abs(x))))}},
    {"relu", {ONE(float, x > 0 || x != x ? x : 0.f), ONE(double, x > 0 || x != x ? x : 0.)}},
    {"gelu", REAL(x * std::erfc(x * decltype(x)(-0.7071067811865476)) / 2)},
    {"gelu_tanh", REAL(x * (std::tanh((x + x * x * x * decltype(x)(0.044715)) * decltype(x)(0.7978845608028654)) + 1) / 2)},
    {"expm1", REAL(std::expm1(x))},
    {"log", REAL(std::log(x))},
    {"log1p", REAL(std::log1p(x))},
    {"tanh", REAL(std::tanh(x))},
    {"sin", REAL(std::sin(x))},
    {"cos", REAL(std::cos(x))},
    {"sqrt", REAL(std::sqrt(x))},
    {"rsqrt", REAL(1 / std::sqrt(x))},
    {"reciprocal", REAL(1 / x)},
    {"round", REAL(std::nearbyint(x))},
    {"floor", REAL(std::floor(x))},
    {"not", {nullptr, nullptr, ONE(int64_t, ~x), ONE(uint8_t, !x)}},
    {"add", ARITHMETIC(x + z)},
    {"sub", ARITHMETIC(x - z)},
    {"mul", {TWO(float, x * z), TWO(double, x * z), TWO(int64_t, x * z), TWO(uint8_t, x && z)}},
    {"div", {TWO(float, x / z), TWO(double, x / z)}},
    {"floor_div", {TWO(float, std::floor(x / z)), TWO(double, std::floor(x / z)), TWO(int64_t, floor_divide(x, z))}},
    {"pow", {TWO(float, std::pow(x, z)), TWO(double, std::pow(x, z))}},
    {"maximum", ARITHMETIC(larger(x, z))},
    {"minimum", ARITHMETIC(smaller(x, z))},
    {"logaddexp", {TWO(float, log_add(x, z)), TWO(double, log_add(x, z))}},
    {"eq", COMPARISON(x == z)},
    {"ne", COMPARISON(x != z)},
    {"lt", COMPARISON(x < z)},
    {"le", COMPARISON(x <= z)},
    {"gt", COMPARISON(x > z)},
    {"ge", COMPARISON(x >= z)},
    {"and", BITS(x & z)},
    {"or", BITS(x | z)},
    {"xor", BITS(x ^ z)},
    {"shift_left", {nullptr, nullptr, TWO(int64_t, x << z)}},
    {"shift_right", {nullptr, nullptr, TWO(int64_t, x >> z)}},
    {"where", {SELECT(float), SELECT(double), SELECT(int64_t), SELECT(uint8_t)}},
    {"fused", {FUSED(float), FUSED(double), FUSED(int64_t)}},
};

// Elements of the last axis into a row without gaps; in place where they are one already.
template <class T>
void gather(T* to, const char* from, int64_t stride, int64_t n) {
  for (int64_t i = 0; i < n; i++) __builtin_memcpy(to + i, from + i * stride, sizeof(T));
}
const void* row_of(char* room, const char* from, int64_t bytes, int64_t stride, int64_t n) {
  if (stride == bytes) return from;
  if (bytes == 8)
    gather(reinterpret_cast<int64_t*>(room), from, stride, n);
  else if (bytes == 4)
    gather(reinterpret_cast<int32_t*>(room), from, stride, n);
  else if (bytes == 2)
    gather(reinterpret_cast<int16_t*>(room), from, stride, n);
  else
    gather(room, from, stride, n);
  return room;
}

// Walks all axes but the last `inner` ones; `at` are the addresses of a row.
template <int Operands, class Each>
void walk(const Instruction& s, int64_t axes, int64_t from, int64_t to, Each each) {
  int64_t index[AXES] = {};
  char* at[Operands];
  for (int k = 0; k < Operands; k++) at[k] = s.x[k].at;
  for (int64_t rest = from, a = axes - 1; a >= 0; a--) {
    index[a] = rest % s.sizes[a], rest /= s.sizes[a];
    for (int k = 0; k < Operands; k++) at[k] += index[a] * s.x[k].strides[a];
  }
  for (int64_t i = from; i < to; i++) {
    each(at);
    for (int64_t a = axes - 1; a >= 0; a--) {
      for (int k = 0; k < Operands; k++) at[k] += s.x[k].strides[a];
      if (++index[a] < s.sizes[a]) break;
      for (int k = 0; k < Operands; k++) at[k] -= index[a] * s.x[k].strides[a];
      index[a] = 0;
    }
  }
}

int64_t count(const Instruction& s, int64_t from, int64_t to) {
  int64_t n = 1;
  for (int64_t a = from; a < to; a++) n *= s.sizes[a];
  return n;
}

void map(const Instruction& s, const Crew& me) {
  const Row row = OPERATIONS[s.code].rows[s.type];
  const int64_t last = s.rank - 1, n = s.sizes[last], rows = count(s, 0, last);
  const bool split = rows < me.threads;  // along the last axis, then
  const Share outer(rows, 1, split ? 0 : me.i, split ? 1 : me.threads);
  const Share inner(n, CHUNK, split ? me.i : 0, split ? me.threads : 1);
  walk<4>(s, last, outer.from, outer.to, [&](char* const* at) {
    alignas(64) char room[4][CHUNK * 8];
    for (int64_t i = inner.from; i < inner.to; i += CHUNK) {
      const int64_t m = least(CHUNK, inner.to - i);
      const void* in[4];
      for (int k = 1; k < 4; k++)
        in[k] = s.x[k].at ? row_of(room[k], at[k] + i * s.x[k].strides[last], s.x[k].bytes, s.x[k].strides[last], m)
                          : nullptr;
      const int64_t bytes = s.x[0].bytes, stride = s.x[0].strides[last];
      char* to = at[0] + i * stride;
      if (stride == bytes) {
        row(m, to, in[1], in[2], in[3]);
        continue;
      }
      row(m, room[0], in[1], in[2], in[3]);
      for (int64_t j = 0; j < m; j++) __builtin_memcpy(to + j * stride, room[0] + j * bytes, bytes);
    }
  });
}

// ---- over axes

enum Fold : int64_t { SUM = 0, LARGEST = 1, SMALLEST = 2, RUNNING = 3 };

// Float32 is summed in float64.
template <class T>
struct Wide {
  using type = T;
};
template <>
struct Wide<float> {
  using type = double;
};

template <class T>
void fold(const Instruction& s, const Crew& me) {
  const int64_t axes = s.axes, rows = count(s, 0, axes), n = count(s, axes, s.rank), last = s.rank - 1;
  const Share mine(rows, 1, me.i, me.threads);
  walk<2>(s, axes, mine.from, mine.to, [&](char* const* start) {
    if constexpr (sizeof(T) == 4)
      if (s.code == SUM && s.rank == axes + 1 && s.x[1].strides[last] == sizeof(T)) {
        const float* from = reinterpret_cast<const float*>(start[1]);
        Vec total = {};
        int64_t i = 0;
        for (; i + L <= n; i += L) total += load(from + i);
        float rest = 0;
        for (; i < n; i++) rest += from[i];
        *reinterpret_cast<float*>(start[0]) = (sum(total) + rest) * static_cast<float>(s.number);
        return;
      }
    using Total = typename Wide<T>::type;
    Total total = {};
    Instruction part = s;
    for (int k = 0; k < 2; k++) {
      part.x[k].at = start[k];
      for (int64_t a = axes; a < s.rank; a++) part.x[k].strides[a - axes] = s.x[k].strides[a];
    }
    for (int64_t a = axes; a < s.rank; a++) part.sizes[a - axes] = s.sizes[a];
    bool first = true;
    walk<2>(part, s.rank - axes, 0, n, [&](char* const* at) {
      const Total x = static_cast<Total>(*reinterpret_cast<const T*>(at[1]));
      if (first || s.code == SUM || s.code == RUNNING)
        total += x;
      else
        total = s.code == LARGEST ? larger(total, x) : smaller(total, x);
      first = false;
      if (s.code == RUNNING) *reinterpret_cast<T*>(at[0]) = static_cast<T>(total);
    });
    if (s.code != RUNNING)
      *reinterpret_cast<T*>(start[0]) = s.number == 1 ? static_cast<T>(total) : static_cast<T>(total * s.number);
  });
}

// Elements of x[1] at indices x[2] and x[3], whose steps lie in the strides of an axis that the result hasn't.
// False if an index is out of range.
bool pick(const Instruction& s, const Crew& me) {
  const int64_t last = s.rank - 1, n = s.sizes[last], rows = count(s, 0, last), bytes = s.x[0].bytes;
  const Share mine(rows, 1, me.i, me.threads);
  bool good = true;
  walk<4>(s, last, mine.from, mine.to, [&](char* const* at) {
    const bool run = !s.x[2].strides[last] && !(s.x[3].at && s.x[3].strides[last]);
    for (int64_t i = 0; i < n; i++) {
      const char* from = at[1] + i * s.x[1].strides[last];
      for (int k = 2; k < 4; k++) {
        if (!s.x[k].at) continue;
        int64_t index = *reinterpret_cast<const int64_t*>(at[k] + i * s.x[k].strides[last]);
        const int64_t size = s.picked[k - 2][0];
        index = index < 0 ? index + size : index;
        if (index < 0 || index >= size) {
          good = false;
          return;
        }
        from += index * s.picked[k - 2][1];
      }
      if (run && s.x[0].strides[last] == bytes && s.x[1].strides[last] == bytes) {
        __builtin_memcpy(at[0], from, n * bytes);
        return;
      }
      __builtin_memcpy(at[0] + i * s.x[0].strides[last], from, bytes);
    }
  });
  return good;
}

// sizes: batch, rows, columns, inner.
void product(const Instruction& s, const Crew& me) {
  const int64_t rows = s.sizes[0] * s.sizes[1], columns = s.sizes[2], inner = s.sizes[3];
  const Operand &y = s.x[0], &a = s.x[1], &b = s.x[2];
  const Share mine(rows, 1, me.i, me.threads);
  for (int64_t row = mine.from; row < mine.to; row++) {
    const int64_t batch = row / s.sizes[1], i = row % s.sizes[1];
    char* to = y.at + batch * y.strides[0] + i * y.strides[1];
    const char *left = a.at + batch * a.strides[0] + i * a.strides[1], *right = b.at + batch * b.strides[0];
    auto number = [](const char* at) { return *reinterpret_cast<const float*>(at); };
    int64_t j = 0;
    if (b.strides[2] == 4 && y.strides[2] == 4)
      for (; j + L <= columns; j += L) {
        Vec total = {};
        for (int64_t k = 0; k < inner; k++)
          total += number(left + k * a.strides[3]) * load(reinterpret_cast<const float*>(right + k * b.strides[3]) + j);
        store(reinterpret_cast<float*>(to) + j, total);
      }
    for (; j < columns; j++) {
      float total = 0;
      for (int64_t k = 0; k < inner; k++)
        total += number(left + k * a.strides[3]) * number(right + k * b.strides[3] + j * b.strides[2]);
      *reinterpret_cast<float*>(to + j * y.strides[2]) = total;
    }
  }
}

// ---- weights

// Weight rows and batch rows of a tile of sums in registers; weight rows where vectors run along the batch, one or two.
#if LINATTN_LANES == 16 || defined(__aarch64__)
constexpr int TALL = 4, WIDE = 4, HIGH[] = {12, 12};
#else
constexpr int TALL = 4, WIDE = 2, HIGH[] = {12, 6};
#endif
constexpr int64_t DEEP = 512;    // inputs that such a tile sums before they are added up
constexpr int64_t APART = DEEP + LINE;  // of its rows of weights, so that they fall into different sets
constexpr int64_t AHEAD = 4096;  // bytes that weights are fetched ahead, further than the hardware does
constexpr int STREAMS = 4;       // rows of weights that one row of x meets at once
constexpr int64_t STEP = 64;     // numbers that rows of int8 weights are a multiple of

// A share's rows of weights, STREAMS at once that lie far apart: memory is read faster so than from one place, as the
// hardware fetches ahead of each. Then those that are left, one by one.
template <class Several, class Single>
void streams(const Share& mine, Several several, Single single) {
  const int64_t apart = (mine.to - mine.from) / STREAMS;
  for (int64_t o = mine.from; o < mine.from + apart; o++) several(o, apart);
  for (int64_t o = mine.from + apart * STREAMS; o < mine.to; o++) single(o);
}

// Rows of x without gaps, padded with zeros, bfloat16's partners dealt out.
void spread(float* to, int64_t width, const Instruction& s, int64_t type) {
  const int64_t K = s.sizes[2];
  for (int64_t m = 0; m < s.sizes[0]; m++, to += width) {
    const float* from = reinterpret_cast<const float*>(s.x[1].at + m * s.x[1].strides[0]);
    if (type == FLOAT32) {
      __builtin_memcpy(to, from, K * sizeof(float));
      zero(to + K, width - K);
      continue;
    }
    int64_t at = 0;
    for (; at + 2 * L <= K; at += 2 * L)
      for (int i = 0; i < L; i++) to[at + i] = from[at + 2 * i], to[at + L + i] = from[at + 2 * i + 1];
    if (at == width) continue;
    zero(to + at, 2 * L);
    for (int64_t i = 0; i < K - at; i++) to[at + i % 2 * L + i / 2] = from[at + i];
  }
}

struct Floats {
  static constexpr int64_t BYTES = 4, UNIT = L;
  static Vec dot(const char* w, const float* x, Vec sum) {
    return sum + load(reinterpret_cast<const float*>(w)) * load(x);
  }
};
struct Pairs {
  static constexpr int64_t BYTES = 2, UNIT = 2 * L;
  static Vec dot(const char* w, const float* x, Vec sum) {
    const Ints both = bits<Ints>(load(reinterpret_cast<const float*>(w)));
    sum += bits<Vec>(both << 16) * load(x);
    return sum + bits<Vec>(both & static_cast<int32_t>(0xffff0000u)) * load(x + L);
  }
};

template <class W, int R, int C, int Unroll>
inline void tile(const char* w, int64_t row, const float* x, int64_t width, char* y, int64_t batch) {
  Vec sums[R][C][Unroll] = {};
  int64_t k = 0;
  for (; k + Unroll * W::UNIT <= width; k += Unroll * W::UNIT) {
#pragma GCC unroll 4
    for (int u = 0; u < Unroll; u++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          const int64_t at = k + u * W::UNIT;
          sums[r][c][u] = W::dot(w + r * row + at * W::BYTES, x + c * width + at, sums[r][c][u]);
        }
  }
  for (; k < width; k += W::UNIT)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sums[r][c][0] = W::dot(w + r * row + k * W::BYTES, x + c * width + k, sums[r][c][0]);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      Vec total = sums[r][c][0];
      for (int u = 1; u < Unroll; u++) total += sums[r][c][u];
      reinterpret_cast<float*>(y + c * batch)[r] = sum(total);
    }
}

template <class W, int R>
void rows_of(const char* w, int64_t row, const float* x, int64_t width, char* y, int64_t batch, int64_t M) {
  int64_t m = 0;
  for (; m + WIDE <= M; m += WIDE) tile<W, R, WIDE, 1>(w, row, x + m * width, width, y + m * batch, batch);
  for (; m < M; m++) tile<W, R, 1, 1>(w, row, x + m * width, width, y + m * batch, batch);
}

template <class W>
void few(const Instruction& s, const Crew& me) {
  const int64_t M = s.sizes[0], K = s.sizes[2], width = ceil_to(K, W::UNIT), row = s.x[2].strides[0];
  const Share mine(s.sizes[1], TALL, me.i, me.threads);
  if (mine.from == mine.to) return;
  float* x = reinterpret_cast<float*>(me.scratch);
  spread(x, width, s, W::BYTES == 2 ? BFLOAT16 : FLOAT32);
  const char* w = s.x[2].at;
  if (M == 1) {
    float* y = reinterpret_cast<float*>(s.x[0].at);
    streams(
        mine,
        [&](int64_t o, int64_t apart) {
          float totals[STREAMS];
          tile<W, STREAMS, 1, 2>(w + o * row, apart * row, x, width, reinterpret_cast<char*>(totals), 0);
          for (int r = 0; r < STREAMS; r++) y[o + r * apart] = totals[r];
        },
        [&](int64_t o) { tile<W, 1, 1, 2>(w + o * row, row, x, width, reinterpret_cast<char*>(y + o), 0); });
    return;
  }
  int64_t o = mine.from;
  for (; o + TALL <= mine.to; o += TALL)
    rows_of<W, TALL>(w + o * row, row, x, width, s.x[0].at + o * sizeof(float), s.x[0].strides[0], M);
  for (; o < mine.to; o++)
    rows_of<W, 1>(w + o * row, row, x, width, s.x[0].at + o * sizeof(float), s.x[0].strides[0], M);
}

// Plain loops: the compiler makes of them sums of products of int16 pairs.
inline int32_t dot(const int8_t* w, const int16_t* x, int64_t width) {
  int32_t sum = 0;
  for (int64_t k = 0; k < width / STEP * STEP; k++) sum += static_cast<int16_t>(w[k]) * static_cast<int32_t>(x[k]);
  return sum;
}
// Four rows that are `apart` with one: of x with one of weights, or the other way round.
template <class Four, class One>
inline void dots(const Four* a, int64_t apart, const One* b, int64_t width, int32_t* to) {
  const Four *a1 = a + apart, *a2 = a1 + apart, *a3 = a2 + apart;
  int32_t s = 0, s1 = 0, s2 = 0, s3 = 0;
  for (int64_t k = 0; k < width / STEP * STEP; k++) {
    const int32_t v = static_cast<int16_t>(b[k]);
    s += static_cast<int16_t>(a[k]) * v, s1 += static_cast<int16_t>(a1[k]) * v;
    s2 += static_cast<int16_t>(a2[k]) * v, s3 += static_cast<int16_t>(a3[k]) * v;
  }
  to[0] = s, to[1] = s1, to[2] = s2, to[3] = s3;
}

// `number` is the largest int16 that no sum overflows with.
void rounded(const Instruction& s, const Crew& me) {
  const int64_t M = s.sizes[0], K = s.sizes[2], width = ceil_to(K, STEP), row = s.x[2].strides[0];
  const Share mine(s.sizes[1], 1, me.i, me.threads);
  if (mine.from == mine.to) return;
  float* scales = reinterpret_cast<float*>(me.scratch);
  int16_t* x = reinterpret_cast<int16_t*>(scales + ceil_to(M, LINE));
  for (int64_t m = 0; m < M; m++) {
    const float* from = reinterpret_cast<const float*>(s.x[1].at + m * s.x[1].strides[0]);
    float top = 0;
    for (int64_t k = 0; k < K; k++) top = larger(std::abs(from[k]), top);
    scales[m] = top / static_cast<float>(s.number);
    const float to_whole = top > 0 ? static_cast<float>(s.number) / top : 0;
    for (int64_t k = 0; k < K; k++)
      x[m * width + k] = static_cast<int16_t>(static_cast<int32_t>(std::nearbyint(from[k] * to_whole)));
    __builtin_memset(x + m * width + K, 0, (width - K) * sizeof(int16_t));
  }
  const float* by = reinterpret_cast<const float*>(s.x[3].at);
  const int8_t* w = reinterpret_cast<const int8_t*>(s.x[2].at);
  auto put = [&](int64_t m, int64_t o, int32_t total) {
    reinterpret_cast<float*>(s.x[0].at + m * s.x[0].strides[0])[o] = static_cast<float>(total) * (by[o] * scales[m]);
  };
  if (M == 1) {
    streams(
        mine,
        [&](int64_t o, int64_t apart) {
          int32_t totals[STREAMS];
          dots(w + o * row, apart * row, x, width, totals);
          for (int r = 0; r < STREAMS; r++) put(0, o + r * apart, totals[r]);
        },
        [&](int64_t o) { put(0, o, dot(w + o * row, x, width)); });
    return;
  }
  for (int64_t o = mine.from; o < mine.to; o++) {
    for (int64_t k = 0; k < width; k += 64) __builtin_prefetch(w + o * row + AHEAD + k);
    int64_t m = 0;
    for (; m + 4 <= M; m += 4) {
      int32_t totals[4];
      dots(x + m * width, width, w + o * row, width, totals);
      for (int i = 0; i < 4; i++) put(m + i, o, totals[i]);
    }
    for (; m < M; m++) put(m, o, dot(w + o * row, x + m * width, width));
  }
}

// Batch rows beyond half a vector: vectors along the batch, weights one by one.

inline float number(float w) { return w; }
inline float number(uint16_t w) { return from_bfloat(w); }
inline float number(int8_t w) { return static_cast<float>(w); }

// sums [R, C vectors] += w [R, n] x [n, `stride`]. Meanwhile the weights at `next` come nearer, R rows that are `row` apart
// with `Line` numbers in a cache line.
template <int R, int C, int Line>
void outer_tile(const float* w, const float* x, int64_t stride, int64_t n, float* sums, const char* next, int64_t row) {
  Vec total[R][C] = {};
  for (int64_t k = 0; k < n; k++, x += stride) {
    if (k % Line < R) __builtin_prefetch(next + k % Line * row + k / Line * 64);
    Vec along[C];
    for (int c = 0; c < C; c++) along[c] = load(x + c * L);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Vec by = all(w[r * APART + k]);
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) total[r][c] += by * along[c];
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(sums + (r * C + c) * L, load(sums + (r * C + c) * L) + total[r][c]);
}

// R rows of weights from `o` on, all rows of the batch.
template <class T, int R, int C>
void outer_rows(const Instruction& s, int64_t o, const float* x, int64_t stride, float* room) {
  const int64_t M = s.sizes[0], K = s.sizes[2], row = s.x[2].strides[0];
  const float* scales = reinterpret_cast<const float*>(s.x[3].at);
  float* const sums = room + R * APART;
  zero(sums, R * stride);
  for (int64_t k = 0; k < K; k += DEEP) {
    const int64_t n = least(DEEP, K - k);
    const char* const from = s.x[2].at + o * row + k * sizeof(T);
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < n; i++) room[r * APART + i] = number(reinterpret_cast<const T*>(from + r * row)[i]);
    for (int64_t m = 0; m < stride; m += C * L)
      outer_tile<R, C, 64 / sizeof(T)>(room, x + k * stride + m, stride, n, sums + m * R, from + R * row, row);
  }
  for (int r = 0; r < R; r++)
    for (int64_t m = 0; m < M; m++) {
      const float total = sums[m / (C * L) * R * C * L + r * C * L + m % (C * L)];
      reinterpret_cast<float*>(s.x[0].at + m * s.x[0].strides[0])[o + r] = scales ? total * scales[o + r] : total;
    }
}

template <class T, int C>
void outer(const Instruction& s, const Crew& me) {
  constexpr int R = HIGH[C - 1];
  const int64_t M = s.sizes[0], K = s.sizes[2], stride = ceil_to(M, C * L);
  const Share mine(s.sizes[1], R, me.i, me.threads);
  if (mine.from == mine.to) return;
  float *x = reinterpret_cast<float*>(me.scratch), *room = x + ceil_to(K * stride, LINE);
  for (int64_t m = 0; m < stride; m++) {
    const float* from = reinterpret_cast<const float*>(s.x[1].at + m * s.x[1].strides[0]);
    for (int64_t k = 0; k < K; k++) x[k * stride + m] = m < M ? from[k] : 0.f;
  }
  int64_t o = mine.from;
  for (; o + R <= mine.to; o += R) outer_rows<T, R, C>(s, o, x, stride, room);
  for (; o < mine.to; o++) outer_rows<T, 1, C>(s, o, x, stride, room);
}

template <class T>
bool many(const Instruction& s, const Crew& me) {
  const int64_t M = s.sizes[0];
  if (2 * M <= L) return false;
  if (M <= L)
    outer<T, 1>(s, me);
  else
    outer<T, 2>(s, me);
  return true;
}

void linear(const Instruction& s, const Crew& me) {
  if (s.type == FLOAT32) {
    if (!many<float>(s, me)) few<Floats>(s, me);
  } else if (s.type == BFLOAT16) {
    if (!many<uint16_t>(s, me)) few<Pairs>(s, me);
  } else if (!many<int8_t>(s, me)) {
    rounded(s, me);
  }
}

// ---- recurrences: a thread's share of the rows, or of the heads of each row

template <class T>
void shift(T*& at, int64_t by) {
  if (at) at += by;
}
void shift(const void*& at, int64_t by) {
  if (at) at = static_cast<const float*>(at) + by;
}
void shift(void*& at, int64_t by) {
  if (at) at = static_cast<float*>(at) + by;
}

bool heads(const Matrix& whole, int64_t n, int64_t rows, int64_t g, int64_t groups, char* scratch) {
  Matrix p = whole;
  const int64_t each = p.H / p.G, h = g * each, token = n * p.T;
  p.N = rows, p.G = groups, p.H = groups * each, p.tokens = rows * p.T, p.threads = 1, p.parts = 1;
  p.scratch = reinterpret_cast<float*>(scratch);
  const int64_t key = (token * whole.G + g) * p.K, row = token * whole.H + h;
  shift(p.q, key), shift(p.k, key), shift(p.v, row * p.V), shift(p.o, row * p.V);
  shift(p.beta, row), shift(p.a, row * p.K), shift(p.b, row * p.K), shift(p.u, h * p.K);
  const bool channels = p.decay == CHANNEL || p.decay == TOKEN_CHANNEL;
  shift(p.g, (p.decay == HEAD || p.decay == CHANNEL ? h : row) * (channels ? p.K : 1));
  const int64_t state = (n * whole.H + h) * p.K * p.V;
  shift(p.state, state), shift(p.final, state);
  return LINATTN_KERNELS.forward(p) == 0;
}

bool recur(const Matrix& p, const Crew& me) {
  if (p.N >= me.threads || p.T > 1) {
    const Share mine(p.N, 1, me.i, me.threads);
    return mine.from == mine.to || heads(p, mine.from, mine.to - mine.from, 0, p.G, me.scratch);
  }
  const Share mine(p.G, 1, me.i, me.threads);
  bool good = true;
  for (int64_t n = 0; n < p.N && mine.from < mine.to; n++)
    good &= heads(p, n, 1, mine.from, mine.to - mine.from, me.scratch);
  return good;
}

bool channels(const Selective& whole, int64_t s, int64_t rows, int64_t d, int64_t size, int64_t g, int64_t groups,
              char* scratch) {
  Selective p = whole;
  p.S = rows, p.D = size, p.G = groups, p.tokens = rows * p.T, p.threads = 1, p.parts = 1;
  p.scratch = reinterpret_cast<float*>(scratch);
  const int64_t token = s * p.T, row = token * whole.D + d, maps = (token * whole.G + g) * p.N;
  shift(p.x, row), shift(p.dt, row), shift(p.y, row), shift(p.B, maps), shift(p.C, maps), shift(p.A, d * p.N);
  const int64_t state = (s * whole.D + d) * p.N;
  shift(p.state, state), shift(p.final, state);
  return LINATTN_SELECTIVE.forward(p) == 0;
}

bool select(const Selective& p, const Crew& me) {
  if (p.S >= me.threads || p.T > 1) {
    const Share mine(p.S, 1, me.i, me.threads);
    return mine.from == mine.to || channels(p, mine.from, mine.to - mine.from, 0, p.D, 0, p.G, me.scratch);
  }
  bool good = true;
  const int64_t each = p.D / p.G;
  for (int64_t s = 0; s < p.S; s++) {
    if (p.G == 1) {
      const Share mine(p.D, L, me.i, me.threads);
      if (mine.from < mine.to) good &= channels(p, s, 1, mine.from, mine.to - mine.from, 0, 1, me.scratch);
    } else {
      const Share mine(p.G, 1, me.i, me.threads);
      const int64_t some = mine.to - mine.from;
      if (some) good &= channels(p, s, 1, mine.from * each, some * each, mine.from, some, me.scratch);
    }
  }
  return good;
}

// ---- the tape

bool perform(const Instruction& s, const Crew& me) {
  switch (s.kind) {
    case Instruction::MAP: map(s, me); return true;
    case Instruction::FOLD:
      if (s.type == 0)
        fold<float>(s, me);
      else if (s.type == 1)
        fold<double>(s, me);
      else if (s.type == 2)
        fold<int64_t>(s, me);
      else
        fold<uint8_t>(s, me);
      return true;
    case Instruction::PICK: return pick(s, me);
    case Instruction::PRODUCT: product(s, me); return true;
    case Instruction::LINEAR: linear(s, me); return true;
    case Instruction::MATRIX: return recur(*reinterpret_cast<const Matrix*>(s.x[0].at), me);
    default: return select(*reinterpret_cast<const Selective*>(s.x[0].at), me);
  }
}

// The place of the first instruction that failed, or -1.
int64_t run(const Program& p) {
  int64_t failed = -1;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
  {
#ifdef _OPENMP
    const int64_t threads = omp_get_num_threads();
#else
    const int64_t threads = 1;
#endif
    const int64_t i = thread();
    char* const scratch = p.scratch + i * p.bytes;
    for (int64_t at = 0; at < p.length; at++) {
      const Instruction& s = p.tape[at];
      if (s.wait && threads > 1) {
#pragma omp barrier
      }
      if (!s.parallel && i) continue;
      if (!perform(s, {s.parallel ? i : 0, s.parallel ? threads : 1, scratch})) {
#pragma omp critical(linattn_decode)
        failed = failed < 0 || at < failed ? at : failed;
      }
    }
  }
  return failed;
}

// The number of an operation by its name, or -1 if there is none for that kind of numbers.
int64_t operation(const char* name, int64_t type) {
  int64_t at = 0;
  for (const Operation& known : OPERATIONS) {
    if (!__builtin_strcmp(known.name, name)) return known.rows[type] ? at : -1;
    at++;
  }
  return -1;
}

int64_t unit() { return 2 * L; }

}  // namespace

extern const DecodeKernels LINATTN_DECODE;
const DecodeKernels LINATTN_DECODE = {run, operation, unit};

}  // namespace linattn
