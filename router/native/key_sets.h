/* Hash tables from keys to sets of slots, with bounded pauses: 1,024 shards, each of which grows, shrinks and is swept alone.

   A shard is probed linearly, at most three quarters full. Keys are mixed with secrets of the process, so nobody who sends
   keys can choose which ones meet in a chain. A set is a number: 0 none, to 512 the one slot below it, above that a bitmap
   that equal sets may share. A failed allocation leaves everything as it was. */

#ifndef KVRELAY_KEY_SETS_H
#define KVRELAY_KEY_SETS_H

#include <stdlib.h>

#include "prefix_keys.h"

enum { NUM_SHARDS = 1024, MAX_SLOTS = 512, WORDS = MAX_SLOTS / 64, FIRST_CAPACITY = 4 };
enum { SETS_PER_CHUNK = 1024, NUM_RECENT = 8192 };
enum { FAILED = UINT32_MAX };

struct entry {
    uint64_t key;
    uint32_t set; /* 0: the entry is free */
    uint32_t used; /* the shard's clock when it was used last */
};

struct shard {
    struct entry *entries;
    uint32_t mask; /* capacity - 1; 0: no entries */
    uint32_t count;
    uint32_t clock;
    uint32_t period; /* of another period than its table: what is in it does not count */
};

struct table {
    struct shard shards[NUM_SHARDS];
    uint64_t count;
    uint32_t period;
};

struct set {
    uint64_t words[WORDS];
    uint32_t references; /* 0: free */
    uint32_t next_free;
};

struct sets {
    struct set **chunks;
    uint64_t max_sets, num_sets;
    uint32_t free; /* head of a list */
    uint32_t recent[NUM_RECENT]; /* by hash: who asks for an equal set gets the same */
    uint64_t secrets[4];
    uint64_t num_bytes; /* allocated by all of it, and by the tables */
};

INLINE uint64_t mixed(const struct sets *s, uint64_t key) {
    return fold(fold(key ^ s->secrets[0], s->secrets[1]) ^ s->secrets[2], s->secrets[3]);
}

INLINE int any(const lanes *words) {
    uint64_t all = 0;
    for (int i = 0; i < WORDS; i++) all |= (*words)[i];
    return all != 0;
}

INLINE struct set *set_at(const struct sets *s, uint32_t id) {
    const uint32_t number = id - MAX_SLOTS - 1;
    return s->chunks[number / SETS_PER_CHUNK] + number % SETS_PER_CHUNK;
}

INLINE int holds(const struct sets *s, uint32_t id, uint32_t slot) {
    if (id <= MAX_SLOTS) return id == slot + 1;
    return set_at(s, id)->words[slot / 64] >> (slot % 64) & 1;
}

INLINE void words_of(const struct sets *s, uint32_t id, lanes *words) {
    if (id > MAX_SLOTS) {
        memcpy(words, set_at(s, id)->words, sizeof *words);
        return;
    }
    *words = (lanes){0};
    if (id) (*words)[(id - 1) / 64] = 1ull << (id - 1) % 64;
}

INLINE void retain(struct sets *s, uint32_t id) {
    if (id > MAX_SLOTS) set_at(s, id)->references++;
}

INLINE void release(struct sets *s, uint32_t id) {
    if (id <= MAX_SLOTS) return;
    struct set *const set = set_at(s, id);
    if (--set->references) return;
    set->next_free = s->free;
    s->free = id;
}

static uint32_t new_set(struct sets *s, const lanes *words) {
    if (!s->free) {
        if (s->num_sets + SETS_PER_CHUNK > s->max_sets) return FAILED;
        struct set *const chunk = malloc(SETS_PER_CHUNK * sizeof *chunk);
        if (!chunk) return FAILED;
        s->num_bytes += SETS_PER_CHUNK * sizeof *chunk;
        s->chunks[s->num_sets / SETS_PER_CHUNK] = chunk;
        for (uint32_t i = 0; i < SETS_PER_CHUNK; i++) {
            chunk[i].references = 0;
            chunk[i].next_free = s->free;
            s->free = (uint32_t)s->num_sets + i + MAX_SLOTS + 1;
        }
        s->num_sets += SETS_PER_CHUNK;
    }
    const uint32_t id = s->free;
    struct set *const set = set_at(s, id);
    s->free = set->next_free;
    memcpy(set->words, words, sizeof *words);
    set->references = 1;
    return id;
}

/* The set with these members, to be released by the caller; FAILED without memory. */
static uint32_t set_of(struct sets *s, const lanes *words) {
    uint64_t hash = 0;
    int count = 0, last = 0;
    for (int i = 0; i < WORDS; i++) {
        const uint64_t word = (*words)[i];
        if (!word) continue;
        count += __builtin_popcountll(word), last = i;
        hash = fold(hash ^ word ^ s->secrets[0], s->secrets[1] + (uint64_t)i);
    }
    if (count < 2) return count ? (uint32_t)(64 * last + __builtin_ctzll((*words)[last]) + 1) : 0;
    uint32_t *const recent = s->recent + hash % NUM_RECENT;
    if (*recent) {
        struct set *const set = set_at(s, *recent);
        if (set->references && memcmp(set->words, words, sizeof *words) == 0) {
            set->references++;
            return *recent;
        }
    }
    const uint32_t id = new_set(s, words);
    if (id != FAILED) *recent = id;
    return id;
}

/* `id` with a slot more or less: another set, to be released by the caller. */
static uint32_t set_with(struct sets *s, uint32_t id, uint32_t slot, int there) {
    if (!id) return slot + 1;
    lanes words;
    words_of(s, id, &words);
    const uint64_t bit = 1ull << slot % 64;
    if (there) words[slot / 64] |= bit;
    else words[slot / 64] &= ~bit;
    return set_of(s, &words);
}

INLINE struct shard *shard_of(struct table *t, uint64_t hash) { return t->shards + hash % NUM_SHARDS; }

INLINE uint32_t home_of(const struct shard *shard, uint64_t hash) { return (uint32_t)(hash / NUM_SHARDS) & shard->mask; }

/* Where the key is, or would be put; the shard has entries. */
INLINE struct entry *place_of(const struct shard *shard, uint64_t key, uint64_t hash) {
    uint32_t i = home_of(shard, hash);
    while (shard->entries[i].set && shard->entries[i].key != key) i = (i + 1) & shard->mask;
    return shard->entries + i;
}

INLINE struct entry *find(struct table *t, uint64_t key, uint64_t hash) {
    struct shard *const shard = shard_of(t, hash);
    if (!shard->count || shard->period != t->period) return NULL;
    struct entry *const entry = place_of(shard, key, hash);
    return entry->set ? entry : NULL;
}

INLINE void use(struct shard *shard, struct entry *entry) {
    if (shard->clock == UINT32_MAX) {
        for (uint32_t i = 0; i <= shard->mask; i++) shard->entries[i].used /= 2;
        shard->clock /= 2;
    }
    entry->used = ++shard->clock;
}

static int resize(struct sets *s, struct shard *shard, uint32_t capacity) {
    struct entry *const entries = calloc(capacity, sizeof *entries), *const old = shard->entries;
    if (!entries) return 0;
    const uint32_t old_capacity = old ? shard->mask + 1 : 0;
    shard->entries = entries, shard->mask = capacity - 1;
    for (uint32_t i = 0; i < old_capacity; i++)
        if (old[i].set) *place_of(shard, old[i].key, mixed(s, old[i].key)) = old[i];
    free(old);
    s->num_bytes += (capacity - (uint64_t)old_capacity) * sizeof *entries;
    return 1;
}

/* Whether one key more makes it grow. */
INLINE int is_full(const struct shard *shard) {
    const uint64_t capacity = shard->entries ? shard->mask + 1ull : 0;
    return 4 * (shard->count + 1ull) > 3 * capacity;
}

/* An entry for a key that the shard has not; its set is still to be filled in. NULL without memory. */
static struct entry *insert(struct sets *s, struct table *t, uint64_t key, uint64_t hash) {
    struct shard *const shard = shard_of(t, hash);
    const uint32_t capacity = shard->entries ? 2 * (shard->mask + 1) : FIRST_CAPACITY;
    if (is_full(shard) && !resize(s, shard, capacity)) return NULL;
    struct entry *const entry = place_of(shard, key, hash);
    entry->key = key;
    shard->count++, t->count++;
    return entry;
}

/* Later entries of the chain move up. */
static void erase(struct sets *s, struct table *t, struct shard *shard, struct entry *entry) {
    const uint32_t mask = shard->mask;
    struct entry *const entries = shard->entries;
    uint32_t hole = (uint32_t)(entry - entries);
    release(s, entry->set);
    for (uint32_t i = (hole + 1) & mask; entries[i].set; i = (i + 1) & mask) {
        const uint32_t home = home_of(shard, mixed(s, entries[i].key));
        if (((i - home) & mask) < ((i - hole) & mask)) continue;
        entries[hole] = entries[i];
        hole = i;
    }
    entries[hole].set = 0;
    shard->count--, t->count--;
}

static void clear(struct sets *s, struct shard *shard) {
    if (shard->entries) {
        for (uint32_t i = 0; i <= shard->mask; i++) release(s, shard->entries[i].set);
        s->num_bytes -= (shard->mask + 1ull) * sizeof *shard->entries;
        free(shard->entries);
    }
    *shard = (struct shard){.period = shard->period};
}

/* What is left of another period goes. */
INLINE struct shard *current(struct sets *s, struct table *t, uint64_t hash) {
    struct shard *const shard = shard_of(t, hash);
    if (shard->period != t->period) {
        clear(s, shard);
        shard->period = t->period;
    }
    return shard;
}

#endif
