/* Puts many values into a Valkey server; see resp_exchange.h.
 *
 * The two checksums of a page stand in front of its payload, so it is hashed before it is sent: while the socket takes no
 * more of the page before it, and else right before, so that what is sent is in the processor's caches. */
#include "page_hash.h"
#include "resp_exchange.h"
#include <poll.h>

enum { HEADER = 256, CHECKSUM_AT = 40, HEADER_CHECKSUM_AT = 248 }; /* of a page; see kvparams/pages.py */
enum { HASH_STEP = 64 << 10, VECTORS = 64 };

typedef struct {
    Py_buffer *pieces; /* the command, the value, and what ends the command */
    Py_ssize_t count, held, size;
    Py_buffer header; /* of a page, without its two checksums; no memory: nothing is computed */
    PageHash hash;
    Py_ssize_t piece, at; /* how far it is hashed */
    bool is_complete;
    int code;
} Put;

typedef struct {
    Exchange exchange;
    Put *puts;
    Py_ssize_t count, sending, answered; /* those before `sending` are sent */
    Py_ssize_t piece, at;                /* how much of that one is sent */
} Puts;

static void write_number(char *to, uint64_t number) {
    for (int byte = 0; byte < 8; byte++)
        to[byte] = (char)(number >> 8 * byte);
}

/* Writes the header of a page whose payload is hashed. */
static void complete(Put *put) {
    char *header = put->pieces[1].buf;
    memcpy(header, put->header.buf, HEADER);
    write_number(header + CHECKSUM_AT, page_hash_end(&put->hash));
    PageHash hash;
    page_hash_begin(&hash);
    page_hash_add(&hash, header, HEADER_CHECKSUM_AT);
    write_number(header + HEADER_CHECKSUM_AT, page_hash_end(&hash));
    put->is_complete = true;
}

/* Hashes some of a payload, and completes the page behind its end. */
static void hash_some(Put *put, Py_ssize_t size) {
    while (size > 0 && put->piece < put->count - 1) {
        const Py_buffer *piece = &put->pieces[put->piece];
        Py_ssize_t some = piece->len - put->at < size ? piece->len - put->at : size;
        page_hash_add(&put->hash, (const char *)piece->buf + put->at, (size_t)some);
        size -= some;
        put->at += some;
        if (put->at == piece->len) {
            put->piece++;
            put->at = 0;
        }
    }
    if (put->piece == put->count - 1)
        complete(put);
}

/* Hashes a little of the next value that is not complete; returns whether there was one. */
static bool hash_ahead(Puts *puts) {
    for (Py_ssize_t number = puts->sending; number < puts->count && number <= puts->sending + 1; number++)
        if (!puts->puts[number].is_complete) {
            hash_some(&puts->puts[number], HASH_STEP);
            return true;
        }
    return false;
}

/* Reads the replies that are held; returns false at one that is not ordinary. */
static bool read_replies(Puts *puts) {
    Exchange *exchange = &puts->exchange;
    while (exchange->under_way > 0 && exchange->held_bytes > 0) {
        size_t known = exchange->held_bytes < 5 ? (size_t)exchange->held_bytes : 5;
        bool is_stored = memcmp(exchange->held, "+OK\r\n", known) == 0;
        if (!is_stored && memcmp(exchange->held, "$-1\r\n", known) != 0)
            return exchange_end(exchange, OTHER_REPLY);
        if (known < 5)
            return true;
        Put *put = &puts->puts[puts->answered++];
        put->code = is_stored ? 1 : 0;
        exchange->under_way--;
        exchange->under_way_bytes -= put->size;
        exchange_drop(exchange, 5);
    }
    return true;
}

/* Sends some of the value that is being sent; returns as `exchange_send`. */
static Py_ssize_t send_value(Puts *puts) {
    Put *put = &puts->puts[puts->sending];
    struct iovec vectors[VECTORS];
    size_t count = 0;
    Py_ssize_t skip = puts->at;
    for (Py_ssize_t piece = puts->piece; piece < put->count && count < VECTORS; piece++, skip = 0)
        vectors[count++] = (struct iovec){(char *)put->pieces[piece].buf + skip, (size_t)(put->pieces[piece].len - skip)};
    Py_ssize_t sent = exchange_send(&puts->exchange, vectors, count);
    for (puts->at += sent > 0 ? sent : 0; puts->piece < put->count && puts->at >= put->pieces[puts->piece].len;)
        puts->at -= put->pieces[puts->piece++].len;
    if (puts->piece == put->count) {
        puts->exchange.under_way++;
        puts->exchange.under_way_bytes += put->size;
        puts->sending++;
        puts->piece = 0;
    }
    return sent;
}

static void put_all(Puts *puts) {
    Exchange *exchange = &puts->exchange;
    while (puts->answered < puts->count) {
        bool is_begun = puts->piece > 0 || puts->at > 0;
        bool stops = exchange->status == OTHER_REPLY;
        if (stops && !is_begun)
            return;
        bool sends = is_begun || (puts->sending < puts->count && exchange_fits(exchange, puts->puts[puts->sending].size));
        if (sends) {
            if (!is_begun && exchange_is_late(exchange))
                return;
            Put *put = &puts->puts[puts->sending];
            if (!put->is_complete)
                hash_some(put, put->size);
            Py_ssize_t sent = send_value(puts);
            if (sent < 0)
                return;
            if (sent > 0)
                continue;
        }
        if (!stops && hash_ahead(puts))
            continue;
        if (!exchange_await(exchange, (short)((sends ? POLLOUT : 0) | (stops ? 0 : POLLIN))))
            return;
        if (stops || exchange->held_bytes == HELD)
            continue;
        if (exchange_hold(exchange, HELD) < 0 || (!read_replies(puts) && exchange->status != OTHER_REPLY))
            return;
    }
}

static void release_puts(Puts *puts) {
    for (Py_ssize_t number = 0; number < puts->count; number++) {
        Put *put = &puts->puts[number];
        for (Py_ssize_t piece = 0; piece < put->held; piece++)
            PyBuffer_Release(&put->pieces[piece]);
        if (put->header.obj != NULL)
            PyBuffer_Release(&put->header);
        PyMem_Free(put->pieces);
    }
    PyMem_Free(puts->puts);
}

/* Holds the buffers of a value, `(pieces, header)`; returns false with an exception. */
static bool hold_put(Put *put, PyObject *item) {
    PyObject *pieces, *header;
    if (!is_tuple(item) || !PyArg_ParseTuple(item, "O!O", &PyList_Type, &pieces, &header))
        return false;
    put->count = PyList_Size(pieces);
    put->pieces = PyMem_Calloc((size_t)put->count + 1, sizeof(Py_buffer));
    if (put->pieces == NULL)
        return PyErr_NoMemory() != NULL;
    put->is_complete = header == Py_None;
    for (; put->held < put->count; put->held++) {
        bool is_written = !put->is_complete && put->held == 1;
        PyObject *piece = PyList_GetItem(pieces, put->held);
        if (piece == NULL ||
            PyObject_GetBuffer(piece, &put->pieces[put->held], is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return false;
        put->size += put->pieces[put->held].len;
    }
    if (put->is_complete)
        return true;
    if (PyObject_GetBuffer(header, &put->header, PyBUF_SIMPLE) < 0)
        return false;
    if (put->count < 3 || put->pieces[1].len < HEADER || put->header.len != HEADER) {
        PyErr_SetString(PyExc_ValueError, "a page has a header, and what comes before and after it");
        return false;
    }
    page_hash_begin(&put->hash);
    put->piece = 1;
    put->at = HEADER;
    return true;
}

/* put_values(fd, deadline, values, few_bytes, pair_bytes); see interface.py. */
PyObject *put_values(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 5))
        return NULL;
    Puts puts = {0};
    PyObject *results = NULL;
    if (!exchange_begin(&puts.exchange, args, count))
        return NULL;
    Py_ssize_t values = PyList_Size(args[2]);
    puts.puts = PyMem_Calloc((size_t)values + 1, sizeof(Put));
    bool is_held = puts.puts != NULL || PyErr_NoMemory() != NULL;
    for (; is_held && puts.count < values; puts.count++) /* one that failed is released as well */
        is_held = hold_put(&puts.puts[puts.count], PyList_GetItem(args[2], puts.count));
    if (is_held) {
        Py_BEGIN_ALLOW_THREADS
        put_all(&puts);
        Py_END_ALLOW_THREADS
        results = PyList_New(puts.answered);
        for (Py_ssize_t number = 0; results != NULL && number < puts.answered; number++)
            if (PyList_SetItem(results, number, PyBool_FromLong(puts.puts[number].code)) < 0)
                Py_CLEAR(results);
        results = exchange_outcome(&puts.exchange, results, puts.sending);
    }
    release_puts(&puts);
    return results;
}
