// The figures at the top of the page.

import { byId, h, keyed, s, setAttribute, setData, setText } from "./dom.js";
import { bytes, count, ms, percent, rate } from "./format.js";
import { quantile, total } from "./history.js";

const OUTCOMES = ["refused", "failed", "midway"];

/** Shows the figures of a snapshot. */
export function showSummary(snapshot, history) {
  keyed(byId("summary"), figures(snapshot, history), (figure) => figure.name, create, update);
}

function figures(snapshot, history) {
  const { counters, rates, states } = snapshot;
  const ttft = history.histogram("ttft", "minute");
  const itl = history.histogram("itl", "minute");
  const errors = OUTCOMES.map((outcome) => `{outcome="${outcome}"}`);
  const errorRate = sum(errors.map((labels) => rates[`kvparams_proxy_requests_total${labels}`]));
  const errorCount = sum(errors.map((labels) => counters[`kvparams_proxy_requests_total${labels}`]));
  const prompt = rates.kvparams_proxy_prompt_tokens_sum;
  const cached = rates.kvparams_proxy_cached_prompt_tokens_total;
  const share = prompt ? Math.min(1, cached / prompt) : null;
  const running = states.pending + states.encoding + states.prefilling + states.decoding;
  const steps = [[states.pending, "waiting"], ...(states.encoding ? [[states.encoding, "encode"]] : []), [states.prefilling, "prefill"], [states.decoding, "decode"]];
  const isBad = rates['kvparams_proxy_requests_total{outcome="failed"}'] > 0 || rates['kvparams_proxy_requests_total{outcome="midway"}'] > 0;
  return [
    { name: "Requests", now: total(rates, "requests_total"), show: rate, unit: "/s", more: `${count(total(counters, "requests_total"))} in all` },
    { name: "Under way", now: running, show: count, unit: "", more: steps.filter(([number], place) => number || place).map(([number, state]) => `${count(number)} ${state}`).join(" · ") },
    { name: "Time to first token", now: milli(quantile(ttft, 0.5)), show: ms, unit: "p50", more: `p95 ${ms(milli(quantile(ttft, 0.95)))} · last minute` },
    { name: "Time between tokens", now: milli(quantile(itl, 0.5)), show: ms, unit: "p50", more: `p95 ${ms(milli(quantile(itl, 0.95)))} · last minute` },
    { name: "Prompt tokens", now: prompt, show: rate, unit: "/s", more: `${percent(share)} found in caches` },
    { name: "Answers", now: rates.kvparams_proxy_answer_bytes_total, show: bytes, unit: "/s", more: `${count(counters.kvparams_proxy_completion_tokens_sum)} tokens reported` },
    { name: "Errors", now: errorRate == null ? null : 60 * errorRate, show: rate, unit: "/min", more: `${count(errorCount)} in all`, bad: isBad },
  ].map((figure) => ({ ...figure, value: figure.show(figure.now), line: history.line(figure.name, figure.now) }));
}

const milli = (seconds) => (seconds == null ? null : 1000 * seconds);
const sum = (values) => values.reduce((all, value) => (value == null ? all : (all ?? 0) + value), null);

function create(figure) {
  const value = h("div", { class: "value" }, h("span"), h("small"));
  const line = s("svg", { viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { class: "spark-area" }), s("path", { class: "spark" }));
  return h("div", { class: "figure", data: { figure: figure.name } }, h("div", { class: "name", text: figure.name }), value, h("div", { class: "more" }), line);
}

function update(element, figure) {
  setText(element.querySelector(".value span"), figure.value);
  setText(element.querySelector(".value small"), figure.unit);
  setText(element.querySelector(".more"), figure.more);
  setData(element, "bad", Boolean(figure.bad));
  if (figure.line.length < 2) return;
  const highest = Math.max(...figure.line, 1e-9);
  const step = 100 / (figure.line.length - 1);
  const points = figure.line.map((value, place) => `${(place * step).toFixed(1)},${(26 - (24 * value) / highest).toFixed(1)}`).join("L");
  setAttribute(element.querySelector(".spark"), "d", `M${points}`);
  setAttribute(element.querySelector(".spark-area"), "d", `M0,28L${points}L100,28Z`);
}
