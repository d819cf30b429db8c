/* Copies and hashes; see page_hash.h.
 *
 * On x86-64 with AVX2, which is looked for when the program runs, a stripe of 64 bytes is loaded into registers once,
 * hashed and written from them past the caches: this takes less time than a memcpy, which reads the target first.
 * Elsewhere blocks are copied and then hashed in the target. `tests/unit/kvparams/native/test_page_copy.py` holds both
 * against the package xxhash. */
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2_CODE 1
#include <immintrin.h>
#define XXH_TARGET_AVX2 __attribute__((target("avx2")))
#define XXH_DISPATCH_AVX2 1
#endif
#define XXH_INLINE_ALL
#include "page_hash.h"
#include <string.h>

enum { BLOCK = 16 << 10 };   /* bytes that are copied before they are hashed: half of a first cache of 32 KiB */

void page_hash_begin(PageHash *hash) { XXH3_64bits_reset(&hash->state); }

bool page_hash_is_empty(const PageHash *hash) { return hash->state.totalLen == 0; }

uint64_t page_hash_end(const PageHash *hash) { return XXH3_64bits_digest(&hash->state); }

#ifdef HAS_AVX2_CODE

enum { STRIPE = XXH_STRIPE_LEN, AHEAD = 512 };

static bool has_avx2(void) { return __builtin_cpu_supports("avx2"); }

XXH_TARGET_AVX2 static void add_avx2(PageHash *hash, const char *at, size_t size) {
    XXH3_update(&hash->state, (const xxh_u8 *)at, size, XXH3_accumulate_avx2, XXH3_scrambleAcc_avx2);
}

/* XXH3_accumulate_512_avx2 of xxhash.h for 32 bytes in a register. */
XXH_TARGET_AVX2 static inline __m256i accumulate(__m256i sums, __m256i data, const xxh_u8 *secret) {
    __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)(const void *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(sums, swapped));
}

/* XXH3_scrambleAcc_avx2 of xxhash.h for 32 bytes in a register. */
XXH_TARGET_AVX2 static inline __m256i scramble(__m256i sums, const xxh_u8 *secret) {
    __m256i key = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)),
                                   _mm256_loadu_si256((const __m256i *)(const void *)secret));
    __m256i prime = _mm256_set1_epi32((int)XXH_PRIME32_1);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(key, prime), _mm256_slli_epi64(high, 32));
}

/* XXH3_hashLong_64b of xxhash.h. `to` is aligned to 32 bytes, `size` more than `XXH3_MIDSIZE_MAX`. */
XXH_TARGET_AVX2 static uint64_t stream_avx2(char *to, const char *from, size_t size) {
    enum { STRIPES = (XXH_SECRET_DEFAULT_SIZE - STRIPE) / XXH_SECRET_CONSUME_RATE, ROUND = STRIPE * STRIPES };
    XXH_ALIGN(32) xxh_u64 sums[8] = XXH3_INIT_ACC;
    __m256i *low = (__m256i *)(void *)sums, *high = low + 1;
    size_t rounds = (size - 1) / ROUND;
    for (size_t round = 0; round < rounds; round++) {
        __m256i a = _mm256_load_si256(low), b = _mm256_load_si256(high);
        for (int stripe = 0; stripe < STRIPES; stripe++, from += STRIPE, to += STRIPE) {
            const xxh_u8 *secret = XXH3_kSecret + stripe * XXH_SECRET_CONSUME_RATE;
            _mm_prefetch(from + AHEAD, _MM_HINT_T0); /* no fault behind the end */
            __m256i first = _mm256_loadu_si256((const __m256i *)(const void *)from);
            __m256i second = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
            _mm256_stream_si256((__m256i *)(void *)to, first);
            _mm256_stream_si256((__m256i *)(void *)(to + 32), second);
            a = accumulate(a, first, secret);
            b = accumulate(b, second, secret + 32);
        }
        _mm256_store_si256(low, a);
        _mm256_store_si256(high, b);
        XXH3_scrambleAcc_avx2(sums, XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - STRIPE);
    }
    size_t rest = size - rounds * ROUND;
    memcpy(to, from, rest);
    _mm_sfence(); /* whoever is told that the bytes are there reads them */
    size_t stripes = (rest - 1) / STRIPE;
    XXH3_accumulate_avx2(sums, (const xxh_u8 *)to, XXH3_kSecret, stripes);
    XXH3_accumulate_512_avx2(sums, (const xxh_u8 *)to + rest - STRIPE,
                             XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - STRIPE - XXH_SECRET_LASTACC_START);
    return XXH3_mergeAccs(sums, XXH3_kSecret + XXH_SECRET_MERGEACCS_START, (xxh_u64)size * XXH_PRIME64_1);
}

void page_stream_begin(PageStream *stream, size_t size) {
    static const xxh_u64 initial[8] = XXH3_INIT_ACC;
    memcpy(stream->sums, initial, sizeof initial);
    stream->stripe = 0;
    stream->stripes = size / STRIPE;
}

XXH_TARGET_AVX2 void page_stream_copy(PageStream *stream, char *to, const char *from, size_t size, const char *ahead) {
    enum { STRIPES = (XXH_SECRET_DEFAULT_SIZE - STRIPE) / XXH_SECRET_CONSUME_RATE };
    __m256i *low = (__m256i *)(void *)stream->sums, *high = low + 1;
    __m256i a = _mm256_load_si256(low), b = _mm256_load_si256(high);
    size_t stripe = stream->stripe;
    for (size_t at = 0; at < size; at += STRIPE, stripe++) {
        bool is_last = stripe + 1 == stream->stripes;
        const xxh_u8 *secret = XXH3_kSecret + (is_last ? XXH_SECRET_DEFAULT_SIZE - STRIPE - XXH_SECRET_LASTACC_START
                                                       : stripe % STRIPES * XXH_SECRET_CONSUME_RATE);
        _mm_prefetch(ahead + at, _MM_HINT_T1);
        __m256i first = _mm256_loadu_si256((const __m256i *)(const void *)(from + at));
        __m256i second = _mm256_loadu_si256((const __m256i *)(const void *)(from + at + 32));
        _mm256_stream_si256((__m256i *)(void *)(to + at), first);
        _mm256_stream_si256((__m256i *)(void *)(to + at + 32), second);
        a = accumulate(a, first, secret);
        b = accumulate(b, second, secret + 32);
        if (stripe % STRIPES == STRIPES - 1 && !is_last) {
            a = scramble(a, XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - STRIPE);
            b = scramble(b, XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - STRIPE + 32);
        }
    }
    _mm256_store_si256(low, a);
    _mm256_store_si256(high, b);
    stream->stripe = stripe;
}

uint64_t page_stream_end(const PageStream *stream) {
    page_stream_finish();
    return XXH3_mergeAccs(stream->sums, XXH3_kSecret + XXH_SECRET_MERGEACCS_START,
                          (xxh_u64)stream->stripes * STRIPE * XXH_PRIME64_1);
}

XXH_TARGET_AVX2 void page_stream_write(char *to, const char *from, size_t size, const char *ahead) {
    for (size_t at = 0; at < size; at += STRIPE) {
        _mm_prefetch(ahead + at, _MM_HINT_T1);
        __m256i first = _mm256_loadu_si256((const __m256i *)(const void *)(from + at));
        __m256i second = _mm256_loadu_si256((const __m256i *)(const void *)(from + at + 32));
        _mm256_stream_si256((__m256i *)(void *)(to + at), first);
        _mm256_stream_si256((__m256i *)(void *)(to + at + 32), second);
    }
}

void page_stream_ask(const char *at, size_t size) {
    for (size_t done = 0; done < size; done += 64)
        _mm_prefetch(at + done, _MM_HINT_T1); /* no fault, wherever it is */
}

void page_stream_finish(void) { _mm_sfence(); }

bool page_stream_is_possible(void) { return has_avx2(); }

#else

/* Never called: `page_stream_is_possible` says so. */
void page_stream_begin(PageStream *stream, size_t size) { (void)stream, (void)size; }
void page_stream_copy(PageStream *stream, char *to, const char *from, size_t size, const char *ahead) {
    (void)stream, (void)to, (void)from, (void)size, (void)ahead;
}
uint64_t page_stream_end(const PageStream *stream) { return (void)stream, 0; }
void page_stream_write(char *to, const char *from, size_t size, const char *ahead) {
    (void)to, (void)from, (void)size, (void)ahead;
}
void page_stream_ask(const char *at, size_t size) { (void)at, (void)size; }
void page_stream_finish(void) {}
bool page_stream_is_possible(void) { return false; }

#endif

void page_hash_add(PageHash *hash, const char *at, size_t size) {
#ifdef HAS_AVX2_CODE
    if (has_avx2()) {
        add_avx2(hash, at, size);
        return;
    }
#endif
    XXH3_64bits_update(&hash->state, at, size);
}

void page_hash_copy(PageHash *hash, char *to, const char *from, size_t size) {
    for (size_t at = 0; at < size; at += BLOCK) {
        size_t some = size - at < BLOCK ? size - at : BLOCK;
        memcpy(to + at, from + at, some);
        page_hash_add(hash, to + at, some);
    }
}

uint64_t page_hash_copy_whole(char *to, const char *from, size_t size) {
#ifdef HAS_AVX2_CODE
    if (size >= PAGE_STREAM_BYTES && (uintptr_t)to % 32 == 0 && has_avx2())
        return stream_avx2(to, from, size);
#endif
    PageHash hash;
    page_hash_begin(&hash);
    page_hash_copy(&hash, to, from, size);
    return page_hash_end(&hash);
}
