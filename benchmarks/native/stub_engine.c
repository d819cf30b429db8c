/* Plays OpenAI-compatible engines for router benchmarks: one thread, several prefill and decode ports.
 *
 *     stub_engine --prefill 8100 --prefill 8101 --decode 8102 --decode 8103
 *
 * It serves completions and chats, whole and streamed, in the shapes of vLLM 0.32, and answers a prefill leg as vLLM's
 * NixlConnector or as an SGLang prefill server does. Every event of a stream is one send(2), as engines send them.
 * GET /stats returns the counters of every port, /reset clears them. /set?itl_ms=N&cached=SHARE paces streams and says
 * how much of each prompt engines find in their caches.
 *
 * tests/support/stub_engine.py plays engines for tests; this program takes less than half as much CPU. */
#define _GNU_SOURCE
#include "http_server.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_TOKENS = 16, MAX_BLOCKS = 4000, BLOCK_ID_BYTES = 5, EDGE_BYTES = 8192 };

static uint64_t itl_ns;
static double cached_share; /* of each prompt, what engines say that they found in their caches */
static unsigned long next_id = 1;
static Connection *first_paced, *last_paced;
static char block_ids[MAX_BLOCKS * BLOCK_ID_BYTES + 1];

static void answer(Connection *connection, const char *type, const char *body, size_t size) {
    appendf(connection, "HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-length: %zu\r\n", size);
    appendf(connection, "content-type: %s\r\n\r\n", type);
    append(connection, body, size);
}

static const char *last_of(const char *text, size_t size, const char *wanted) {
    const char *found = NULL, *end = text + size;
    while (text < end && (text = memmem(text, (size_t)(end - text), wanted, strlen(wanted)))) found = text++;
    return found;
}

/* Finds the value of a member near either end of a body, where routers and clients put what matters here. A prompt in
 * the middle is not read: it would cost more than all the rest. Of members of one name the last counts. */
static const char *member(const Request *request, const char *quoted_name) {
    size_t edge = request->body_size < EDGE_BYTES ? request->body_size : EDGE_BYTES;
    const char *end = request->body + request->body_size, *found = last_of(end - edge, edge, quoted_name);
    if (!found && request->body_size > edge) found = last_of(request->body, edge, quoted_name);
    if (!found) return NULL;
    for (found += strlen(quoted_name); found < end && (*found == ' ' || *found == ':'); found++) {}
    return found < end ? found : NULL;
}

/* Returns whether the path is this one, or starts with it. */
static int has_path(const Request *request, const char *path, int whole) {
    size_t size = strlen(path);
    return request->path_size >= size && !memcmp(request->path, path, size) && (!whole || request->path_size == size);
}

static int is_true(const char *value) { return value && *value == 't'; }

static void usage(Connection *connection, long completion_tokens, int with_kv) {
    long prompt = (long)connection->body_size / 4 + 1;
    appendf(connection,
            "\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":%ld,"
            "\"prompt_tokens_details\":{\"cached_tokens\":%ld}}",
            prompt, prompt + completion_tokens, completion_tokens,
            with_kv ? prompt - 1 : (long)(cached_share * (double)(prompt - 1)));
}

/* Appends the answer to a request that does not stream; `nixl_prefill`: with the names of the prompt's KV blocks. */
static void whole_answer(Connection *connection, long tokens, int nixl_prefill, int with_kv) {
    static Connection body; /* a buffer to learn the size in */
    body.out_size = 0;
    body.body_size = connection->body_size;
    const char *kind = connection->chat ? "chat.completion" : "text_completion";
    const char *prefix = connection->chat ? "chatcmpl" : "cmpl";
    appendf(&body, "{\"id\":\"%s-%016lx\",\"object\":\"%s\",", prefix, connection->id, kind);
    appendf(&body, "\"created\":1790000000,\"model\":\"stub\",\"choices\":[{\"index\":0,");
    appendf(&body, connection->chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"");
    for (long token = 0; token < tokens; token++) append(&body, " tok", 4);
    appendf(&body, connection->chat ? "\",\"refusal\":null,\"tool_calls\":[]}" : "\"");
    appendf(&body, ",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}],");
    usage(&body, tokens, with_kv);
    if (nixl_prefill) {
        long prompt = (long)connection->body_size / 4 + 1, blocks = (prompt + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        if (blocks > MAX_BLOCKS) blocks = MAX_BLOCKS;
        appendf(&body, ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,");
        appendf(&body, "\"remote_block_ids\":[[");
        append(&body, block_ids, (size_t)blocks * BLOCK_ID_BYTES - 1);
        appendf(&body,
                "]],\"remote_engine_id\":\"engine-%d\",\"remote_request_id\":\"cmpl-%016lx-0\","
                "\"remote_host\":\"127.0.0.1\",\"remote_port\":%d,\"tp_size\":1,\"remote_num_tokens\":%ld}}",
                connection->engine->port, connection->id, connection->engine->port + 1000, prompt);
    } else {
        appendf(&body, ",\"kv_transfer_params\":null}");
    }
    answer(connection, "application/json", body.out, body.out_size);
}

/* Appends one token of a stream, and the end behind the last one. */
static void stream_token(Connection *connection) {
    char event[512];
    const char *finish = --connection->tokens_left ? "null" : "\"length\"";
    int size = snprintf(event, sizeof event,
                        connection->chat
                            ? "data: {\"id\":\"chatcmpl-%016lx\",\"object\":\"chat.completion.chunk\","
                              "\"created\":1790000000,\"model\":\"stub\",\"choices\":[{\"index\":0,"
                              "\"delta\":{\"content\":\" tok\"},\"logprobs\":null,\"finish_reason\":%s,"
                              "\"token_ids\":null}]}\n\n"
                            : "data: {\"id\":\"cmpl-%016lx\",\"object\":\"text_completion\",\"created\":1790000000,"
                              "\"model\":\"stub\",\"choices\":[{\"index\":0,\"text\":\" tok\",\"logprobs\":null,"
                              "\"finish_reason\":%s,\"stop_reason\":null}],\"usage\":null}\n\n",
                        connection->id, finish);
    appendf(connection, "%x\r\n%s\r\n", size, event);
    if (!connection->tokens_left) {
        appendf(connection, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
        connection->engine->live--;
    }
}

/* All streams have the same pace, so the queue is in the order of time. */
static void pace(Connection *connection, uint64_t due_ns) {
    connection->due_ns = due_ns;
    connection->next = NULL;
    connection->queued = 1;
    if (last_paced) last_paced->next = connection;
    else first_paced = connection;
    last_paced = connection;
}

static void step_paced(void) {
    uint64_t now = now_ns();
    while (first_paced && first_paced->due_ns <= now) {
        Connection *connection = first_paced;
        first_paced = connection->next;
        if (!first_paced) last_paced = NULL;
        connection->queued = 0;
        if (connection->fd < 0) {
            recycle(connection);
            continue;
        }
        stream_token(connection);
        if (connection->tokens_left) pace(connection, connection->due_ns + itl_ns);
        if (flush(connection) && !connection->tokens_left) serve(connection);
    }
}

static void complete(Connection *connection, const Request *request) {
    Engine *engine = connection->engine;
    const char *tokens = member(request, "\"max_completion_tokens\"");
    if (!tokens) tokens = member(request, "\"max_tokens\"");
    long wanted = tokens ? strtol(tokens, NULL, 10) : 16;
    int nixl_prefill = is_true(member(request, "\"do_remote_decode\""));
    int with_kv = !nixl_prefill && member(request, "\"remote_engine_id\"") &&
                  memmem(request->body, request->body_size, "\"remote_block_ids\"", 18) != NULL;
    int bootstrap = member(request, "\"bootstrap_room\"") != NULL;
    connection->chat = has_path(request, "/v1/chat", 0);
    connection->body_size = request->body_size;
    connection->id = next_id++;
    engine->requests++;
    engine->prefill += nixl_prefill;
    engine->decode_with_kv += with_kv;
    engine->bootstrap += bootstrap;
    if (bootstrap && engine->prefill_role) wanted = 1; /* SGLang's prefill server answers one token */
    if (wanted < 1) wanted = 1;
    if (!is_true(member(request, "\"stream\""))) {
        whole_answer(connection, wanted, nixl_prefill, with_kv);
        return;
    }
    engine->live++;
    connection->tokens_left = wanted;
    appendf(connection, "HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                        "transfer-encoding: chunked\r\n\r\n");
    if (itl_ns) {
        pace(connection, now_ns() + itl_ns);
        return;
    }
    while (connection->tokens_left) {
        stream_token(connection);
        if (!flush(connection)) return;
    }
}

static void stats(Connection *connection) {
    char text[8192];
    size_t size = 0;
    for (int each = 0; each < engine_count; each++) {
        const Engine *engine = &engines[each];
        size += (size_t)snprintf(text + size, sizeof text - size,
                                 "%s\"%d\":{\"requests\":%ld,\"prefill\":%ld,\"decode_with_kv\":%ld,"
                                 "\"bootstrap\":%ld,\"aborted\":%ld,\"live\":%ld}",
                                 each ? "," : "{", engine->port, engine->requests, engine->prefill,
                                 engine->decode_with_kv, engine->bootstrap, engine->aborted, engine->live);
    }
    text[size++] = '}';
    answer(connection, "application/json", text, size);
}

static void control(Connection *connection, const Request *request) {
    static const struct { const char *path, *body; } fixed[] = {
        {"/v1/models", "{\"object\":\"list\",\"data\":[{\"id\":\"stub\",\"object\":\"model\",\"created\":1790000000,"
                       "\"owned_by\":\"stub\",\"root\":\"stub\",\"parent\":null,\"max_model_len\":131072}]}"},
        {"/get_model_info", "{\"model_path\":\"stub\",\"tokenizer_path\":\"stub\",\"served_model_name\":\"stub\","
                            "\"is_generation\":true,\"model_type\":\"llama\"}"},
        {"/model_info", "{\"model_path\":\"stub\",\"tokenizer_path\":\"stub\",\"served_model_name\":\"stub\","
                        "\"is_generation\":true,\"model_type\":\"llama\"}"},
        {"/get_server_info", "{\"model_path\":\"stub\",\"served_model_name\":\"stub\",\"tp_size\":1,\"dp_size\":1,"
                             "\"version\":\"0.5.23\",\"max_running_requests\":256}"},
        {"/server_info", "{\"model_path\":\"stub\",\"served_model_name\":\"stub\",\"tp_size\":1,\"dp_size\":1,"
                         "\"version\":\"0.5.23\",\"max_running_requests\":256}"},
        {"/route", "{\"attn_tp_size\":1,\"dp_size\":1,\"pp_size\":1}"}, /* of SGLang's bootstrap server */
        {"/version", "{\"version\":\"0.32.0\"}"},
        {"/get_load", "[{\"dp_rank\":0,\"num_reqs\":0,\"num_waiting_reqs\":0,\"num_tokens\":0}]"},
    };
    if (has_path(request, "/stats", 1)) {
        stats(connection);
        return;
    }
    if (has_path(request, "/reset", 1)) {
        for (int each = 0; each < engine_count; each++) {
            Engine *engine = &engines[each];
            engine->requests = engine->prefill = engine->decode_with_kv = engine->bootstrap = engine->aborted = 0;
        }
    } else if (has_path(request, "/set?itl_ms=", 0)) {
        char *end;
        itl_ns = (uint64_t)(strtod(request->path + 12, &end) * 1e6);
        if (!strncmp(end, "&cached=", 8)) cached_share = strtod(end + 8, NULL);
    } else {
        for (size_t each = 0; each < sizeof fixed / sizeof *fixed; each++) {
            if (!has_path(request, fixed[each].path, 0)) continue;
            answer(connection, "application/json", fixed[each].body, strlen(fixed[each].body));
            return;
        }
    }
    answer(connection, "application/json", "{}", 2);
}

/* Answers vLLM's /v1/completions/render and /v1/chat/completions/render, by which routers learn token ids: one id for
 * each word, which depends on the word alone. */
static void render(Connection *connection, const Request *request) {
    static Connection body;
    const char *text = request->body, *end = request->body + request->body_size;
    unsigned word = 0, length = 0, count = 0;
    int chat = has_path(request, "/v1/chat", 0);
    body.out_size = 0;
    appendf(&body, "%s{\"request_id\":\"r\",\"token_ids\":[", chat ? "" : "[");
    for (; text < end; text++) {
        if (*text != ' ' && *text != ',') {
            word = 31 * word + (unsigned char)*text;
            length++;
        } else if (length) {
            appendf(&body, "%s%u", count++ ? "," : "", 1000 + word % 120000);
            word = length = 0;
        }
    }
    appendf(&body, "],\"sampling_params\":{},\"model\":\"stub\",\"n\":%u}%s", count, chat ? "" : "]");
    answer(connection, "application/json", body.out, body.out_size);
}

void handle_request(Connection *connection, const Request *request) {
    int posted = request->method == 'P';
    if (posted && (has_path(request, "/v1/completions", 1) || has_path(request, "/v1/chat/completions", 1))) {
        complete(connection, request);
    } else if (posted && (has_path(request, "/v1/completions/render", 1) ||
                          has_path(request, "/v1/chat/completions/render", 1))) {
        render(connection, request);
    } else {
        control(connection, request);
    }
}

int main(int count, char **values) {
    signal(SIGPIPE, SIG_IGN);
    for (int block = 0; block < MAX_BLOCKS; block++) {
        snprintf(block_ids + BLOCK_ID_BYTES * block, BLOCK_ID_BYTES + 1, "%d,", 1000 + block);
    }
    for (int at = 1; at + 1 < count; at += 2) {
        int prefill = !strcmp(values[at], "--prefill");
        if (engine_count == MAX_ENGINES || (!prefill && strcmp(values[at], "--decode"))) return 2;
        Engine *engine = &engines[engine_count++];
        engine->port = atoi(values[at + 1]);
        engine->prefill_role = prefill;
        if (listen_on(engine)) {
            perror(values[at + 1]);
            return 1;
        }
    }
    for (;;) {
        uint64_t now = now_ns(), left = first_paced && first_paced->due_ns > now ? first_paced->due_ns - now : 0;
        poll_clients(first_paced ? &left : NULL);
        step_paced();
    }
}
