// Stores and other proxies, and the errors with what to do.

import { byId, empty, h, keyed, replace, setData, setText } from "./dom.js";
import { count, percent, rate } from "./format.js";

const HEALTH = {
  ok: "found what was expected",
  degraded: "often lacks what was expected: it may be too small, or restarted",
  failing: "mostly lacks what was expected: look at its log and at the engines’",
  unknown: "nothing was fetched from it lately",
};

/** Shows the stores of a snapshot, and the connection to other proxies. */
export function showStores(snapshot) {
  const cards = snapshot.stores.map((store) =>
    h("div", { class: "card" }, h("span", { class: "pill", data: { state: store.health }, text: store.health }), h("b", { text: store.name }), h("span", { text: `${count(store.ready)} of ${count(store.engines)} engines ready` }),
      h("span", { text: store.expected_tokens ? `${percent(store.confirmed_tokens / store.expected_tokens)} of ${count(store.expected_tokens)} expected tokens found in ${count(store.fetches)} fetches` : "" }), h("span", { text: HEALTH[store.health] })));
  if (snapshot.exchange) {
    const { reachable, alive } = snapshot.exchange;
    cards.push(h("div", { class: "card" }, h("span", { class: "pill", data: { state: reachable ? "ok" : "degraded" }, text: reachable ? "connected" : "alone" }), h("b", { text: snapshot.workers > 1 ? "Other workers and proxies" : "Other proxies" }), h("span", { text: reachable ? `${count(alive)} share this fleet` : "cannot be reached; this proxy goes on with what it knows" })));
  }
  const body = byId("stores-body");
  body.className = "cards";
  if (!cards.length) cards.push(empty("No store and no other proxy", "Engines that share a store name it with `store` in the fleet file; proxies share a fleet with --share."));
  replace(body, cards);
}

/** Shows the errors of a snapshot. */
export function showErrors(snapshot) {
  const body = byId("errors-body");
  if (!snapshot.errors.length) {
    replace(body, empty("No errors since the start", "Failed legs, refused requests and broken streams appear here, each with what it means and what to do."));
    body.list = null;
    return;
  }
  if (!body.list) {
    body.list = h("ul", { class: "error-list" });
    replace(body, body.list);
  }
  keyed(body.list, snapshot.errors, (row) => row.series, (row) => h("li", { data: { series: row.series } }, h("span", { class: "kind" }), h("span", { class: "count" }), h("p"), h("p", { class: "action" })), (item, row) => {
    const [kind, number, meaning, action] = item.children;
    setText(kind, row.kind);
    setText(number, `${count(row.count)}${row.per_min ? ` · ${rate(row.per_min)}/min` : ""}`);
    setText(meaning, `${row.meaning[0].toUpperCase()}${row.meaning.slice(1)}.`);
    setText(action, row.action);
    setData(item, "active", row.per_min > 0);
  });
}
