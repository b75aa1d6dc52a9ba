// Products with bfloat16 weights: y = x W^T in float32.
//
// Weights are packed in tiles of 32 rows: [rows / 32][columns / 2][32][2], so that one load holds a pair of columns of
// several rows, and one tile is read from one end to the other. A row's result is one sum per output in the order of
// the columns, whatever rows come with it and however many threads there are: results do not depend on the batch.
#pragma once

#include "simd.h"
#include "tiles.h"

// W [rows][columns] row after row to tiles; rows beyond the last one are zeros.
static void pack_weight(const bf16 *from, bf16 *to, int rows, int columns) {
  for (int tile = 0; tile < padded(rows) / TILE; tile++, to += size_t(TILE) * columns)
    for (int r = 0; r < TILE; r++) {
      const int row = tile * TILE + r;
      for (int k = 0; k < columns; k++)
        to[size_t(k / 2) * 2 * TILE + 2 * r + k % 2] = row < rows ? from[size_t(row) * columns + k] : 0;
    }
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

struct Bf16Step {
  const bf16 *weight;
  const Pair *pairs;
  float *y;  // [rows][stride]
  int columns;
  size_t stride;

  template <int ROWS, int N> ALONE void run(int row, int tile, int part) const {
    const bf16 *w = weight + size_t(tile) * TILE * columns + size_t(part) * 2 * LANES;
    const Pair *x = pairs + size_t(row) * (columns / 2);
    const int n = columns / 2;
    Floats sums[ROWS][N];
    UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int g = 0; g < N; g++) sums[m][g] = Floats{};
    for (int k = 0; k < n; k++) {
      const bf16 *at = w + size_t(k) * 2 * TILE;
      UNROLL for (int g = 0; g < N; g++) prefetch((const char *)(at + 2 * g * LANES) + 4096);
      add_products<ROWS, N>(sums, (const uint32_t *)at, LANES, x + size_t(k) * ROWS);
    }
    float *to = y + row * stride + size_t(tile) * TILE + size_t(part) * LANES;
    UNROLL for (int m = 0; m < ROWS; m++)
      UNROLL for (int g = 0; g < N; g++) store(to + m * stride + g * LANES, sums[m][g]);
  }
};
