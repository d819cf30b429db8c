"""Faults of the reference proxy in JavaScript, one for nearly every check of a store proxy."""

from typing import Final

from tests.system.conformance.mutants.faults import Mutant

__all__ = ["NODE_MUTANTS"]

_PROXY: Final = "store_proxy.mjs"
_JSON: Final = "lossless_json.mjs"


def _fault(check: str, fault: str, *changes: tuple[str, str], file: str = _PROXY) -> Mutant:
    return Mutant(check, fault, file, changes)


_WRITTEN: Final = '  return `{"kvparams":{${all.map(([name, text]) => `"${name}":${text}`).join(\',\')}}}`;'
_SIGNAL: Final = "agent: false, timeout, signal: request.signal }"
_ONLY_KEPT: Final = "event ? `data: ${corrected(parseJson(event[1]), kv)}\\n` : line);"

NODE_MUTANTS: Final = (
    _fault(
        "2.1/documents",
        "writes the document as text",
        (
            _WRITTEN,
            "  const told = `{${all.map(([name, text]) => `\"${name}\":${text}`).join(',')}}`;\n"
            "  return `{\"kvparams\":${JSON.stringify(told)}}`;",
        ),
    ),
    _fault("3.2/documents", "names an empty consumer", ("told.consumer = JSON.stringify({ id: engine.name })", "told.consumer = '{\"id\":\"\"}'")),
    _fault("3.3/broken-result", "does not look at the lease's type", ("throw wrong('its lease')", "void 0")),
    _fault("3.6/integers", "reads the lease as doubles", ("told.lease = lease.edit({ ttl_ms: String(ttl) })", "told.lease = JSON.stringify({ ...lease.value(), ttl_ms: ttl })")),
    _fault("3.7/next-try", "counts no attempts", ("${++transfers}`, attempt };", "${++transfers}`, attempt: 1 };")),
    _fault("3.7/next-try", "makes a new request id for each try", ("kv = await prefill(request, transfer);", "{ if (attempt > 1) request.requestId += 'x'; kv = await prefill(request, transfer); }")),
    _fault("3.9/rest-of-lease", "hands on the whole lease", (" - Math.ceil(performance.now() - kv.came)", "")),
    _fault("3.13/incarnation", "invents an incarnation", ("{ producer: JSON.stringify({ id: engine.name }) }", "{ producer: JSON.stringify({ id: engine.name, incarnation: 'run-1' }) }")),
    _fault("3.15/transfer-ids", "makes ids of a counter alone", ("randomBytes(12).toString('hex'); // 96", "'run'; // 96")),
    _fault("3.15/transfer-ids", "makes ids of the client's", ("id: `${RUN}-${++transfers}`", "id: `${RUN}-${request.requestId}-${++transfers}`")),
    _fault("4.1/one-transfer", "tells decode another transfer", ("document(request, transfer, 'decode', told)", "document(request, { ...transfer, id: `${transfer.id}.d` }, 'decode', told)")),
    _fault("4.1/one-transfer", "tells decode another request id", ("document(request, transfer, 'decode', told)", "document({ ...request, requestId: `${request.requestId}.d` }, transfer, 'decode', told)")),
    _fault("4.1/empty-keys", "cannot do without keys", ("const keys = result.load_keys ?? [];", "const keys = result.load_keys === undefined ? 0 : result.load_keys ?? [];")),
    _fault("4.3/claimed-transfer", "keeps the transfer for the next decode leg", ("${++transfers}`, attempt };", "${kv === null ? ++transfers : transfers}`, attempt };")),
    _fault("4.6/phase", "does not look at the phase", ("result.phase !== 'prefill_result' || ", "")),
    _fault("4.6/request-id", "does not look at the request id", ("result.request_id !== request.requestId || ", "")),
    _fault("4.6/transfer", "does not look at the transfer's id", ("result.transfer?.id !== transfer.id ||", "")),
    _fault("4.6/transfer", "does not look at the attempt", ("result.transfer?.attempt !== transfer.attempt", "false")),
    _fault("4.6/mode", "does not look at the mode", (" || result.mode !== 'store'", "")),
    _fault("5.1/null", "leaves out nulls", ("if (member) told[name]", "if (member && member.text !== 'null') told[name]")),
    _fault("5.1/null", "writes absent members as null", ("if (member) told[name] = member.text;", "told[name] = member?.text ?? 'null';")),
    _fault("5.2/unknown", "hands on the rest of the lease alone", ("told.lease = lease.edit({ ttl_ms: String(ttl) })", "told.lease = `{\"ttl_ms\":${ttl}}`")),
    _fault("5.4/must-understand", "overlooks what it must understand", (" || !names.every((name) => KNOWN.test(name))", "")),
    _fault("6.1/later-version", "reads 1.0 alone", (r"/^1\.(0|[1-9][0-9]{0,3})$/", r"/^1\.0$/")),
    _fault("6.2/major-version", "reads every version", (r"/^1\.(0|[1-9][0-9]{0,3})$/", r"/^[0-9]+\.[0-9]+$/")),
    _fault("6.5/versions", "declares a later version", ("version: '\"1.0\"'", "version: '\"1.7\"'")),
    _fault("6.9/must-understand", "drops the names that must be understood", ("if (names.length) told", "if (false) told")),
    _fault("8.4/digest", "computes the digest of the text", (".update(bytes)", ".update(JSON.stringify(prompt))")),
    _fault("8.4/digest", "computes the digest of 2 bytes for each id", ("Uint32Array.from(prompt)", "Uint16Array.from(prompt)")),
    _fault(
        "12.1/kv-transfer-params",
        "keeps the client's native keys",
        ("new Set(`kv_transfer_params ", "new Set(`"),
        (_WRITTEN, _WRITTEN.replace('{"kvparams"', "{${(request.body.get('kv_transfer_params')?.entries ?? []).filter((e) => e.name !== 'kvparams').map((e) => `${e.text},`).join('')}\"kvparams\"")),
    ),
    _fault("12.1/bootstrap-members", "keeps bootstrap members", ("bootstrap_host bootstrap_port bootstrap_room ", "")),
    _fault("12.1/sglang-members", "keeps `rid`", ("session_params rid ", "session_params ")),
    _fault("12.1/vllm-members", "keeps `ec_transfer_params`", (" ec_transfer_params kv_hints", " kv_hints")),
    _fault("12.1/other-members", "keeps `kv_hint`", ("kv_hints kv_hint ", "kv_hints ")),
    _fault("12.1/nested", "strips only the body itself", ("new Set(['', 'vllm_xargs', 'sampling_params.extra_args', 'nvext'])", "new Set([''])")),
    _fault("12.1/nested", "removes `vllm_xargs` as a whole", ("return (PLACES", "return (place === '' && name === 'vllm_xargs') || (PLACES")),
    _fault("12.1/nvext", "keeps `nvext`", ("|.*(worker_id|instance_id|worker_ids|dp_rank))$/", ")$/")),
    _fault("12.1/media-hashes", "keeps the `uuid` of media", ("(MEDIA.test(place) && name === 'uuid')", "false")),
    _fault("12.1/request-id", "takes every id of a client", ("/^[A-Za-z0-9._-]{1,128}$/.test(given) && ", "given !== '' && ")),
    _fault("12.1/request-id", "takes ids with addresses", (r" && !/___(prefill|decode)_addr_/.test(given)", ""), (r"/^[A-Za-z0-9._-]{1,128}$/", r"/^[A-Za-z0-9._:-]{1,128}$/")),
    _fault("12.2/json", "passes on the engine's parameters", ("if (body.get('kv_transfer_params')) changes", "if (false) changes")),
    _fault("12.2/stream", "corrects only events that come whole", ("const end = rest.lastIndexOf(10) + 1;", "const end = rest.length;")),
    _fault("12.5/logs", "logs what decode is told", ("const params = document(request, transfer, 'decode', told);", "console.error(told); const params = document(request, transfer, 'decode', told);")),
    _fault("12.5/logs", "logs the salt", ("if (salt && salt.value() !== null) made", "if (salt) console.error(salt.text);\n  if (salt && salt.value() !== null) made")),
    _fault("12.6/producer-address", "hands on every address", ("host !== undefined && host !== engine.url.hostname", "false")),
    _fault(
        "12.6/native-address",
        "hands on native keys",
        ("return { members: found,", "return { native: body.get('kv_transfer_params').entries.filter((e) => e.name !== 'kvparams').map((e) => `${e.text},`).join(''), members: found,"),
        ("const params = document(request, transfer, 'decode', told);", "const params = document(request, transfer, 'decode', told).replace('{', () => `{${kv.native}`);"),
    ),
    _fault("17.1/decode-bytes", "writes the body anew", ("return parseJson(found.without(isForbidden));", "return parseJson(JSON.stringify(JSON.parse(found.without(isForbidden))));")),
    _fault("17.1/decode-bytes", "adds a member to the decode leg", ("request.body.edit({ kv_transfer_params: params })", "request.body.edit({ kv_transfer_params: params, seed: '0' })")),
    _fault("17.2/prefill-limits", "asks prefill for two tokens", ("{ max_tokens: '1',", "{ max_tokens: '2',")),
    _fault("17.2/prefill-limits", "asks prefill for a stream", (" stream: 'false',", "")),
    _fault("17.2/prefill-limits", "leaves the chat's limit", ("changes.max_completion_tokens = '1'", "void 0")),
    _fault("17.3/answer-members", "leaves `min_tokens`", ("stop_token_ids min_tokens n", "stop_token_ids n")),
    _fault("17.3/answer-members", "lets prefill stop early", (", ignore_eos: 'true' }", " }")),
    _fault("17.4/prefill-bytes", "leaves out `user` at prefill", ("if (request.body.get('max_completion_tokens'))", "changes.user = null;\n  if (request.body.get('max_completion_tokens'))")),
    _fault("17.5/request-id", "sends no X-Request-Id", (", 'x-request-id': request.requestId };", " };")),
    _fault("17.6/headers", "passes on cookies", ("['traceparent', 'tracestate', 'authorization']", "['traceparent', 'tracestate', 'authorization', 'cookie']")),
    _fault("17.6/headers", "drops the trace", ("['traceparent', 'tracestate', 'authorization']", "['tracestate', 'authorization']")),
    _fault("17.7/no-json", "takes a list for a body", ("if (found.kind !== '{') throw new SyntaxError('no object');", "")),
    _fault("17.7/no-json", "ignores what stands behind the body", ("if (at !== text.length) fail();", ""), file=_JSON),
    _fault("17.7/key-twice", "takes a key twice", ("|| names.has(name = string())", "|| (name = string()) === undefined"), file=_JSON),
    _fault("17.7/numbers", "takes numbers out of bounds", ("&& !Number.isFinite(Number(text.slice(begin, at)))", "&& false"), file=_JSON),
    _fault("17.7/surrogate", "takes half a surrogate pair", ("if (!found.isWellFormed()) fail();", ""), file=_JSON),
    _fault("17.7/bytes", "takes bytes that are no UTF-8", ("{ fatal: true, ignoreBOM: true }", "{ fatal: false, ignoreBOM: true }"), file=_JSON),
    _fault("17.7/bytes", "takes a byte order mark", ("{ fatal: true, ignoreBOM: true }", "{ fatal: true, ignoreBOM: false }"), file=_JSON),
    _fault("17.8/phases", "tells decode another mode", ("told.consumer = ", "told.mode = '\"pull\"';\n  told.consumer = ")),
    _fault("17.9/text-prompt", "takes two prompts for one", ("const prompt = request.body.get('prompt')?.value();", "const prompt = [request.body.get('prompt')?.value()].flat(3);")),
    _fault("17.10/choices", "asks prefill for every answer", ("min_tokens n best_of ", "min_tokens ")),
    _fault("17.11/salt", "does not tell the salt", ("if (salt && salt.value() !== null) made", "if (false) made")),
    _fault("17.11/salt", "invents a salt", ("if (salt && salt.value() !== null) made", "if (!salt) made.isolation = '{\"cache_salt\":\"default\"}';\n  else made")),
    _fault("17.12/null-ids", "refuses `prompt_token_ids`", ("return parseJson(found.without(isForbidden));", "if (found.get('prompt_token_ids')) throw new SyntaxError('no prompt');\n    return parseJson(found.without(isForbidden));")),
    _fault(
        "17.13/no-result",
        "promises KV without a result",
        (
            "const found = body.get('kv_transfer_params')?.get('kvparams');",
            "const found = body.get('kv_transfer_params')?.get('kvparams') ?? parseJson(JSON.stringify({ version: '1.0', "
            "phase: 'prefill_result', mode: 'store', request_id: request.requestId, transfer }));",
        ),
    ),
    _fault("17.14/handed-on", "hands on `usage`", ("['producer', 'prefix', 'load_keys', 'lease']", "['producer', 'prefix', 'load_keys', 'lease', 'usage']")),
    _fault("17.14/handed-on", "does not hand on `load_keys`", ("['producer', 'prefix', 'load_keys', 'lease']", "['producer', 'prefix', 'lease']")),
    _fault("17.15/lease-over", "uses KV after its lease", ("kv === null || performance.now() >= kv.until", "kv === null")),
    _fault("17.16/rounding", "hands on a lease of 0", ("Math.max(1, lease.get", "Math.max(0, lease.get")),
    _fault("17.17/flood", "reads answers of any length", ("const MAX_ANSWER = 64 << 20;", "const MAX_ANSWER = 2 ** 40;")),
    _fault("17.18/relay", "drops a line of each part", ("for (const line of rest.subarray(0, end).toString().split(/(?<=\\n)/)) {", "for (const line of rest.subarray(0, end).toString().split(/(?<=\\n)/).slice(0, 6)) {")),
    _fault(
        "17.18/pace",
        "holds a stream back until it ends",
        ("let isDone = false;", "let isDone = false;\n  const held = [];"),
        (f"response.write({_ONLY_KEPT}", f"held.push({_ONLY_KEPT}"),
        ("  if (!isDone) response.write(", "  response.write(held.join(''));\n  if (!isDone) response.write("),
    ),
    _fault("17.19/cut-stream", "completes a stream that was cut off", ("data: ${JSON.stringify({ error: { message: 'the engine broke off', type: 'proxy_error' } })}", "data: [DONE]")),
    _fault("17.20/cached-tokens", "leaves decode's cached tokens", ("&& kv.details) changes.usage", "&& false) changes.usage")),
    _fault("17.21/client-id", "answers without X-Request-Id", ("  response.setHeader('x-request-id', requestId);\n", "")),
    _fault("17.21/errors", "passes on addresses in messages", (r" && !/\d+\.\d+\.\d+\.\d+|:\d{2,5}\b/.test(error.message)", "")),
    _fault("17.21/errors", "answers errors as text", ("JSON.stringify({ error: { message, type: 'proxy_error', param: error.param ?? null, code: null } })", "JSON.stringify(message)")),
    _fault("17.22/prefill-fails", "tries once", ("const TRIES = 3;", "const TRIES = 1;")),
    _fault("17.22/bounded-tries", "tries forty times", ("const TRIES = 3;", "const TRIES = 40;")),
    _fault("17.22/decode-fails", "takes a busy decode engine for a fault of the client", ("return relay(answered, response, kv);\n  }", "return relay(answered, response, kv);\n  }\n  if (answered.statusCode === 503) throw new Refusal(429, 'busy');")),
    _fault("17.23/kv-refused", "passes on a refusal of the document", ("`${error.param}.`.startsWith('kv_transfer_params.') || ", "")),
    _fault("17.23/unauthorized", "passes on a refusal of its credentials", (" || (!request.headers.authorization && [401, 403].includes(status))", "")),
    _fault("17.24/client-fault", "tries again what the client has done wrong", ("if (status < 400 || status >= 500) throw new LegFailed(", "if (status !== 401) throw new LegFailed(")),
    _fault("17.25/prefill", "does not notice that the client has left", (_SIGNAL, "agent: false, timeout }")),
    _fault("17.25/decode", "closes the legs two seconds later", ("response.on('close', () => left.abort());", "response.on('close', () => setTimeout(() => left.abort(), 2000));")),
    _fault(
        "17.25/stream",
        "goes on reading a stream for nobody",
        (_SIGNAL, "agent: false, timeout, signal: request.body.get('stream')?.text === 'true' ? undefined : request.signal }"),
    ),
)
