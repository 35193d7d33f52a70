// Where a sequence lies among the tokens. Included into an anonymous namespace, after vector.h.

// Its tokens, and the place of its first kept state: one before every BLOCK tokens of every sequence.
struct Sequence {
  int64_t first, length, slot;
};

// The n-th of rows of T tokens, or of those packed between `ends`.
inline Sequence sequence_of(const int64_t* ends, int64_t T, int64_t n) {
  if (ends) return {ends[n], ends[n + 1] - ends[n], ends[n] / BLOCK + n};
  return {n * T, T, n * (ceil_to(T, BLOCK) / BLOCK)};
}
