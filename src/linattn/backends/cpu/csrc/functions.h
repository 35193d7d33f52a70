// Functions of vectors beside the exponential. Included into an anonymous namespace, after vector.h.
inline Vec magnitude(Vec x) { return x < Vec{} ? -x : x; }
// log(1 + e) for 0 <= e <= 1 by the series of artanh(e / (2 + e)).
inline Vec log_one_plus(Vec e) {
  const Vec s = e / (e + 2.f), z = s * s;
  Vec p = all(2.f / 17);
  p = p * z + 2.f / 15;
  p = p * z + 2.f / 13;
  p = p * z + 2.f / 11;
  p = p * z + 2.f / 9;
  p = p * z + 2.f / 7;
  p = p * z + 2.f / 5;
  p = p * z + 2.f / 3;
  p = p * z + 2.f;
  return s * p;
}
inline Vec softplus(Vec x) {
  const Vec positive = x > Vec{} ? x : x == x ? Vec{} : x;
  return positive + log_one_plus(exponential(-magnitude(x)));
}
