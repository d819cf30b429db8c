/* See http_server.h. One thread, epoll, level-triggered. */
#define _GNU_SOURCE
#include "http_server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_EVENTS = 256, READ_BYTES = 1 << 17, BACKLOG = 4096 };

Engine engines[MAX_ENGINES];
int engine_count;
static int poller = -1;
static Connection *unused;

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void append(Connection *connection, const char *data, size_t size) {
    if (connection->out_size + size > connection->out_room) {
        connection->out_room = 2 * (connection->out_size + size) + 4096;
        connection->out = realloc(connection->out, connection->out_room);
        if (!connection->out) abort();
    }
    memcpy(connection->out + connection->out_size, data, size);
    connection->out_size += size;
}

void appendf(Connection *connection, const char *format, ...) {
    char text[8192];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (size < 0 || (size_t)size >= sizeof text) abort();
    append(connection, text, (size_t)size);
}

void recycle(Connection *connection) {
    connection->next = unused;
    unused = connection;
}

static void drop(Connection *connection) {
    if (connection->tokens_left) {
        connection->engine->aborted++;
        connection->engine->live--;
    }
    close(connection->fd);
    connection->fd = -1;
    connection->tokens_left = 0;
    connection->in_size = connection->out_start = connection->out_size = 0;
    connection->waits_for_room = 0;
    if (!connection->queued) recycle(connection); /* otherwise the queue still refers to it */
}

static void watch(Connection *connection, int for_room) {
    if (connection->waits_for_room == for_room) return;
    connection->waits_for_room = for_room;
    struct epoll_event event = {.events = EPOLLIN | (for_room ? EPOLLOUT : 0), .data.ptr = connection};
    epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
}

int flush(Connection *connection) {
    while (connection->out_start < connection->out_size) {
        ssize_t sent = send(connection->fd, connection->out + connection->out_start,
                            connection->out_size - connection->out_start, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            watch(connection, 1);
            return 1;
        }
        if (sent < 0) {
            drop(connection);
            return 0;
        }
        connection->out_start += (size_t)sent;
    }
    connection->out_start = connection->out_size = 0;
    watch(connection, 0);
    if (connection->close_after && !connection->tokens_left) {
        drop(connection);
        return 0;
    }
    return 1;
}

/* Joins the chunks of a body in place. Returns the bytes that they took, or 0 if the end is not there yet. */
static size_t join_chunks(char *start, size_t available, size_t *joined_size) {
    size_t at = 0, joined = 0;
    for (int pass = 0; pass < 2; pass++) { /* the first pass only looks whether all is there */
        at = joined = 0;
        for (;;) {
            char *line_end = memmem(start + at, available - at, "\r\n", 2);
            if (!line_end) return 0;
            size_t size = strtoul(start + at, NULL, 16), data = (size_t)(line_end + 2 - start);
            if (size > available || data + size + 2 > available) return 0;
            if (pass) memmove(start + joined, start + data, size);
            joined += size;
            at = data + size + 2;
            if (!size) break;
        }
    }
    *joined_size = joined;
    return at;
}

/* Reads one request from what has arrived. Returns its size; 0: more must arrive; -1: this is no HTTP/1. */
static ssize_t read_request(Connection *connection, Request *request) {
    char *head = connection->in, *end = memmem(head, connection->in_size, "\r\n\r\n", 4);
    if (!end) return 0;
    size_t head_size = (size_t)(end + 4 - head), available = connection->in_size - head_size;
    char *path = memchr(head, ' ', head_size), *path_end = NULL;
    if (path) path_end = memmem(path, head_size - (size_t)(path - head), " HTTP/1.", 8);
    if (!path_end) return -1;
    *end = 0; /* the head is a string now */
    const char *length = strcasestr(head, "\r\ncontent-length:");
    int chunked = strcasestr(head, "\r\ntransfer-encoding: chunked") != NULL;
    connection->close_after = strcasestr(head, "\r\nconnection: close") != NULL || !memcmp(path_end, " HTTP/1.0", 9);
    size_t taken = 0;
    *request = (Request){.method = head[0], .path = path + 1, .path_size = (size_t)(path_end - path - 1)};
    request->body = head + head_size;
    if (length) {
        taken = request->body_size = strtoul(length + 17, NULL, 10);
        if (available < taken) {
            *end = '\r';
            return 0;
        }
    } else if (chunked && !(taken = join_chunks(head + head_size, available, &request->body_size))) {
        *end = '\r';
        return 0;
    }
    return (ssize_t)(head_size + taken);
}

void serve(Connection *connection) {
    while (connection->fd >= 0 && !connection->tokens_left && connection->in_size) {
        Request request;
        ssize_t size = read_request(connection, &request);
        if (size < 0) drop(connection);
        if (size <= 0) return;
        handle_request(connection, &request);
        if (connection->fd < 0) return;
        connection->in_size -= (size_t)size;
        memmove(connection->in, connection->in + size, connection->in_size);
        if (!flush(connection)) return;
    }
}

static void receive(Connection *connection) {
    for (;;) {
        if (connection->in_room - connection->in_size < READ_BYTES / 2) {
            connection->in_room = connection->in_room ? 2 * connection->in_room : READ_BYTES;
            connection->in = realloc(connection->in, connection->in_room);
            if (!connection->in) abort();
        }
        size_t room = connection->in_room - connection->in_size;
        ssize_t size = recv(connection->fd, connection->in + connection->in_size, room, 0);
        if (size < 0 && errno == EAGAIN) break;
        if (size <= 0) {
            drop(connection);
            return;
        }
        connection->in_size += (size_t)size;
        if ((size_t)size < room) break;
    }
    serve(connection);
}

static void accept_all(Engine *engine) {
    for (;;) {
        int fd = accept4(engine->listener, NULL, NULL, SOCK_NONBLOCK), one = 1;
        if (fd < 0) return;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Connection *connection = unused;
        if (connection) unused = connection->next;
        else if (!(connection = calloc(1, sizeof *connection))) abort();
        connection->fd = fd;
        connection->engine = engine;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

int listen_on(Engine *engine) {
    if (poller < 0) poller = epoll_create1(0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)engine->port)};
    int one = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    engine->listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(engine->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(engine->listener, (struct sockaddr *)&address, sizeof address) || listen(engine->listener, BACKLOG)) {
        return -1;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = engine};
    return epoll_ctl(poller, EPOLL_CTL_ADD, engine->listener, &event);
}

void poll_clients(const uint64_t *wait_ns) {
    struct epoll_event events[MAX_EVENTS];
    struct timespec wait = {0, 0};
    if (wait_ns) wait = (struct timespec){(time_t)(*wait_ns / 1000000000u), (long)(*wait_ns % 1000000000u)};
    int ready = epoll_pwait2(poller, events, MAX_EVENTS, wait_ns ? &wait : NULL, NULL);
    for (int each = 0; each < ready; each++) {
        char *source = events[each].data.ptr;
        if (source >= (char *)engines && source < (char *)(engines + MAX_ENGINES)) {
            accept_all((Engine *)source);
            continue;
        }
        Connection *connection = events[each].data.ptr;
        if (connection->fd < 0) continue;
        if (events[each].events & EPOLLOUT && !flush(connection)) continue;
        if (events[each].events & ~(uint32_t)EPOLLOUT) receive(connection);
    }
}
