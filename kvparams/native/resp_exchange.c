/* See resp_exchange.h. */
#include "resp_exchange.h"
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

bool exchange_fits(const Exchange *exchange, Py_ssize_t size) {
    Py_ssize_t bytes = exchange->under_way_bytes + size;
    return exchange->under_way == 0 || bytes <= exchange->few_bytes ||
           (exchange->under_way == 1 && bytes <= exchange->pair_bytes);
}

bool exchange_end(Exchange *exchange, int status) {
    exchange->status = status;
    exchange->error = status == FAILED ? errno : 0;
    return false;
}

static double left_s(const Exchange *exchange) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return exchange->deadline - ((double)now.tv_sec + (double)now.tv_nsec * 1e-9);
}

bool exchange_is_late(Exchange *exchange) { return left_s(exchange) <= 0 && !exchange_end(exchange, LATE); }

bool exchange_await(Exchange *exchange, short events) {
    for (;;) {
        double left = left_s(exchange);
        if (left <= 0)
            return exchange_end(exchange, LATE);
        struct pollfd entry = {.fd = exchange->fd, .events = events};
        int found = poll(&entry, 1, left > 1000 ? 1000000 : (int)(left * 1000) + 1);
        if (found > 0)
            return true;
        if (found < 0 && errno != EINTR)
            return exchange_end(exchange, FAILED);
    }
}

Py_ssize_t exchange_send(Exchange *exchange, struct iovec *vectors, size_t count) {
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
    for (;;) {
        ssize_t sent = sendmsg(exchange->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0)
            return sent;
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        if (errno != EINTR)
            return exchange_end(exchange, FAILED) - 1;
    }
}

Py_ssize_t exchange_receive(Exchange *exchange, struct iovec *vectors, size_t count) {
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
    for (;;) {
        ssize_t received = recvmsg(exchange->fd, &message, MSG_DONTWAIT);
        if (received > 0)
            return received;
        if (received == 0)
            return exchange_end(exchange, CLOSED) - 1;
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        if (errno != EINTR)
            return exchange_end(exchange, FAILED) - 1;
    }
}

Py_ssize_t exchange_hold(Exchange *exchange, Py_ssize_t size) {
    struct iovec vector = {exchange->held + exchange->held_bytes, (size_t)(size - exchange->held_bytes)};
    Py_ssize_t received = exchange_receive(exchange, &vector, 1);
    exchange->held_bytes += received > 0 ? received : 0;
    return received;
}

void exchange_drop(Exchange *exchange, Py_ssize_t size) {
    exchange->held_bytes -= size;
    memmove(exchange->held, exchange->held + size, (size_t)exchange->held_bytes);
}

PyObject *exchange_outcome(const Exchange *exchange, PyObject *results, Py_ssize_t sent) {
    if (results == NULL)
        return NULL;
    return Py_BuildValue("(iiNny#)", exchange->status, exchange->error, results, sent, exchange->held,
                         exchange->held_bytes);
}

bool exchange_begin(Exchange *exchange, PyObject *const *args, Py_ssize_t count) {
    exchange->fd = (int)PyLong_AsLong(args[0]);
    exchange->deadline = PyFloat_AsDouble(args[1]);
    exchange->few_bytes = PyLong_AsSsize_t(args[count - 2]);
    exchange->pair_bytes = PyLong_AsSsize_t(args[count - 1]);
    if (!PyErr_Occurred() && !PyList_Check(args[2]))
        PyErr_SetString(PyExc_TypeError, "the values are no list");
    return !PyErr_Occurred();
}
