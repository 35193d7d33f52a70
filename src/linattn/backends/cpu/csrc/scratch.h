// A thread's scratch memory. Included into an anonymous namespace, after vector.h.
constexpr int64_t LINE = 16;

inline int thread() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Consecutive pieces of a thread's scratch; counts only, when it starts at null.
struct Arena {
  float* base;
  int64_t used = 0;
  float* take(int64_t n) {
    float* piece = base ? base + used : nullptr;
    used += ceil_to(n, LINE);
    return piece;
  }
};

inline void zero(float* x, int64_t n) { __builtin_memset(x, 0, n * sizeof(float)); }
