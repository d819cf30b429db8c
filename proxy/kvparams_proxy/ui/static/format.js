// Numbers as text.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

/** A count, in full. */
export const count = (value) => (value == null ? "–" : WHOLE.format(value));

/** A count, in few characters. */
export const short = (value) => (value == null ? "–" : value < 10000 ? WHOLE.format(value) : SHORT.format(value));

/** A rate each second. */
export function rate(value) {
  if (value == null) return "–";
  if (value >= 10000) return SHORT.format(value);
  return value >= 100 ? WHOLE.format(value) : value.toFixed(1);
}

/** A duration in milliseconds. */
export function ms(value) {
  if (value == null) return "–";
  if (value >= 60000) return `${(value / 60000).toFixed(1)} min`;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return value >= 10 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

/** How long ago something was, of seconds. */
export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(0)} h` : `${(seconds / 86400).toFixed(0)} d`;
}

/** A share from 0 to 1. */
export const percent = (value) => (value == null ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`);

/** Bytes. */
export function bytes(value) {
  if (value == null) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${value >= 100 || unit === "B" ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

/** A word of the proxy, for people. */
export const words = (name) => String(name).replaceAll("_", " ");

/** The time of day. */
export const clock = (epoch) => new Date(1000 * epoch).toLocaleTimeString("en-GB");
