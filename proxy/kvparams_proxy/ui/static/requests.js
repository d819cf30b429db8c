// Requests as a waterfall: where each spent its time, which engines ran it, and why these.

import { byId, empty, h, keyed, pressSegment, replace, segments, setAttribute, setData, setText } from "./dom.js";
import { bytes, clock, count, ms, percent, words } from "./format.js";

const PARTS = { created: "intake", queued: "queue", encode: "encode", prefill: "prefill", result: "handoff", decode: "first", first_byte: "decode" };
const LABELS = { intake: "intake", queue: "waits for room", encode: "encode", prefill: "prefill", handoff: "handoff", first: "KV transfer and first token", decode: "decode" };
const LISTS = [["running", "Running"], ["recent", "Recent"], ["slow", "Slowest"], ["failed", "Failed"]];
const NOTHING = {
  running: ["Nothing is running", "Send a request to /v1/completions or /v1/chat/completions of this proxy; it appears here at once."],
  recent: ["No request has ended yet", "The last requests appear here, with the time that each step took."],
  slow: ["No request in the last two minutes", "The slowest requests of the last two minutes appear here."],
  failed: ["No request has failed", "Requests that were refused, failed, broke off or lost their client appear here."],
};

export class RequestsPanel {
  /** `open(title, content)` shows one request. */
  constructor(open) {
    this.open = open;
    this.list = "recent";
    this.isHeld = false;
    this.snapshot = null;
    const tools = byId("requests-tools");
    this.lists = h("div", { class: "segments", role: "group", "aria-label": "Requests" });
    segments(this.lists, LISTS, this.list, (list) => {
      this.list = list;
      pressSegment(this.lists, list);
      if (this.snapshot) this.draw(this.snapshot);
    });
    this.hold = h("button", { type: "button", class: "plain", text: "Hold", "aria-pressed": "false", title: "Keep the list as it is, to read it", on: { click: () => this.setHeld(!this.isHeld) } });
    replace(tools, this.lists, this.hold);
    this.rows = h("ol", { class: "request-list" });
    this.nothing = h("div");
    const legend = h("div", { class: "legend" }, Object.entries(LABELS).map(([part, label]) => h("span", {}, h("i", { data: { part } }), label)));
    replace(byId("requests-body"), this.rows, this.nothing, legend);
  }

  setHeld(isHeld) {
    this.isHeld = isHeld;
    setAttribute(this.hold, "aria-pressed", isHeld);
    setText(this.hold, isHeld ? "Go on" : "Hold");
    if (!isHeld && this.snapshot) this.draw(this.snapshot);
  }

  show(snapshot) {
    this.snapshot = snapshot;
    if (!this.isHeld) this.draw(snapshot);
  }

  draw(snapshot) {
    const requests = snapshot.requests[this.list];
    const running = snapshot.states.pending + snapshot.states.encoding + snapshot.states.prefilling + snapshot.states.decoding;
    const numbers = { running, failed: snapshot.requests.failed.length };
    for (const button of this.lists.children) {
      const number = numbers[button.dataset.value];
      const label = LISTS.find(([value]) => value === button.dataset.value)[1];
      setText(button, number ? `${label} ${count(number)}` : label);
    }
    const longest = Math.max(1, ...requests.map((each) => each.total_ms));
    if (!requests.length) replace(this.nothing, empty(...NOTHING[this.list]));
    this.nothing.hidden = requests.length > 0;
    keyed(this.rows, requests, (each) => `${this.list} ${each.id} ${each.started.toFixed(1)}`, () => this.makeRow(), (row, each) => updateRow(row, each, longest));
  }

  makeRow() {
    const row = h("li", {}, h("button", { type: "button", class: "request", on: { click: () => this.open(`Request ${row.request.id || "without an id"}`, describe(row.request, this.snapshot)) } },
      h("span", { class: "who" }, h("span", { class: "id" }), h("span", { class: "what" })), h("span", { class: "pill" }), h("span", { class: "bar-track" }, h("span", { class: "bar" })), h("span", { class: "total" })));
    return row;
  }
}

function updateRow(row, request, longest) {
  row.request = request;
  const [who, pill, track, spent] = row.firstElementChild.children;
  setText(who.firstElementChild, request.id.length > 22 ? `…${request.id.slice(-20)}` : request.id || "(no id)");
  setText(who.lastElementChild, request.route.length ? request.route.map(([, id]) => id).join(" → ") : request.error ?? request.endpoint);
  setAttribute(who, "title", `${request.id} ${request.model} ${request.endpoint}`.trim());
  const state = request.outcome || "running";
  setText(pill, request.error && request.status ? String(request.status) : words(state));
  setData(pill, "state", request.outcome || "waiting");
  setAttribute(pill, "title", request.error ?? state);
  setText(spent, request.spans.length ? ms(request.total_ms) : "–");
  const bar = track.firstElementChild;
  bar.style.width = `${((100 * request.total_ms) / longest).toFixed(2)}%`;
  const parts = partsOf(request);
  const key = parts.map((each) => `${each.part}${each.ms.toFixed(1)}`).join();
  if (row.barKey === key) return;
  row.barKey = key;
  replace(bar, parts.map((each) => {
    const part = h("span", { class: "part", data: { part: each.part }, title: `${LABELS[each.part]}: ${ms(each.ms)}` });
    part.style.width = `${((100 * each.ms) / Math.max(request.total_ms, 0.001)).toFixed(2)}%`;
    return part;
  }));
}

/** Returns the steps of a request with their durations. */
function partsOf(request) {
  const found = [];
  request.spans.forEach(([state, who, at], place) => {
    if (state === "done") return;
    const end = request.spans[place + 1]?.[2] ?? request.total_ms;
    const runs = who || (state === "first_byte" ? found.at(-1)?.who : "");
    found.push({ part: PARTS[state], state, who: runs, at, ms: Math.max(0, end - at) });
  });
  return found;
}

function describe(request, snapshot) {
  const pair = (name, value) => (value == null || value === "" ? null : h("div", {}, h("dt", { text: name }), h("dd", { text: value })));
  const facts = h("dl", { class: "pairs" },
    pair("Outcome", request.outcome ? words(request.outcome) : "running"), pair("Status", request.status), pair("Error", request.error), pair("Model", request.model), pair("Endpoint", request.endpoint), pair("Tenant", request.tenant),
    pair("Began", clock(request.started)), pair("Took", request.spans.length ? ms(request.total_ms) : null), pair("Prompt tokens", request.prompt_tokens == null ? null : count(request.prompt_tokens)), pair("Of these cached", request.cached_tokens == null ? null : count(request.cached_tokens)), pair("Answer tokens", request.completion_tokens == null ? null : count(request.completion_tokens)), pair("Answer", request.outcome ? bytes(request.answer_bytes) : null), pair("Further attempts", request.retries || null), pair("Trace", request.trace));
  const steps = partsOf(request);
  const table = steps.length && h("div", { class: "scroll" }, h("table", { class: "steps" }, h("caption", { class: "unseen", text: "Steps" }), h("thead", {}, h("tr", {}, ["Step", "Engine", "From", "Took"].map((text, place) => h("th", { scope: "col", text, class: place > 1 ? "number" : null })))), h("tbody", {}, steps.map((each) => h("tr", {}, h("td", {}, h("i", { data: { part: each.part } }), LABELS[each.part]), h("td", { text: each.who || "–" }), h("td", { class: "number", text: ms(each.at) }), h("td", { class: "number", text: ms(each.ms) }))))));
  return [facts, longest(request, steps), table, why(request, snapshot)];
}

/** The step that took longest, and what that usually means. */
function longest(request, steps) {
  const most = steps.reduce((one, other) => (other.ms > (one?.ms ?? 0) ? other : one), null);
  if (!most) return null;
  const share = percent(Math.min(1, most.ms / Math.max(request.total_ms, 0.001)));
  const where = most.who ? ` on ${most.who}` : "";
  return h("p", { class: "longest", text: `Longest step: ${LABELS[most.part]}${where}, ${ms(most.ms)} (${share}). ${cause(request, most)}` });
}

function cause(request, step) {
  const { completion_tokens: answer, prompt_tokens: prompt, cached_tokens: cached } = request;
  if (step.part === "queue") return "All engines that may run it were at their limits: add engines, or raise the limits.";
  if (step.part === "encode") return "The encode engine encoded the media; it may have had others to encode first.";
  if (step.part === "prefill") return `The engine computed the prompt${prompt != null && cached != null ? `, with ${count(cached)} of ${count(prompt)} tokens cached` : ""}; it may have had others to compute first.`;
  if (step.part === "first") return "The engine loaded the KV and had its turn for the first token; look at its load and at the store.";
  if (step.part === "decode") return answer ? `That is ${ms(step.ms / answer)} for each of ${count(answer)} tokens.` : "The engine generated the answer.";
  return "The proxy itself took that long: look at its CPU, and at how fast the client sends.";
}

/** The decision and its alternatives. */
function why(request, snapshot) {
  const decision = request.decision;
  const title = h("h3", { text: "Why here?" });
  if (!decision) {
    const [first] = request.route;
    const text = first ? `The policy ${snapshot.policy} chose ${first[1]}. It does not look at caches, so there is no estimate for each engine; with --tokenizer the policy is cache_aware.` : "No engine had been chosen.";
    return h("div", { class: "why" }, title, h("p", { text }));
  }
  const source = decision.source ? ` from ${decision.source}` : "";
  const fetch = decision.fetched ? `, fetch ${count(decision.fetched)}${source} in ${ms(decision.fetch_ms)}` : "";
  const found = request.cached_tokens == null ? "" : ` The engine then reported ${count(request.cached_tokens)} cached.`;
  const rows = [[decision.chosen, decision.cached, true], ...decision.others.map(([id, cached]) => [id, cached, false])];
  return h("div", { class: "why" }, title,
    h("p", { text: `${decision.chosen} was expected to give the first token soonest of ${count(decision.candidates)} candidates: wait ${ms(decision.wait_ms)}${fetch}, compute ${count(decision.computed)} tokens in ${ms(decision.compute_ms)}.${found}` }),
    h("table", {}, h("caption", { class: "unseen", text: "Candidates" }), h("thead", {}, h("tr", {}, h("th", { scope: "col", text: "Candidate" }), h("th", { scope: "col", class: "number", text: `Cached of ${count(decision.prompt_tokens)} tokens` }))), h("tbody", {}, rows.map(([id, cached, isChosen]) => h("tr", {}, h("td", { text: isChosen ? `${id} (chosen)` : id }), h("td", { class: "number", text: count(cached) }))))));
}
