// Products with int8 weights: y = x W^T, where each row of W and each row of x is whole numbers from -127 to 127 times a
// scale of its own.
//
// Sums of whole numbers are exact: they are the same on every CPU, in any order, for any batch. What follows a sum is
// two multiplications. A packed weight is [rows / 32][columns / 4][32][4] int8, then the scale of each row in float32,
// then the sum of its numbers in int32, each for the rows rounded up to 32.
#pragma once

#include <limits>
#include <vector>

#include "simd.h"
#include "tiles.h"

constexpr float LARGEST_INT8 = 127.0f;
constexpr float SMALLEST_SCALED = 1e-30f;  // rows of nothing larger are zeros

typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

#if defined(KV_AVX512) && defined(__AVX512VNNI__)
#define KV_BYTES_DOT 1
#endif
#if defined(KV_BYTES_DOT) || !defined(__AVX2__)
#define KV_BYTES 1
#endif

// Four consecutive numbers of a row of x, to be multiplied with four of a row of W. The instruction that adds four
// products takes one side without sign: then the numbers are 128 more, and what that adds to a sum is taken off at the
// end. AVX2 has one for two products of 16 bits; its one for bytes saturates.
#ifdef KV_BYTES
typedef uint32_t Quad;
constexpr int OFFSET = 128;

INLINE Quad quad_of(const int8_t *four) {
  Quad quad;
  memcpy(&quad, four, 4);
  return quad ^ 0x80808080u;
}

INLINE Ints add_quad(Ints sum, Quad x, Ints w) {
#ifdef KV_BYTES_DOT
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)all(x), (__m512i)w);
#else
  UNROLL for (int i = 0; i < 4; i++) sum += (w << (24 - 8 * i) >> 24) * int32_t(x >> 8 * i & 0xff);
  return sum;
#endif
}
#else
struct Quad {
  uint32_t even, odd;  // two int16 each: numbers 0 and 2, 1 and 3
};
constexpr int OFFSET = 0;

INLINE Quad quad_of(const int8_t *four) {
  const auto two = [](int8_t a, int8_t b) { return uint32_t(uint16_t(a)) | uint32_t(uint16_t(b)) << 16; };
  return {two(four[0], four[2]), two(four[1], four[3])};
}

// Of two int16 in each lane: the sum of both products.
INLINE Ints multiply_pairs(Shorts a, Shorts b) {
#ifdef KV_AVX512
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

// Compilers that take on several rows at once run out of registers: so each sum is in one before the next begins.
INLINE void add(Ints &sum, Ints v) {
  sum += v;
#ifdef __x86_64__
  asm volatile("" : "+v"(sum));
#endif
}

// Adds to each sum of each row the products of the row's four numbers with those of LANES outputs of each group.
template <int ROWS, int GROUPS> INLINE void add_quads(Ints (*sums)[GROUPS], const int8_t *w, const Quad *x) {
#ifdef KV_BYTES
  Ints outputs[GROUPS];
  UNROLL for (int g = 0; g < GROUPS; g++) outputs[g] = load<Ints>(w + g * 4 * LANES);
  UNROLL for (int m = 0; m < ROWS; m++)
    UNROLL for (int g = 0; g < GROUPS; g++) sums[m][g] = add_quad(sums[m][g], x[m], outputs[g]);
#else
  Shorts outputs[GROUPS];
  UNROLL for (int g = 0; g < GROUPS; g++) outputs[g] = load<Shorts>(w + g * 4 * LANES) << 8 >> 8;
  UNROLL for (int m = 0; m < ROWS; m++) {
    const Shorts same = (Shorts)all(x[m].even);
    UNROLL for (int g = 0; g < GROUPS; g++) add(sums[m][g], multiply_pairs(outputs[g], same));
  }
  UNROLL for (int g = 0; g < GROUPS; g++) outputs[g] = load<Shorts>(w + g * 4 * LANES) >> 8;
  UNROLL for (int m = 0; m < ROWS; m++) {
    const Shorts same = (Shorts)all(x[m].odd);
    UNROLL for (int g = 0; g < GROUPS; g++) add(sums[m][g], multiply_pairs(outputs[g], same));
  }
#endif
}

// 127 / most, cut to 16 bits: its product with a bfloat16 number needs no rounding, so compilers may fuse what follows.
INLINE float inverse_scale(float most) {
  const float inverse = LARGEST_INT8 / most;
  uint32_t bits;
  memcpy(&bits, &inverse, 4);
  bits &= 0xffffff00u;
  float cut;
  memcpy(&cut, &bits, 4);
  return cut;
}

// Whole numbers of the n in x, to `to`; returns their scale. An infinite one or NaN makes the scale NaN.
static float quantize(const bf16 *x, int8_t *to, int n) {
  Floats largest = Floats{}, zero = Floats{};
  for (int i = 0; i < n; i += LANES) {
    const Floats v = load_bf16(x + i);
    largest = max(largest, (Floats)((Words)v & 0x7fffffff));
    zero += v * 0.0f;
  }
  const float most = max(largest);
  const bool finite = sum(zero) == 0.0f;
  if (!finite || most <= SMALLEST_SCALED) {
    std::fill(to, to + n, 0);
    return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const float inverse = inverse_scale(most);
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers, ties to even
  for (int i = 0; i < n; i += LANES)
    store(to + i, __builtin_convertvector((Ints)(load_bf16(x + i) * inverse + magic), Bytes));
  return most / LARGEST_INT8;
}

struct Int8Weight {
  int8_t *values;
  float *scales;  // [rows, padded]
  int32_t *sums;  // the same
};

INLINE Int8Weight int8_weight(const void *packed, int rows, int columns) {
  int8_t *values = (int8_t *)packed;
  float *scales = (float *)(values + size_t(padded(rows)) * columns);
  return {values, scales, (int32_t *)(scales + padded(rows))};
}

// W [rows][columns] to the packed weight; rows beyond the last one are zeros.
static void pack_weight_int8(const bf16 *from, void *packed, int rows, int columns) {
  const Int8Weight weight = int8_weight(packed, rows, columns);
  std::vector<int8_t> row(columns);
  for (int r = 0; r < padded(rows); r++) {
    std::fill(row.begin(), row.end(), 0);
    weight.scales[r] = r < rows ? quantize(from + size_t(r) * columns, row.data(), columns) : 0.0f;
    weight.sums[r] = 0;
    int8_t *to = weight.values + size_t(r / TILE) * TILE * columns + size_t(r % TILE) * 4;
    for (int k = 0; k < columns; k++) {
      to[size_t(k / 4) * 4 * TILE + k % 4] = row[k];
      weight.sums[r] += row[k];
    }
  }
}

// x [rows][columns] to quads: step after step of rows, each [columns / 4][rows of the step]; and the scale of each row.
static void pack_rows_int8(const bf16 *x, Quad *quads, float *scales, int rows, int columns) {
  const int n = columns / 4;
  std::vector<int8_t> whole(columns);
  for (int m = 0; m < rows;) {
    const int c = rows_of_step(rows - m);
    Quad *to = quads + size_t(m) * n;
    for (int j = 0; j < c; j++) {
      scales[m + j] = quantize(x + size_t(m + j) * columns, whole.data(), columns);
      for (int k = 0; k < n; k++) to[size_t(k) * c + j] = quad_of(&whole[4 * k]);
    }
    m += c;
  }
}

struct Int8Step {
  Int8Weight weight;
  const Quad *quads;
  const float *row_scales;
  float *y;  // [rows][stride]
  int columns;
  size_t stride;

  template <int ROWS, int N> ALONE void run(int row, int tile, int part) const {
    const size_t output = size_t(tile) * TILE + size_t(part) * LANES;
    const int8_t *w = weight.values + size_t(tile) * TILE * columns + size_t(part) * 4 * LANES;
    const Quad *x = quads + size_t(row) * (columns / 4);
    Ints sums[ROWS][N];
    UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int g = 0; g < N; g++) sums[m][g] = Ints{};
    for (int k = 0; k < columns / 4; k++) {
      const int8_t *at = w + size_t(k) * 4 * TILE;
      UNROLL for (int g = 0; g < N; g++) prefetch(at + 4 * g * LANES + 4096);
      add_quads<ROWS, N>(sums, at, x + size_t(k) * ROWS);
    }
    UNROLL for (int m = 0; m < ROWS; m++)
      UNROLL for (int g = 0; g < N; g++) {
        const Ints sum = sums[m][g] - OFFSET * load<Ints>(weight.sums + output + g * LANES);
        const Floats scale = load<Floats>(weight.scales + output + g * LANES);
        store(y + (row + m) * stride + output + g * LANES,
              __builtin_convertvector(sum, Floats) * row_scales[row + m] * scale);
      }
  }
};
