// Prefixes that many prompts have in common, as a tree map: the area is the number of prompts, the color the hits.

import { byId, empty, h, replace, s, setText } from "./dom.js";
import { count, percent } from "./format.js";

const HEIGHT = 210;
const PADDING = 20;

/** Shows the hot prefixes of a snapshot. */
export function showPrefixes(snapshot) {
  const body = byId("prefixes-body");
  const { prefixes } = snapshot;
  setText(byId("prefixes-hint"), prefixes?.length ? `Of the last ${count(snapshot.sampled)} requests` : "");
  const isOpen = body.querySelector("details")?.open ?? false;
  const key = JSON.stringify([prefixes, body.clientWidth]);
  if (body.shownKey === key) return;
  body.shownKey = key;
  if (!prefixes) {
    replace(body, empty("The policy does not look at caches", "Give the proxy --tokenizer PATH (or bytes), and it sends prompts where their beginning is cached.", h("code", { text: "kvparams proxy --tokenizer bytes …" })));
    return;
  }
  if (!prefixes.length) {
    replace(body, empty("No prefix is shared yet", "A prefix appears once several of the last prompts begin with the same blocks. No prompt text is shown: a label stands for it."));
    return;
  }
  const nodes = new Map(prefixes.map(([label, parent, blocks, requests, hits]) => [label, { label, parent, blocks, requests, hits, children: [] }]));
  const roots = [];
  for (const node of nodes.values()) (nodes.get(node.parent)?.children ?? roots).push(node);
  const width = Math.max(260, body.clientWidth);
  const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": `Tree map of ${prefixes.length} hot prefixes; the table below says the same` });
  place(svg, roots, 0, 0, width, HEIGHT);
  const rows = prefixes.map(([label, parent, blocks, requests, hits]) => h("tr", {}, [label, parent || "–"].map((text) => h("td", { class: "mono", text })), [count(blocks), count(requests), count(hits), percent(hits / requests)].map((text) => h("td", { class: "number", text }))));
  const table = h("table", {}, h("caption", { class: "unseen", text: "Hot prefixes" }), h("thead", {}, h("tr", {}, ["Prefix", "Begins with", "Blocks", "Prompts", "Hits", "Hit ratio"].map((text, column) => h("th", { scope: "col", text, class: column > 1 ? "number" : null })))), h("tbody", {}, rows));
  const legend = h("div", { class: "legend" }, [0, 1, 2, 3, 4].map((level) => h("span", {}, h("i", { class: "cell", data: { level } }), level ? `${25 * level - 24}–${25 * level} % hits` : "no hit")));
  body.className = "treemap";
  replace(body, svg, legend, h("details", { open: isOpen }, h("summary", { text: "As a table" }), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of prefixes" }, table)));
}

/** Divides a rectangle among nodes: rows along the shorter side, as square as they can be. */
function place(svg, nodes, x, y, width, height) {
  let left = nodes.reduce((sum, node) => sum + node.requests, 0);
  let rest = [...nodes].sort((one, other) => other.requests - one.requests);
  while (rest.length && width > 6 && height > 6) {
    const side = Math.min(width, height);
    const scale = (width * height) / left;
    let taken = 1;
    while (taken < rest.length && worst(rest.slice(0, taken + 1), side, scale) <= worst(rest.slice(0, taken), side, scale)) taken += 1;
    const row = rest.slice(0, taken);
    const sum = row.reduce((all, node) => all + node.requests, 0);
    const depth = (sum * scale) / side;
    let offset = 0;
    for (const node of row) {
      const length = (node.requests / sum) * side;
      if (width >= height) draw(svg, node, x, y + offset, depth, length);
      else draw(svg, node, x + offset, y, length, depth);
      offset += length;
    }
    if (width >= height) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
    left -= sum;
    rest = rest.slice(taken);
  }
}

function worst(row, side, scale) {
  const sum = row.reduce((all, node) => all + node.requests, 0) * scale;
  const most = Math.max(...row.map((node) => node.requests)) * scale;
  const least = Math.min(...row.map((node) => node.requests)) * scale;
  return Math.max((side * side * most) / (sum * sum), (sum * sum) / (side * side * least));
}

function draw(svg, node, x, y, width, height) {
  const share = node.hits / node.requests;
  const level = node.hits ? Math.min(4, Math.max(1, Math.ceil(4 * share))) : 0;
  const label = `${node.label}: ${count(node.blocks)} blocks, ${count(node.requests)} prompts, ${percent(share)} hits`;
  svg.append(s("g", {}, s("rect", { class: `l${level}`, x, y, width, height, rx: 6 }), s("title", { text: label })));
  const tone = level === 4 ? "on-light on-dark" : level === 3 ? "on-dark" : "";
  if (width > 74 && height > 18) svg.append(s("text", { class: tone, x: x + 8, y: y + 15, text: width > 190 ? `${node.label} · ${count(node.requests)} prompts · ${percent(share)} hits` : `${count(node.requests)} · ${percent(share)}` }));
  if (node.children.length && width > 40 && height > PADDING + 18) {
    const inner = node.children.reduce((sum, child) => sum + child.requests, 0) / node.requests;
    place(svg, node.children, x + 5, y + PADDING, (width - 10) * Math.min(1, Math.max(inner, 0.25)), height - PADDING - 5);
  }
}
