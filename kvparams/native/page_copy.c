/* Copies the bytes of stored values and computes their checksums in the same pass over memory.
 *
 * The checksum is always of the bytes that were written: of the registers they were written from, or of the target,
 * block by block, while it is in the processor's first cache. */
#include "native.h"
#include "page_hash.h"

enum { SMALL = 32 << 10 }; /* bytes that are copied without letting go of the interpreter lock */

typedef struct {
    Py_buffer target, source;
} Pair;

typedef struct {
    Py_ssize_t first, count; /* its pairs */
    size_t nbytes;
    uint64_t checksum;
} Value;

typedef struct {
    Pair *pairs;
    Value *values;
    Py_ssize_t pair_count, value_count; /* what is held so far */
    Py_ssize_t nbytes;
} Batch;

static void release(Batch *batch) {
    for (Py_ssize_t at = 0; at < batch->pair_count; at++) {
        PyBuffer_Release(&batch->pairs[at].target);
        PyBuffer_Release(&batch->pairs[at].source);
    }
    PyMem_Free(batch->pairs);
    PyMem_Free(batch->values);
}

static bool overlap(const Pair *pair) {
    const char *to = pair->target.buf, *from = pair->source.buf;
    return to < from + pair->source.len && from < to + pair->target.len;
}

/* Returns 1 if the pair is held; 0 if it is not ordinary; -1 with an exception. */
static int hold_pair(Batch *batch, PyObject *item) {
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 2)
        return 0;
    Pair *pair = &batch->pairs[batch->pair_count];
    if (PyObject_GetBuffer(PyTuple_GetItem(item, 0), &pair->target, PyBUF_WRITABLE) < 0)
        return -1;
    if (PyObject_GetBuffer(PyTuple_GetItem(item, 1), &pair->source, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&pair->target);
        return -1;
    }
    batch->pair_count++;
    batch->nbytes += pair->target.len;
    return pair->target.len == pair->source.len && !overlap(pair);
}

/* Holds the buffers of all values; returns as `hold_pair`. */
static int hold(Batch *batch, PyObject *values) {
    Py_ssize_t count = PyList_Size(values), pairs = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *value = PyList_GetItem(values, at);
        if (!PyList_Check(value))
            return 0;
        pairs += PyList_Size(value);
    }
    batch->pairs = PyMem_Calloc((size_t)pairs + 1, sizeof(Pair));
    batch->values = PyMem_Calloc((size_t)count + 1, sizeof(Value));
    if (batch->pairs == NULL || batch->values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *value = PyList_GetItem(values, at);
        if (value == NULL || !PyList_Check(value))
            return 0;
        Value *held = &batch->values[batch->value_count++];
        held->first = batch->pair_count;
        for (Py_ssize_t number = 0; number < PyList_Size(value); number++) {
            if (batch->pair_count == pairs) /* the list grew while a buffer was asked for */
                return 0;
            int is_held = hold_pair(batch, PyList_GetItem(value, number));
            if (is_held != 1)
                return is_held;
            held->count++;
            held->nbytes += (size_t)batch->pairs[batch->pair_count - 1].target.len;
        }
    }
    return 1;
}

/* Returns whether the bytes of a value from `skip` on can be written past the caches, piece by piece. */
static bool can_stream(const Pair *pairs, const Value *value, size_t skip) {
    size_t hashed = 0;
    for (Py_ssize_t at = value->first; at < value->first + value->count; at++) {
        size_t size = (size_t)pairs[at].target.len, plain = skip < size ? skip : size;
        skip -= plain;
        if ((size - plain) % PAGE_STREAM_ALIGNMENT != 0)
            return false;
        if (plain < size && ((uintptr_t)pairs[at].target.buf + plain) % PAGE_STREAM_TARGET != 0)
            return false;
        hashed += size - plain;
    }
    return hashed >= PAGE_STREAM_BYTES && page_stream_is_possible();
}

/* Copies a value; the checksum is of its bytes from `skip` on. */
static void copy_value(const Pair *pairs, Value *value, size_t skip) {
    bool streams = value->count > 1 && can_stream(pairs, value, skip);
    PageStream stream;
    PageHash hash;
    page_hash_begin(&hash);
    if (streams)
        page_stream_begin(&stream, value->nbytes - skip);
    for (Py_ssize_t at = value->first; at < value->first + value->count; at++) {
        char *to = pairs[at].target.buf;
        const char *from = pairs[at].source.buf;
        size_t size = (size_t)pairs[at].target.len;
        size_t plain = skip < size ? skip : size;
        if (plain > 0)
            memcpy(to, from, plain);
        skip -= plain;
        if (plain == size)
            continue;
        if (streams) {
            page_stream_copy(&stream, to + plain, from + plain, size - plain, from + plain + PAGE_STREAM_AHEAD);
        } else if (at == value->first + value->count - 1 && page_hash_is_empty(&hash)) { /* all that is hashed */
            value->checksum = page_hash_copy_whole(to + plain, from + plain, size - plain);
            return;
        } else {
            page_hash_copy(&hash, to + plain, from + plain, size - plain);
        }
    }
    value->checksum = streams ? page_stream_end(&stream) : page_hash_end(&hash);
}

static void copy_all(Batch *batch, size_t skip) {
    for (Py_ssize_t at = 0; at < batch->value_count; at++)
        copy_value(batch->pairs, &batch->values[at], skip);
}

/* copy_values(values, skip): copies each value, a list of (target, source); returns their checksums.
 * None for other types, for a target as long as its source is not, and for memory that overlaps. */
PyObject *copy_values(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 2))
        return NULL;
    Py_ssize_t skip = PyLong_AsSsize_t(args[1]);
    if (skip == -1 && PyErr_Occurred())
        return NULL;
    if (!PyList_Check(args[0]) || skip < 0)
        Py_RETURN_NONE;
    Batch batch = {0};
    int is_held = hold(&batch, args[0]);
    if (is_held != 1) {
        release(&batch);
        if (is_held < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    if (batch.nbytes <= SMALL) {
        copy_all(&batch, (size_t)skip);
    } else {
        Py_BEGIN_ALLOW_THREADS
        copy_all(&batch, (size_t)skip);
        Py_END_ALLOW_THREADS
    }
    PyObject *checksums = PyList_New(batch.value_count);
    for (Py_ssize_t at = 0; checksums != NULL && at < batch.value_count; at++) {
        PyObject *checksum = PyLong_FromUnsignedLongLong(batch.values[at].checksum);
        if (checksum == NULL || PyList_SetItem(checksums, at, checksum) < 0)
            Py_CLEAR(checksums);
    }
    release(&batch);
    return checksums;
}
