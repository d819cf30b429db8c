// The engines: a table that can be sorted, and a heat map for fleets that are too large for one.

import { byId, empty, h, keyed, pressSegment, replace, segments, setAttribute, setData, setText } from "./dom.js";
import { ago, count, ms, percent, rate, words } from "./format.js";
import { isUnhealthy } from "./history.js";

const PAGE = 25;
const MANY = 60;
const BAD_FIRST = { broken: 0, not_ready: 1, draining: 2, ready: 3 };
const COLUMNS = [
  { name: "id", label: "Engine", value: (each) => each.id },
  { name: "state", label: "State", value: (each) => -BAD_FIRST[each.state] },
  { name: "in_flight", label: "Running", value: (each) => each.in_flight + each.foreign },
  { name: "legs_per_s", label: "Requests/s", value: (each) => each.legs_per_s, number: true },
  { name: "tokens_per_s", label: "Tokens/s", value: (each) => speed(each), number: true },
  { name: "itl_ms", label: "Token gap", value: (each) => each.itl_ms, number: true },
  { name: "wait_ms", label: "Queue", value: (each) => each.wait_ms, number: true },
  { name: "cache_usage", label: "KV cache", value: (each) => each.cache_usage },
  { name: "hit_ratio", label: "Hits", value: (each) => each.hit_ratio, number: true },
  { name: "legs", label: "Ended", value: (each) => each.legs, number: true },
  { name: "breaker", label: "Breaker", value: (each) => each.breaker },
];
const HEAT = [["load", "Running"], ["cache", "KV cache"], ["speed", "Tokens/s"]];

const speed = (engine) => (engine.role === "prefill" ? engine.prompt_tokens_per_s : engine.answer_tokens_per_s);

export class EnginesPanel {
  /** `open(engine)` shows one engine; `add()` asks for another, for those who may. */
  constructor(open, add) {
    this.open = open;
    this.sort = { column: "state", descending: true };
    this.first = 0;
    this.role = "all";
    this.text = "";
    this.view = null;
    this.heat = "load";
    this.snapshot = null;
    this.filter = h("input", { type: "search", placeholder: "Filter by id, group or state", "aria-label": "Filter engines", on: { input: () => this.change({ text: this.filter.value.trim().toLowerCase(), first: 0 }) } });
    this.roles = h("div", { class: "segments", role: "group", "aria-label": "Role" });
    segments(this.roles, [["all", "All"], ["prefill", "Prefill"], ["decode", "Decode"]], "all", (role) => this.change({ role, first: 0 }));
    this.views = h("div", { class: "segments", role: "group", "aria-label": "View" });
    segments(this.views, [["table", "Table"], ["map", "Map"]], "table", (view) => this.change({ view }));
    this.adding = h("button", { type: "button", class: "plain", text: "Add an engine", hidden: true, on: { click: add } });
    replace(byId("engines-tools"), this.filter, this.roles, this.views, this.adding);
    this.table = this.makeTable();
    this.map = this.makeMap();
    this.nothing = empty("No engine matches", "Change the filter above.");
    replace(byId("engines-body"), this.table.element, this.map.element, this.nothing);
  }

  setAdmin(isAdmin) {
    this.adding.hidden = !isAdmin;
  }

  change(changes) {
    Object.assign(this, changes);
    if (this.snapshot) this.show(this.snapshot);
  }

  show(snapshot) {
    this.snapshot = snapshot;
    const { engines } = snapshot;
    this.view ??= engines.length > MANY ? "map" : "table";
    pressSegment(this.roles, this.role);
    pressSegment(this.views, this.view);
    const ready = engines.filter((each) => each.state === "ready").length;
    setText(byId("engines-count"), `${count(engines.length)} engines, ${count(ready)} ready`);
    const shown = engines.filter((each) => (this.role === "all" || each.role === this.role) && (!this.text || `${each.id} ${each.group} ${each.state} ${each.connector}`.toLowerCase().includes(this.text)));
    this.nothing.hidden = shown.length > 0;
    this.table.element.hidden = this.view !== "table" || !shown.length;
    this.map.element.hidden = this.view !== "map" || !shown.length;
    if (this.view === "table") this.showTable(shown);
    else this.showMap(shown);
  }

  makeTable() {
    const heads = COLUMNS.map((column) => h("th", { scope: "col", class: column.number ? "number" : null }, h("button", { type: "button", text: column.label, on: { click: () => this.sortBy(column.name) } })));
    const body = h("tbody");
    const position = h("span");
    const back = h("button", { type: "button", class: "plain", text: "Previous", on: { click: () => this.change({ first: Math.max(0, this.first - PAGE) }) } });
    const on = h("button", { type: "button", class: "plain", text: "Next", on: { click: () => this.change({ first: this.first + PAGE }) } });
    const pager = h("div", { class: "pager" }, back, on, position);
    const table = h("table", {}, h("caption", { class: "unseen", text: "Engines" }), h("thead", {}, h("tr", {}, heads)), body);
    return { element: h("div", {}, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of engines" }, table), pager), heads, body, pager, position, back, on };
  }

  sortBy(name) {
    const isSame = this.sort.column === name;
    this.change({ sort: { column: name, descending: isSame ? !this.sort.descending : name !== "id" }, first: 0 });
  }

  showTable(engines) {
    const { table, sort } = this;
    const column = COLUMNS.find((each) => each.name === sort.column);
    const direction = sort.descending ? -1 : 1;
    const sorted = [...engines].sort((one, other) => direction * compare(column.value(one), column.value(other)) || (one.role === other.role ? compare(one.id, other.id) : compare(other.role, one.role)));
    this.first = Math.min(this.first, Math.max(0, PAGE * Math.floor((sorted.length - 1) / PAGE)));
    COLUMNS.forEach((each, place) => {
      if (each.name === sort.column) setAttribute(table.heads[place], "aria-sort", sort.descending ? "descending" : "ascending");
      else table.heads[place].removeAttribute("aria-sort");
    });
    const shown = sorted.slice(this.first, this.first + PAGE);
    const most = Math.max(1, ...engines.map((each) => each.in_flight + each.foreign));
    keyed(table.body, shown, (each) => each.id, (each) => this.makeRow(each), (row, each) => updateRow(row, each, most, this.snapshot.time));
    table.pager.hidden = sorted.length <= PAGE;
    setText(table.position, `${count(this.first + 1)} to ${count(this.first + shown.length)} of ${count(sorted.length)}`);
    table.back.disabled = this.first === 0;
    table.on.disabled = this.first + PAGE >= sorted.length;
  }

  makeRow(engine) {
    const name = h("button", { type: "button", class: "link", on: { click: () => this.open(engine.id) } });
    const cells = COLUMNS.slice(1).map((column) => h("td", { class: column.number ? "number" : null, data: { column: column.name } }));
    const row = h("tr", {}, h("td", {}, name, h("div", { class: "hint" })), cells);
    cells[0].append(h("span", { class: "pill" }), h("div", { class: "hint reason" }));
    cells[1].append(meter());
    cells[6].append(meter());
    return row;
  }

  makeMap() {
    const tools = h("div", { class: "segments", role: "group", "aria-label": "Color of the map" });
    segments(tools, HEAT, this.heat, (heat) => this.change({ heat }));
    const racks = h("div", { class: "racks", on: { keydown: (event) => moveFocus(event, racks) } });
    const legend = h("div", { class: "legend" });
    return { element: h("div", { class: "heat" }, tools, racks, legend), tools, racks, legend };
  }

  showMap(engines) {
    const { map } = this;
    pressSegment(map.tools, this.heat);
    const value = { load: (each) => each.in_flight + each.foreign, cache: (each) => each.cache_usage, speed }[this.heat];
    const most = this.heat === "cache" ? 1 : Math.max(4, ...engines.map((each) => value(each) ?? 0));
    const groups = Map.groupBy ? Map.groupBy(engines, rack) : groupBy(engines, rack);
    const shown = [...groups].map(([name, members]) => ({ name, members }));
    keyed(map.racks, shown, (each) => each.name, (each) => h("div", { class: "heat-rack" }, h("h3", { text: each.name }), h("div", { class: "cells" })), (element, each) => {
      keyed(element.lastElementChild, each.members, (engine) => engine.id, (engine) => h("button", { type: "button", class: "cell", tabindex: -1, on: { click: () => this.open(engine.id) } }), (cell, engine) => {
        const amount = value(engine);
        setData(cell, "state", engine.state);
        setData(cell, "level", amount ? Math.min(4, Math.ceil((4 * amount) / most)) : 0);
        setAttribute(cell, "aria-label", `${engine.id}: ${words(engine.state)}, ${count(engine.in_flight + engine.foreign)} running${engine.cache_usage == null ? "" : `, cache ${percent(engine.cache_usage)}`}`);
        setAttribute(cell, "title", cell.getAttribute("aria-label"));
      });
    });
    if (!map.racks.querySelector('.cell[tabindex="0"]')) map.racks.querySelector(".cell")?.setAttribute("tabindex", "0");
    const unit = this.heat === "cache" ? percent : this.heat === "speed" ? rate : count;
    replace(map.legend, ["0", 1, 2, 3, 4].map((level) => h("span", {}, h("i", { class: "cell", data: { level } }), level === "0" ? "idle" : `up to ${unit((most * level) / 4)}`)), [["broken", "broken"], ["not_ready", "not ready"], ["draining", "draining"]].map(([state, label]) => h("span", {}, h("i", { class: "cell", data: { state, level: 0 } }), label)));
  }
}

function rack(engine) {
  return `${engine.role[0].toUpperCase()}${engine.role.slice(1)}${engine.group ? ` · ${engine.group}` : ""}`;
}

function groupBy(items, keyOf) {
  const found = new Map();
  for (const item of items) found.set(keyOf(item), [...(found.get(keyOf(item)) ?? []), item]);
  return found;
}

function compare(one, other) {
  if (one == null || other == null) return (one == null ? -1 : 0) - (other == null ? -1 : 0);
  return typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
}

function meter() {
  return h("span", { class: "meter" }, h("span", { class: "track" }, h("span", { class: "fill" })), h("span", { class: "amount" }));
}

function setMeter(cell, share, text, isHigh, title) {
  const fill = cell.querySelector(".fill");
  const width = `${(100 * Math.min(1, share ?? 0)).toFixed(1)}%`;
  if (fill.style.width !== width) fill.style.width = width;
  setData(fill, "high", isHigh);
  setText(cell.querySelector(".amount"), text);
  if (title) setAttribute(cell, "title", title);
}

function updateRow(row, engine, most, time) {
  const cells = row.children;
  const name = cells[0].firstElementChild;
  setText(name, engine.id);
  setAttribute(name, "title", engine.id);
  setText(cells[0].lastElementChild, [engine.role, engine.group, engine.connector].filter(Boolean).join(" · "));
  const pill = cells[1].firstElementChild;
  setText(pill, words(engine.state));
  setData(pill, "state", engine.state);
  setText(cells[1].lastElementChild, isUnhealthy(engine) && engine.since ? `${engine.reason || "no reason is known"}, for ${ago(time - engine.since)}` : "");
  const running = engine.in_flight + engine.foreign;
  setMeter(cells[2], running / most, count(running), false, engine.foreign ? `${count(engine.foreign)} of them of clients that this proxy does not know` : "");
  setText(cells[3], rate(engine.legs_per_s));
  setText(cells[4], rate(speed(engine)));
  setText(cells[5], ms(engine.itl_ms));
  setText(cells[6], engine.role === "decode" ? "–" : ms(engine.wait_ms));
  const usage = engine.cache_usage;
  setMeter(cells[7], usage, usage == null ? "–" : percent(usage), usage > 0.9 && !engine.cache_is_estimate, usage == null ? "The engine does not say how full its cache is" : engine.cache_is_estimate ? "Estimated from the requests that it got" : "As the engine says");
  setText(cells[8], percent(engine.hit_ratio));
  setText(cells[9], count(engine.legs));
  setText(cells[10], words(engine.breaker));
}

/** Arrow keys move between the cells, of which only one is in the tab order. */
function moveFocus(event, racks) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
  const step = steps[event.key];
  const cells = [...racks.querySelectorAll(".cell")];
  const place = cells.indexOf(document.activeElement);
  if (step === undefined || place < 0) return;
  event.preventDefault();
  const next = cells[Math.max(0, Math.min(cells.length - 1, place + step))];
  cells[place].setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}
