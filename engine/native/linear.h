// Products with bfloat16 weights: y = x W^T in float32.
//
// Weights are packed in tiles of 32 rows: [rows / 32][columns / 2][32][2], so that one load holds a pair of columns of
// several rows, and one tile is read from one end to the other. A row's result is one sum per output in the order of
// the columns, whatever rows come with it and however many threads there are: results do not depend on the batch.
#pragma once

#include <vector>

#include "simd.h"

constexpr int TILE = 32;
constexpr int PARTS = 2;  // registers of outputs that one pass over a tile fills, for each row
#ifdef KV_AVX512
constexpr int MAX_ROWS = 12;  // with 2 parts 24 accumulators, of 32 registers
#else
constexpr int MAX_ROWS = 6;  // 12 of 16
#endif

INLINE int padded(int rows) { return (rows + TILE - 1) / TILE * TILE; }

// How many of `left` rows the next step takes.
INLINE int rows_of_step(int left) {
  for (const int rows : {12, 8, 6, 4, 2})
    if (rows <= MAX_ROWS && rows <= left) return rows;
  return 1;
}

// x [rows][columns] to pairs: step after step of rows, each [columns / 2][rows of the step].
static void pack_rows(const bf16 *x, Pair *pairs, int rows, int columns) {
  const int n = columns / 2;
  for (int m = 0; m < rows;) {
    const int c = rows_of_step(rows - m);
    Pair *to = pairs + size_t(m) * n;
    for (int j = 0; j < c; j++) {
      const bf16 *row = x + size_t(m + j) * columns;
      for (int k = 0; k < n; k++) to[size_t(k) * c + j] = pair_of(row + 2 * k);
    }
    m += c;
  }
}

// PARTS registers of outputs, of a tile.
template <int ROWS> static void tile_product(const bf16 *w, const Pair *pairs, int columns, float *y, size_t stride) {
  Floats sums[ROWS][PARTS];
  UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int h = 0; h < PARTS; h++) sums[m][h] = Floats{};
  for (int k = 0; k < columns / 2; k++) {
    const bf16 *at = w + size_t(k) * 2 * TILE;
    UNROLL for (int h = 0; h < PARTS; h++) prefetch((const char *)(at + 2 * h * LANES) + 4096);
    add_products<ROWS, PARTS>(sums, (const uint32_t *)at, LANES, pairs + size_t(k) * ROWS);
  }
  UNROLL for (int m = 0; m < ROWS; m++)
    UNROLL for (int h = 0; h < PARTS; h++) store(y + m * stride + h * LANES, sums[m][h]);
}

// Tiles [first, last) of y [rows][stride] from packed rows and weights.
static void multiply_tiles(
    const bf16 *w, const Pair *pairs, float *y, int rows, int columns, size_t stride, int first, int last) {
  constexpr int PASSES = TILE / (PARTS * LANES);
  for (int pass = first * PASSES; pass < last * PASSES; pass++) {
    const bf16 *part = w + size_t(pass / PASSES) * TILE * columns + pass % PASSES * (2 * PARTS * LANES);
    for (int m = 0; m < rows;) {
      const int c = rows_of_step(rows - m);
      const Pair *x = pairs + size_t(m) * (columns / 2);
      float *to = y + m * stride + size_t(pass) * PARTS * LANES;
      switch (c) {
        case 12: tile_product<12>(part, x, columns, to, stride); break;
        case 8: tile_product<8>(part, x, columns, to, stride); break;
        case 6: tile_product<6>(part, x, columns, to, stride); break;
        case 4: tile_product<4>(part, x, columns, to, stride); break;
        case 2: tile_product<2>(part, x, columns, to, stride); break;
        default: tile_product<1>(part, x, columns, to, stride);
      }
      m += c;
    }
  }
}
