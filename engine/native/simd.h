// As many floats as a register of this CPU holds, and as many pairs of bfloat16, as one value each. GCC and Clang turn
// these types into whatever instructions there are; only what they cannot express is written for one instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define KV_AVX512 1
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#if defined(KV_AVX512) && defined(__AVX512BF16__)
#define KV_BF16_DOT 1
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <class V> INLINE V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V> INLINE void store(void *p, V v) { memcpy(p, &v, sizeof v); }

// Less 0, which changes no number; plus 0 would make 0 of -0, so compilers keep that addition.
INLINE Floats all(float x) { return x - Floats{}; }

INLINE Words all(uint32_t x) { return Words{} + x; }

INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// Nearest, ties to even. Infinities stay; NaN stays NaN.
INLINE bf16 to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void store_bf16(bf16 *p, Floats v) {
#ifdef KV_BF16_DOT
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  UNROLL for (int i = 0; i < LANES; i++) p[i] = to_bf16(v[i]);
#endif
}

INLINE Words widened(const uint16_t *p) {
#ifdef KV_AVX512
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#else
  return __builtin_convertvector(load<Halves>(p), Words);
#endif
}

INLINE Floats load_bf16(const bf16 *p) { return (Floats)(widened(p) << 16); }

// A pair of bfloat16 numbers of a row, to be multiplied with others and added up. A CPU without the instruction for two
// products at once gets them as floats, one after the other.
#ifdef KV_BF16_DOT
typedef uint32_t Pair;

INLINE Pair pair_of(const bf16 *two) {
  Pair pair;
  memcpy(&pair, two, 4);
  return pair;
}
#else
struct Pair {
  float first, second;
};

INLINE Pair pair_of(const bf16 *two) { return {to_float(two[0]), to_float(two[1])}; }
#endif

// Adds to each sum of each row the products of the row's pair and the pairs of LANES outputs; of each group of LANES they
// lie `stride` pairs behind those of the group before.
template <int ROWS, int GROUPS>
INLINE void add_products(Floats (*sums)[GROUPS], const uint32_t *pairs, size_t stride, const Pair *x) {
#ifdef KV_BF16_DOT
  UNROLL for (int g = 0; g < GROUPS; g++) {
    const Words w = load<Words>(pairs + g * stride);
    UNROLL for (int m = 0; m < ROWS; m++)
      sums[m][g] = (Floats)_mm512_dpbf16_ps((__m512)sums[m][g], (__m512bh)w, (__m512bh)all(x[m]));
  }
#else
  // A row's number is spread once for all groups: 12 sums, 2 registers of outputs and 1 of the row are all there are.
  Floats w[GROUPS];
  UNROLL for (int g = 0; g < GROUPS; g++) w[g] = (Floats)(load<Words>(pairs + g * stride) << 16);
  UNROLL for (int m = 0; m < ROWS; m++) {
    const Floats same = all(x[m].first);
    UNROLL for (int g = 0; g < GROUPS; g++) sums[m][g] += w[g] * same;
  }
  UNROLL for (int g = 0; g < GROUPS; g++) w[g] = (Floats)(load<Words>(pairs + g * stride) & 0xffff0000u);
  UNROLL for (int m = 0; m < ROWS; m++) {
    const Floats same = all(x[m].second);
    UNROLL for (int g = 0; g < GROUPS; g++) sums[m][g] += w[g] * same;
  }
#endif
}

INLINE float sum(Floats v) {
#ifdef KV_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#else
  float a[LANES];
  store(a, v);
  for (int n = LANES / 2; n; n /= 2) for (int i = 0; i < n; i++) a[i] += a[i + n];
  return a[0];
#endif
}

INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

INLINE float max(Floats v) {
#ifdef KV_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = m > v[i] ? m : v[i];
  return m;
#endif
}

// e^x within 2 units in the last place for x in [-87, 88]; smaller x give less than 2e-38, greater ones the largest.
// 2^n times a polynomial of the rest (the Taylor series to the 7th power, |rest| <= log(2) / 2: error below 1e-8).
INLINE Floats exp(Floats x) {
  x = max(x, all(-87.0f));
  x = x < all(88.0f) ? x : all(88.0f);
  const Floats scaled = x * 1.44269504f;
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
  const Floats n = (scaled + magic) - magic;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log(2) in two parts
  Floats p = all(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints exponent = __builtin_convertvector(n, Ints) << 23;
  return (Floats)((Ints)p + exponent);
}

INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }
