// Histograms of the time to the first token, and between two tokens.

import { byId, h, pressSegment, replace, s, segments, setAttribute, setText } from "./dom.js";
import { count, ms } from "./format.js";
import { quantile } from "./history.js";

const SHOWN = [["ttft", "Time to first token"], ["itl", "Time between tokens"]];
const WIDTH = 480;
const HEIGHT = 100;
const FLOOR = 84;

export class LatencyPanel {
  constructor() {
    this.period = "minute";
    this.history = null;
    const tools = byId("latency-tools");
    segments(tools, [["minute", "Last minute"], ["all", "Since start"]], this.period, (period) => {
      this.period = period;
      pressSegment(tools, period);
      if (this.history) this.show(this.history);
    });
    this.figures = SHOWN.map(([name, title]) => ({ name, ...figure(title) }));
    replace(byId("latency-body"), this.figures.map((each) => each.element));
  }

  show(history) {
    this.history = history;
    for (const each of this.figures) draw(each, history.histogram(each.name, this.period) ?? [], this.period);
  }
}

function figure(title) {
  const caption = h("figcaption", {}, h("b", { text: title }));
  const labels = ["p50", "p95", "p99"].map((name) => {
    const value = h("b");
    caption.append(h("span", { class: "quantile" }, `${name} `, value));
    return value;
  });
  const number = h("span", { class: "hint" });
  caption.append(number);
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  return { element: h("figure", { class: "histogram" }, caption, svg), labels, number, svg, title, key: "" };
}

function draw(each, pairs, period) {
  const quantiles = [0.5, 0.95, 0.99].map((share) => quantile(pairs, share));
  quantiles.forEach((value, place) => setText(each.labels[place], ms(value == null ? null : 1000 * value)));
  const all = pairs.reduce((sum, [, number]) => sum + number, 0);
  setText(each.number, all ? `${count(all)} ${period === "all" ? "since the start" : "in the last minute"}` : "nothing measured yet");
  setAttribute(each.svg, "aria-label", `${each.title}: ${quantiles[0] == null ? "nothing measured yet" : `median ${ms(1000 * quantiles[0])}, 95 % below ${ms(1000 * quantiles[1])}`}`);
  const highest = Math.max(1, ...pairs.map(([, number]) => number));
  const step = WIDTH / Math.max(1, pairs.length);
  const key = JSON.stringify(pairs);
  if (key === each.key) return;
  each.key = key;
  replace(
    each.svg,
    s("line", { class: "base", x1: 0, x2: WIDTH, y1: FLOOR + 0.5, y2: FLOOR + 0.5 }),
    pairs.map(([bound, number], place) => {
      const height = number ? Math.max(1.5, (FLOOR - 4) * (number / highest)) : 0;
      const bar = s("rect", { x: place * step + 1, y: FLOOR - height, width: step - 2, height, rx: 1.5 });
      bar.append(s("title", { text: `${number} ${bound === Infinity ? "above" : `up to ${ms(1000 * bound)}`}` }));
      return bar;
    }),
    pairs.filter((_, place) => place % 3 === 2).map(([bound], place) => s("text", { x: (3 * place + 3) * step, y: HEIGHT - 3, "text-anchor": "end", text: bound === Infinity ? "more" : ms(1000 * bound) })),
  );
}
