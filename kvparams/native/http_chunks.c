/* Reads a body that comes in chunks. RFC 9112, section 7.1. */
#include "native.h"

enum { MAX_SIZE_DIGITS = 7 };
enum { GOES_ON = 0, COMPLETE = 1, NOT_ORDINARY = 2, BROKEN = 3 };
/* What is left of the current chunk: bytes of its data, then the line break behind it. */
enum { BREAK = -2, LINE_FEED = -1 };

typedef struct {
    const char *at, *end;
    Py_ssize_t left, size; /* `size`: bytes of data passed */
    char *to;              /* where the data goes, or NULL to count it only */
} Chunks;

static int hex_digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Passes what is there. At a size line that is not whole or not ordinary, `at` stays in front of it. */
static int pass(Chunks *chunks) {
    while (chunks->at < chunks->end) {
        if (chunks->left > 0) {
            Py_ssize_t some = chunks->end - chunks->at;
            if (some > chunks->left)
                some = chunks->left;
            if (chunks->to != NULL)
                memcpy(chunks->to + chunks->size, chunks->at, (size_t)some);
            chunks->at += some;
            chunks->size += some;
            chunks->left -= some;
            if (chunks->left > 0)
                return GOES_ON;
            chunks->left = BREAK;
        } else if (chunks->left == BREAK || chunks->left == LINE_FEED) {
            if (*chunks->at != (chunks->left == BREAK ? '\r' : '\n'))
                return BROKEN;
            chunks->at++;
            chunks->left++;
        } else {
            const char *at = chunks->at;
            Py_ssize_t size = 0;
            int digit;
            while (at < chunks->end && (digit = hex_digit(*at)) >= 0) {
                size = size * 16 + digit;
                if (++at - chunks->at > MAX_SIZE_DIGITS)
                    return NOT_ORDINARY;
            }
            if (at == chunks->at)
                return NOT_ORDINARY;
            const char *rest = size == 0 ? "\r\n\r\n" : "\r\n";
            for (; *rest != 0; rest++, at++) {
                if (at == chunks->end)
                    return GOES_ON;
                if (*at != *rest)
                    return NOT_ORDINARY;
            }
            chunks->at = at;
            if (size == 0)
                return COMPLETE;
            chunks->left = size;
        }
    }
    return GOES_ON;
}

/* read_chunks(data: bytes, left: int) -> tuple[bytes, int, int, int]
 *
 * The data of the chunks in `data`; how far it was read; what is left of the last chunk, for the next call; and 0 if
 * more has to come, 1 at the end of the body, 2 before a size line that is not ordinary: an extension, a trailer, more
 * than 7 digits, no size at all; 3 where a chunk does not end with a line break. */
PyObject *read_chunks(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    char *raw;
    Py_ssize_t size;
    (void)module;
    if (!has_arguments(count, 2) || PyBytes_AsStringAndSize(args[0], &raw, &size) < 0)
        return NULL;
    Py_ssize_t left = PyLong_AsSsize_t(args[1]);
    if (left == -1 && PyErr_Occurred())
        return NULL;
    if (left < BREAK) {
        PyErr_SetString(PyExc_ValueError, "nothing like this can be left of a chunk");
        return NULL;
    }
    Chunks counted = {raw, raw + size, left, 0, NULL};
    pass(&counted);
    PyObject *body = PyBytes_FromStringAndSize(NULL, counted.size);
    if (body == NULL)
        return NULL;
    Chunks copied = {raw, raw + size, left, 0, PyBytes_AsString(body)};
    int state = pass(&copied);
    return Py_BuildValue("(Nnni)", body, (Py_ssize_t)(copied.at - raw), copied.left, state);
}
