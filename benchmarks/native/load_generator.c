/* Loads one port with HTTP requests; times and checks every answer. benchmarks/load_process.py runs it.
 *
 *     load_generator PORT PATH BODY [--events N | --stream 1] [--header LINE] [--first-serial N] [--warm-up N] MODE
 *     MODE: --concurrency N --requests N --limit S [--ramp S]     closed loop: N in flight
 *           --arrivals N --drain S                                open loop: N offsets in seconds (doubles) on stdin
 *
 * A request's clock starts when it should have been sent, so a server that stalls is charged for every request that
 * was due meanwhile. The first `@@@@@@@@` of the body becomes a counter of eight digits. An answer is right if its
 * status is 200, its framing is whole, and a stream ends with [DONE] and has N events (--events).
 *
 * Output: one line of JSON with the counts, then the times in seconds as doubles: e2e, ttft, itl, lag. */
#define _GNU_SOURCE
#include "http_client.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { ERROR_KINDS = 16, HEAD_BYTES = 1024 };

typedef struct {
    double *values;
    size_t size, room;
} Series;

static Series e2e, ttft, itl, lag;
static struct {
    char name[96];
    long count;
} errors[ERROR_KINDS];
static long sent, done, right_answers, planned, warm_up, serial, concurrency;
static double *arrivals, start_s, limit_s = 60, ramp_s, drain_s = 10;
static char *body_template, *counter;
static size_t body_size;
static const char *path, *header = "";
static int port;

static void add(Series *series, double value) {
    if (series->size == series->room) {
        series->room = series->room ? 2 * series->room : 4096;
        series->values = realloc(series->values, series->room * sizeof value);
        if (!series->values) abort();
    }
    series->values[series->size++] = value;
}

static void count_error(const char *name) {
    for (int each = 0; each < ERROR_KINDS; each++) {
        if (errors[each].count && strcmp(errors[each].name, name)) continue;
        snprintf(errors[each].name, sizeof errors[each].name, "%s", name);
        errors[each].count++;
        return;
    }
}

static void send_request(double due_s) {
    char digits[16];
    Exchange exchange = {.due_s = due_s, .measured = sent >= warm_up};
    sent++;
    if (counter) {
        snprintf(digits, sizeof digits, "%08ld", serial++ % 100000000);
        memcpy(counter, digits, 8);
    }
    exchange.wire = malloc(body_size + HEAD_BYTES);
    if (!exchange.wire) abort();
    int head = snprintf(exchange.wire, HEAD_BYTES,
                        "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                        "%s%scontent-length: %zu\r\n\r\n",
                        path, port, header, *header ? "\r\n" : "", body_size);
    memcpy(exchange.wire + head, body_template, body_size);
    exchange.wire_size = (size_t)head + body_size;
    start_exchange(exchange);
}

void exchange_began(const Exchange *exchange, double now_s) {
    if (exchange->measured) add(&lag, now_s - exchange->due_s);
}

void exchange_events(const Exchange *exchange, double now_s, long events) {
    if (!exchange->measured || !events) return;
    if (exchange->events) add(&itl, now_s - exchange->last_event_s);
    for (long more = 1; more < events; more++) add(&itl, 0.0); /* these arrived together */
}

void exchange_ended(const Exchange *exchange, double now_s, const char *error) {
    done++;
    if (error) count_error(error);
    else right_answers++;
    int timed = !error || !strcmp(error, "unanswered"); /* no percentile may hide those */
    if (exchange->measured && exchange->first_byte_s) add(&ttft, exchange->first_byte_s - exchange->due_s);
    if (exchange->measured && timed) add(&e2e, now_s - exchange->due_s);
}

/* Keeps `concurrency` requests in flight until enough are sent or the time is over. */
static void run_closed(void) {
    double end_s = start_s + limit_s;
    while (monotonic_s() < end_s + ramp_s + limit_s) {
        double now_s = monotonic_s(), next_s = end_s;
        int may_send = sent < planned && now_s < end_s;
        if (!may_send && sent == done) return;
        while (may_send && sent < planned && sent - done < concurrency) {
            if (sent < concurrency && ramp_s > 0) { /* the first ones are spread over the ramp */
                next_s = start_s + ramp_s * (double)sent / (double)concurrency;
                if (next_s > now_s) break;
            }
            send_request(now_s);
        }
        poll_connections(next_s > now_s ? next_s : now_s + 0.1);
    }
}

static void run_open(void) {
    while (done < planned) {
        double now_s = monotonic_s();
        while (sent < planned && start_s + arrivals[sent] <= now_s) send_request(start_s + arrivals[sent]);
        double next_s = start_s + (sent < planned ? arrivals[sent] : arrivals[planned - 1] + drain_s);
        if (sent == planned && now_s >= next_s) return;
        poll_connections(next_s);
    }
}

static void print_report(double wall_s) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                   (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"requests\":%ld,\"right\":%ld,\"wall_s\":%.6f,\"cpu_s\":%.6f,\"connections\":%ld,\"errors\":{", sent,
           right_answers, wall_s, cpu_s, opened_connections);
    for (int each = 0; each < ERROR_KINDS && errors[each].count; each++) {
        printf("%s\"%s\":%ld", each ? "," : "", errors[each].name, errors[each].count);
    }
    Series *all[] = {&e2e, &ttft, &itl, &lag};
    printf("},\"sizes\":[%zu,%zu,%zu,%zu]}\n", e2e.size, ttft.size, itl.size, lag.size);
    for (int each = 0; each < 4; each++) fwrite(all[each]->values, sizeof(double), all[each]->size, stdout);
}

static void read_body(const char *file_name) {
    FILE *file = fopen(file_name, "rb");
    if (!file || fseek(file, 0, SEEK_END)) {
        perror(file_name);
        exit(2);
    }
    body_size = (size_t)ftell(file);
    rewind(file);
    body_template = malloc(body_size + 1);
    if (!body_template || fread(body_template, 1, body_size, file) != body_size) exit(2);
    fclose(file);
    counter = memmem(body_template, body_size, "@@@@@@@@", 8);
}

int main(int count, char **values) {
    signal(SIGPIPE, SIG_IGN);
    if (count < 4) return 2;
    
    port = atoi(values[1]);
    path = values[2];
    read_body(values[3]);
    for (int at = 4; at + 1 < count; at += 2) {
        const char *name = values[at], *value = values[at + 1];
        if (!strcmp(name, "--events")) expected_events = atol(value), expects_stream = 1;
        else if (!strcmp(name, "--stream")) expects_stream = atoi(value);
        else if (!strcmp(name, "--header")) header = value;
        else if (!strcmp(name, "--first-serial")) serial = atol(value);
        else if (!strcmp(name, "--warm-up")) warm_up = atol(value);
        else if (!strcmp(name, "--concurrency")) concurrency = atol(value);
        else if (!strcmp(name, "--requests") || !strcmp(name, "--arrivals")) planned = atol(value);
        else if (!strcmp(name, "--limit")) limit_s = atof(value);
        else if (!strcmp(name, "--ramp")) ramp_s = atof(value);
        else if (!strcmp(name, "--drain")) drain_s = atof(value);
        else {
            fprintf(stderr, "unknown option %s\n", name);
            return 2;
        }
    }
    open_client(port);
    if (!concurrency) {
        arrivals = malloc(((size_t)planned + 1) * sizeof *arrivals);
        if (!arrivals || planned < 1) return 2;
        if (fread(arrivals, sizeof *arrivals, (size_t)planned, stdin) != (size_t)planned) return 2;
    }
    start_s = monotonic_s() + (concurrency ? 0 : 0.01);
    if (concurrency) run_closed();
    else run_open();
    double wall_s = monotonic_s() - start_s;
    abandon_exchanges();
    print_report(wall_s);
    return 0;
}
