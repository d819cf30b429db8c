/* XXH3-64 of bytes while they are copied. Nothing here needs the interpreter lock. */
#ifndef KVPARAMS_PAGE_HASH_H
#define KVPARAMS_PAGE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define XXH_STATIC_LINKING_ONLY
#include "vendor/xxhash.h"

/* A checksum of bytes that are copied in several pieces. */
typedef struct {
    XXH3_state_t state;
} PageHash;

void page_hash_begin(PageHash *hash);
/* Copies `size` bytes, which do not overlap, and hashes them behind what was hashed before. */
void page_hash_copy(PageHash *hash, char *to, const char *from, size_t size);
/* Hashes bytes that lie there. */
void page_hash_add(PageHash *hash, const char *at, size_t size);
uint64_t page_hash_end(const PageHash *hash);
bool page_hash_is_empty(const PageHash *hash);
/* Copies and hashes bytes that are all that is hashed. Large ones go past the processor's caches. */
uint64_t page_hash_copy_whole(char *to, const char *from, size_t size);

/* From so many bytes on a copy goes past the caches. */
enum { PAGE_STREAM_BYTES = 128 << 10 };
/* What the size of a piece that goes past the caches is a multiple of, and what its target is. */
enum { PAGE_STREAM_ALIGNMENT = 64, PAGE_STREAM_TARGET = 32 };
/* Memory that is read one byte after the other is asked for so many bytes ahead. */
enum { PAGE_STREAM_AHEAD = 4096 };

/* A checksum of bytes that are written past the caches in several pieces. Only where `page_stream_is_possible`. */
typedef struct {
    XXH_ALIGN(32) uint64_t sums[8];
    size_t stripe, stripes; /* of 64 bytes: hashed so far, and all that will be */
} PageStream;

bool page_stream_is_possible(void);
/* Begins with `size` bytes to come, at least `PAGE_STREAM_BYTES`. */
void page_stream_begin(PageStream *stream, size_t size);
/* Copies and hashes a piece, and asks for as much memory at `ahead`. */
void page_stream_copy(PageStream *stream, char *to, const char *from, size_t size, const char *ahead);
/* Returns the checksum. Who is told that the bytes are there reads them from now on. */
uint64_t page_stream_end(const PageStream *stream);
/* Copies a piece without a checksum, and asks for as much memory at `ahead`; `page_stream_finish` ends several of
 * these. */
void page_stream_write(char *to, const char *from, size_t size, const char *ahead);
void page_stream_finish(void);
/* Brings memory that is read soon into the second cache. */
void page_stream_ask(const char *at, size_t size);

#endif
