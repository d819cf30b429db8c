/* The load generator's HTTP/1 client: as many connections to one port as it takes, one exchange at a time on each. */
#ifndef HTTP_CLIENT_H
#define HTTP_CLIENT_H

#include <stddef.h>

/* One request and what has arrived of its answer. Times are those of the monotonic clock, in seconds. */
typedef struct {
    double due_s;        /* when it should have been sent */
    double first_byte_s; /* of the body; 0: nothing has arrived */
    double last_event_s;
    char *wire; /* owned */
    size_t wire_size;
    long events;
    int measured, retried;
} Exchange;

extern int expects_stream;
extern long expected_events; /* [DONE] included; below zero: any number */
extern long opened_connections;

double monotonic_s(void);
void open_client(int port);
void start_exchange(Exchange exchange);

/* Waits for answers, at most until that time, and handles what has arrived. */
void poll_connections(double until_s);

/* Ends what is unanswered. */
void abandon_exchanges(void);

/* The program defines these. `error` is NULL for an answer that is right. */
void exchange_began(const Exchange *exchange, double now_s);
void exchange_events(const Exchange *exchange, double now_s, long events);
void exchange_ended(const Exchange *exchange, double now_s, const char *error);

#endif
