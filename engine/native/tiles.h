// In which order a product goes over rows and tiles of outputs, for weights of any type.
#pragma once

#include <algorithm>
#include <cstddef>

#include "simd.h"

constexpr int TILE = 32;                // rows of a weight that are packed together
constexpr int PARTS = 2;                // registers of outputs that one pass over a tile fills, for each row
constexpr int ALL_PARTS = TILE / LANES;  // of few rows: more sums are under way, and the tile is read once
#ifdef KV_AVX512
constexpr int MAX_ROWS = 12;  // with 2 parts 24 accumulators, of 32 registers
#else
constexpr int MAX_ROWS = 6;  // 12 of 16
#endif
constexpr int FEW_ROWS = LANES < 8 ? 1 : 2;
constexpr size_t NEAR_BYTES = 256 << 10;  // of rows that all outputs are computed for before the next: they stay in L2

INLINE int padded(int rows) { return (rows + TILE - 1) / TILE * TILE; }

// How many of `left` rows the next step takes.
INLINE int rows_of_step(int left) {
  for (const int rows : {12, 8, 6, 4, 2})
    if (rows <= MAX_ROWS && rows <= left) return rows;
  return 1;
}

// How many of the last rows are in steps of few.
INLINE int last_few(int rows) {
  int left = rows % MAX_ROWS;
  while (left && rows_of_step(left) > FEW_ROWS) left -= rows_of_step(left);
  return left;
}

template <class Step>
static void many_rows(const Step &step, int begin, int end, int tile, int part) {
  for (int m = begin, c; m < end; m += c) switch (c = rows_of_step(end - m)) {
      case 12: if constexpr (MAX_ROWS >= 12) step.template run<12, PARTS>(m, tile, part); break;
      case 8: if constexpr (MAX_ROWS >= 8) step.template run<8, PARTS>(m, tile, part); break;
      case 6: step.template run<6, PARTS>(m, tile, part); break;
      case 4: step.template run<4, PARTS>(m, tile, part); break;
      case 2: step.template run<2, PARTS>(m, tile, part); break;
      default: step.template run<1, PARTS>(m, tile, part);
    }
}

// Calls step.run<ROWS, PARTS>(first row, tile, first register of the tile) for all of `rows` and tiles
// [first, last). A row has `row_bytes`, packed.
template <class Step> static void for_each_tile(int rows, size_t row_bytes, int first, int last, const Step &step) {
  const int block = std::max(1, int(NEAR_BYTES / row_bytes / MAX_ROWS)) * MAX_ROWS;
  for (int begin = 0; begin < rows; begin += block) {
    const int end = std::min(rows, begin + block), few = last_few(end - begin);
    for (int tile = first; tile < last; tile++) {
      for (int part = 0; part < ALL_PARTS; part += PARTS)
        many_rows(step, begin, end - few, tile, part);
      for (int m = end - few; m < end; m += rows_of_step(end - m)) {
        if (FEW_ROWS > 1 && rows_of_step(end - m) > 1)
          step.template run<FEW_ROWS, ALL_PARTS>(m, tile, 0);
        else
          step.template run<1, ALL_PARTS>(m, tile, 0);
      }
    }
  }
}
