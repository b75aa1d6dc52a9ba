// One forward pass of a dense decoder with bfloat16 or int8 weights over paged bfloat16 KV, in one call.
//
// Called through ctypes, which lets go of the interpreter lock. Knows no Python and no torch. What a caller says was
// checked on the other side (engine/model/native_decoder.py).
#include <algorithm>
#include <memory>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "simd.h"

#include "attention.h"
#include "linear.h"
#include "linear_int8.h"

extern "C" {

struct Layer {
  const bf16 *input_norm;
  const void *qkv, *attention_out;  // packed, see linear.h and linear_int8.h
  const bf16 *mlp_norm;
  const void *gate_up, *down;  // packed
  const bf16 *qkv_bias, *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm;  // null where a family has none
  int32_t window;    // tokens that a query sees, itself included; 0: all before it
  int32_t rotation;  // which of the batch's
};

struct Model {
  int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab;
  int32_t gelu;  // gate by GELU (its approximation by tanh) instead of SiLU
  int32_t int8;  // what is packed is int8
  float norm_eps, scale;
  float norm_offset;      // added to the weights of every norm
  float embedding_scale;  // factor of every embedding
  const void *embedding;  // packed
  const bf16 *final_norm;
  const void *lm_head;  // packed; may be the embedding
  const Layer *layers;
};

struct AttentionShape {
  int32_t num_queries, context_len, num_layers, layer, num_heads, num_kv_heads, block_size, head_dim, window;
};

// Of one pass. Others write `stop` while it runs, and read `layers_done`.
struct Control {
  int32_t stop, layers_done;
};

struct Batch {
  int32_t num_tokens, num_sequences, num_samples, block_size;
  const int64_t *token_ids, *positions;                         // [num_tokens]
  const int32_t *query_starts, *table_starts;                   // [num_sequences + 1], [num_sequences]
  const int32_t *tables;                                        // blocks of all sequences
  const int32_t *sample_rows;                                   // [num_samples]
  const float *rotations[2];                                    // [positions][head_dim]: cosines, then sines
  bf16 *pool;                                                   // [blocks][layers][2][kv_heads][block_size][head_dim]
  Control *control;                                             // may be null
};
}

namespace {

struct Item {
  int sequence, first_query, num_queries, first_head, last_head;
};

struct Scratch {
  std::vector<float> hidden, product;
  std::vector<bf16> normed, mixed, queries;
  std::vector<Pair> pairs;
  std::vector<Quad> quads;
  std::vector<float> row_scales;
  std::vector<Item> items;
  std::vector<AttentionScratch> attention;
};

int log2(int power_of_two) { return __builtin_ctz(power_of_two); }

Context context_of(const bf16 *pool, const int32_t *table, int num_layers, int layer, int num_kv_heads, int block_size,
                   int head_dim) {
  const size_t per_part = size_t(num_kv_heads) * block_size * head_dim;  // elements of a layer's keys, or values
  return {pool, table, size_t(num_layers) * 2 * per_part, size_t(layer) * 2 * per_part,
          (size_t(layer) * 2 + 1) * per_part, log2(block_size), head_dim};
}

bf16 *slot(const Model &m, const Batch &b, int layer, int part, int kv_head, int sequence, int position) {
  const int block = b.tables[b.table_starts[sequence] + position / b.block_size];
  const size_t layers = size_t(block) * m.num_layers + layer;
  return b.pool + ((layers * 2 + part) * m.num_kv_heads + kv_head) * b.block_size * m.head_dim +
         size_t(position % b.block_size) * m.head_dim;
}

void embed(const Model &m, int64_t token, float *to) {
  const size_t tile = size_t(token / TILE) * TILE * m.hidden;
  if (m.int8) {
    const Int8Weight w = int8_weight(m.embedding, m.vocab, m.hidden);
    const int8_t *at = w.values + tile + token % TILE * 4;
    for (int k = 0; k < m.hidden; k += 4, at += 4 * TILE)
      for (int i = 0; i < 4; i++) to[k + i] = at[i] * w.scales[token] * m.embedding_scale;
    return;
  }
  const bf16 *at = (const bf16 *)m.embedding + tile + token % TILE * 2;
  for (int k = 0; k < m.hidden; k += 2, at += 2 * TILE)
    for (int i = 0; i < 2; i++) to[k + i] = to_float(at[i]) * m.embedding_scale;
}

// Calls use(i, normed) for each register of the row x.
template <class Use> void rms_norm(const Model &m, const float *x, const bf16 *weight, int n, Use use) {
  Floats squares = Floats{};
  for (int i = 0; i < n; i += LANES) squares += load<Floats>(x + i) * load<Floats>(x + i);
  const float scale = 1.0f / std::sqrt(sum(squares) / n + m.norm_eps);
  for (int i = 0; i < n; i += LANES)
    use(i, load<Floats>(x + i) * scale * (load_bf16(weight + i) + m.norm_offset));
}

void rms_norm(const Model &m, const float *x, const bf16 *weight, bf16 *to) {
  rms_norm(m, x, weight, m.hidden, [&](int i, Floats normed) { store_bf16(to + i, normed); });
}

// x += y, which is normed before if there is a weight for that.
void add(const Model &m, float *x, float *y, const bf16 *norm) {
  if (norm) rms_norm(m, y, norm, m.hidden, [&](int i, Floats normed) { store(y + i, normed); });
  for (int i = 0; i < m.hidden; i += LANES) store(x + i, load<Floats>(x + i) + load<Floats>(y + i));
}

// silu(gate) * up, or gelu(gate) * up: tanh(u) = 2 / (1 + exp(-2 u)) - 1.
void gate(const Model &m, const float *gate_up, bf16 *to) {
  for (int i = 0; i < m.intermediate; i += LANES) {
    const Floats g = load<Floats>(gate_up + i), up = load<Floats>(gate_up + m.intermediate + i);
    const Floats u = m.gelu ? 1.59576912f * (g + 0.044715f * g * g * g) : g;  // 2 sqrt(2 / pi)
    store_bf16(to + i, g / (1.0f + exp(-u)) * up);
  }
}

// Rotary embedding as Hugging Face has it: element i turns with element i + head_dim / 2.
void rotate(const float *x, const float *rotation, bf16 *to, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i++) {
    const float c = rotation[i], s = rotation[half + i];
    to[i] = to_bf16(x[i] * c - x[i + half] * s);
    to[i + half] = to_bf16(x[i + half] * c + x[i] * s);
  }
}

class Pass {
 public:
  Pass(const Model &m, const Batch &b, Scratch &s) : m(m), b(b), s(s) {
    heads_size = m.num_heads * m.head_dim;
    kv_size = m.num_kv_heads * m.head_dim;
    qkv_stride = padded(heads_size + 2 * kv_size);
    gate_up_stride = padded(2 * m.intermediate);
  }

  bool stopped = false;  // between two layers: there are no logits

  // By every thread of the team.
  void run(float *logits) {
    each(b.num_tokens, [&](int t) { embed(m, b.token_ids[t], hidden(t)); });
    for (int l = 0; l < m.num_layers; l++) {
      if (thread() == 0 && b.control) look(*b.control, l);
      if (!layer(l, m.layers[l])) return;
    }
    each(b.num_samples, [&](int i) {
      rms_norm(m, hidden(b.sample_rows[i]), m.final_norm, &s.normed[size_t(i) * m.hidden]);
    });
    multiply(m.lm_head, s.normed.data(), logits, b.num_samples, m.hidden, m.vocab);
  }

 private:
  const Model &m;
  const Batch &b;
  Scratch &s;
  int heads_size, kv_size, qkv_stride, gate_up_stride;

  float *hidden(int token) { return &s.hidden[size_t(token) * m.hidden]; }

  float *product(int token) { return &s.product[size_t(token) * padded(m.hidden)]; }

  void look(Control &control, int l) {
    __atomic_store_n(&control.layers_done, l, __ATOMIC_RELAXED);
    stopped = __atomic_load_n(&control.stop, __ATOMIC_RELAXED) != 0;
  }

  // False: stopped before it. All threads see the same: they read behind a barrier what one wrote before it, and the
  // next write comes behind further barriers.
  bool layer(int l, const Layer &w) {
    const int T = b.num_tokens;
    each(T, [&](int t) { rms_norm(m, hidden(t), w.input_norm, &s.normed[size_t(t) * m.hidden]); });
    if (stopped) return false;
    multiply(w.qkv, s.normed.data(), s.product.data(), T, m.hidden, heads_size + 2 * kv_size);
    store_kv(l, w);
    attention(l, w.window);
    multiply(w.attention_out, s.mixed.data(), s.product.data(), T, heads_size, m.hidden);
    each(T, [&](int t) {
      add(m, hidden(t), product(t), w.post_attention_norm);
      rms_norm(m, hidden(t), w.mlp_norm, &s.normed[size_t(t) * m.hidden]);
    });
    multiply(w.gate_up, s.normed.data(), s.product.data(), T, m.hidden, 2 * m.intermediate);
    each(T, [&](int t) { gate(m, &s.product[size_t(t) * gate_up_stride], &s.mixed[size_t(t) * m.intermediate]); });
    multiply(w.down, s.mixed.data(), s.product.data(), T, m.intermediate, m.hidden);
    each(T, [&](int t) { add(m, hidden(t), product(t), w.post_mlp_norm); });
    return true;
  }

  void store_kv(int l, const Layer &w) {
    const int T = b.num_tokens;
#pragma omp for schedule(static)
    for (int t = 0; t < T; t++) {
      const int32_t *after = std::upper_bound(b.query_starts, b.query_starts + b.num_sequences, t);
      const int sequence = int(after - b.query_starts) - 1;
      const int position = int(b.positions[t]);
      float *x = &s.product[size_t(t) * qkv_stride];
      const float *rotation = b.rotations[w.rotation] + size_t(position) * m.head_dim;
      if (w.qkv_bias)
        for (int i = 0; i < heads_size + 2 * kv_size; i += LANES)
          store(x + i, load<Floats>(x + i) + load_bf16(w.qkv_bias + i));
      for (int h = 0; h < m.num_heads; h++) {
        norm_head(w.q_norm, x + h * m.head_dim);
        rotate(x + h * m.head_dim, rotation, &s.queries[size_t(t) * heads_size + h * m.head_dim], m.head_dim);
      }
      for (int h = 0; h < m.num_kv_heads; h++) {
        float *key = x + heads_size + h * m.head_dim;
        norm_head(w.k_norm, key);
        rotate(key, rotation, slot(m, b, l, 0, h, sequence, position), m.head_dim);
        bf16 *value = slot(m, b, l, 1, h, sequence, position);
        const float *v = key + kv_size;
        for (int i = 0; i < m.head_dim; i += LANES) store_bf16(value + i, load<Floats>(v + i));
      }
    }
  }

  void norm_head(const bf16 *weight, float *x) {
    if (weight) rms_norm(m, x, weight, m.head_dim, [&](int i, Floats normed) { store(x + i, normed); });
  }

  void attention(int l, int window) {
    const int num_items = int(s.items.size()), group = m.num_heads / m.num_kv_heads;
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < num_items; i++) {
      const Item &item = s.items[i];
      const int first = b.query_starts[item.sequence] + item.first_query;
      const size_t at = size_t(first) * heads_size;
      const Context kv = context_of(b.pool, b.tables + b.table_starts[item.sequence], m.num_layers, l, m.num_kv_heads,
                                    b.block_size, m.head_dim);
      const Queries of = {&s.queries[at], &s.mixed[at], size_t(heads_size), item.num_queries, int(b.positions[first]),
                          item.first_head, item.last_head, group, window, m.scale};
      attend(kv, of, s.attention[thread()]);
    }
  }

  // y [rows][padded(outputs)] = x [rows][columns] W^T. y is there for all threads when this returns.
  void multiply(const void *w, const bf16 *x, float *y, int rows, int columns, int outputs) {
    if (rows == 0) return;
    // Each thread packs whole steps, so that none of them is cut.
    each((rows + MAX_ROWS - 1) / MAX_ROWS, [&](int i) {
      const size_t first = size_t(i) * MAX_ROWS;
      const int n = std::min(MAX_ROWS, rows - int(first));
      if (m.int8)
        pack_rows_int8(x + first * columns, &s.quads[first * (columns / 4)], &s.row_scales[first], n, columns);
      else
        pack_rows(x + first * columns, &s.pairs[first * (columns / 2)], n, columns);
    });
    const int tiles = padded(outputs) / TILE, n = threads();
    each(n, [&](int i) {
      const int first = int(int64_t(tiles) * i / n), last = int(int64_t(tiles) * (i + 1) / n);
      const size_t stride = padded(outputs);
      if (m.int8) {
        const Int8Step step = {
            int8_weight(w, outputs, columns), s.quads.data(), s.row_scales.data(), y, columns, stride};
        for_each_tile(rows, sizeof(Quad) * columns / 4, first, last, step);
      } else {
        const Bf16Step step = {(const bf16 *)w, s.pairs.data(), y, columns, stride};
        for_each_tile(rows, sizeof(Pair) * columns / 2, first, last, step);
      }
    });
  }

  template <class Work> void each(int n, Work work) {
#pragma omp for schedule(static)
    for (int i = 0; i < n; i++) work(i);
  }

  static int thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
  }

  static int threads() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
  }
};

void prepare(const Model &m, const Batch &b, Scratch &s, int threads) {
  const size_t T = b.num_tokens, heads = size_t(m.num_heads) * m.head_dim;
  const int widest = std::max({int(heads) + 2 * m.num_kv_heads * m.head_dim, 2 * m.intermediate, m.hidden});
  const size_t most_inputs = std::max({size_t(m.hidden), heads, size_t(m.intermediate)});
  s.hidden.resize(T * m.hidden);
  s.normed.resize(T * m.hidden);
  s.product.resize(T * padded(widest));
  s.mixed.resize(T * std::max(heads, size_t(m.intermediate)));
  s.queries.resize(T * heads);
  (m.int8 ? s.quads.resize((T + MAX_ROWS) * most_inputs / 4) : s.pairs.resize((T + MAX_ROWS) * most_inputs / 2));
  s.row_scales.resize(T);
  s.attention.resize(threads);
  s.items.clear();
  // One item reads a block's heads one after the other, as they lie; with several threads each takes some of the heads.
  const int heads_of_item = (m.num_kv_heads + threads - 1) / threads;
  for (int i = 0; i < b.num_sequences; i++) {
    const int n = b.query_starts[i + 1] - b.query_starts[i];
    // From the back: the last queries have the most to read, and what is left at the end of a loop should be short.
    for (int q = (n - 1) / QUERIES * QUERIES; q >= 0; q -= QUERIES)
      for (int h = 0; h < m.num_kv_heads; h += heads_of_item)
        s.items.push_back({i, q, std::min(QUERIES, n - q), h, std::min(h + heads_of_item, m.num_kv_heads)});
  }
}

}  // namespace

extern "C" {

const char *kv_instruction_set() {
#if defined(KV_BF16_DOT)
  return "avx512_bf16";
#elif defined(KV_AVX512)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "baseline";
#endif
}

// See linear.h and linear_int8.h.
void kv_pack_weight(const bf16 *from, void *to, int32_t rows, int32_t columns, int32_t int8) {
  if (int8)
    pack_weight_int8(from, to, rows, columns);
  else
    pack_weight(from, (bf16 *)to, rows, columns);
}

// For tests: y [rows][padded(outputs)] = x [rows][columns] W^T.
void kv_linear(const void *w, const bf16 *x, float *y, int32_t rows, int32_t columns, int32_t outputs, int32_t int8) {
  const int tiles = padded(outputs) / TILE;
  if (int8) {
    std::vector<Quad> quads(size_t(rows) * columns / 4);
    std::vector<float> scales(rows);
    pack_rows_int8(x, quads.data(), scales.data(), rows, columns);
    const Int8Step step = {
        int8_weight(w, outputs, columns), quads.data(), scales.data(), y, columns, size_t(padded(outputs))};
    for_each_tile(rows, sizeof(Quad) * columns / 4, 0, tiles, step);
  } else {
    std::vector<Pair> pairs(size_t(rows) * columns / 2);
    pack_rows(x, pairs.data(), rows, columns);
    const Bf16Step step = {(const bf16 *)w, pairs.data(), y, columns, size_t(padded(outputs))};
    for_each_tile(rows, sizeof(Pair) * columns / 2, 0, tiles, step);
  }
}

// For tests: one layer's attention. q and out [queries][heads][head_dim], all queries of one sequence.
void kv_attention(const bf16 *q, bf16 *out, const bf16 *pool, const int32_t *table, const AttentionShape *of,
                  float scale) {
  AttentionScratch scratch;
  const size_t stride = size_t(of->num_heads) * of->head_dim;
  const Context kv =
      context_of(pool, table, of->num_layers, of->layer, of->num_kv_heads, of->block_size, of->head_dim);
  for (int first = 0; first < of->num_queries; first += QUERIES) {
    const int count = std::min(QUERIES, of->num_queries - first), group = of->num_heads / of->num_kv_heads;
    const int position = of->context_len - of->num_queries + first;
    const Queries queries = {q + first * stride, out + first * stride, stride, count, position, 0, of->num_kv_heads,
                             group, of->window, scale};
    attend(kv, queries, scratch);
  }
}

void *kv_scratch_new() { return new Scratch(); }

void kv_scratch_delete(void *scratch) { delete static_cast<Scratch *>(scratch); }

// logits: [num_samples][vocab, rounded up to 32]. 0: the control said stop.
int32_t kv_forward(const Model *model, const Batch *batch, void *scratch, float *logits, int32_t num_threads) {
  Scratch &s = *static_cast<Scratch *>(scratch);
  prepare(*model, *batch, s, num_threads);
  Pass pass(*model, *batch, s);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  pass.run(logits);
  return !pass.stopped;
}
}
