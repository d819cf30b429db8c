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

#endif
