/* Short routing keys of a prompt's prefixes (`engine/routing_key.py` has the rule): the upper 60 bits of XXH3-128 with a
   seed, over the first bytes of `data`. The state after every 1,024 bytes is kept, so all keys that a search asks for cost
   one pass over the prompt. For inputs of 17 bytes or more; the caller has no others. */

#ifndef KVRELAY_PREFIX_KEYS_H
#define KVRELAY_PREFIX_KEYS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "for little-endian machines"
#endif

#define INLINE static inline __attribute__((always_inline))

enum { STRIPE = 64, STRIPES = 16, ROUND = STRIPE * STRIPES, SECRET_BYTES = 192, SHORT_SHIFT = 4 };
enum { SCRAMBLE_KEY = 128, LAST_KEY = 121, HIGH_KEY = 117 };

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9;
static const uint64_t P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5, PMX_1 = 0x165667919E3779F9;

static const uint64_t SECRET[SECRET_BYTES / 8] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

typedef uint64_t lanes __attribute__((vector_size(64)));

struct hashed {
    const uint8_t *data;
    uint64_t seed;
    uint8_t secret[SECRET_BYTES];
    lanes *states; /* after 0, 1, 2, ... rounds; room for those of the whole data */
    size_t num_states;
    lanes last; /* after `last_stripes` stripes: where the next, longer prefix goes on */
    size_t last_stripes;
};

INLINE uint64_t get64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

INLINE uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

INLINE uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= PMX_1;
    return h ^ h >> 32;
}

/* `count` stripes, from the secret's beginning plus 8 bytes for each. */
INLINE void accumulate(lanes *acc, const uint8_t *data, const uint8_t *key, size_t count) {
#if defined(__AVX2__) /* compilers do not see that one multiplication of 32 bits is enough */
    __m256i sums[2];
    memcpy(sums, acc, sizeof sums);
    for (; count; count--, data += STRIPE, key += 8) {
        for (int half = 0; half < 2; half++) {
            const __m256i value = _mm256_loadu_si256((const __m256i *)data + half);
            const __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)key + half));
            const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
            const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
        }
    }
    memcpy(acc, sums, sizeof sums);
#else
    for (; count; count--, data += STRIPE, key += 8) {
        for (int i = 0; i < 8; i++) {
            const uint64_t value = get64(data + 8 * i), mixed = value ^ get64(key + 8 * i);
            (*acc)[i ^ 1] += value;
            (*acc)[i] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
        }
    }
#endif
}

INLINE void scramble(lanes *acc, const uint8_t *secret) {
    lanes key;
    memcpy(&key, secret + SCRAMBLE_KEY, sizeof key);
    *acc = (*acc ^ (*acc >> 47) ^ key) * P32_1;
}

/* How many states `hashed` has room for with so many bytes. */
INLINE size_t states_of(size_t length) { return length / ROUND + 1; }

static void begin_hashing(struct hashed *h, const uint8_t *data, uint64_t seed, lanes *states) {
    h->data = data, h->seed = seed, h->states = states, h->num_states = 1, h->last_stripes = 0;
    for (int i = 0; i < SECRET_BYTES / 8; i++) {
        const uint64_t word = SECRET[i] + (i & 1 ? -seed : seed);
        memcpy(h->secret + 8 * i, &word, sizeof word);
    }
    states[0] = (lanes){P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
}

INLINE uint64_t mix16(const uint8_t *data, size_t secret, uint64_t seed) {
    const uint8_t *const key = (const uint8_t *)SECRET + secret;
    return fold(get64(data) ^ (get64(key) + seed), get64(data + 8) ^ (get64(key + 8) - seed));
}

INLINE void mix32(uint64_t acc[2], const uint8_t *first, const uint8_t *second, size_t secret, uint64_t seed) {
    acc[0] = (acc[0] + mix16(first, secret, seed)) ^ (get64(second) + get64(second + 8));
    acc[1] = (acc[1] + mix16(second, secret + 16, seed)) ^ (get64(first) + get64(first + 8));
}

/* The upper half for 17 to 240 bytes. */
static uint64_t high_of_few(const uint8_t *data, size_t length, uint64_t seed) {
    uint64_t acc[2] = {length * P64_1, 0};
    if (length <= 128) {
        for (size_t i = (length - 1) / 32 + 1; i--;)
            mix32(acc, data + 16 * i, data + length - 16 * (i + 1), 32 * i, seed);
    } else {
        for (size_t i = 0; i < 4; i++) mix32(acc, data + 32 * i, data + 32 * i + 16, 32 * i, seed);
        acc[0] = avalanche(acc[0]), acc[1] = avalanche(acc[1]);
        for (size_t i = 4; i < length / 32; i++)
            mix32(acc, data + 32 * i, data + 32 * i + 16, 3 + 32 * (i - 4), seed);
        mix32(acc, data + length - 16, data + length - 32, 136 - 17 - 16, -seed);
    }
    return -avalanche(acc[0] * P64_1 + acc[1] * P64_4 + (length - seed) * P64_2);
}

/* Short key of the first `length` bytes. */
static uint64_t key_of(struct hashed *h, size_t length) {
    if (length <= 240) return high_of_few(h->data, length, h->seed) >> SHORT_SHIFT;
    const size_t rounds = (length - 1) / ROUND;
    for (; h->num_states <= rounds; h->num_states++) {
        lanes acc = h->states[h->num_states - 1];
        const uint8_t *const data = h->data + (h->num_states - 1) * ROUND;
        accumulate(&acc, data, h->secret, STRIPES);
        scramble(&acc, h->secret);
        h->states[h->num_states] = acc;
    }
    const size_t first = rounds * STRIPES, stripes = (length - 1) / STRIPE;
    const int goes_on = h->last_stripes > first && h->last_stripes <= stripes;
    lanes acc = goes_on ? h->last : h->states[rounds];
    const size_t next = goes_on ? h->last_stripes : first;
    accumulate(&acc, h->data + STRIPE * next, h->secret + 8 * (next - first), stripes - next);
    h->last = acc, h->last_stripes = stripes;
    accumulate(&acc, h->data + length - STRIPE, h->secret + LAST_KEY, 1);
    uint64_t high = ~(length * P64_2);
    for (int i = 0; i < 8; i += 2)
        high += fold(acc[i] ^ get64(h->secret + HIGH_KEY + 8 * i), acc[i + 1] ^ get64(h->secret + HIGH_KEY + 8 * i + 8));
    return avalanche(high) >> SHORT_SHIFT;
}

#endif
