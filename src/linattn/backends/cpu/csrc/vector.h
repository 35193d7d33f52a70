// One vector type for every instruction set (GCC and Clang vector extensions), its exponential, and rows of any dtype.
// Included into an anonymous namespace, so that code of one instruction set is never linked into another's.
constexpr int L = LINATTN_LANES;
typedef float Vec __attribute__((vector_size(4 * LINATTN_LANES)));
typedef float Loose __attribute__((vector_size(4 * LINATTN_LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LINATTN_LANES)));

inline Vec load(const float* x) { return *reinterpret_cast<const Loose*>(x); }
inline void store(float* x, Vec y) { *reinterpret_cast<Loose*>(x) = y; }
inline Vec all(float x) { return x - Vec{}; }
template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
inline int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t ceil_to(int64_t x, int64_t m) { return (x + m - 1) / m * m; }

inline float sum(Vec x) {
  float y[L];
  store(y, x);
  for (int width = L / 2; width; width /= 2)
    for (int i = 0; i < width; i++) y[i] += y[i + width];
  return y[0];
}

// [rows, columns] -> [columns, rows], four by four.
typedef float Four __attribute__((vector_size(16)));
typedef float LooseFour __attribute__((vector_size(16), aligned(4), may_alias));
#ifdef __clang__
#define LINATTN_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
typedef int32_t FourInts __attribute__((vector_size(16)));
#define LINATTN_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, FourInts{__VA_ARGS__})
#endif
inline void transpose(float* y, int64_t y_stride, const float* x, int64_t x_stride, int64_t rows, int64_t columns) {
  const int64_t whole_rows = rows / 4 * 4, whole = columns / 4 * 4;
  for (int64_t r = 0; r < whole_rows; r += 4)
    for (int64_t c = 0; c < whole; c += 4) {
      Four a[4], b[4];
      for (int i = 0; i < 4; i++) a[i] = *reinterpret_cast<const LooseFour*>(x + (r + i) * x_stride + c);
      for (int i = 0; i < 4; i += 2) {
        b[i] = LINATTN_SHUFFLE(a[i], a[i + 1], 0, 4, 1, 5);
        b[i + 1] = LINATTN_SHUFFLE(a[i], a[i + 1], 2, 6, 3, 7);
      }
      for (int i = 0; i < 2; i++) {
        float* to = y + (c + 2 * i) * y_stride + r;
        *reinterpret_cast<LooseFour*>(to) = LINATTN_SHUFFLE(b[i], b[i + 2], 0, 1, 4, 5);
        *reinterpret_cast<LooseFour*>(to + y_stride) = LINATTN_SHUFFLE(b[i], b[i + 2], 2, 3, 6, 7);
      }
    }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = r < whole_rows ? whole : 0; c < columns; c++) y[c * y_stride + r] = x[r * x_stride + c];
}

// e^x = 2^n p to float32's accuracy: x = n ln 2 + r, |r| <= ln 2 / 2; returns p.
inline Vec exponential(Vec x, Ints& n) {
  const Vec shift = all(12582912.f);  // 1.5 * 2^23: adding it rounds to integer
  const Vec e = (x * 1.44269504f + shift) - shift;
  const Vec r = (x - e * 0.693359375f) - e * -2.12194440e-4f;
  n = __builtin_convertvector(e, Ints);
  Vec p = all(1.98412698e-4f);
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  return p * (r * r) + r + 1.f;
}

// Exactly 0 where e^x is below the smallest denormal, -inf included; 2^n in two factors, so that results may be denormal.
inline Vec exponential(Vec x) {
  const Vec low = all(-104.f), high = all(88.7f);
  Vec y = x < low ? low : x;
  y = y > high ? high : y;
  Ints n;
  const Vec p = exponential(y, n);
  const Ints half = n >> 1;
  Vec first = bits<Vec>((half + 127) << 23), second = bits<Vec>((n - half + 127) << 23);
  Vec result = p * first * second;
  return x < low ? Vec{} : result;
}

inline float from_half(uint16_t h) {
  uint32_t magnitude = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
  uint32_t finite = bits<uint32_t>(bits<float>(magnitude) * bits<float>(0x77800000u));  // 2^112
  return bits<float>(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}
inline uint16_t to_half(float x) {
  uint32_t all_bits = bits<uint32_t>(x), sign = (all_bits >> 16) & 0x8000u, u = all_bits & 0x7fffffffu;
  uint32_t normal = (u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13;
  uint32_t small = bits<uint32_t>(bits<float>(u) + 0.5f) - 0x3f000000u;  // denormals: the addition rounds
  uint32_t result = u < 0x38800000u ? small : normal;
  result = u >= 0x477ff000u ? 0x7c00u : result;
  return static_cast<uint16_t>(sign | (u > 0x7f800000u ? 0x7e00u : result));
}
inline float from_bfloat(uint16_t h) { return bits<float>(static_cast<uint32_t>(h) << 16); }
inline uint16_t to_bfloat(float x) {
  uint32_t u = bits<uint32_t>(x);
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline void read_row(float* y, const void* x, int64_t type, int64_t at, int64_t n) {
  if (type == FLOAT32) {
    __builtin_memcpy(y, static_cast<const float*>(x) + at, n * sizeof(float));
    return;
  }
  const uint16_t* h = static_cast<const uint16_t*>(x) + at;
  if (type == BFLOAT16)
    for (int64_t i = 0; i < n; i++) y[i] = from_bfloat(h[i]);
  else
    for (int64_t i = 0; i < n; i++) y[i] = from_half(h[i]);
}
inline void write_row(void* y, const float* x, int64_t type, int64_t at, int64_t n) {
  if (type == FLOAT32) {
    __builtin_memcpy(static_cast<float*>(y) + at, x, n * sizeof(float));
    return;
  }
  uint16_t* h = static_cast<uint16_t*>(y) + at;
  if (type == BFLOAT16)
    for (int64_t i = 0; i < n; i++) h[i] = to_bfloat(x[i]);
  else
    for (int64_t i = 0; i < n; i++) h[i] = to_half(x[i]);
}
