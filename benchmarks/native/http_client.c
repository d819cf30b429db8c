/* See http_client.h. One thread, epoll, level-triggered. */
#define _GNU_SOURCE
#include "http_client.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_EVENTS = 256, HEAD_BYTES = 16384, READ_BYTES = 1 << 18, DONE_BYTES = 14, LINE_BYTES = 24 };

/* What the parser expects next. */
typedef enum { HEAD, BODY, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER } Part;

typedef struct Connection {
    int fd, busy, fresh, for_room;
    Exchange exchange;
    size_t sent;
    Part part;
    char head[HEAD_BYTES + 1], line[LINE_BYTES + 1], tail[DONE_BYTES];
    size_t head_size, line_size, tail_size, left, body_size;
    int status, keep_alive, after_newline;
    struct Connection *next_idle, *next;
} Connection;

int expects_stream;
long expected_events = -1, opened_connections;
static int poller;
static struct sockaddr_in address = {.sin_family = AF_INET};
static Connection *idle, *all;

double monotonic_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void open_client(int port) {
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    poller = epoll_create1(0);
}

static void drop(Connection *connection) {
    close(connection->fd);
    connection->fd = -1;
    for (Connection **each = &idle; *each; each = &(*each)->next_idle) {
        if (*each == connection) {
            *each = connection->next_idle;
            break;
        }
    }
}

static void end(Connection *connection, const char *error) {
    double now_s = monotonic_s();
    connection->busy = connection->fresh = 0;
    free(connection->exchange.wire);
    connection->exchange.wire = NULL;
    if (error || !connection->keep_alive) {
        drop(connection);
    } else {
        connection->next_idle = idle;
        idle = connection;
    }
    exchange_ended(&connection->exchange, now_s, error);
}

static void watch(Connection *connection, int for_room) {
    if (connection->for_room == for_room) return;
    connection->for_room = for_room;
    struct epoll_event event = {.events = EPOLLIN | (for_room ? EPOLLOUT : 0), .data.ptr = connection};
    epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
}

static void lost(Connection *connection, const char *error) {
    Exchange exchange = connection->exchange;
    int stale = !connection->fresh && !connection->head_size && !exchange.retried;
    if (!connection->busy || !stale) {
        if (connection->busy) end(connection, error);
        else drop(connection);
        return;
    }
    /* The server closed an idle connection just as it was used again: any client would try once more. */
    connection->busy = 0;
    drop(connection);
    exchange.retried = 1;
    start_exchange(exchange);
}

static void send_rest(Connection *connection) {
    Exchange *exchange = &connection->exchange;
    while (connection->busy && connection->sent < exchange->wire_size) {
        ssize_t size = send(connection->fd, exchange->wire + connection->sent, exchange->wire_size - connection->sent,
                            MSG_NOSIGNAL);
        if (size < 0 && (errno == EAGAIN || errno == ENOTCONN)) {
            watch(connection, 1);
            return;
        }
        if (size < 0) {
            char error[64];
            int refused = connection->fresh && !connection->sent;
            snprintf(error, sizeof error, "%s: %s", refused ? "connect" : "send", strerror(errno));
            lost(connection, error);
            return;
        }
        connection->sent += (size_t)size;
    }
    watch(connection, 0);
}

static Connection *connect_to_server(void) {
    Connection *connection = all;
    while (connection && (connection->fd >= 0 || connection->busy)) connection = connection->next;
    if (!connection) {
        connection = calloc(1, sizeof *connection);
        if (!connection) abort();
        connection->next = all;
        all = connection;
    }
    int one = 1;
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = connection};
    epoll_ctl(poller, EPOLL_CTL_ADD, connection->fd, &event);
    connection->for_room = connection->fresh = 1;
    opened_connections++;
    return connection;
}

void start_exchange(Exchange exchange) {
    Connection *connection = exchange.retried ? NULL : idle; /* other idle connections may be stale, too */
    int is_new = !connection;
    if (connection) idle = connection->next_idle;
    else connection = connect_to_server();
    connection->busy = 1;
    connection->exchange = exchange;
    connection->sent = connection->head_size = connection->tail_size = connection->body_size = 0;
    connection->part = HEAD;
    connection->after_newline = 0;
    connection->keep_alive = 1;
    if (is_new && connect(connection->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) {
        char error[64];
        snprintf(error, sizeof error, "connect: %s", strerror(errno));
        end(connection, error);
        return;
    }
    if (!exchange.retried) exchange_began(&exchange, monotonic_s());
    send_rest(connection);
}

/* Counts the ends of events, which are empty lines, however the bytes are cut. */
static long count_events(Connection *connection, const char *data, size_t size) {
    long events = 0;
    for (const char *end = data + size; data < end;) {
        const char *newline = memchr(data, '\n', (size_t)(end - data));
        if (newline != data) connection->after_newline = 0; /* other bytes lie between */
        if (!newline) break;
        events += connection->after_newline;
        connection->after_newline = !connection->after_newline;
        data = newline + 1;
    }
    return events;
}

static void take_body(Connection *connection, const char *data, size_t size, double now_s) {
    Exchange *exchange = &connection->exchange;
    if (!connection->body_size) exchange->first_byte_s = now_s;
    connection->body_size += size;
    if (!expects_stream) return;
    long events = count_events(connection, data, size);
    exchange_events(exchange, now_s, events);
    exchange->events += events;
    if (events) exchange->last_event_s = now_s;
    if (size >= DONE_BYTES) {
        memcpy(connection->tail, data + size - DONE_BYTES, DONE_BYTES);
        connection->tail_size = DONE_BYTES;
        return;
    }
    size_t keep = DONE_BYTES - size < connection->tail_size ? DONE_BYTES - size : connection->tail_size;
    memmove(connection->tail, connection->tail + connection->tail_size - keep, keep);
    memcpy(connection->tail + keep, data, size);
    connection->tail_size = keep + size;
}

static void finish(Connection *connection) {
    char error[64] = "";
    long events = connection->exchange.events;
    if (connection->status != 200) snprintf(error, sizeof error, "status %d", connection->status);
    else if (!connection->body_size) snprintf(error, sizeof error, "empty answer");
    else if (expects_stream) {
        if (connection->tail_size != DONE_BYTES || memcmp(connection->tail, "data: [DONE]\n\n", DONE_BYTES)) {
            snprintf(error, sizeof error, "no [DONE]");
        } else if (expected_events >= 0 && events != expected_events) {
            snprintf(error, sizeof error, "%ld events instead of %ld", events, expected_events);
        }
    }
    end(connection, *error ? error : NULL);
}

/* Reads the head if it is complete now. Returns the bytes taken of `data`, or -1 if it is malformed. */
static ssize_t take_head(Connection *connection, const char *data, size_t size) {
    size_t room = HEAD_BYTES - connection->head_size, before = connection->head_size;
    size_t copied = size < room ? size : room;
    memcpy(connection->head + before, data, copied);
    connection->head_size += copied;
    connection->head[connection->head_size] = 0;
    char *head = connection->head, *head_end = strstr(head, "\r\n\r\n");
    if (connection->head_size >= 5 && memcmp(head, "HTTP/", 5)) return -1;
    if (!head_end) return copied < size ? -1 : (ssize_t)size;
    head_end[2] = 0;
    if (head_end - head < 12) return -1;
    connection->status = atoi(head + 9);
    const char *length = strcasestr(head, "\r\ncontent-length:");
    connection->keep_alive = !strcasestr(head, "\r\nconnection: close") && memcmp(head, "HTTP/1.0", 8);
    connection->line_size = 0;
    if (strcasestr(head, "\r\ntransfer-encoding: chunked")) {
        connection->part = CHUNK_SIZE;
    } else if (length) {
        connection->part = BODY;
        connection->left = strtoul(length + 17, NULL, 10);
    } else {
        return -1;
    }
    return (ssize_t)((size_t)(head_end + 4 - head) - before);
}

/* Collects a line. Returns the bytes taken; the line is whole if the last of them is a newline. */
static size_t take_line(Connection *connection, const char *data, size_t size) {
    const char *newline = memchr(data, '\n', size);
    size_t taken = newline ? (size_t)(newline + 1 - data) : size;
    for (size_t at = 0; at < taken; at++) {
        if (data[at] == '\r' || data[at] == '\n' || connection->line_size == LINE_BYTES) continue;
        connection->line[connection->line_size++] = data[at];
    }
    connection->line[connection->line_size] = 0;
    return taken;
}

/* Handles bytes of an answer. Returns those taken; 0: the answer has ended; -1: it is malformed. */
static ssize_t take(Connection *connection, const char *data, size_t size, double now_s) {
    size_t part = size < connection->left ? size : connection->left;
    switch (connection->part) {
    case HEAD:
        return take_head(connection, data, size);
    case BODY:
    case CHUNK:
        take_body(connection, data, part, now_s);
        connection->left -= part;
        if (!connection->left && connection->part == CHUNK) connection->part = CHUNK_END;
        return (ssize_t)part;
    default:
        break;
    }
    size_t taken = take_line(connection, data, size);
    if (data[taken - 1] != '\n') return (ssize_t)taken;
    int empty = !connection->line_size;
    connection->line_size = 0;
    if (connection->part == CHUNK_SIZE) {
        char *digits_end;
        connection->left = strtoul(connection->line, &digits_end, 16);
        if (digits_end == connection->line) return -1;
        connection->part = connection->left ? CHUNK : TRAILER;
    } else if (connection->part == CHUNK_END) {
        connection->part = CHUNK_SIZE;
    } else if (empty) {
        connection->left = 0;
        connection->part = BODY; /* of which nothing is left */
    }
    return (ssize_t)taken;
}

static void receive(Connection *connection) {
    static char data[READ_BYTES];
    ssize_t size = recv(connection->fd, data, sizeof data, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) {
        char error[64] = "connection lost";
        int refused = size < 0 && connection->fresh && !connection->sent;
        if (refused) snprintf(error, sizeof error, "connect: %s", strerror(errno));
        lost(connection, error);
        return;
    }
    double now_s = monotonic_s();
    for (size_t at = 0; at < (size_t)size && connection->busy;) {
        ssize_t taken = take(connection, data + at, (size_t)size - at, now_s);
        if (taken < 0) {
            end(connection, "malformed answer");
            return;
        }
        at += (size_t)taken;
        if (connection->part == BODY && !connection->left) {
            finish(connection);
            return;
        }
    }
}

void poll_connections(double until_s) {
    struct epoll_event events[MAX_EVENTS];
    double wait_s = until_s - monotonic_s();
    if (wait_s < 0) wait_s = 0;
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - (double)(time_t)wait_s) * 1e9)};
    int ready = epoll_pwait2(poller, events, MAX_EVENTS, &wait, NULL);
    for (int each = 0; each < ready; each++) {
        Connection *connection = events[each].data.ptr;
        if (connection->fd >= 0 && events[each].events & EPOLLOUT) send_rest(connection);
        if (connection->fd >= 0 && events[each].events & ~(uint32_t)EPOLLOUT) receive(connection);
    }
}

void abandon_exchanges(void) {
    for (Connection *each = all; each; each = each->next) {
        if (each->busy) end(each, "unanswered");
        else if (each->fd >= 0) drop(each);
    }
}
