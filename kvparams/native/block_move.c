/* Copies pages between blocks and payloads; see `blocks.h`.
 *
 * Two ways: large pages whose rows are whole cache lines are written past the processor's caches, in the order of the
 * payload, and hashed from the registers that they are written from. All others are copied layer by layer, and hashed in
 * the payload.
 *
 * Blocks lie anywhere, and a payload has the tokens of one head after the other, so the processor cannot guess what is
 * read next. The first way asks for memory in the order in which it lies, far enough ahead that a whole layer of a page
 * is in the second cache when its first head is read. */
#include "blocks.h"
#include "page_hash.h"

enum { LINE = 64 };
enum { NEAR = 32 << 10, FAR = 384 << 10 }; /* bytes to ask for ahead: at least, at most */

/* Copies bytes, and asks for those at `ahead` meanwhile. */
static inline void move(char *to, const char *from, Py_ssize_t size, const char *ahead) {
    for (; size >= LINE; size -= LINE, to += LINE, from += LINE, ahead += LINE) {
#ifdef __GNUC__
        __builtin_prefetch(ahead); /* no fault, wherever it is */
#endif
        memcpy(to, from, LINE); /* of a known size: no call */
    }
    if (size > 0)
        memcpy(to, from, (size_t)size);
    (void)ahead;
}

/* Returns where a range of a page begins in a layer. */
static char *start_of(const Layer *layer, const Range *range) {
    const Py_ssize_t *steps = layer->slice->view.strides;
    return layer->blocks + range->block * steps[BLOCK] + range->first * steps[TOKEN];
}

/* Copies a layer of a page, in the order in which the blocks lie in memory. `next`: the layer after it, or itself. */
static void copy_layer(const Layer *layer, const Layer *next, const Page *page, bool to_blocks) {
    const SliceView *slice = layer->slice;
    Py_ssize_t head_stride = slice->view.strides[HEAD], token_stride = slice->view.strides[TOKEN];
    Py_ssize_t row = row_of(slice), heads = slice->view.shape[HEAD], head_step = page->tokens * row;
    char *payload = (char *)page->payload.buf + layer->offset + page->skip * row;
    for (Py_ssize_t at = 0; at < page->range_count; at++) {
        const Range *range = &page->ranges[at];
        char *block = start_of(layer, range);
        const char *ahead = at + 1 < page->range_count ? start_of(layer, range + 1) : start_of(next, page->ranges);
        bool is_run = token_stride == row; /* the tokens of a head follow each other */
        Py_ssize_t runs = is_run ? 1 : range->count, run = is_run ? range->count * row : row;
        for (Py_ssize_t token = 0; token < runs; token++)
            for (Py_ssize_t head = 0; head < heads; head++) {
                Py_ssize_t inside = token * token_stride + head * head_stride;
                char *outside = payload + head * head_step + token * row;
                move(to_blocks ? block + inside : outside, to_blocks ? outside : block + inside, run, ahead + inside);
            }
        payload += range->count * row;
    }
}

static void gather_page(const Copying *copying, Page *page) {
    PageHash hash;
    Py_ssize_t hashed = 0;
    bool is_seamless = true; /* each layer begins where the one before it ends */
    page_hash_begin(&hash);
    for (Py_ssize_t at = 0; at < copying->layer_count; at++) {
        const Layer *layer = &copying->layers[at];
        copy_layer(layer, layer + (at + 1 < copying->layer_count), page, false);
        is_seamless = is_seamless && layer->offset == hashed;
        if (!is_seamless)
            continue;
        Py_ssize_t size = layer_bytes(layer->slice, page->tokens);
        page_hash_add(&hash, (const char *)page->payload.buf + hashed, (size_t)size);
        hashed += size;
    }
    page->is_covered = page->is_whole && is_seamless && hashed == page->payload.len;
    page->checksum = page_hash_end(&hash);
}

/* The rows of some pages, in the order in which they lie in the blocks of a layer. */
typedef struct {
    const Copying *copying;
    Py_ssize_t page, layer, range;
    const char *at, *line;          /* the next row, and the first one of those that are walked together with it */
    Py_ssize_t step, left, rows;    /* from row to row; how many are left, of how many */
    Py_ssize_t line_step, lines;
} RowWalk;

/* Begins with the rows of the next range that has some. */
static void enter_range(RowWalk *walk) {
    const Copying *copying = walk->copying;
    for (; walk->page < copying->page_count; walk->page++, walk->layer = 0)
        for (; walk->layer < copying->layer_count; walk->layer++, walk->range = 0)
            for (; walk->range < copying->pages[walk->page].range_count; walk->range++) {
                const Range *range = &copying->pages[walk->page].ranges[walk->range];
                const Layer *layer = &copying->layers[walk->layer];
                const Py_buffer *view = &layer->slice->view;
                Py_ssize_t heads = view->shape[HEAD];
                bool by_head = view->strides[HEAD] <= view->strides[TOKEN];
                if (range->count == 0)
                    continue;
                walk->at = walk->line = start_of(layer, range);
                walk->left = walk->rows = by_head ? heads : range->count;
                walk->lines = by_head ? range->count : heads;
                walk->step = view->strides[by_head ? HEAD : TOKEN];
                walk->line_step = view->strides[by_head ? TOKEN : HEAD];
                return;
            }
    walk->rows = 0;
}

/* Returns the next row, or the last one when there are no more. */
static inline const char *next_row(RowWalk *walk) {
    const char *row = walk->at;
    if (walk->left > 1) {
        walk->left--;
        walk->at += walk->step;
    } else if (walk->lines > 1) {
        walk->lines--;
        walk->left = walk->rows;
        walk->at = walk->line += walk->line_step;
    } else if (walk->rows > 0) {
        walk->range++;
        enter_range(walk);
    }
    return row;
}

/* Begins a walk that is ahead of the copying, with the rows up to there asked for. */
static RowWalk walk_ahead(const Copying *copying) {
    RowWalk walk = {.copying = copying};
    enter_range(&walk);
    Py_ssize_t row = row_of(copying->layers->slice);
    Py_ssize_t bytes = NEAR / 2 + layer_bytes(copying->layers->slice, copying->pages->tokens);
    bytes = bytes < NEAR ? NEAR : bytes > FAR ? FAR : bytes;
    for (Py_ssize_t asked = 0; asked < bytes; asked += row)
        page_stream_ask(next_row(&walk), (size_t)row);
    return walk;
}

static void stream_page_out(const Copying *copying, Page *page, RowWalk *walk) {
    PageStream stream;
    char *to = page->payload.buf;
    page_stream_begin(&stream, (size_t)page->payload.len);
    for (Py_ssize_t number = 0; number < copying->layer_count; number++) {
        const Layer *layer = &copying->layers[number];
        const Py_buffer *view = &layer->slice->view;
        Py_ssize_t row = row_of(layer->slice);
        for (Py_ssize_t head = 0; head < view->shape[HEAD]; head++)
            for (Py_ssize_t at = 0; at < page->range_count; at++) {
                const char *from = start_of(layer, &page->ranges[at]) + head * view->strides[HEAD];
                for (Py_ssize_t token = 0; token < page->ranges[at].count; token++, to += row) {
                    page_stream_copy(&stream, to, from, (size_t)row, next_row(walk));
                    from += view->strides[TOKEN];
                }
            }
    }
    page->checksum = page_stream_end(&stream);
    page->is_covered = true;
}

/* Copies a page to the blocks. `next`: the page after it, which is asked for meanwhile, or itself. */
static void stream_page_in(const Copying *copying, const Page *page, const Page *next) {
    const char *payload = page->payload.buf, *ahead = next->payload.buf;
    for (Py_ssize_t number = 0; number < copying->layer_count; number++) {
        const Layer *layer = &copying->layers[number];
        const Py_buffer *view = &layer->slice->view;
        Py_ssize_t row = row_of(layer->slice);
        for (Py_ssize_t head = 0; head < view->shape[HEAD]; head++) {
            const char *from = payload + layer->offset + (head * page->tokens + page->skip) * row;
            for (Py_ssize_t at = 0; at < page->range_count; at++) {
                char *to = start_of(layer, &page->ranges[at]) + head * view->strides[HEAD];
                for (Py_ssize_t token = 0; token < page->ranges[at].count; token++, from += row) {
                    page_stream_write(to, from, (size_t)row, ahead + (from - payload));
                    to += view->strides[TOKEN];
                }
            }
        }
    }
}

/* Returns whether each row is whole cache lines. */
static bool has_whole_rows(const Copying *copying) {
    for (Py_ssize_t at = 0; at < copying->slice_count; at++)
        if (row_of(&copying->slices[at]) % PAGE_STREAM_ALIGNMENT != 0)
            return false;
    return page_stream_is_possible();
}

/* Returns whether the layers follow each other in a payload and fill it. */
static bool fills(const Copying *copying, const Page *page) {
    Py_ssize_t filled = 0;
    for (Py_ssize_t at = 0; at < copying->layer_count; at++) {
        if (copying->layers[at].offset != filled)
            return false;
        filled += layer_bytes(copying->layers[at].slice, page->tokens);
    }
    return page->is_whole && filled == page->payload.len;
}

static bool is_aligned(const void *at) { return (uintptr_t)at % PAGE_STREAM_TARGET == 0; }

/* Returns whether every row of the blocks can be written past the caches. */
static bool has_aligned_blocks(const Copying *copying) {
    for (Py_ssize_t at = 0; at < copying->slice_count; at++) {
        const Py_buffer *view = &copying->slices[at].view;
        if (!is_aligned(view->buf))
            return false;
        for (int axis = LAYER; axis <= TOKEN; axis++)
            if (view->shape[axis] > 1 && view->strides[axis] % PAGE_STREAM_TARGET != 0)
                return false;
    }
    return true;
}

void gather_all(Copying *copying) {
    bool can_stream = copying->page_count > 0 && has_whole_rows(copying);
    for (Py_ssize_t at = 0; can_stream && at < copying->page_count; at++) {
        const Page *page = &copying->pages[at];
        can_stream = page->payload.len >= PAGE_STREAM_BYTES && is_aligned(page->payload.buf) && fills(copying, page);
    }
    if (!can_stream) {
        for (Py_ssize_t at = 0; at < copying->page_count; at++)
            gather_page(copying, &copying->pages[at]);
        return;
    }
    RowWalk walk = walk_ahead(copying);
    for (Py_ssize_t at = 0; at < copying->page_count; at++)
        stream_page_out(copying, &copying->pages[at], &walk);
}

static bool is_expected(const Page *page) {
    if (!page->is_checked)
        return true;
    PageHash hash;
    page_hash_begin(&hash);
    page_hash_add(&hash, page->payload.buf, (size_t)page->payload.len);
    return page_hash_end(&hash) == page->checksum;
}

Py_ssize_t scatter_all(const Copying *copying) {
    bool can_stream = has_whole_rows(copying) && has_aligned_blocks(copying);
    Py_ssize_t at = 0;
    for (; at < copying->page_count && is_expected(&copying->pages[at]); at++) {
        const Page *page = &copying->pages[at];
        if (can_stream && page->payload.len >= PAGE_STREAM_BYTES) {
            stream_page_in(copying, page, page + (at + 1 < copying->page_count));
            continue;
        }
        for (Py_ssize_t layer = 0; layer < copying->layer_count; layer++)
            copy_layer(&copying->layers[layer], &copying->layers[layer + (layer + 1 < copying->layer_count)], page, true);
    }
    if (can_stream)
        page_stream_finish();
    return at;
}
