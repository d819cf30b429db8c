// The way of requests: clients, groups of prefill engines, groups of decode engines, answers; and stores.

import { byId, empty, h, replace, s } from "./dom.js";
import { bytes, count, rate } from "./format.js";
import { isUnhealthy, total } from "./history.js";

const MOST = 7;
const NODE = 46;
const GAP = 14;
const ROOM = 264;
const LABELED = 4;
const TOP = 24;
const NARROW = 620;

/** Shows the flow of a snapshot. */
export function showFlow(snapshot) {
  const body = byId("flow-body");
  body.className = "flow";
  if (!snapshot.engines.length) {
    replace(body, empty("No engine yet", "Engines come from --prefill and --decode, a fleet file, discovery, or “Add an engine” on this page."));
    return;
  }
  const picture = arrange(snapshot);
  const width = body.clientWidth;
  replace(body, width < NARROW ? drawList(picture) : drawGraph(picture, width), describe(picture));
}

/** Groups engines, and puts the smallest groups of a role together where there are many. */
function arrange(snapshot) {
  const columns = { prefill: [], decode: [] };
  for (const role of ["encode", "prefill", "aggregated", "decode"]) {
    const groups = new Map();
    for (const engine of snapshot.engines) {
      if (engine.role !== role) continue;
      const group = groups.get(engine.group) ?? { role, names: [engine.group], engines: [] };
      group.engines.push(engine);
      groups.set(engine.group, group);
    }
    const column = columns[role === "decode" ? "decode" : "prefill"];
    const sorted = [...groups.values()].sort((one, other) => other.engines.length - one.engines.length);
    column.push(...sorted.slice(0, sorted.length > MOST ? MOST - 1 : MOST));
    const rest = sorted.slice(column.length);
    if (sorted.length > MOST) column.push({ role, names: rest.flatMap((each) => each.names), engines: rest.flatMap((each) => each.engines) });
  }
  for (const group of [...columns.prefill, ...columns.decode]) summarize(group);
  const flows = [];
  for (const source of columns.prefill) {
    for (const target of columns.decode) {
      const ways = snapshot.flows.filter((way) => source.names.includes(way.from) && target.names.includes(way.to));
      if (source.role === "prefill" && ways.length) flows.push({ source, target, rate: sum(ways, "per_s"), tokens: sum(ways, "tokens_per_s"), bytes: sum(ways, "bytes_per_s") });
    }
  }
  const requests = total(snapshot.rates, "requests_total");
  const stores = snapshot.stores.map((store) => ({ ...store, links: linksOf(store, columns) }));
  return { ...columns, flows, requests, bytes: snapshot.rates.kvparams_proxy_answer_bytes_total, stores };
}

/** What each group with engines of a store saves to it and loads from it, in bytes each second. */
function linksOf(store, columns) {
  const links = [];
  for (const group of [...columns.prefill, ...columns.decode]) {
    const engines = group.engines.filter((each) => each.store === store.name);
    if (engines.length) links.push({ group, saved: sum(engines, "save_bytes_per_s"), loaded: sum(engines, "load_bytes_per_s") });
  }
  return links;
}

/** Bytes each second in words; empty where no engine says how many. */
function linkText(saved, loaded) {
  return [saved == null ? "" : `saves ${bytes(saved)}/s`, loaded == null ? "" : `loads ${bytes(loaded)}/s`].filter(Boolean).join(" · ");
}

const flowText = (flow) => `${rate(flow.rate)}/s · ${rate(flow.tokens)} tok/s${flow.bytes == null ? "" : ` · ${bytes(flow.bytes)}/s`}`;

function summarize(group) {
  const { engines, names } = group;
  const ready = engines.filter((each) => each.state === "ready").length;
  const broken = engines.filter(isUnhealthy).length;
  group.title = names.length > 1 ? `${names.length} more groups` : names[0] || (group.role === "aggregated" ? "Aggregated" : `All ${group.role}`);
  group.state = !ready ? "broken" : broken ? "degraded" : "ready";
  group.ready = `${ready}/${engines.length} ready`;
  group.inFlight = engines.reduce((all, each) => all + each.in_flight + each.foreign, 0);
  group.rate = sum(engines, "legs_per_s");
  group.promptTokens = sum(engines, "prompt_tokens_per_s");
  group.answerTokens = sum(engines, "answer_tokens_per_s");
}

function sum(items, name) {
  return items.reduce((all, each) => (each[name] == null ? all : (all ?? 0) + each[name]), null);
}

function drawGraph(picture, width) {
  const nodeWidth = Math.min(210, Math.max(112, width * 0.165));
  const places = { clients: 0, prefill: (width - nodeWidth) / 3, decode: (2 * (width - nodeWidth)) / 3, answers: width - nodeWidth };
  const rows = Math.max(picture.prefill.length, picture.decode.length, 1);
  const stores = picture.stores.slice(0, 3);
  const room = stores.length ? ROOM - NODE - 40 : ROOM;
  const gap = Math.max(GAP, Math.min(64, (room - rows * NODE) / rows));
  const inner = Math.max(rows * (NODE + gap) - gap, room);
  const height = TOP + inner + (stores.length ? NODE + 44 : 4);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Flow of requests; the table below says the same" });
  const edges = s("g");
  const labels = s("g");
  svg.append(edges);
  const put = (group, x, place, number) => {
    const y = TOP + (inner - (number * (NODE + gap) - gap)) / 2 + place * (NODE + gap);
    Object.assign(group, { x, y: y + NODE / 2, right: x + nodeWidth });
    svg.append(node(group, x, y, nodeWidth));
  };
  const clients = { title: "Clients", ready: `${rate(picture.requests)} requests/s`, state: "ready" };
  const answers = { title: "Answers", ready: `${bytes(picture.bytes)}/s`, state: "ready" };
  put(clients, places.clients, 0, 1);
  picture.prefill.forEach((group, place) => put(group, places.prefill, place, picture.prefill.length));
  picture.decode.forEach((group, place) => put(group, places.decode, place, picture.decode.length));
  put(answers, places.answers, 0, 1);
  const most = Math.max(1e-9, ...picture.flows.map((each) => each.rate ?? 0), ...picture.prefill.map((each) => each.rate ?? 0));
  for (const group of picture.prefill) {
    edge(edges, labels, clients, group, group.rate, most, group.role === "encode" ? `${rate(group.rate)}/s` : `${rate(group.rate)}/s · ${rate(group.promptTokens)} tok/s`, picture.prefill.length <= LABELED);
    if (group.role === "aggregated") edge(edges, labels, group, answers, group.rate, most, `${rate(group.answerTokens)} tok/s`);
  }
  for (const flow of picture.flows) edge(edges, labels, flow.source, flow.target, flow.rate || (flow.bytes ? Number.EPSILON : 0), most, flowText(flow), picture.flows.length <= 9);
  for (const group of picture.decode) edge(edges, labels, group, answers, group.rate, most, `${rate(group.answerTokens)} tok/s`, picture.decode.length <= LABELED);
  stores.forEach((store, place) => {
    const x = (places.prefill + places.decode) / 2 + (place - (stores.length - 1) / 2) * (nodeWidth + GAP);
    const y = TOP + inner + 40;
    const shown = { title: store.name, ready: `store · ${store.health === "unknown" ? "no fetch yet" : store.health}`, state: store.health === "failing" ? "broken" : store.health === "degraded" ? "degraded" : "ready" };
    svg.append(node(shown, x, y, nodeWidth));
    for (const { group, saved, loaded } of store.links) {
      const from = group.x + nodeWidth / 2;
      const line = s("path", { class: saved || loaded ? "edge" : "edge idle", "stroke-width": 1.5, d: `M${from},${group.y + NODE / 2}C${from},${y - 14} ${x + nodeWidth / 2},${y - 26} ${x + nodeWidth / 2},${y}` });
      line.append(s("title", { text: `${group.title} and ${store.name}: ${linkText(saved, loaded) || "the engines do not say how many bytes"}` }));
      edges.append(line);
    }
    if (stores.length === 1) {
      for (const groups of [picture.prefill, picture.decode]) {
        const links = store.links.filter((each) => groups.includes(each.group));
        const text = linkText(sum(links, "saved"), sum(links, "loaded"));
        if (!text) continue;
        const isLeft = groups === picture.prefill;
        const side = links[0].group.x + nodeWidth / 2 + (isLeft ? -8 : 8);
        text.split(" · ").forEach((each, line) => labels.append(s("text", { class: "rate", x: side, y: y - 16 + 15 * line, "text-anchor": isLeft ? "end" : "start", text: each })));
      }
    }
  });
  for (const [name, x] of [["", places.clients], ["PREFILL", places.prefill], ["DECODE", places.decode]]) svg.append(s("text", { class: "column", x: x + 1, y: 12, text: name }));
  svg.append(labels);
  return svg;
}

function node(group, x, y, width) {
  const shown = s("g", { class: "node", data: { state: group.state } }, s("rect", { x, y, width, height: NODE, rx: 9 }));
  shown.append(s("text", { class: "title", x: x + 12, y: y + 19, text: clip(group.title, width - 20, 7.4) }));
  const whole = group.inFlight == null ? group.ready : `${group.ready} · ${count(group.inFlight)} run`;
  const more = whole.length > letters(width - 20, 5.7) ? group.ready : whole;
  shown.append(s("text", { class: "sub", x: x + 12, y: y + 35, text: clip(more, width - 20) }));
  shown.append(s("title", { text: `${group.title}: ${whole}` }));
  return shown;
}

function edge(edges, labels, source, target, perSecond, most, label, isLabeled = true) {
  const isIdle = !perSecond;
  const middle = (source.right + target.x) / 2;
  const width = isIdle ? 1.5 : 1.5 + 7 * Math.sqrt(perSecond / most);
  const line = s("path", { class: isIdle ? "edge idle" : "edge", "stroke-width": width.toFixed(1), d: `M${source.right},${source.y}C${middle},${source.y} ${middle},${target.y} ${target.x},${target.y}` });
  line.append(s("title", { text: `${source.title} to ${target.title}: ${label}` }));
  edges.append(line);
  const room = target.x - source.right;
  if (!isLabeled || isIdle || room < 56) return;
  const y = (source.y + target.y) / 2;
  label.split(" · ").forEach((line, place) => labels.append(s("text", { class: "rate", x: middle, y: y - 8 + (place ? 10 + 14 * place : 0), "text-anchor": "middle", text: clip(line, room) })));
}

const letters = (width, each) => Math.max(4, Math.floor(width / each));

function clip(text, width, each = 5.7) {
  const most = letters(width, each);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** A phone shows the same as a list. */
function drawList(picture) {
  const block = (title, groups) =>
    h("div", {}, h("h3", { text: title }), h("div", { class: "cards" }, groups.map((group) =>
      h("div", { class: "card" }, h("b", { text: group.title }), h("span", { text: `${group.ready} · ${count(group.inFlight)} running` }), h("span", { text: `${rate(group.rate)}/s · ${rate(group.role === "decode" ? group.answerTokens : group.promptTokens)} tokens/s` })))));
  const links = picture.stores.flatMap((store) => store.links.map((each) => [store.name, each.group.title, linkText(each.saved, each.loaded)])).filter(([, , text]) => text);
  const kv = [...picture.flows.filter((each) => each.bytes != null).map((flow) => `${flow.source.title} to ${flow.target.title}: ${bytes(flow.bytes)}/s of KV`), ...links.map(([store, group, text]) => `${group} ${text} (${store})`)];
  return h("div", { class: "cards" }, block(`${rate(picture.requests)} requests/s to prefill`, picture.prefill), block("then to decode", picture.decode), h("p", { class: "hint", text: `${bytes(picture.bytes)}/s of answers to clients` }), kv.map((text) => h("p", { class: "hint", text })));
}

function describe(picture) {
  const rows = [
    ...picture.prefill.map((group) => ["Clients", group.title, rate(group.rate), rate(group.promptTokens), ""]),
    ...picture.flows.map((flow) => [flow.source.title, flow.target.title, rate(flow.rate), rate(flow.tokens), bytes(flow.bytes)]),
    ...picture.stores.flatMap((store) => store.links.flatMap(({ group, saved, loaded }) => [[group.title, store.name, "", "", bytes(saved)], [store.name, group.title, "", "", bytes(loaded)]])),
    ...picture.decode.map((group) => [group.title, "Clients", rate(group.rate), rate(group.answerTokens), ""]),
  ];
  return h("div", { class: "unseen" }, h("table", {}, h("caption", { text: "Flow of requests" }), h("thead", {}, h("tr", {}, ["From", "To", "Requests each second", "Tokens each second", "KV each second"].map((text) => h("th", { scope: "col", text })))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => h("td", { text: value })))))));
}
