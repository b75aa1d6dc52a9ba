// Causal attention over paged KV, for any number of queries: the same sums in the same order for a query whether it
// comes alone (decode) or with its whole prompt (prefill). Online softmax over tiles of 64 keys, which begin at
// multiples of 64.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

constexpr int KEYS = 64;         // of a tile
constexpr int QUERIES = 32;      // of a work item: its keys and values are rearranged once for all of them
#ifdef KV_AVX512
constexpr int ATTENTION_ROWS = 12;
constexpr int ATTENTION_SUMS = 12;  // registers of sums under way: what one instruction of two products takes
#else
constexpr int ATTENTION_ROWS = 6;
constexpr int ATTENTION_SUMS = 12;  // 10 keep two units busy, whose sums take 5 cycles
#endif
constexpr int MAX_HEAD_DIM = 256;
constexpr float NOTHING = -1e30f;

// Where the keys and values of one sequence and layer are.
struct Context {
  const bf16 *pool;     // [blocks][layers][2][kv_heads][block_size][head_dim]
  const int32_t *table;  // blocks of the sequence, in order
  size_t block_stride;   // elements
  size_t keys, values;   // of this layer in a block, elements
  int block_shift, head_dim;  // blocks have 2^block_shift tokens

  const bf16 *key(int token, int head) const { return at(token, head) + keys; }
  const bf16 *value(int token, int head) const { return at(token, head) + values; }
  const bf16 *at(int token, int head) const {
    const int in_block = token & ((1 << block_shift) - 1);
    return pool + size_t(table[token >> block_shift]) * block_stride +
           ((size_t(head) << block_shift) + in_block) * head_dim;
  }
};

// Tokens that somebody sees: only they are read. Others may have no block.
struct Seen {
  int first, end;
  bool has(int token) const { return first <= token && token < end; }
};

static const bf16 UNSEEN[MAX_HEAD_DIM] = {};

// The cache lines that the next tile or head will read. They are asked for one by one beside the arithmetic of this one:
// all at once they fill the queue of misses, and what is needed now waits behind them. Into the second level, because
// the first one has room for few.
struct Ahead {
  static constexpr int PER_STEP = KEYS / 16;  // lines for each step of the loops over head_dim / 2 or KEYS / 2
  const bf16 *keys[KEYS * MAX_HEAD_DIM / 32], *values[KEYS * MAX_HEAD_DIM / 32];
  int count = 0;

  // Tokens [start, start + 64) of a head that somebody sees.
  void set(const Context &kv, int head, int start, Seen seen) {
    count = 0;
    for (int token = std::max(start, seen.first); token < std::min(start + KEYS, seen.end); token++) {
      const bf16 *key = kv.key(token, head), *value = kv.value(token, head);
      for (int i = 0; i < kv.head_dim; i += 32) {
        keys[count] = key + i;
        values[count++] = value + i;
      }
    }
  }
  static void fetch(const bf16 *const *lines, int count, int step) {
    for (int i = step * PER_STEP; i < std::min((step + 1) * PER_STEP, count); i++)
      __builtin_prefetch(lines[i], 0, 2);
  }
};

#ifdef KV_AVX512
// 16 rows of 16 words to 16 columns.
INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
  UNROLL for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}
#elif defined(__AVX2__)
// 8 rows of 8 words to 8 columns.
INLINE void transpose(__m256i r[8]) {
  __m256i t[8];
  UNROLL for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  UNROLL for (int i = 0; i < 8; i++) r[i] = t[i];
}
#endif

// Keys [start, start + 64) of a head as [64 / LANES][head_dim / 2][LANES] pairs; those that nobody sees as zeros.
static void pack_keys(const Context &kv, int head, int start, Seen seen, uint32_t *to) {
  const int n = kv.head_dim / 2;
  for (int b = 0; b < KEYS / LANES; b++, to += size_t(n) * LANES) {
    const bf16 *rows[LANES];
    for (int t = 0; t < LANES; t++) {
      const int token = start + b * LANES + t;
      rows[t] = seen.has(token) ? kv.key(token, head) : UNSEEN;
    }
    int j = 0;
#ifdef KV_AVX512
    for (; j + LANES <= n; j += LANES) {
      __m512i r[LANES];
      UNROLL for (int t = 0; t < LANES; t++) r[t] = _mm512_loadu_si512(rows[t] + 2 * j);
      transpose(r);
      UNROLL for (int i = 0; i < LANES; i++) _mm512_storeu_si512(to + size_t(j + i) * LANES, r[i]);
    }
#elif defined(__AVX2__)
    for (; j + LANES <= n; j += LANES) {
      __m256i r[LANES];
      UNROLL for (int t = 0; t < LANES; t++) r[t] = load<__m256i>(rows[t] + 2 * j);
      transpose(r);
      UNROLL for (int i = 0; i < LANES; i++) store(to + size_t(j + i) * LANES, r[i]);
    }
#endif
    for (; j < n; j++)
      for (int t = 0; t < LANES; t++) memcpy(to + size_t(j) * LANES + t, rows[t] + 2 * j, 4);
  }
}

// Values [start, start + 64) of a head as [64 / 2][head_dim] pairs of consecutive tokens; those that nobody sees as
// zeros: what lies there may be NaN, which a weight of zero would not remove.
static void pack_values(const Context &kv, int head, int start, Seen seen, uint32_t *to) {
  const int d = kv.head_dim;
  for (int t = start; t < start + KEYS; t += 2, to += d) {
    const bf16 *a = seen.has(t) ? kv.value(t, head) : UNSEEN;
    const bf16 *b = seen.has(t + 1) ? kv.value(t + 1, head) : UNSEEN;
    for (int i = 0; i < d; i += LANES) {
      store(to + i, widened(a + i) | widened(b + i) << 16);
    }
  }
}

// Some rows (a query of one head each) against one tile of keys and values.
struct Rows {
  float best[ATTENTION_ROWS], total[ATTENTION_ROWS];
  float mixed[ATTENTION_ROWS][MAX_HEAD_DIM];
  int first_key[ATTENTION_ROWS], position[ATTENTION_ROWS];  // it sees the keys first_key to position
  Pair query[MAX_HEAD_DIM / 2 * ATTENTION_ROWS];            // [head_dim / 2][rows]
};

INLINE Ints lane_numbers() {
  Ints numbers;
  UNROLL for (int i = 0; i < LANES; i++) numbers[i] = i;
  return numbers;
}

template <bool MASKED> INLINE Floats visible(Floats x, int key, int first, int last, float otherwise) {
  if constexpr (!MASKED) return x;
  const Ints at = lane_numbers() + key;
  const Ints seen = (at >= first) & (at <= last);
  return seen ? x : all(otherwise);
}

// Scores of GROUP registers of keys. Few rows take several registers at a time, to have enough sums under way; each sum
// has the same order however many there are.
template <int ROWS, int GROUP>
ALONE static void score(const Rows &r, const uint32_t *keys, int n, Floats (*scores)[KEYS / LANES], int first,
                  const Ahead &next) {
  Floats s[ROWS][GROUP];
  UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int g = 0; g < GROUP; g++) s[m][g] = Floats{};
  for (int j = 0; j < n; j++) {
    if (first == 0) Ahead::fetch(next.keys, next.count, j);
    add_products<ROWS, GROUP>(s, keys + size_t(first * n + j) * LANES, size_t(n) * LANES, r.query + j * ROWS);
  }
  UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int g = 0; g < GROUP; g++) scores[m][first + g] = s[m][g];
}

// Adds the weighted values of GROUP registers of elements.
template <int ROWS, int GROUP>
ALONE static void mix(Rows &r, const Pair *weights, const uint32_t *values, int d, int first, const Ahead &next) {
  Floats mixed[ROWS][GROUP];
  UNROLL for (int m = 0; m < ROWS; m++)
    UNROLL for (int g = 0; g < GROUP; g++) mixed[m][g] = load<Floats>(r.mixed[m] + first + g * LANES);
  for (int t = 0; t < KEYS / 2; t++) {
    if (first == 0) Ahead::fetch(next.values, next.count, t);
    add_products<ROWS, GROUP>(mixed, values + size_t(t) * d + first, LANES, weights + t * ROWS);
  }
  UNROLL for (int m = 0; m < ROWS; m++)
    UNROLL for (int g = 0; g < GROUP; g++) store(r.mixed[m] + first + g * LANES, mixed[m][g]);
}

// Whether every row sees all keys of the tile.
template <int ROWS> INLINE bool all_seen(const Rows &r, int start) {
  bool seen = true;
  for (int m = 0; m < ROWS; m++) seen = seen && r.first_key[m] <= start && start + KEYS - 1 <= r.position[m];
  return seen;
}

// MASKED: some key may be hidden from some row.
template <int ROWS, bool MASKED>
static void attend_tile(Rows &r, const uint32_t *keys, const uint32_t *values, int start, int d, float scale,
                        const Ahead &next) {
  constexpr int BLOCKS = KEYS / LANES, GROUP = ROWS * 4 <= ATTENTION_SUMS ? 4 : ROWS * 2 <= ATTENTION_SUMS ? 2 : 1;
  Floats scores[ROWS][BLOCKS];
  UNROLL for (int b = 0; b < BLOCKS; b += GROUP) score<ROWS, GROUP>(r, keys, d / 2, scores, b, next);
  Pair pairs[KEYS / 2 * ROWS];
  UNROLL for (int m = 0; m < ROWS; m++) {
    UNROLL for (int b = 0; b < BLOCKS; b++)
      scores[m][b] = visible<MASKED>(scores[m][b] * scale, start + b * LANES, r.first_key[m], r.position[m], NOTHING);
    Floats highest = scores[m][0];
    UNROLL for (int b = 1; b < BLOCKS; b++) highest = max(highest, scores[m][b]);
    const float best = max(highest);
    if (best > r.best[m]) {
      const float kept = r.best[m] == NOTHING ? 0.0f : exp(all(r.best[m] - best))[0];
      r.best[m] = best;
      r.total[m] *= kept;
      for (int i = 0; i < d; i += LANES) store(r.mixed[m] + i, load<Floats>(r.mixed[m] + i) * kept);
    }
    Floats total = Floats{};
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      Floats p = exp(scores[m][b] - r.best[m]);
      p = visible<MASKED>(p, start + b * LANES, r.first_key[m], r.position[m], 0.0f);
      total += p;
      store_pairs(pairs + b * (LANES / 2) * ROWS + m, ROWS, p);
    }
    r.total[m] += sum(total);
  }
  int i = 0;
  for (; i + GROUP * LANES <= d; i += GROUP * LANES) mix<ROWS, GROUP>(r, pairs, values, d, i, next);
  for (; i < d; i += LANES) mix<ROWS, 1>(r, pairs, values, d, i, next);
}

template <int ROWS>
static void attend_rows(Rows &r, const uint32_t *k, const uint32_t *v, int start, int d, float scale,
                        const Ahead &next) {
  if (all_seen<ROWS>(r, start))
    attend_tile<ROWS, false>(r, k, v, start, d, scale, next);
  else
    attend_tile<ROWS, true>(r, k, v, start, d, scale, next);
}

INLINE int attention_rows_of_step(int left) {
  for (const int rows : {12, 8, 6, 4, 3, 2})
    if (rows <= ATTENTION_ROWS && rows <= left) return rows;
  return 1;
}

static void attend_step(int rows, Rows &r, const uint32_t *k, const uint32_t *v, int start, int d, float scale,
                        const Ahead &next) {
  switch (rows) {
    case 12: if constexpr (ATTENTION_ROWS >= 12) attend_rows<12>(r, k, v, start, d, scale, next); break;
    case 8: if constexpr (ATTENTION_ROWS >= 8) attend_rows<8>(r, k, v, start, d, scale, next); break;
    case 6: attend_rows<6>(r, k, v, start, d, scale, next); break;
    case 4: attend_rows<4>(r, k, v, start, d, scale, next); break;
    case 3: attend_rows<3>(r, k, v, start, d, scale, next); break;
    case 2: attend_rows<2>(r, k, v, start, d, scale, next); break;
    default: attend_rows<1>(r, k, v, start, d, scale, next);
  }
}

struct AttentionScratch {
  std::vector<uint32_t> keys, values;
  std::vector<Rows> rows;
  std::vector<int> steps;
  Ahead next;
};

// What one call of `attend` computes: some queries of one sequence, for some of its KV heads.
struct Queries {
  const bf16 *q;  // [query][head of the model][head_dim], from the first query and head 0 on
  bf16 *out;      // the same
  size_t stride;  // elements from query to query
  int count, first_position;
  int first_head, last_head;  // KV heads [first_head, last_head)
  int group;                  // heads that share a KV head
  int window;                 // tokens that a query sees, itself included; 0: all before it
  float scale;
};

static void begin_rows(const Queries &of, int head, int first_row, int rows, int head_dim, Rows &r) {
  for (int j = 0; j < rows; j++) {
    const int query = (first_row + j) / of.group, h = head * of.group + (first_row + j) % of.group;
    const bf16 *from = of.q + query * of.stride + size_t(h) * head_dim;
    for (int i = 0; i < head_dim / 2; i++) r.query[i * rows + j] = pair_of(from + 2 * i);
    r.best[j] = NOTHING;
    r.total[j] = 0.0f;
    memset(r.mixed[j], 0, sizeof(float) * head_dim);
    r.position[j] = of.first_position + query;
    r.first_key[j] = of.window ? std::max(0, r.position[j] - of.window + 1) : 0;
  }
}

static void end_rows(const Queries &of, int head, int first_row, int rows, int head_dim, const Rows &r) {
  for (int j = 0; j < rows; j++) {
    const int query = (first_row + j) / of.group, h = head * of.group + (first_row + j) % of.group;
    bf16 *to = of.out + query * of.stride + size_t(h) * head_dim;
    const float inverse = 1.0f / r.total[j];
    for (int i = 0; i < head_dim; i += LANES) store_bf16(to + i, load<Floats>(r.mixed[j] + i) * inverse);
  }
}

static void attend(const Context &kv, const Queries &of, AttentionScratch &scratch) {
  const int d = kv.head_dim, num_rows = of.count * of.group, num_heads = of.last_head - of.first_head;
  scratch.keys.resize(size_t(KEYS) * d / 2);
  scratch.values.resize(size_t(KEYS) / 2 * d);
  std::vector<int> &steps = scratch.steps;
  steps.clear();
  for (int m = 0; m < num_rows; m += steps.back()) steps.push_back(attention_rows_of_step(num_rows - m));
  const int num_steps = int(steps.size());
  if (scratch.rows.size() < size_t(num_steps) * num_heads) scratch.rows.resize(size_t(num_steps) * num_heads);
  Rows *rows = scratch.rows.data();
  for (int h = 0; h < num_heads; h++)
    for (int s = 0, m = 0; s < num_steps; m += steps[s++])
      begin_rows(of, of.first_head + h, m, steps[s], d, rows[h * num_steps + s]);
  const Seen seen = {of.window ? std::max(0, of.first_position - of.window + 1) : 0, of.first_position + of.count};
  for (int start = seen.first / KEYS * KEYS; start < seen.end; start += KEYS)
    for (int h = 0; h < num_heads; h++) {  // inside: the heads of a block lie side by side
      const bool last = h + 1 == num_heads;
      pack_keys(kv, of.first_head + h, start, seen, scratch.keys.data());
      pack_values(kv, of.first_head + h, start, seen, scratch.values.data());
      Ahead &next = scratch.next;
      next.set(kv, of.first_head + (last ? 0 : h + 1), last ? start + KEYS : start, seen);
      for (int s = 0; s < num_steps; s++) {
        Rows &r = rows[h * num_steps + s];
        if (start > r.position[steps[s] - 1] || start + KEYS <= r.first_key[0]) continue;  // nobody sees any of it
        attend_step(steps[s], r, scratch.keys.data(), scratch.values.data(), start, d, of.scale, next);
        next.count = 0;
      }
    }
  for (int h = 0; h < num_heads; h++)
    for (int s = 0, m = 0; s < num_steps; m += steps[s++])
      end_rows(of, of.first_head + h, m, steps[s], d, rows[h * num_steps + s]);
}
