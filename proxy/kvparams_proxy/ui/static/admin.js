// What the admin token allows: the calls of the admin API, each after a question.

import { h } from "./dom.js";
import { askForm, confirmAction, openDialog } from "./dialogs.js";
import { bytes, clock, count, ms, percent, rate, words } from "./format.js";

const kv = (value) => (value == null ? null : bytes(value));

export class Admin {
  constructor() {
    this.token = "";
    this.isAdmin = false;
  }

  async call(method, path, body) {
    const response = await fetch(path, { method, cache: "no-store", headers: { authorization: `Bearer ${this.token}`, "content-type": "application/json" }, body: body && JSON.stringify(body) });
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(answer.error?.message ?? `The proxy answers ${response.status}.`);
    return answer;
  }

  /** Shows an engine, with its address for those who may see it. */
  openEngine(engine) {
    const pair = (name, value) => (value == null || value === "" ? null : h("div", {}, h("dt", { text: name }), h("dd", { text: value })));
    const facts = h("dl", { class: "pairs" }, pair("State", words(engine.state)), pair("Since", engine.since ? clock(engine.since) : null), pair("Reason", engine.reason), pair("Role", engine.role), pair("Group", engine.group), pair("Connector", engine.connector), pair("Store", engine.store), pair("Breaker", words(engine.breaker)), pair("Running", count(engine.in_flight)), pair("Of other clients", engine.foreign || null), pair("Their prompt tokens", count(engine.tokens)), pair("Held KV transfers", count(engine.leases)), pair("Wait for a prompt", engine.role === "decode" ? null : ms(engine.wait_ms)), pair("Requests/s", rate(engine.legs_per_s)), pair("Ended", count(engine.legs)), pair("Prompt tokens/s", rate(engine.prompt_tokens_per_s)), pair("Answer tokens/s", rate(engine.answer_tokens_per_s)), pair("A token every", ms(engine.itl_ms)), pair("KV cache in use", engine.cache_usage == null ? null : `${percent(engine.cache_usage)}${engine.cache_is_estimate ? " (estimate)" : ""}`), pair("Cache hits", engine.hit_ratio == null ? null : percent(engine.hit_ratio)), pair("KV transferred/s", kv(engine.transfer_bytes_per_s)), pair("KV loaded/s", kv(engine.load_bytes_per_s)), pair("KV saved/s", kv(engine.save_bytes_per_s)));
    const hint = h("p", { class: "hint", text: HINTS[engine.state] });
    openDialog(engine.id, [facts, hint], this.isAdmin ? this.buttons(engine) : []);
    if (this.isAdmin) this.addAddress(engine, facts, pair);
  }

  async addAddress(engine, facts, pair) {
    const known = await this.call("GET", instancePath(engine.id)).catch(() => null);
    if (known) facts.append(...[pair("URL", known.url), pair("Source", known.source), pair("Models", known.models?.join(", ")), pair("Incarnation", known.incarnation)].filter(Boolean));
  }

  buttons(engine) {
    const button = (label, style, act) => h("button", { type: "button", class: style, text: label, on: { click: act } });
    const path = instancePath(engine.id);
    const drain = () => confirmAction(`Drain ${engine.id}?`, "It gets no new requests; those that run there go on to their end. All workers and proxies of the site follow.", "Drain", () => this.call("POST", `${path}/drain`));
    const undrain = () => confirmAction(`Undrain ${engine.id}?`, "It gets new requests again.", "Undrain", () => this.call("POST", `${path}/undrain`), false);
    const remove = () => confirmAction(`Remove ${engine.id}?`, "It leaves the fleet; requests that run there go on. Only engines that were added here can be removed here.", "Remove", () => this.call("DELETE", path));
    return [button("Remove…", "danger", remove), engine.state === "draining" ? button("Undrain…", "primary", undrain) : button("Drain…", "danger", drain)];
  }

  /** Asks for a new engine. */
  askEngine() {
    askForm("Add an engine", "It is there until the proxy ends; put it into the fleet file to keep it.", [
      { name: "id", title: "Name", required: true, placeholder: "decode-7" },
      { name: "url", title: "URL", required: true, placeholder: "http://10.0.0.7:8000" },
      { name: "role", title: "Role", options: ["prefill", "decode", "aggregated", "encode"] },
      { name: "connector", title: "Connector (empty: the proxy’s default)", placeholder: "nixl" },
      { name: "group", title: "Group (may be empty)" },
    ], "Add", (values) => this.call("POST", "admin/instances", values));
  }

  /** Asks for another mode. */
  async askMode(snapshot) {
    const now = snapshot.modes.map((mode) => mode.use).join(", ");
    askForm("Switch the mode", `New requests are coordinated by the chosen mode, without conditions or options. Now: ${now}. The change is forgotten when the proxy ends.`, [
      { name: "mode", title: "Mode", options: MODES },
    ], "Go on", async ({ mode }) => {
      setTimeout(() => confirmAction(`Switch to ${mode}?`, "Requests that run keep their mode. All workers and proxies of the site follow.", "Switch", () => this.call("PUT", "admin/modes", { modes: [{ use: mode }] })));
    });
  }
}

const MODES = ["prefill_then_decode", "concurrent_legs", "conditional", "aggregated"];
const HINTS = {
  ready: "It answers probes, and its requests succeed.",
  broken: "It answers probes, but requests fail there. Others get its work while the breaker is open; see the failed requests and its log.",
  not_ready: "It gets no requests until it answers probes. See whether it runs, and its log; kvparams proxy --check asks all engines.",
  draining: "It gets no new requests. It can be stopped once nothing runs there and it holds no KV transfers.",
};

function instancePath(id) {
  return `admin/instances/${encodeURIComponent(id)}`;
}
