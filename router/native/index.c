/* The router's prefix index: which slots hold which keys. `router/native/index.py` is its only caller and the place of
   everything that is rare; `router/reference_index.py` is the same in Python.

   Knows no Python, no clock and no threads: one at a time may call. What comes from outside is checked here or, where
   that says so, before. */

#include "key_sets.h"

enum { OK, NO_MEMORY, BAD_KEY };
enum { RESIDENT, NUM_TABLES = 3, BATCH = 32, DROP_SHARE = 8, MAX_MATCHES = 32, MAX_PROBES = 256 };
enum { SHORT_BITS = 60, LEAST_SHARE = 64 };

struct index {
    struct table tables[NUM_TABLES]; /* what is resident; what was dispatched in even and in odd periods */
    struct sets sets;
    lanes alive;
    uint64_t max_keys, max_speculative, evictions;
    uint64_t share; /* of a shard, of `max_keys` */
    uint32_t period; /* the tables of dispatched work are of this one and the one before */
    uint32_t next_eviction;
    lanes *states; /* scratch of a prompt's hashing */
    size_t num_states;
};

/* The keys of one prompt: packed, or hashed when they are asked for. */
struct prompt {
    const uint8_t *packed;
    struct hashed own, common; /* under the tenant's scope, and of the public tokens */
    size_t start, common_start, step, num_common;
};

static struct table *dispatched(struct index *x, uint32_t period) { return x->tables + 1 + period % 2; }

void kvrelay_index_free(struct index *x) {
    if (!x) return;
    for (int i = 0; i < NUM_TABLES; i++)
        for (int n = 0; n < NUM_SHARDS; n++) free(x->tables[i].shards[n].entries);
    for (uint64_t i = 0; x->sets.chunks && i < x->sets.num_sets / SETS_PER_CHUNK; i++) free(x->sets.chunks[i]);
    free(x->sets.chunks);
    free(x->states);
    free(x);
}

/* NULL without memory. `secrets`: four random numbers. */
struct index *kvrelay_index_new(uint64_t max_keys, uint64_t max_speculative, const uint64_t *secrets) {
    struct index *const x = aligned_alloc(_Alignof(struct index), sizeof *x);
    if (!x) return NULL;
    memset(x, 0, sizeof *x);
    const uint64_t num_chunks = (max_keys + 4 * max_speculative) / SETS_PER_CHUNK + 2;
    x->sets.chunks = calloc(num_chunks, sizeof *x->sets.chunks);
    if (!x->sets.chunks) {
        kvrelay_index_free(x);
        return NULL;
    }
    x->sets.max_sets = num_chunks * SETS_PER_CHUNK;
    x->sets.num_bytes = sizeof *x + num_chunks * sizeof *x->sets.chunks;
    memcpy(x->sets.secrets, secrets, sizeof x->sets.secrets);
    x->max_keys = max_keys, x->share = max_keys / NUM_SHARDS, x->max_speculative = max_speculative;
    x->period = 2;
    dispatched(x, x->period)->period = x->period;
    dispatched(x, x->period + 1)->period = x->period - 1;
    return x;
}

void kvrelay_index_set_alive(struct index *x, const uint8_t *bits) { memcpy(&x->alive, bits, sizeof x->alive); }

/* The age in the shard that `count` of its entries have at least; `count` is at least 1 and at most the shard's. */
static uint32_t age_of_oldest(const struct shard *shard, uint32_t count) {
    uint32_t prefix = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint32_t numbers[256] = {0}, digit = 255;
        for (uint32_t i = 0; i <= shard->mask; i++) {
            const uint32_t age = shard->clock - shard->entries[i].used;
            if (shard->entries[i].set && (age & known) == prefix) numbers[age >> shift & 255]++;
        }
        for (; numbers[digit] < count; digit--) count -= numbers[digit];
        prefix |= digit << shift, known |= 255u << shift;
    }
    return prefix;
}

/* Drop the keys of a shard that were used longest ago. */
static void evict_from(struct index *x, struct shard *shard) {
    if (!shard->count) return;
    const uint32_t least = age_of_oldest(shard, shard->count / DROP_SHARE + 1);
    for (uint32_t i = 0; i <= shard->mask;) {
        struct entry *const entry = shard->entries + i;
        if (entry->set && shard->clock - entry->used >= least) {
            erase(&x->sets, x->tables + RESIDENT, shard, entry); /* another may be there now */
            x->evictions++;
        } else {
            i++;
        }
    }
}

static void evict(struct index *x) {
    struct table *const t = x->tables + RESIDENT;
    for (; t->count > x->max_keys; x->next_eviction = (x->next_eviction + 1) % NUM_SHARDS)
        evict_from(x, t->shards + x->next_eviction);
}

static int store(struct index *x, uint32_t slot, uint64_t key, uint64_t hash, uint64_t change[2]) {
    struct table *const t = x->tables + RESIDENT;
    struct shard *const shard = shard_of(t, hash);
    struct entry *entry = find(t, key, hash);
    if (!entry) {
        /* One that has its share of all keys does not grow: in the long run each would do so once, by chance. */
        if (is_full(shard) && shard->count >= x->share && x->share >= LEAST_SHARE) evict_from(x, shard);
        if (!(entry = insert(&x->sets, t, key, hash))) return NO_MEMORY;
        entry->set = slot + 1;
    } else if (!holds(&x->sets, entry->set, slot)) {
        const uint32_t set = set_with(&x->sets, entry->set, slot, 1);
        if (set == FAILED) return NO_MEMORY;
        release(&x->sets, entry->set);
        entry->set = set;
    } else {
        use(shard, entry);
        return OK;
    }
    use(shard, entry);
    change[0] += key, change[1]++;
    return OK;
}

static int drop(struct index *x, uint32_t slot, uint64_t key, uint64_t hash, uint64_t change[2]) {
    struct table *const t = x->tables + RESIDENT;
    struct entry *const entry = find(t, key, hash);
    if (!entry || !holds(&x->sets, entry->set, slot)) return OK;
    const uint32_t set = entry->set <= MAX_SLOTS ? 0 : set_with(&x->sets, entry->set, slot, 0);
    if (set == FAILED) return NO_MEMORY;
    if (set) {
        release(&x->sets, entry->set);
        entry->set = set;
    } else {
        erase(&x->sets, t, shard_of(t, hash), entry);
    }
    change[0] -= key, change[1]--;
    return OK;
}

static int change_each(struct index *x, uint32_t slot, const uint8_t *keys, size_t count, int stored, uint64_t change[2]) {
    struct table *const t = x->tables + RESIDENT;
    for (size_t done = 0; done < count; done += BATCH) {
        const size_t n = count - done < BATCH ? count - done : BATCH;
        uint64_t key[BATCH], hash[BATCH];
        for (size_t i = 0; i < n; i++) {
            key[i] = get64(keys + 8 * (done + i));
            hash[i] = mixed(&x->sets, key[i]);
            const struct shard *const shard = shard_of(t, hash[i]);
            if (shard->entries) __builtin_prefetch(shard->entries + home_of(shard, hash[i]), 1);
        }
        for (size_t i = 0; i < n; i++) {
            const int outcome = (stored ? store : drop)(x, slot, key[i], hash[i], change);
            if (outcome != OK) return outcome;
        }
        evict(x);
    }
    return OK;
}

static int keys_fit(const uint8_t *keys, size_t count) {
    uint64_t all = 0;
    for (size_t i = 0; i < count; i++) all |= get64(keys + 8 * i);
    return all >> SHORT_BITS == 0;
}

/* `slot` holds `num_removed` keys no more and `num_stored` from now on. `change`: what that changed, as the sum of keys
   gained less that of keys lost, modulo 2^64, and their number. BAD_KEY changes nothing, NO_MEMORY comes in the
   middle. */
int kvrelay_index_apply(struct index *x, uint32_t slot, const uint8_t *removed, size_t num_removed, const uint8_t *stored,
                        size_t num_stored, uint64_t change[2]) {
    change[0] = change[1] = 0;
    if (!keys_fit(removed, num_removed) || !keys_fit(stored, num_stored)) return BAD_KEY;
    const int outcome = change_each(x, slot, removed, num_removed, 0, change);
    return outcome == OK ? change_each(x, slot, stored, num_stored, 1, change) : outcome;
}

/* What was dispatched lately is old now, what was old is void. */
void kvrelay_index_turn_period(struct index *x) {
    x->period++;
    struct table *const newer = dispatched(x, x->period);
    newer->period = x->period, newer->count = 0;
}

int kvrelay_index_speculate(struct index *x, uint32_t slot, const uint8_t *keys, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const uint64_t key = get64(keys + 8 * i), hash = mixed(&x->sets, key);
        struct entry *const known = find(x->tables + RESIDENT, key, hash);
        if (known) use(shard_of(x->tables + RESIDENT, hash), known);
        if (dispatched(x, x->period)->count >= x->max_speculative) kvrelay_index_turn_period(x);
        struct table *const t = dispatched(x, x->period);
        struct shard *const shard = current(&x->sets, t, hash);
        struct entry *entry = shard->count ? find(t, key, hash) : NULL;
        const uint32_t before = entry ? entry->set : 0;
        const uint32_t set = holds(&x->sets, before, slot) ? before : set_with(&x->sets, before, slot, 1);
        if (set == before) continue;
        if (set == FAILED || (!entry && !(entry = insert(&x->sets, t, key, hash)))) return NO_MEMORY;
        release(&x->sets, before);
        entry->set = set;
    }
    return OK;
}

/* Who of `among` holds a key, or is expected to: 0 for nobody. */
static int holders(struct index *x, uint64_t key, const lanes *among, lanes *held) {
    const uint64_t hash = mixed(&x->sets, key);
    *held = (lanes){0};
    for (int i = 0; i < NUM_TABLES; i++) {
        const struct entry *const entry = x->tables[i].count ? find(x->tables + i, key, hash) : NULL;
        if (!entry) continue;
        lanes words;
        words_of(&x->sets, entry->set, &words);
        *held |= words;
    }
    *held &= *among;
    return any(held);
}

static uint64_t key_at(struct prompt *p, size_t num_blocks) {
    if (p->packed) return get64(p->packed + 8 * (num_blocks - 1));
    if (num_blocks <= p->num_common) return key_of(&p->common, p->common_start + num_blocks * p->step);
    return key_of(&p->own, p->start + num_blocks * p->step);
}

struct match {
    uint64_t num_blocks;
    uint64_t slots[WORDS];
};

/* As `router.prefix_index.search`. Returns how many matches there are. */
static int search(struct index *x, struct prompt *prompt, size_t num_blocks, struct match *found) {
    struct {
        size_t depth;
        lanes holders;
    } probed[MAX_PROBES];
    int num_probed = 0, num_found = 0;
    size_t limit = num_blocks + 1;
    lanes rest;
    if (!num_blocks || !holders(x, key_at(prompt, 1), &x->alive, &rest)) return 0;
    while (num_found < MAX_MATCHES) {
        size_t low = 1, high = limit;
        lanes there = rest;
        for (int i = 0; i < num_probed; i++) {
            const lanes left = probed[i].holders & rest;
            if (!any(&left)) {
                if (probed[i].depth < high) high = probed[i].depth;
            } else if (probed[i].depth > low) {
                low = probed[i].depth, there = left;
            }
        }
        while (high > low + 1) { /* with holes in what is held, `high` may be the lower one */
            const size_t middle = low + (high - low) / 2;
            lanes held;
            const int held_by_some = holders(x, key_at(prompt, middle), &rest, &held);
            if (num_probed < MAX_PROBES) probed[num_probed].depth = middle, probed[num_probed++].holders = held;
            if (held_by_some) low = middle, there = held;
            else high = middle;
        }
        found[num_found].num_blocks = low;
        memcpy(found[num_found++].slots, &there, sizeof there);
        rest &= ~there;
        if (!any(&rest)) break;
        limit = low;
    }
    return num_found;
}

/* The caller has made sure that the keys are there. */
int kvrelay_index_lookup_packed(struct index *x, const uint8_t *keys, size_t num_blocks, struct match *found) {
    struct prompt prompt = {.packed = keys};
    return search(x, &prompt, num_blocks, found);
}

/* Room for the states of both prefixes; 0 without memory. */
static int begin_prompt(struct index *x, struct prompt *p, const uint8_t *data, size_t length, const uint8_t *common,
                        size_t common_length, uint64_t seed) {
    const size_t own_states = states_of(length), needed = own_states + states_of(common_length);
    if (needed > x->num_states) {
        lanes *const states = aligned_alloc(sizeof *states, needed * sizeof *states);
        if (!states) return 0;
        free(x->states);
        x->states = states, x->num_states = needed;
    }
    begin_hashing(&p->own, data, seed, x->states);
    if (p->num_common) begin_hashing(&p->common, common, seed, x->states + own_states);
    return 1;
}

/* Block n ends `n * step` bytes after `start` in `data`, and the first `num_common` of them in `common`. The caller has
   made sure that the bytes are there. Returns how many matches there are; less than 0 without memory. */
int kvrelay_index_lookup(struct index *x, const uint8_t *data, size_t start, size_t step, size_t num_blocks,
                         const uint8_t *common, size_t common_start, size_t num_common, uint64_t seed,
                         struct match *found) {
    struct prompt p = {.start = start, .common_start = common_start, .step = step, .num_common = num_common};
    if (!begin_prompt(x, &p, data, start + num_blocks * step, common, common_start + num_common * step, seed)) return -1;
    return search(x, &p, num_blocks, found);
}

/* The same prompt's keys, in order, to `keys`. */
int kvrelay_index_keys(struct index *x, const uint8_t *data, size_t start, size_t step, size_t num_blocks,
                       const uint8_t *common, size_t common_start, size_t num_common, uint64_t seed, uint64_t *keys) {
    struct prompt p = {.start = start, .common_start = common_start, .step = step, .num_common = num_common};
    if (!begin_prompt(x, &p, data, start + num_blocks * step, common, common_start + num_common * step, seed)) return -1;
    for (size_t n = 1; n <= num_blocks; n++) keys[n - 1] = key_at(&p, n);
    return 0;
}

/* Take the bits of dead slots out of one shard of each table. */
void kvrelay_index_sweep(struct index *x, uint32_t number, const uint8_t *dead) {
    lanes gone;
    memcpy(&gone, dead, sizeof gone);
    for (int table = 0; table < NUM_TABLES; table++) {
        struct table *const t = x->tables + table;
        struct shard *const shard = t->shards + number % NUM_SHARDS;
        if (shard->period != t->period) clear(&x->sets, shard), shard->period = t->period;
        for (uint32_t i = 0; shard->entries && i <= shard->mask;) {
            struct entry *const entry = shard->entries + i;
            lanes words;
            words_of(&x->sets, entry->set, &words);
            const lanes left = words & ~gone;
            if (memcmp(&left, &words, sizeof left) == 0) {
                i++;
                continue;
            }
            const uint32_t set = set_of(&x->sets, &left);
            if (set == FAILED) x->evictions++; /* better forgotten than wrong */
            if (set && set != FAILED) {
                release(&x->sets, entry->set);
                entry->set = set;
                i++;
            } else {
                erase(&x->sets, t, shard, entry);
            }
        }
    }
}

/* Give memory of one shard of each table back, if it holds far less than it could. */
void kvrelay_index_pack(struct index *x, uint32_t number) {
    for (int table = 0; table < NUM_TABLES; table++) {
        struct table *const t = x->tables + table;
        struct shard *const shard = t->shards + number % NUM_SHARDS;
        if (shard->period != t->period) clear(&x->sets, shard), shard->period = t->period;
        if (!shard->count) {
            clear(&x->sets, shard);
            continue;
        }
        uint32_t capacity = shard->mask + 1;
        while (capacity > FIRST_CAPACITY && 16 * (uint64_t)shard->count < 3 * (uint64_t)capacity) capacity /= 2;
        if (capacity <= shard->mask) resize(&x->sets, shard, capacity); /* without memory it stays wide */
    }
}

/* Resident keys, dispatched ones of the newer and the older period, bytes, evictions. */
void kvrelay_index_stats(const struct index *x, uint64_t stats[5]) {
    for (int i = 0; i < NUM_TABLES; i++) stats[i] = x->tables[i].count;
    stats[3] = x->sets.num_bytes + x->num_states * sizeof *x->states;
    stats[4] = x->evictions;
}

/* The resident keys of `slot`, up to `room` of them to `keys`; returns how many there are. */
uint64_t kvrelay_index_resident(const struct index *x, uint32_t slot, uint64_t *keys, uint64_t room) {
    uint64_t count = 0;
    for (int number = 0; number < NUM_SHARDS; number++) {
        const struct shard *const shard = x->tables[RESIDENT].shards + number;
        for (uint32_t i = 0; shard->entries && i <= shard->mask; i++) {
            if (!shard->entries[i].set || !holds(&x->sets, shard->entries[i].set, slot)) continue;
            if (count < room) keys[count] = shard->entries[i].key;
            count++;
        }
    }
    return count;
}

#include "index_check.h"
