/* Gets many values from a Valkey server; see resp_exchange.h. Each is hashed while it comes. */
#include "page_hash.h"
#include "resp_exchange.h"
#include <poll.h>

enum { HEADER = 256 }; /* bytes in front of the payload of a page; see kvparams/pages.py */
enum { HASH_STEP = 64 << 10, MOST_BEHIND = 512 << 10 };
enum { MISSING = -1, DIGITS = 18, LINE = DIGITS + 3 };

typedef struct {
    Py_buffer command, target;
    Py_ssize_t nbytes, received; /* MISSING, or of the value; of it */
    uint64_t checksum; /* of what follows the header of a page */
} Get;

typedef struct {
    Exchange exchange;
    Get *gets;
    Py_ssize_t count, asked, answered, at; /* those before `asked` are sent, and `at` bytes of that one */
    bool is_in_value, are_hashed;
    Py_ssize_t size; /* of the value that comes */
    PageHash hash;
    Py_ssize_t hashing, hashed, behind; /* how far values are hashed; bytes that have come and are not */
} Gets;

/* Asks for as many values as may be under way; returns false when the exchange has ended. */
static bool ask(Gets *gets) {
    Exchange *exchange = &gets->exchange;
    while (gets->asked < gets->count && exchange_fits(exchange, gets->gets[gets->asked].target.len)) {
        Get *get = &gets->gets[gets->asked];
        struct iovec vector = {(char *)get->command.buf + gets->at, (size_t)(get->command.len - gets->at)};
        Py_ssize_t sent = exchange_send(exchange, &vector, 1);
        if (sent < 0 || (sent == 0 && !exchange_await(exchange, POLLOUT)))
            return false;
        gets->at += sent;
        if (gets->at < get->command.len)
            continue;
        gets->at = 0;
        gets->asked++;
        exchange->under_way++;
        exchange->under_way_bytes += get->target.len;
    }
    return true;
}

static void answered(Gets *gets, Py_ssize_t nbytes) {
    Get *get = &gets->gets[gets->answered++];
    get->nbytes = nbytes;
    gets->exchange.under_way--;
    gets->exchange.under_way_bytes -= get->target.len;
    gets->is_in_value = false;
}

/* Hashes some of what has come; returns whether there was anything. */
static bool hash_some(Gets *gets, Py_ssize_t size) {
    while (gets->are_hashed && gets->hashing < gets->count) {
        Get *get = &gets->gets[gets->hashing];
        if (gets->hashed == 0)
            page_hash_begin(&gets->hash);
        Py_ssize_t from = gets->hashed < HEADER ? HEADER : gets->hashed;
        if (from < get->received) {
            Py_ssize_t some = get->received - from < size ? get->received - from : size;
            page_hash_add(&gets->hash, (const char *)get->target.buf + from, (size_t)some);
            gets->behind -= from + some - gets->hashed;
            gets->hashed = from + some;
            return true;
        }
        if (gets->hashing == gets->answered)
            return false;
        get->checksum = page_hash_end(&gets->hash);
        gets->behind -= get->received - gets->hashed;
        gets->hashing++;
        gets->hashed = 0;
    }
    return false;
}

/* Counts bytes that lie in the target. They are hashed when there is time, but while they are in the second cache. */
static void take(Gets *gets, Py_ssize_t size) {
    gets->gets[gets->answered].received += size;
    gets->behind += size;
    while (gets->behind > MOST_BEHIND && hash_some(gets, HASH_STEP))
        ;
}

/* Reads the line that begins a reply, if it is held; returns false at one that is not ordinary. */
static bool read_line(Gets *gets) {
    Exchange *exchange = &gets->exchange;
    char *line = exchange->held, *stop = memchr(line, '\r', (size_t)exchange->held_bytes);
    if (exchange->held_bytes > 0 && line[0] != '$')
        return exchange_end(exchange, OTHER_REPLY);
    if (stop == NULL || stop + 1 == line + exchange->held_bytes) /* no line has so many digits */
        return exchange->held_bytes < LINE || exchange_end(exchange, OTHER_REPLY);
    if (stop[1] != '\n' || stop == line + 1 || stop - line > DIGITS + 1)
        return exchange_end(exchange, OTHER_REPLY);
    if (stop == line + 3 && line[1] == '-' && line[2] == '1') {
        exchange_drop(exchange, 5);
        answered(gets, MISSING);
        return true;
    }
    Py_ssize_t size = 0;
    for (const char *digit = line + 1; digit < stop; digit++) {
        if (*digit < '0' || *digit > '9')
            return exchange_end(exchange, OTHER_REPLY);
        size = size * 10 + (*digit - '0');
    }
    if (size > gets->gets[gets->answered].target.len)
        return exchange_end(exchange, OTHER_REPLY);
    exchange_drop(exchange, stop + 2 - line);
    gets->is_in_value = true;
    gets->size = size;
    Py_ssize_t some = exchange->held_bytes < size ? exchange->held_bytes : size;
    memcpy(gets->gets[gets->answered].target.buf, exchange->held, (size_t)some);
    exchange_drop(exchange, some);
    take(gets, some);
    return true;
}

/* Receives some of a value and of the line behind it; returns as `exchange_send`. */
static Py_ssize_t receive_value(Gets *gets) {
    Exchange *exchange = &gets->exchange;
    const Get *get = &gets->gets[gets->answered];
    Py_ssize_t left = gets->size - get->received;
    struct iovec vectors[2] = {
        {(char *)get->target.buf + get->received, (size_t)left},
        {exchange->held + exchange->held_bytes, (size_t)(LINE - exchange->held_bytes)},
    };
    Py_ssize_t received = exchange_receive(exchange, vectors, 2);
    if (received <= 0)
        return received;
    Py_ssize_t some = received < left ? received : left;
    exchange->held_bytes += received - some;
    take(gets, some);
    return received;
}

static void get_all(Gets *gets) {
    Exchange *exchange = &gets->exchange;
    while (gets->answered < gets->count) {
        if (!ask(gets))
            return;
        if (!gets->is_in_value) {
            if (exchange_is_late(exchange))
                return;
            Py_ssize_t before = gets->answered;
            if (!read_line(gets))
                return;
            if (gets->is_in_value || gets->answered > before)
                continue;
            Py_ssize_t held = exchange_hold(exchange, LINE);
            if (held < 0 || (held == 0 && !hash_some(gets, HASH_STEP) && !exchange_await(exchange, POLLIN)))
                return;
            continue;
        }
        if (gets->gets[gets->answered].received == gets->size && exchange->held_bytes >= 2) {
            if (memcmp(exchange->held, "\r\n", 2) != 0) {
                exchange_end(exchange, BROKEN);
                return;
            }
            exchange_drop(exchange, 2);
            answered(gets, gets->size);
            continue;
        }
        Py_ssize_t received = receive_value(gets);
        if (received < 0 || (received == 0 && !hash_some(gets, HASH_STEP) && !exchange_await(exchange, POLLIN)))
            return;
    }
}

static void release_gets(Gets *gets) {
    for (Py_ssize_t number = 0; number < gets->count; number++) {
        if (gets->gets[number].command.obj != NULL)
            PyBuffer_Release(&gets->gets[number].command);
        if (gets->gets[number].target.obj != NULL)
            PyBuffer_Release(&gets->gets[number].target);
    }
    PyMem_Free(gets->gets);
}

/* Holds the memory of a value, `(command, target)`; returns false with an exception. */
static bool hold_get(Get *get, PyObject *item) {
    PyObject *command, *target;
    return is_tuple(item) && PyArg_ParseTuple(item, "OO", &command, &target) &&
           PyObject_GetBuffer(command, &get->command, PyBUF_SIMPLE) == 0 &&
           PyObject_GetBuffer(target, &get->target, PyBUF_WRITABLE) == 0;
}

/* get_values(fd, deadline, values, are_hashed, few_bytes, pair_bytes); see interface.py. */
PyObject *get_values(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 6))
        return NULL;
    Gets gets = {0};
    PyObject *results = NULL;
    gets.are_hashed = PyObject_IsTrue(args[3]) == 1;
    if (!exchange_begin(&gets.exchange, args, count))
        return NULL;
    Py_ssize_t values = PyList_Size(args[2]);
    gets.gets = PyMem_Calloc((size_t)values + 1, sizeof(Get));
    bool is_held = gets.gets != NULL || PyErr_NoMemory() != NULL;
    for (; is_held && gets.count < values; gets.count++)
        is_held = hold_get(&gets.gets[gets.count], PyList_GetItem(args[2], gets.count));
    if (is_held) {
        Py_BEGIN_ALLOW_THREADS
        get_all(&gets);
        while (hash_some(&gets, PY_SSIZE_T_MAX))
            ;
        Py_END_ALLOW_THREADS
        results = PyList_New(gets.answered);
        for (Py_ssize_t number = 0; results != NULL && number < gets.answered; number++) {
            const Get *get = &gets.gets[number];
            PyObject *pair = Py_BuildValue("(nK)", get->nbytes, (unsigned long long)get->checksum);
            if (pair == NULL || PyList_SetItem(results, number, pair) < 0)
                Py_CLEAR(results);
        }
        results = exchange_outcome(&gets.exchange, results, gets.asked);
    }
    release_gets(&gets);
    return results;
}
