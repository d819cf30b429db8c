/* An exchange of many values with a Valkey server over one connected socket, without the interpreter lock.
 *
 * Only ordinary replies are read: a value that was stored or is there already, a value that fits its memory, no value.
 * Before any other reply everything stops in a known state, and the caller reads that reply and goes on. The protocol:
 * https://valkey.io/topics/protocol/ (as of Valkey 8.0). */
#ifndef KVPARAMS_RESP_EXCHANGE_H
#define KVPARAMS_RESP_EXCHANGE_H

#include "native.h"
#include <sys/uio.h>

enum { ORDINARY = 0, OTHER_REPLY = 1, LATE = 2, CLOSED = 3, BROKEN = 4, FAILED = 5 }; /* how an exchange has ended */
enum { HELD = 512 };

typedef struct {
    int fd;
    double deadline;                  /* on CLOCK_MONOTONIC, in seconds */
    Py_ssize_t few_bytes, pair_bytes; /* so much may be under way: several values, two; see `fits` */
    Py_ssize_t under_way, under_way_bytes;
    char held[HELD]; /* received and not read */
    Py_ssize_t held_bytes;
    int status, error;
} Exchange;

/* Reads the arguments `(fd, deadline, values, ..., few_bytes, pair_bytes)`; returns false with an exception. */
bool exchange_begin(Exchange *exchange, PyObject *const *args, Py_ssize_t count);
/* Ends an exchange; returns false. */
bool exchange_end(Exchange *exchange, int status);
/* Returns `(status, error, results, sent, held)`; takes the reference to the results, which may be NULL. */
PyObject *exchange_outcome(const Exchange *exchange, PyObject *results, Py_ssize_t sent);

/* Returns whether one more value of this size may be under way. */
bool exchange_fits(const Exchange *exchange, Py_ssize_t size);
/* Ends an exchange whose deadline has passed; returns whether it has. */
bool exchange_is_late(Exchange *exchange);
/* Waits until the socket is ready; returns false at the deadline and after an error. */
bool exchange_await(Exchange *exchange, short events);
/* Sends some; returns how much, 0 if the socket takes no more now, -1 when the exchange has ended. */
Py_ssize_t exchange_send(Exchange *exchange, struct iovec *vectors, size_t count);
/* Receives some; returns as `exchange_send`. */
Py_ssize_t exchange_receive(Exchange *exchange, struct iovec *vectors, size_t count);
/* Receives what is there, so that at most `size` bytes are held; returns as `exchange_send`. */
Py_ssize_t exchange_hold(Exchange *exchange, Py_ssize_t size);
/* Forgets the first bytes that are held. */
void exchange_drop(Exchange *exchange, Py_ssize_t size);

#endif
