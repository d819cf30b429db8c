/* Pages and the blocks that they are copied from and to. `block_copy.c` reads them from Python objects, and
 * `block_move.c` copies them; what is in these structures lies inside of its memory.
 *
 * A slice is the K or V of some layers: memory `[layers, heads, blocks, tokens, dim]` with any strides but the last, and
 * where it stands in a payload: the offset of its first layer and the bytes from one layer to the next. In a payload the
 * tokens of a head follow each other, and the heads of a layer. */
#ifndef KVPARAMS_BLOCKS_H
#define KVPARAMS_BLOCKS_H

#include "native.h"

enum { LAYER = 0, HEAD = 1, BLOCK = 2, TOKEN = 3, DIM = 4, DIMS = 5 };

typedef struct {
    Py_buffer view;
    Py_ssize_t offset, layer_step;
} SliceView;

/* One layer of a slice: its bytes follow each other in the payload. */
typedef struct {
    char *blocks;
    const SliceView *slice;
    Py_ssize_t offset;
} Layer;

typedef struct {
    Py_ssize_t block, first, count;
} Range;

typedef struct {
    Py_buffer payload;
    Range *ranges;
    Py_ssize_t range_count, skip, tokens; /* tokens to skip in the payload; all that it has */
    uint64_t checksum; /* that was computed, or that is expected */
    bool is_whole;     /* all of its tokens are copied */
    bool is_covered;   /* all of its bytes were gathered, so that the checksum is that of all of them */
    bool is_checked;   /* it is copied only if its checksum is the expected one */
} Page;

typedef struct {
    SliceView *slices;
    Layer *layers; /* by their offsets */
    Page *pages;
    Py_ssize_t slice_count, layer_count, page_count; /* what is held so far */
} Copying;

/* Returns the bytes of a token of one head. */
static inline Py_ssize_t row_of(const SliceView *slice) { return slice->view.shape[DIM] * slice->view.itemsize; }

/* Returns the bytes that a layer takes in a payload of so many tokens; -1 if that is too much. */
static inline Py_ssize_t layer_bytes(const SliceView *slice, Py_ssize_t tokens) {
    Py_ssize_t heads = slice->view.shape[HEAD], row = row_of(slice);
    if (heads > PY_SSIZE_T_MAX / row || tokens > PY_SSIZE_T_MAX / (heads * row))
        return -1;
    return heads * row * tokens;
}

/* Copies blocks to payloads, and sets the checksums. Needs no interpreter lock. */
void gather_all(Copying *copying);
/* Copies payloads to blocks up to the first one that has another checksum than the expected one; returns how many. Needs
 * no interpreter lock. */
Py_ssize_t scatter_all(const Copying *copying);

#endif
