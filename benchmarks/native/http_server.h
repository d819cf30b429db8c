/* The HTTP/1 server of the stub engines: connections, requests, and answers that may have to wait for room. */
#ifndef HTTP_SERVER_H
#define HTTP_SERVER_H

#include <stddef.h>
#include <stdint.h>

enum { MAX_ENGINES = 16 };

typedef struct {
    int port, prefill_role, listener;
    long requests, prefill, decode_with_kv, bootstrap, aborted, live;
} Engine;

typedef struct Connection {
    int fd, chat, close_after, waits_for_room, queued;
    Engine *engine;
    char *in, *out;
    size_t in_size, in_room, out_start, out_size, out_room, body_size;
    long tokens_left; /* of the stream that is being written */
    unsigned long id;
    uint64_t due_ns;
    struct Connection *next; /* in the queue of paced streams, or in the list of unused connections */
} Connection;

typedef struct {
    char method; /* the first letter */
    const char *path, *body;
    size_t path_size, body_size;
} Request;

extern Engine engines[MAX_ENGINES];
extern int engine_count;

uint64_t now_ns(void);
void append(Connection *connection, const char *data, size_t size);
void appendf(Connection *connection, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Sends what was appended. Returns 0 if the connection is gone. */
int flush(Connection *connection);

/* Calls `handle_request` for every request that has arrived, until one has a stream to be continued. */
void serve(Connection *connection);

/* Makes a connection that is gone usable for another client. */
void recycle(Connection *connection);

int listen_on(Engine *engine);

/* Waits for clients until `wait_ns` has passed (0: without limit), and serves them. */
void poll_clients(const uint64_t *wait_ns);

/* The program defines this one: it appends an answer. */
void handle_request(Connection *connection, const Request *request);

#endif
