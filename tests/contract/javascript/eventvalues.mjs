// Values of KV events, and what is wrong with them: section 14 of spec.md.

import { isInteger } from "./json.mjs";
import { BrokenText } from "./msgpack.mjs";

const MEDIA = {
  device: ["gpu", "device"],
  host: ["cpu", "cpu_pinned", "cpu_tier1", "host_pinned"],
  disk: ["cpu_tier2", "disk", "nvme", "fs", "storage"],
  remote: ["obj", "external", "network", "remote", "shared"],
};
export const MAX = {
  events: 65_536,
  blocks: 2_097_152,
  rank: 65_535n,
  block: 2n ** 24n,
  small: 2n ** 31n - 1n,
  label: 1024,
};
export const [U32, U64] = [2n ** 32n - 1n, 2n ** 64n - 1n];
export const LOWEST = -(2n ** 63n);

/** One event, or a whole message, is wrong: where in it, and how. */
export class Fault extends Error {
  constructor(kind, ...path) {
    super(kind);
    Object.assign(this, { kind, path });
  }
}

export const absent = (value) => value === undefined || value === null;

export function bounded(value, low, high, ...path) {
  if (!isInteger(value)) throw new Fault("type", ...path);
  if (value < low || value > high) throw new Fault("range", ...path);
  return value;
}

export function label(value, member) {
  if (absent(value)) return undefined;
  if (value instanceof BrokenText) throw new Fault("value", member);
  if (typeof value !== "string") throw new Fault("type", member);
  if ([...value].length > MAX.label) throw new Fault("length", member);
  return value || undefined;
}

export const optional = (value, high, member) => (absent(value) ? undefined : bounded(value, 0n, high, member));

/** A hash in hexadecimal; from text only in JSON. */
export function hash(value, member, fromText) {
  if (isInteger(value)) {
    if (value < LOWEST || value > U64) throw new Fault("range", member);
    return BigInt.asUintN(64, value).toString(16).padStart(16, "0");
  }
  let bytes = value;
  if (fromText && typeof value === "string") {
    if (value.length > 128) throw new Fault("length", member);
    if (!/^(?:[0-9a-fA-F]{2})+$/.test(value)) throw new Fault("value", member);
    bytes = Buffer.from(value, "hex");
  }
  if (!Buffer.isBuffer(bytes)) throw new Fault("type", member);
  if (bytes.length < 1 || bytes.length > 64) throw new Fault("length", member);
  return bytes.toString("hex");
}

export function hashes(values, member, fromText = false) {
  if (!Array.isArray(values)) throw new Fault("type", member);
  if (values.length > MAX.blocks) throw new Fault("length", member);
  const found = values.map((value) => hash(value, member, fromText));
  if (found.some((one) => one.length !== found[0].length)) throw new Fault("conflict", member);
  return found;
}

export function parentOf(value, blocks, member, fromText = false) {
  if (absent(value)) return undefined;
  const found = hash(value, member, fromText);
  if (found.length !== blocks[0].length) throw new Fault("conflict", member);
  return found;
}

export function place(medium, group, owner, locality) {
  const native = label(medium, "medium");
  const word = native?.toLowerCase();
  let found = word === undefined ? "device" : "other";
  for (const [name, words] of Object.entries(MEDIA)) if (words.includes(word)) found = name;
  if (label(locality, "locality")?.toUpperCase() === "REMOTE") found = "remote";
  return said({
    medium: found,
    native,
    group: optional(group, MAX.small, "group_idx"),
    owner: label(owner, "ownership"),
  });
}

/** Without the members that are not known. */
export const said = (members) => Object.fromEntries(Object.entries(members).filter(([, value]) => value !== undefined));

/** A batch, and how many of its events were left out. */
export function counted(batch, unknown, problems) {
  if (unknown > 0n) batch.unknown = unknown;
  if (problems.length > 0) Object.assign(batch, { malformed: BigInt(problems.length), problems });
  return batch;
}
