// What the page has seen: snapshots as objects, and what the counters said some time ago.

const KEPT_S = 65;
const PREFIX = "kvparams_proxy_";

/** Returns a snapshot whose engines are objects. */
export function readSnapshot(raw) {
  const engines = raw.engines.map((values) => Object.fromEntries(raw.columns.map((name, place) => [name, values[place]])));
  return { ...raw, engines };
}

/** Whether an engine should get requests and cannot. */
export const isUnhealthy = (engine) => engine.state === "broken" || engine.state === "not_ready";

/** Returns the value of a series, or of a family whose series begin with `name`. */
export function total(values, name) {
  let sum = null;
  for (const [series, value] of Object.entries(values)) {
    if (value != null && (series === PREFIX + name || series.startsWith(`${PREFIX}${name}{`))) sum = (sum ?? 0) + value;
  }
  return sum;
}

/** Remembers snapshots for a minute or so. */
export class History {
  constructor() {
    this.points = [];
    this.lines = {};
  }

  add(snapshot) {
    const last = this.points.at(-1);
    const requests = total(snapshot.counters, "requests_total");
    if (last && (last.requests > requests || snapshot.time < last.time)) this.forget(); // another process
    this.points.push({ time: snapshot.time, requests, ttft: buckets(snapshot, "time_to_first_byte_seconds"), itl: buckets(snapshot, "time_per_output_token_seconds") });
    while (this.points.length > 2 && this.points[1].time < snapshot.time - 60) this.points.shift();
  }

  /** Returns the course of a figure, with its value now. */
  line(name, value) {
    const line = (this.lines[name] ??= []);
    if (value != null) line.push(value);
    if (line.length > KEPT_S) line.shift();
    return line;
  }

  forget() {
    this.points.length = 0;
    this.lines = {};
  }

  /** Returns the buckets of a histogram: of all values, or of those of the last minute. */
  histogram(name, period) {
    const now = this.points.at(-1)?.[name];
    if (!now || period === "all") return now;
    const then = this.points[0][name];
    return now.map(([bound, number], place) => [bound, number - (then[place]?.[1] ?? 0)]);
  }
}

/** Returns the buckets of a histogram as pairs of their upper end and the number of values in them. */
function buckets(snapshot, name) {
  const start = `${PREFIX}${name}_bucket{le="`;
  const found = [];
  for (const [series, value] of Object.entries(snapshot.counters)) {
    if (series.startsWith(start)) found.push([series.slice(start.length, -2) === "+Inf" ? Infinity : Number(series.slice(start.length, -2)), value]);
  }
  found.sort((one, other) => one[0] - other[0]);
  return found.map(([bound, cumulative], place) => [bound, cumulative - (place ? found[place - 1][1] : 0)]);
}

/** Estimates a quantile of a histogram in seconds, as Prometheus does; null without values. */
export function quantile(pairs, share) {
  const all = pairs?.reduce((sum, [, number]) => sum + number, 0) ?? 0;
  if (!all) return null;
  let below = 0;
  let lower = 0;
  for (const [bound, number] of pairs) {
    if (below + number >= share * all && number) {
      return bound === Infinity ? lower : lower + (bound - lower) * ((share * all - below) / number);
    }
    below += number;
    lower = bound;
  }
  return lower;
}
