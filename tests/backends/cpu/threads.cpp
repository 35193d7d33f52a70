// The matrix kernels on several threads, for a compiler's thread sanitizer: every kind, forward and backward, with
// value columns and sequences split. GCC's OpenMP runtime is not instrumented, so its forks and joins would look like
// races: what the kernels need of it is defined here, on std::thread.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "problem.h"

namespace linattn {
extern const Kernels plain_kernels;
}

namespace {
thread_local int number = 0;
thread_local long limit = 0;
std::atomic<long> next{0};
}  // namespace

extern "C" {
int omp_get_thread_num() { return number; }
bool GOMP_loop_nonmonotonic_dynamic_next(long* start, long* end) {
  *start = next.fetch_add(1, std::memory_order_relaxed), *end = *start + 1;
  return *start < limit;
}
bool GOMP_loop_nonmonotonic_dynamic_start(long, long end, long, long, long* start, long* stop) {
  limit = end;
  return GOMP_loop_nonmonotonic_dynamic_next(start, stop);
}
void GOMP_loop_end_nowait() {}
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  next = 0;
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; i++) others.emplace_back([=] { number = static_cast<int>(i), body(data); });
  body(data);
  for (auto& other : others) other.join();
}
int omp_get_num_threads() { return 1; }  // of static loops, which are the scan's and don't run here
}

int main() {
  using namespace linattn;
  constexpr int64_t T = 64 * 17 + 5, K = 12, V = 20, H = 1, slots = (T + BLOCK - 1) / BLOCK;
  std::vector<std::vector<float>> memory;
  uint32_t random = 1;
  auto make = [&](int64_t n, float scale, float shift) {
    memory.emplace_back(n);
    for (float& x : memory.back()) {
      random = random * 1664525u + 1013904223u;
      x = (static_cast<float>(random >> 8) / 16777216.f - 0.5f) * scale + shift;
    }
    return memory.back().data();
  };
  for (int64_t write : {ADDITIVE, DELTA, LOW_RANK})
    for (int64_t decay : {NONE, HEAD, CHANNEL, TOKEN_HEAD, TOKEN_CHANNEL})
      for (int64_t before : {0, 1})
        for (int64_t parts : {1, 3}) {
          memory.clear();
          Matrix p{};
          p.N = 1, p.T = p.tokens = T, p.G = p.H = H, p.K = K, p.V = V, p.scale = 1, p.parts = parts, p.threads = 6;
          p.write = write, p.before = before, p.decay = decay;
          const int64_t gates = decay == NONE ? 0 : (decay < 3 ? 1 : T) * (decay % 2 ? 1 : K), rows = parts * T * K;
          p.q = make(T * K, 1, 0), p.k = make(T * K, .5, 0), p.v = make(T * V, 1, 0), p.g = make(gates, .2f, -.1f);
          if (write == DELTA) p.beta = make(T, 1, .5);
          if (write == LOW_RANK) p.a = make(T * K, .3f, 0), p.b = make(T * K, .3f, 0);
          p.o = make(T * V, 0, 0), p.final = make(K * V, 0, 0);
          p.writes = write ? make(T * V, 0, 0) : nullptr, p.states = make(slots * K * V, 0, 0);
          p.scratch = make(plain_kernels.scratch(p) * p.threads, 0, 0);
          if (plain_kernels.forward(p)) return 1;
          p.d_o = make(T * V, 1, 0), p.d_final = make(K * V, 1, 0), p.dq = make(rows, 0, 0), p.dk = make(rows, 0, 0);
          p.dv = make(T * V, 0, 0), p.dg = gates ? make(parts * gates, 0, 0) : nullptr, p.dstate = make(K * V, 0, 0);
          if (write == DELTA) p.dbeta = make(parts * T, 0, 0);
          if (write == LOW_RANK) p.da = make(rows, 0, 0), p.db = make(rows, 0, 0);
          p.scratch = make(plain_kernels.scratch(p) * p.threads, 0, 0);
          plain_kernels.backward(p);
        }
  std::puts("right");
}
