// A store proxy (spec/draft/store-proxy.md), written for reading: what is not in that page is not in here.
//
//     node store_proxy.mjs --port 8100 --prefill http://a:8000 --prefill http://b:8000 --decode http://c:8000
import { createHash, randomBytes } from 'node:crypto';
import http from 'node:http';
import { parse as parseJson } from './lossless_json.mjs';

const TRIES = 3;
const MAX_BODY = 16 << 20;
const MAX_ANSWER = 64 << 20;
const PREFILL_MS = 300_000;
const RUN = randomBytes(12).toString('hex'); // 96 random bits, in every transfer.id of this run
const PATHS = ['/v1/completions', '/v1/chat/completions'];

// Section 2: what a client may not say.
const FORBIDDEN = new Set(`kv_transfer_params ec_transfer_params kv_hints kv_hint disaggregated_params disagg_prefill_resp
  bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank
  disagg_prefill_dp_rank session_params rid request_id cache_hit_threshold prefix_prompt_ids kvcache_load_keys
  kvcache_store_keys prefill_result bootstrap_info encoder_result routing mm_hashes mm_content_hashes`.split(/\s+/));
const PLACES = new Set(['', 'vllm_xargs', 'sampling_params.extra_args', 'nvext']);
const NVEXT = /^(backend_instance_id|token_data|annotations|session_control|.*(worker_id|instance_id|worker_ids|dp_rank))$/;
const MEDIA = /^messages\.\d+\.content\.\d+$/;

function isForbidden(place, name) {
  return (PLACES.has(place) && FORBIDDEN.has(name)) || (place === 'nvext' && NVEXT.test(name)) ||
    (MEDIA.test(place) && name === 'uuid');
}

// Section 3: what the prefill leg is not asked.
const ANSWER_ALONE = `stream_options stop stop_token_ids min_tokens n best_of logprobs top_logprobs prompt_logprobs echo
  structured_outputs response_format`.split(/\s+/);
// Section 5: what `must_understand` may name.
const KNOWN = /^(version|request_id|transfer(\.(id|attempt))?|phase|mode|prefix(\.(count|packed|digest|ids))?|store_keys|load_keys|(producer|consumer)(\.(id|incarnation|address))?|lease(\.ttl_ms)?|on_load_failure|isolation(\.(cache_salt|lora))?|usage(\..+)?|must_understand|extensions)$/;
const HANDED_ON = ['producer', 'prefix', 'load_keys', 'lease'];

class Refusal extends Error { // ends the request with this status
  constructor(status, message, param = null) { super(message); Object.assign(this, { status, param }); }
}
class LegFailed extends Error {} // another engine may do better

const engines = { prefill: [], decode: [] };
const turns = { prefill: 0, decode: 0 };
let transfers = 0;
const take = (role) => engines[role][turns[role]++ % engines[role].length];

async function serve(request, response) {
  if (request.method !== 'POST' || !PATHS.includes(request.url)) {
    return answer(response, request.url === '/health' ? 200 : 404, JSON.stringify({ error: { message: 'no such path' } }));
  }
  const left = new AbortController(); // the client has left: every leg that runs is closed
  response.on('close', () => left.abort());
  const given = request.headers['x-request-id'] ?? '';
  const isSafe = /^[A-Za-z0-9._-]{1,128}$/.test(given) && !/___(prefill|decode)_addr_/.test(given);
  const requestId = isSafe ? given : randomBytes(12).toString('hex');
  response.setHeader('x-request-id', requestId);
  try {
    const body = parseBody(await readAll(request, MAX_BODY));
    await run({ path: request.url, headers: request.headers, body, requestId, signal: left.signal }, response);
  } catch (error) {
    if (left.signal.aborted) return;
    const status = error instanceof Refusal ? error.status : 502;
    const message = error instanceof Refusal ? error.message : 'no engine has answered';
    if (response.headersSent) response.destroy();
    else answer(response, status, JSON.stringify({ error: { message, type: 'proxy_error', param: error.param ?? null, code: null } }));
  }
}

function parseBody(raw) {
  try {
    const found = parseJson(raw);
    if (found.kind !== '{') throw new SyntaxError('no object');
    return parseJson(found.without(isForbidden));
  } catch {
    throw new Refusal(400, 'the body must be one object in JSON, without a name twice and without numbers out of bounds');
  }
}

// Sections 1 and 7: both legs, and what is tried again.
async function run(request, response) {
  let kv = null;
  for (let attempt = 1; ; attempt++) {
    const transfer = { id: `${RUN}-${++transfers}`, attempt };
    try {
      if (kv === null || performance.now() >= kv.until) kv = await prefill(request, transfer);
      return await decode(request, transfer, kv, response);
    } catch (error) {
      if (!(error instanceof LegFailed) || response.headersSent || attempt === TRIES || request.signal.aborted) throw error;
    }
  }
}

function document(request, transfer, phase, members) {
  const made = { version: '"1.0"', request_id: JSON.stringify(request.requestId), transfer: JSON.stringify(transfer),
    phase: `"${phase}"`, mode: '"store"' };
  const prompt = request.body.get('prompt')?.value();
  if (Array.isArray(prompt) && prompt.length && prompt.every((id) => Number.isInteger(id) && id >= 0 && id < 2 ** 32)) {
    const bytes = Buffer.from(Uint32Array.from(prompt).buffer); // little-endian, as every machine that Node runs on
    made.prefix = JSON.stringify({ count: prompt.length, digest: 'sha256:' + createHash('sha256').update(bytes).digest('hex') });
  }
  const salt = request.body.get('cache_salt');
  if (salt && salt.value() !== null) made.isolation = `{"cache_salt":${salt.text}}`;
  const all = Object.entries({ ...made, ...members });
  return `{"kvparams":{${all.map(([name, text]) => `"${name}":${text}`).join(',')}}}`;
}

async function prefill(request, transfer) {
  const engine = take('prefill');
  const changes = Object.fromEntries(ANSWER_ALONE.map((name) => [name, null]));
  Object.assign(changes, { max_tokens: '1', stream: 'false', ignore_eos: 'true' });
  if (request.body.get('max_completion_tokens')) changes.max_completion_tokens = '1';
  changes.kv_transfer_params = document(request, transfer, 'prefill', { producer: JSON.stringify({ id: engine.name }) });
  const answered = await send(request, engine, request.body.edit(changes), PREFILL_MS);
  const raw = await readAll(answered, MAX_ANSWER).catch(() => { throw new LegFailed('prefill'); });
  checkStatus(request, answered.statusCode, raw);
  const came = performance.now();
  let body;
  try { body = parseJson(raw); } catch { throw new LegFailed('prefill answered what is no JSON'); }
  const found = body.get('kv_transfer_params')?.get('kvparams');
  checkResult(found, request, transfer, engine);
  const ttl = found.get('lease')?.get('ttl_ms')?.value() ?? 600_000;
  return { members: found, came, until: came + ttl, details: body.get('usage')?.get('prompt_tokens_details'), engine };
}

// Section 5.
function checkResult(found, request, transfer, engine) {
  const wrong = (what) => new Refusal(502, `the prefill engine's answer cannot be used: ${what}`);
  if (found?.kind !== '{') throw wrong('it has no document');
  const result = found.value();
  if (!/^1\.(0|[1-9][0-9]{0,3})$/.test(result.version)) throw wrong('its version');
  if (result.phase !== 'prefill_result' || result.mode !== 'store') throw wrong('its phase or mode');
  if (result.request_id !== request.requestId || result.transfer?.id !== transfer.id ||
      result.transfer?.attempt !== transfer.attempt) throw wrong('it is of another request or transfer');
  const lease = result.lease ?? null;
  const ttl = found.get('lease')?.get('ttl_ms')?.text ?? '';
  if (lease !== null && !(/^[1-9][0-9]{0,7}$/.test(ttl) && Number(ttl) <= 86_400_000)) throw wrong('its lease');
  const keys = result.load_keys ?? [];
  if (!Array.isArray(keys) || !keys.every((key) => /^[!-~]{1,128}$/.test(key))) throw wrong('its keys');
  const producer = result.producer ?? null;
  if (producer !== null && !/^[!-~]{1,256}$/.test(producer.id)) throw wrong('its producer');
  const host = producer?.address?.replace(/:[0-9]+$/, '');
  if (host !== undefined && host !== engine.url.hostname) throw wrong('its address');
  const names = result.must_understand ?? [];
  if (!Array.isArray(names) || !names.every((name) => KNOWN.test(name))) throw wrong('something must be understood');
}

async function decode(request, transfer, kv, response) {
  const engine = take('decode');
  const told = { producer: JSON.stringify({ id: kv.engine.name }) };
  for (const name of HANDED_ON) {
    const member = kv.members.get(name);
    if (member) told[name] = member.text;
  }
  if (told.lease && kv.members.get('lease').kind === '{') {
    const lease = kv.members.get('lease');
    const ttl = Math.max(1, lease.get('ttl_ms').value() - Math.ceil(performance.now() - kv.came));
    told.lease = lease.edit({ ttl_ms: String(ttl) });
  }
  const names = (kv.members.get('must_understand')?.value() ?? []).filter((name) => name.split('.')[0] in told);
  if (names.length) told.must_understand = JSON.stringify(names);
  told.consumer = JSON.stringify({ id: engine.name });
  const params = document(request, transfer, 'decode', told);
  const answered = await send(request, engine, request.body.edit({ kv_transfer_params: params }));
  if (answered.statusCode === 200 && /^text\/event-stream/.test(answered.headers['content-type'] ?? '')) {
    return relay(answered, response, kv);
  }
  const raw = await readAll(answered, MAX_ANSWER).catch(() => { throw new LegFailed('decode'); });
  checkStatus(request, answered.statusCode, raw);
  let text;
  try { text = corrected(parseJson(raw), kv); } catch { throw new LegFailed('decode answered what is no JSON'); }
  answer(response, 200, text);
}

// Section 7: what the status of a leg means.
function checkStatus(request, status, raw) {
  if (status === 200) return;
  if (status < 400 || status >= 500) throw new LegFailed(`an engine answered ${status}`);
  let error = {};
  try { error = parseJson(raw).get('error')?.value() ?? {}; } catch { /* the status says enough */ }
  const isOurs = `${error.param}.`.startsWith('kv_transfer_params.') || (!request.headers.authorization && [401, 403].includes(status));
  if (isOurs) throw new Refusal(502, 'an engine refuses what the proxy has sent');
  const message = typeof error.message === 'string' && !/\d+\.\d+\.\d+\.\d+|:\d{2,5}\b/.test(error.message) ? error.message : 'the engine refused the request';
  throw new Refusal(status, message, typeof error.param === 'string' ? error.param : null);
}

// Section 6: an answer or an event, as the client gets it.
function corrected(body, kv) {
  const changes = {};
  if (body.get('kv_transfer_params')) changes.kv_transfer_params = null;
  if (body.get('usage')?.kind === '{' && kv.details) changes.usage = body.get('usage').edit({ prompt_tokens_details: kv.details.text });
  return Object.keys(changes).length ? body.edit(changes) : body.text;
}

async function relay(answered, response, kv) {
  response.writeHead(200, { 'content-type': 'text/event-stream' });
  let rest = Buffer.alloc(0);
  let isDone = false;
  for await (const part of answered) { // throws if the connection breaks: `serve` then breaks the client's
    rest = Buffer.concat([rest, part]);
    if (rest.length > MAX_ANSWER) throw new LegFailed('an event without an end');
    const end = rest.lastIndexOf(10) + 1; // whole lines, so that no character is cut
    for (const line of rest.subarray(0, end).toString().split(/(?<=\n)/)) {
      isDone ||= /^data: ?\[DONE\]/.test(line);
      const event = /^data: ?(\{[^]*)\r?\n$/.exec(line);
      response.write(event ? `data: ${corrected(parseJson(event[1]), kv)}\n` : line);
    }
    rest = rest.subarray(end);
  }
  if (!isDone) response.write(`data: ${JSON.stringify({ error: { message: 'the engine broke off', type: 'proxy_error' } })}\n\n`);
  response.end();
}

function send(request, engine, body, timeout = 600_000) {
  const headers = { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body), 'x-request-id': request.requestId };
  for (const name of ['traceparent', 'tracestate', 'authorization']) {
    if (request.headers[name] !== undefined) headers[name] = request.headers[name];
  }
  return new Promise((resolve, reject) => {
    const leg = http.request(new URL(request.path, engine.url), { method: 'POST', headers, agent: false, timeout, signal: request.signal }, resolve);
    leg.on('timeout', () => leg.destroy());
    leg.on('error', () => reject(new LegFailed('no connection')));
    leg.end(body);
  });
}

async function readAll(stream, most) {
  const parts = [];
  let length = 0;
  for await (const part of stream) {
    length += part.length;
    if (length > most) { stream.destroy(); throw new Refusal(413, 'the body is too long'); }
    parts.push(part);
  }
  return Buffer.concat(parts);
}

function answer(response, status, text) {
  response.writeHead(status, { 'content-type': 'application/json', 'content-length': Buffer.byteLength(text) });
  response.end(text);
}

let port = 8100;
for (let at = 2; at < process.argv.length; at += 2) {
  const [option, value] = process.argv.slice(at, at + 2);
  const role = option.slice(2);
  if (role === 'port') port = Number(value);
  else engines[role].push({ name: `${role}-${engines[role].length}`, url: new URL(value) });
}
http.createServer(serve).listen(port, '127.0.0.1');
