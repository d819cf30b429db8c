/* Copies pages between an engine's blocks in host memory and payloads, and computes the payloads' checksums: what
 * Python gives, checked against its memory. `blocks.h` says what slices and pages are; `block_move.c` copies. */
#include "blocks.h"
#include <stdlib.h>

enum { MAX_SLICES = 4096, MAX_RANGES = 1 << 16 };

static void release(Copying *copying) {
    for (Py_ssize_t at = 0; at < copying->slice_count; at++)
        PyBuffer_Release(&copying->slices[at].view);
    for (Py_ssize_t at = 0; at < copying->page_count; at++) {
        PyBuffer_Release(&copying->pages[at].payload);
        PyMem_Free(copying->pages[at].ranges);
    }
    PyMem_Free(copying->slices);
    PyMem_Free(copying->layers);
    PyMem_Free(copying->pages);
}

static int out_of_memory(void) {
    PyErr_NoMemory();
    return -1;
}

/* Reads a tuple of non-negative numbers. Returns 1, or 0 if it is something else; never with an exception. */
static int read_numbers(PyObject *item, Py_ssize_t from, Py_ssize_t *numbers, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) {
        numbers[at] = PyLong_AsSsize_t(PyTuple_GetItem(item, from + at));
        if (numbers[at] < 0) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* Holds a slice: `(view, offset, layer_step)`. Returns 1; 0 if it is not ordinary; -1 with an exception. */
static int hold_slice(Copying *copying, PyObject *item, int flags) {
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 3)
        return 0;
    Py_ssize_t numbers[2];
    if (!read_numbers(item, 1, numbers, 2))
        return 0;
    SliceView *slice = &copying->slices[copying->slice_count];
    if (PyObject_GetBuffer(PyTuple_GetItem(item, 0), &slice->view, flags) < 0)
        return -1;
    copying->slice_count++;
    slice->offset = numbers[0];
    slice->layer_step = numbers[1];
    const Py_buffer *view = &slice->view;
    if (view->ndim != DIMS || view->shape == NULL || view->strides == NULL || view->suboffsets != NULL)
        return 0;
    for (int axis = 0; axis < DIMS; axis++)
        if (view->shape[axis] < 1 || view->strides[axis] < 0)
            return 0;
    if (view->itemsize < 1 || view->strides[DIM] != view->itemsize || view->shape[LAYER] > MAX_SLICES)
        return 0;
    copying->layer_count += view->shape[LAYER];
    return 1;
}

static int by_offset(const void *one, const void *other) {
    Py_ssize_t a = ((const Layer *)one)->offset, b = ((const Layer *)other)->offset;
    return a < b ? -1 : a > b;
}

static int hold_slices(Copying *copying, PyObject *slices, int flags) {
    Py_ssize_t count = PyList_Size(slices);
    if (count < 1 || count > MAX_SLICES)
        return 0;
    copying->slices = PyMem_Calloc((size_t)count, sizeof(SliceView));
    if (copying->slices == NULL)
        return out_of_memory();
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *item = PyList_GetItem(slices, at);
        int is_held = item == NULL ? -1 : hold_slice(copying, item, flags);
        if (is_held != 1)
            return is_held;
    }
    copying->layers = PyMem_Calloc((size_t)copying->layer_count, sizeof(Layer));
    if (copying->layers == NULL)
        return out_of_memory();
    Layer *layer = copying->layers;
    for (Py_ssize_t at = 0; at < count; at++) {
        const SliceView *slice = &copying->slices[at];
        for (Py_ssize_t number = 0; number < slice->view.shape[LAYER]; number++, layer++) {
            layer->slice = slice;
            layer->blocks = (char *)slice->view.buf + number * slice->view.strides[LAYER];
            if (slice->layer_step > (PY_SSIZE_T_MAX - slice->offset) / MAX_SLICES)
                return 0;
            layer->offset = slice->offset + number * slice->layer_step;
        }
    }
    qsort(copying->layers, (size_t)copying->layer_count, sizeof(Layer), by_offset);
    return 1;
}

/* Reads the ranges of a page, and checks them against every slice. */
static int read_ranges(const Copying *copying, Page *page, PyObject *ranges) {
    Py_ssize_t count = PyList_Size(ranges), tokens = 0;
    if (count > MAX_RANGES || page->skip > page->tokens)
        return 0;
    page->ranges = PyMem_Calloc((size_t)count + 1, sizeof(Range));
    if (page->ranges == NULL)
        return out_of_memory();
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *item = PyList_GetItem(ranges, at);
        Py_ssize_t numbers[3];
        if (!PyTuple_Check(item) || PyTuple_Size(item) != 3 || !read_numbers(item, 0, numbers, 3))
            return 0;
        for (Py_ssize_t number = 0; number < copying->slice_count; number++) {
            const Py_ssize_t *shape = copying->slices[number].view.shape;
            if (numbers[0] >= shape[BLOCK] || numbers[2] > shape[TOKEN] || numbers[1] > shape[TOKEN] - numbers[2])
                return 0;
        }
        if (numbers[2] > page->tokens - page->skip - tokens)
            return 0;
        page->ranges[page->range_count++] = (Range){numbers[0], numbers[1], numbers[2]};
        tokens += numbers[2];
    }
    page->is_whole = page->skip == 0 && tokens == page->tokens;
    return 1;
}

/* Reads the checksum that a page must have, if one is given; returns as `read_numbers`. */
static int read_expected(Page *page, PyObject *expected) {
    page->is_checked = expected != Py_None;
    if (!page->is_checked)
        return 1;
    page->checksum = PyLong_AsUnsignedLongLong(expected);
    bool is_number = !PyErr_Occurred();
    PyErr_Clear();
    return is_number;
}

/* Holds a page: `(payload, ranges, skip, tokens, checksum)`; see interface.py. Returns as `hold_slice`. */
static int hold_page(Copying *copying, PyObject *item, int flags) {
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 5 || !PyList_Check(PyTuple_GetItem(item, 1)))
        return 0;
    Py_ssize_t numbers[2];
    if (!read_numbers(item, 2, numbers, 2))
        return 0;
    Page *page = &copying->pages[copying->page_count];
    if (PyObject_GetBuffer(PyTuple_GetItem(item, 0), &page->payload, flags) < 0)
        return -1;
    copying->page_count++;
    page->skip = numbers[0];
    page->tokens = numbers[1];
    if (!read_expected(page, PyTuple_GetItem(item, 4)))
        return 0;
    for (Py_ssize_t at = 0; at < copying->layer_count; at++) {
        const Layer *layer = &copying->layers[at];
        Py_ssize_t size = layer_bytes(layer->slice, page->tokens);
        if (size < 0 || layer->offset > page->payload.len || size > page->payload.len - layer->offset)
            return 0;
    }
    return read_ranges(copying, page, PyTuple_GetItem(item, 1));
}

static int hold_pages(Copying *copying, PyObject *pages, int flags) {
    Py_ssize_t count = PyList_Size(pages);
    copying->pages = PyMem_Calloc((size_t)count + 1, sizeof(Page));
    if (copying->pages == NULL)
        return out_of_memory();
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *item = PyList_GetItem(pages, at);
        int is_held = item == NULL ? -1 : hold_page(copying, item, flags);
        if (is_held != 1)
            return is_held;
    }
    return 1;
}

/* Holds what the arguments `(slices, pages)` name; returns as `hold_slice`. */
static int hold(Copying *copying, PyObject *const *args, bool to_blocks) {
    if (!PyList_Check(args[0]) || !PyList_Check(args[1]))
        return 0;
    int is_held = hold_slices(copying, args[0], to_blocks ? PyBUF_STRIDED : PyBUF_STRIDED_RO);
    return is_held == 1 ? hold_pages(copying, args[1], to_blocks ? PyBUF_SIMPLE : PyBUF_WRITABLE) : is_held;
}

static PyObject *not_held(Copying *copying, int is_held) {
    release(copying);
    if (is_held < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* gather_pages(slices, pages): copies blocks to payloads; returns their checksums.
 * None, with nothing copied, where something is not as `blocks.h` says, or lies outside of its memory; None
 * where the slices leave out a part of a payload. */
PyObject *gather_pages(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 2))
        return NULL;
    Copying copying = {0};
    int is_held = hold(&copying, args, false);
    if (is_held != 1)
        return not_held(&copying, is_held);
    Py_BEGIN_ALLOW_THREADS
    gather_all(&copying);
    Py_END_ALLOW_THREADS
    PyObject *checksums = PyList_New(copying.page_count);
    for (Py_ssize_t at = 0; checksums != NULL && at < copying.page_count; at++) {
        if (!copying.pages[at].is_covered) {
            Py_CLEAR(checksums);
            return not_held(&copying, 0);
        }
        PyObject *checksum = PyLong_FromUnsignedLongLong(copying.pages[at].checksum);
        if (checksum == NULL || PyList_SetItem(checksums, at, checksum) < 0)
            Py_CLEAR(checksums);
    }
    release(&copying);
    return checksums;
}

/* scatter_pages(slices, pages): copies payloads to blocks; returns how many. None as of `gather_pages`. */
PyObject *scatter_pages(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 2))
        return NULL;
    Copying copying = {0};
    int is_held = hold(&copying, args, true);
    if (is_held != 1)
        return not_held(&copying, is_held);
    Py_ssize_t written;
    Py_BEGIN_ALLOW_THREADS
    written = scatter_all(&copying);
    Py_END_ALLOW_THREADS
    release(&copying);
    return PyLong_FromSsize_t(written);
}
