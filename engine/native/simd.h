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
#include <immintrin.h>
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#if defined(KV_AVX512) && defined(__AVX512BF16__)
#define KV_BF16_DOT 1
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))
#define ALONE __attribute__((noinline))  // a loop that needs all registers: within others it gets fewer

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

// The same, in the upper halves; the lower ones are anything.
INLINE Words rounded_bf16(Floats v) {
  const Words bits = (Words)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded;
}

INLINE void store_bf16(bf16 *p, Floats v) {
#ifdef KV_BF16_DOT
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  store(p, __builtin_convertvector(rounded_bf16(v) >> 16, Halves));
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

// LANES / 2 pairs of the numbers v, rounded to bfloat16; of each pair they lie `stride` pairs behind the one before.
INLINE void store_pairs(Pair *to, size_t stride, Floats v) {
#ifdef KV_BF16_DOT
  bf16 rounded[LANES];
  store_bf16(rounded, v);
  UNROLL for (int i = 0; i < LANES / 2; i++) to[i * stride] = pair_of(rounded + 2 * i);
#else
  float rounded[LANES];
  store(rounded, rounded_bf16(v) & 0xffff0000u);
  UNROLL for (int i = 0; i < LANES / 2; i++) memcpy(to + i * stride, rounded + 2 * i, sizeof(Pair));
#endif
}

#ifndef KV_BF16_DOT
// sums[m][g] += outputs(g) * row(m). What is fewer is kept in registers: 12 sums leave 4, of 16.
template <int ROWS, int GROUPS, class Outputs, class Row>
INLINE void add_halves(Floats (*sums)[GROUPS], Outputs outputs, Row row) {
  if constexpr (ROWS < GROUPS) {
    Floats same[ROWS];
    UNROLL for (int m = 0; m < ROWS; m++) same[m] = all(row(m));
    UNROLL for (int g = 0; g < GROUPS; g++) {
      const Floats w = outputs(g);
      UNROLL for (int m = 0; m < ROWS; m++) sums[m][g] += w * same[m];
    }
  } else {
    Floats w[GROUPS];
    UNROLL for (int g = 0; g < GROUPS; g++) w[g] = outputs(g);
    UNROLL for (int m = 0; m < ROWS; m++) {
      const Floats same = all(row(m));
      UNROLL for (int g = 0; g < GROUPS; g++) sums[m][g] += w[g] * same;
    }
  }
}
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
  add_halves<ROWS, GROUPS>(
      sums, [&](int g) { return (Floats)(load<Words>(pairs + g * stride) << 16); }, [&](int m) { return x[m].first; });
  add_halves<ROWS, GROUPS>(
      sums, [&](int g) { return (Floats)(load<Words>(pairs + g * stride) & 0xffff0000u); },
      [&](int m) { return x[m].second; });
#endif
}

#if defined(__AVX2__) && !defined(KV_AVX512)
// of(of(0, 4), of(2, 6)) with of(of(1, 5), of(3, 7)).
template <class Of> INLINE float folded(Floats v, Of of) {
  const __m128 four = of(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 two = of(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(of(two, _mm_movehdup_ps(two)));
}
#endif

INLINE float sum(Floats v) {
#ifdef KV_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  return folded(v, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
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
#elif defined(__AVX2__)
  return folded(v, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
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
