// What both sides speak, and a document without what a later minor version has added: section 6.

import { isObject } from "./json.mjs";

const FORM = /^(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})$/;

function highest(versions) {
  const found = new Map();
  for (const text of versions) {
    const match = typeof text === "string" ? FORM.exec(text) : null;
    if (match) found.set(Number(match[1]), Math.max(Number(match[2]), found.get(Number(match[1])) ?? 0));
  }
  return found;
}

/** The highest version that both speak, or null (1.0#6.6). */
export function negotiate(ours, theirs) {
  const [mine, others] = [highest(ours), highest(theirs)];
  const both = [...mine.keys()].filter((major) => others.has(major));
  if (both.length === 0) return null;
  const major = Math.max(...both);
  return `${major}.${Math.min(mine.get(major), others.get(major))}`;
}

function without(value, [name, ...rest]) {
  if (!isObject(value)) return value;
  const kept = Object.entries(value).flatMap(([key, member]) =>
    key !== name ? [[key, member]] : rest.length === 0 ? [] : [[key, without(member, rest)]],
  );
  return Object.fromEntries(kept);
}

const minor = (version) => Number(version.split(".")[1]);

/** The document in an earlier version, or the members that cannot be said there (1.0#6.7, 1.0#6.8). */
export function downgrade(document, to, added) {
  const later = Object.entries(added).flatMap(([version, paths]) => (minor(version) > minor(to) ? paths : []));
  const values = later.filter((entry) => entry.includes("=")).sort();
  const said = values.filter((entry) => document[entry.split("=")[0]] === entry.slice(entry.indexOf("=") + 1));
  const lost = [...(document.must_understand ?? []).filter((path) => later.includes(path)), ...said];
  if (lost.length > 0) return { lost };
  const kept = later.filter((entry) => !values.includes(entry)).reduce((whole, path) => without(whole, path.split(".")), document);
  return { downgraded: { ...kept, version: to } };
}
