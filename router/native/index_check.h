/* The invariants of an index, for tests. */

#ifndef KVRELAY_INDEX_CHECK_H
#define KVRELAY_INDEX_CHECK_H

enum { LONGEST_CHAIN = 400 }; /* what chance cannot make */

static const char *check_shard(const struct index *x, struct table *t, uint32_t number, const lanes *known, uint32_t *references) {
    const struct shard *const shard = t->shards + number;
    uint32_t count = 0;
    for (uint32_t i = 0; shard->entries && i <= shard->mask; i++) {
        struct entry *const entry = shard->entries + i;
        if (!entry->set) continue;
        if (entry->set > MAX_SLOTS) references[entry->set - MAX_SLOTS - 1]++;
        count++;
        const uint64_t hash = mixed(&x->sets, entry->key);
        if (hash % NUM_SHARDS != number) return "a key is in the wrong shard";
        if (((i - home_of(shard, hash)) & shard->mask) > LONGEST_CHAIN) return "a chain is too long";
        if (place_of(shard, entry->key, hash) != entry) return "a key is not where it is looked for";
        lanes words;
        words_of(&x->sets, entry->set, &words);
        if (!any(&words)) return "a set is empty";
        words &= ~*known;
        if (shard->period == t->period && any(&words)) return "a set has bits of unknown slots";
        if (entry->used > shard->clock) return "a key was used in the future";
    }
    if (count != shard->count) return "a shard counts wrongly";
    return shard->entries && 4 * (uint64_t)count > 3 * (shard->mask + 1ull) ? "a shard is too full" : NULL;
}

static const char *check_sets(const struct sets *s, const uint32_t *references) {
    uint64_t num_free = 0, num_listed = 0;
    for (uint64_t i = 0; i < s->num_sets; i++) {
        const struct set *const set = set_at(s, (uint32_t)i + MAX_SLOTS + 1);
        if (set->references != references[i]) return "a set has another number of references";
        num_free += set->references == 0;
    }
    for (uint32_t id = s->free; id; id = set_at(s, id)->next_free) num_listed++;
    return num_free == num_listed ? NULL : "the list of free sets is wrong";
}

/* What does not hold, or NULL. `known`: the slots that may be in sets. */
const char *kvrelay_index_check(struct index *x, const uint8_t *known) {
    lanes slots;
    memcpy(&slots, known, sizeof slots);
    uint32_t *const references = calloc(x->sets.num_sets + 1, sizeof *references);
    if (!references) return "no memory for the check";
    const char *wrong = NULL;
    for (int table = 0; table < NUM_TABLES && !wrong; table++) {
        struct table *const t = x->tables + table;
        uint64_t count = 0;
        for (uint32_t number = 0; number < NUM_SHARDS && !wrong; number++) {
            wrong = check_shard(x, t, number, &slots, references);
            if (t->shards[number].period == t->period) count += t->shards[number].count;
        }
        if (!wrong && count != t->count) wrong = "a table counts wrongly";
        if (!wrong && count > (table == RESIDENT ? x->max_keys : x->max_speculative)) wrong = "a table is over its limit";
    }
    if (!wrong) wrong = check_sets(&x->sets, references);
    free(references);
    return wrong;
}

#endif
