/* One pass over the bytes of many KV blocks: copy them, take their digests, or both while each byte is in a register.

   The digest is XXH3-128 without a seed (the specification's rule for inputs of more than 240 bytes; the caller has no
   others), in canonical order. Where both are asked for, the digest is of the very registers that were stored: a source
   that somebody changes meanwhile cannot make the two disagree. Knows no Python and keeps no state. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define INLINE static inline __attribute__((always_inline))
#endif

enum { STRIPE = 64, STRIPES = 16, ROUND = STRIPE * STRIPES, SCRAMBLE_KEY = 128, LAST_KEY = 121, LOW_KEY = 11, HIGH_KEY = 117 };
enum { DIGEST_ONLY, STORE, STREAM };
enum { PORTABLE, AVX2, AVX512 };
/* Bytes: hides the memory latency that the hardware does not, at the ends of pages. Each the fastest where it was tried:
   AVX-512 on Zen 4, AVX2 on Zen 2. What is copied past the caches is not kept on the way there either. */
enum { AHEAD_AVX512 = 2048, AHEAD_AVX2 = 512 };

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9;
static const uint64_t P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5, PMX_1 = 0x165667919E3779F9;

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e
};

static uint64_t get64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static void put64_big_endian(uint8_t *p, uint64_t value) {
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(value >> (56 - 8 * i));
}

static void accumulate(uint64_t *acc, const uint8_t *data, const uint8_t *key) {
    for (int i = 0; i < 8; i++) {
        const uint64_t value = get64(data + 8 * i), mixed = value ^ get64(key + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
    }
}

static void scramble(uint64_t *acc) {
    for (int i = 0; i < 8; i++) acc[i] = (acc[i] ^ acc[i] >> 47 ^ get64(SECRET + SCRAMBLE_KEY + 8 * i)) * P32_1;
}

static uint64_t merge(const uint64_t *acc, const uint8_t *key, uint64_t sum) {
    for (int i = 0; i < 8; i += 2) {
        const unsigned __int128 product =
            (unsigned __int128)(acc[i] ^ get64(key + 8 * i)) * (acc[i + 1] ^ get64(key + 8 * i + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= PMX_1;
    return sum ^ sum >> 32;
}

/* `rounds` rounds of ROUND bytes each, through the accumulators. */

static void rounds_portable(uint64_t *acc, uint8_t *dst, const uint8_t *src, size_t rounds) {
    for (; rounds; rounds--, src += ROUND) {
        const uint8_t *data = src;
        if (dst) {
            data = memcpy(dst, src, ROUND); /* what is digested is what was stored */
            dst += ROUND;
        }
        for (int i = 0; i < STRIPES; i++) accumulate(acc, data + STRIPE * i, SECRET + 8 * i);
        scramble(acc);
    }
}

#if defined(__x86_64__)

__attribute__((target("avx512f"))) INLINE void
rounds_avx512(uint64_t *acc_, uint8_t *dst, const uint8_t *src, size_t rounds, const int mode) {
    const __m512i prime = _mm512_set1_epi64((long long)P32_1), last = _mm512_loadu_si512(SECRET + SCRAMBLE_KEY);
    __m512i acc = _mm512_loadu_si512(acc_), key[STRIPES];
    for (int i = 0; i < STRIPES; i++) key[i] = _mm512_loadu_si512(SECRET + 8 * i);
    for (; rounds; rounds--, src += ROUND, dst += mode == DIGEST_ONLY ? 0 : ROUND) {
#pragma GCC unroll 16
        for (int i = 0; i < STRIPES; i++) {
            _mm_prefetch((const char *)src + STRIPE * i + AHEAD_AVX512, _MM_HINT_T0);
            const __m512i data = _mm512_loadu_si512(src + STRIPE * i);
            if (mode == STREAM) _mm512_stream_si512((void *)(dst + STRIPE * i), data);
            if (mode == STORE) _mm512_storeu_si512(dst + STRIPE * i, data);
            const __m512i mixed = _mm512_xor_si512(data, key[i]);
            const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
            const __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
            acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
        }
        acc = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), last);
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(acc, 32), prime);
        acc = _mm512_add_epi64(_mm512_mul_epu32(acc, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(acc_, acc);
}

__attribute__((target("avx2"))) INLINE void
rounds_avx2(uint64_t *acc_, uint8_t *dst, const uint8_t *src, size_t rounds, const int mode) {
    const __m256i prime = _mm256_set1_epi64x((long long)P32_1);
    __m256i acc[2];
    for (int h = 0; h < 2; h++) acc[h] = _mm256_loadu_si256((const __m256i *)acc_ + h);
    for (; rounds; rounds--, src += ROUND, dst += mode == DIGEST_ONLY ? 0 : ROUND) {
#pragma GCC unroll 16
        for (int i = 0; i < STRIPES; i++) {
            if (mode == STREAM) _mm_prefetch((const char *)src + STRIPE * i + AHEAD_AVX2, _MM_HINT_NTA);
            else _mm_prefetch((const char *)src + STRIPE * i + AHEAD_AVX2, _MM_HINT_T0);
            for (int h = 0; h < 2; h++) {
                const __m256i data = _mm256_loadu_si256((const __m256i *)(src + STRIPE * i) + h);
                __m256i *const out = (__m256i *)(dst + STRIPE * i) + h;
                if (mode == STREAM) _mm256_stream_si256(out, data);
                if (mode == STORE) _mm256_storeu_si256(out, data);
                const __m256i key = _mm256_loadu_si256((const __m256i *)(SECRET + 8 * i) + h);
                const __m256i mixed = _mm256_xor_si256(data, key);
                const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
                const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
                acc[h] = _mm256_add_epi64(acc[h], _mm256_add_epi64(product, swapped));
            }
        }
        for (int h = 0; h < 2; h++) {
            const __m256i last = _mm256_loadu_si256((const __m256i *)(SECRET + SCRAMBLE_KEY) + h);
            const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(acc[h], _mm256_srli_epi64(acc[h], 47)), last);
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            acc[h] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
    for (int h = 0; h < 2; h++) _mm256_storeu_si256((__m256i *)acc_ + h, acc[h]);
}

#define VARIANTS(name, isa)                                                                                     \
    __attribute__((target(isa))) static void name##_of(uint64_t *acc, uint8_t *dst, const uint8_t *src, size_t n, \
                                                       int mode) {                                              \
        if (mode == STREAM) name(acc, dst, src, n, STREAM);                                                     \
        else if (mode == STORE) name(acc, dst, src, n, STORE);                                                  \
        else name(acc, dst, src, n, DIGEST_ONLY);                                                               \
    }
VARIANTS(rounds_avx512, "avx512f")
VARIANTS(rounds_avx2, "avx2")

__attribute__((target("avx512f"))) static void stream_avx512(uint8_t *dst, const uint8_t *src, size_t lines) {
    for (; lines; lines--, src += 64, dst += 64) {
        _mm_prefetch((const char *)src + AHEAD_AVX512, _MM_HINT_T0);
        _mm512_stream_si512((void *)dst, _mm512_loadu_si512(src));
    }
}

__attribute__((target("avx2"))) static void stream_avx2(uint8_t *dst, const uint8_t *src, size_t lines) {
    for (; lines; lines--, src += 64, dst += 64) {
        _mm_prefetch((const char *)src + AHEAD_AVX2, _MM_HINT_NTA);
        for (int h = 0; h < 2; h++)
            _mm256_stream_si256((__m256i *)dst + h, _mm256_loadu_si256((const __m256i *)src + h));
    }
}

#endif

static void run_rounds(int level, uint64_t *acc, uint8_t *dst, const uint8_t *src, size_t rounds, int streaming) {
#if defined(__x86_64__)
    const int mode = !dst ? DIGEST_ONLY : streaming ? STREAM : STORE;
    if (level == AVX512) { rounds_avx512_of(acc, dst, src, rounds, mode); return; }
    if (level == AVX2) { rounds_avx2_of(acc, dst, src, rounds, mode); return; }
#endif
    (void)level, (void)streaming;
    rounds_portable(acc, dst, src, rounds);
}

static void digest_block(int level, uint8_t *dst, const uint8_t *src, size_t length, int streaming, uint8_t *digest) {
    uint64_t acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const size_t rounds = (length - 1) / ROUND, done = rounds * ROUND, rest = length - done;
    run_rounds(level, acc, dst, src, rounds, streaming);
    /* The last stripe ends with the block; a short rest is completed by what comes before it, as it was stored. */
    uint8_t tail[STRIPE + ROUND];
    const size_t before = rest < STRIPE ? STRIPE - rest : 0;
    memcpy(tail, (dst ? dst : src) + done - before, before);
    memcpy(tail + before, src + done, rest);
    if (dst) memcpy(dst + done, tail + before, rest);
    for (size_t i = 0; i < (rest - 1) / STRIPE; i++) accumulate(acc, tail + before + STRIPE * i, SECRET + 8 * i);
    accumulate(acc, tail + before + rest - STRIPE, SECRET + LAST_KEY);
    put64_big_endian(digest, merge(acc, SECRET + HIGH_KEY, ~(length * P64_2)));
    put64_big_endian(digest + 8, merge(acc, SECRET + LOW_KEY, length * P64_1));
}

static void copy_block(int level, uint8_t *dst, const uint8_t *src, size_t length, int streaming) {
    size_t done = 0;
#if defined(__x86_64__)
    if (streaming && level != PORTABLE) {
        done = length / 64 * 64;
        if (level == AVX512) stream_avx512(dst, src, done / 64);
        else stream_avx2(dst, src, done / 64);
    }
#endif
    memcpy(dst + done, src + done, length - done);
}

/* The best of PORTABLE, AVX2 and AVX512 that this machine has. */
int kvrelay_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return AVX512;
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return PORTABLE;
}

/* For each of `count` blocks of `length` bytes: copy it to `targets[i]` (if `targets`), and write its 16 digest bytes to
   `digests + 16 * i` (if `digests`; then `length` > 240). `streaming`: past the caches, where a target is aligned. */
void kvrelay_pass(int level, int streaming, size_t count, size_t length, uint8_t *const *targets,
                  const uint8_t *const *sources, uint8_t *digests) {
    for (size_t i = 0; i < count; i++) {
        uint8_t *const dst = targets ? targets[i] : NULL;
        const int past = streaming && ((uintptr_t)dst & 63) == 0;
        if (digests) digest_block(level, dst, sources[i], length, past, digests + 16 * i);
        else copy_block(level, dst, sources[i], length, past);
    }
#if defined(__x86_64__)
    if (streaming) _mm_sfence();
#endif
}
