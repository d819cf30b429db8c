// Dialects: section 15 of spec.md, by the tables of dialects.json; and carriers, by README.md of spec/dialects.

import { createHash } from "node:crypto";
import { bytesOf, packed } from "./documents.mjs";
import { dump, isInteger, isObject, parse } from "./json.mjs";

const IDENTIFIER = /^[A-Za-z0-9._~-]{1,128}$/;
const copy = (value) => parse(dump(value), Infinity);
const numbersOf = (release) =>
  release
    .match(/^[0-9]+(?:\.[0-9]+)*/)[0]
    .split(".")
    .map(Number);

function older(release, than) {
  const [one, other] = [numbersOf(release), numbersOf(than)];
  for (let i = 0; i < 4; i += 1) if ((one[i] ?? 0) !== (other[i] ?? 0)) return (one[i] ?? 0) < (other[i] ?? 0);
  return false;
}

const fits = ({ since, until }, release) =>
  release === undefined ||
  !((since !== undefined && older(release, since)) || (until !== undefined && !older(release, until)));

// Trees of objects and lists, by paths; an index in a path is a number.

function look(tree, path) {
  for (const step of path) {
    const there = Array.isArray(tree) ? typeof step === "number" : isObject(tree) && typeof step === "string";
    if (!there || !Object.hasOwn(tree, step)) return undefined;
    tree = tree[step];
  }
  return tree;
}

function put(tree, path, value) {
  path.slice(0, -1).forEach((step, i) => {
    tree[step] ??= typeof path[i + 1] === "number" ? [] : {};
    tree = tree[step];
  });
  if (Object.hasOwn(tree, path.at(-1))) return false;
  tree[path.at(-1)] = value;
  return true;
}

/** Takes away what stands there, and the objects and lists that hold nothing else; `body` and `headers` stay. */
function take(tree, path) {
  const holder = look(tree, path.slice(0, -1));
  if (Array.isArray(holder)) holder.pop();
  else delete holder[path.at(-1)];
  const above = path.slice(0, -1);
  if (above.length < 2 || Object.keys(holder).length > 0) return;
  const outer = look(tree, above.slice(0, -1));
  if (!Array.isArray(outer) || outer.length === 1) take(tree, above);
}

export class Dialect {
  #table;
  #schema;

  /** @param schema judges a value by a form */
  constructor(table, schema) {
    this.#table = copy(table);
    this.#schema = schema;
    for (const home of Object.values(this.#table.home))
      home.forEach((step, i) => (home[i] = isInteger(step) ? Number(step) : step));
  }

  get mode() {
    return this.#table.mode;
  }

  get extension() {
    return this.#table.extension;
  }

  #keys(release) {
    return this.#table.keys.filter((key) => fits(key, release));
  }

  #path(key, phase) {
    if (key.in === "headers") return ["headers", key.name];
    return ["body", ...(key.in === "body" ? [] : this.#table.home[phase]), ...(key.inside ?? []), key.name];
  }

  #isNeeded(key, phase, release) {
    if (phase in (key.marks ?? {})) return true;
    return (key.needed ?? []).includes(phase) && (key.since === undefined || release !== undefined);
  }

  /** What is wrong with a message. */
  problems({ request_id: id, body, headers = {} }, phase, release) {
    if (!new RegExp(`^(?:${this.#table.request_id ?? "[!-~]{1,256}"})$`).test(id))
      return [{ path: ["request_id"], kind: "value" }];
    if (!fits(this.#table, release)) return [{ path: ["engine"], kind: "value" }];
    const tree = { body, headers };
    const found = this.#blocked(body, phase);
    const blocked = found.map((one) => one.path);
    const rows = new Map();
    for (const key of this.#keys(release)) {
      for (const path of this.#places(key, tree, phase)) {
        const shown = path[0] === "body" ? path.slice(1) : path;
        if (blocked.some((way) => way.length < shown.length && way.every((step, i) => shown[i] === step))) continue;
        const name = JSON.stringify(shown);
        rows.set(name, [...(rows.get(name) ?? []), { key, shown, value: look(tree, path) }]);
      }
    }
    for (const group of rows.values()) {
      const { shown, value } = group[0];
      if (value === undefined || value === null) {
        if (group.some(({ key }) => this.#isNeeded(key, phase, release))) found.push({ path: shown, kind: "missing" });
        continue;
      }
      const faults = group.map(({ key }) => this.#schema.formProblem(value, key.form, shown));
      if (!faults.includes(null)) found.push(faults.at(-1));
      else if (group.some(({ key }) => phase in (key.marks ?? {}) && key.marks[phase] !== value))
        found.push({ path: shown, kind: "value" });
    }
    return found;
  }

  #places(key, tree, phase) {
    const path = this.#path(key, phase);
    if (!key.name.endsWith("*")) return [path];
    const names = Object.keys(look(tree, path.slice(0, -1)) ?? {});
    return names.filter((name) => name.startsWith(key.name.slice(0, -1))).map((name) => [...path.slice(0, -1), name]);
  }

  /** What stands where objects and lists lead to native keys, and is none. */
  #blocked(body, phase) {
    const ways = [
      this.#table.home[phase],
      ...this.#table.keys.filter((key) => key.in !== "headers").map((key) => this.#path(key, phase).slice(1, -1)),
    ];
    const found = new Map();
    for (const way of ways) {
      for (let length = 1; length <= way.length; length += 1) {
        const value = look(body, way.slice(0, length));
        if (value === undefined || value === null) break;
        if (typeof way[length] === "number" ? Array.isArray(value) : isObject(value)) continue;
        found.set(JSON.stringify(way.slice(0, length)), { path: way.slice(0, length), kind: "type" });
        break;
      }
    }
    return [...found.values()];
  }

  /** The document that a valid message is. */
  decode(message, phase, release) {
    const document = { version: "1.0", request_id: message.request_id, transfer: {}, phase, mode: this.#table.mode };
    const rest = copy({ body: message.body, headers: message.headers ?? {} });
    for (const key of this.#keys(release)) {
      const path = this.#path(key, phase);
      const value = look(rest, path);
      if (value === undefined) continue;
      if (phase in (key.marks ?? {})) {
        take(rest, path);
      } else if (key.member_in?.includes(phase)) {
        const said = this.#toMember(key.member, value);
        if (said === undefined || this.#isImplied(key, phase, release, said, message.request_id)) continue;
        if (put(document, key.member.split("."), said)) take(rest, path);
      }
    }
    document.transfer = { id: derived(message.request_id), ...document.transfer, attempt: 1n };
    const extension = this.#fold(rest, this.#table.home[phase]);
    if (Object.keys(extension).length > 0) document.extensions = { [this.#table.extension]: extension };
    return document;
  }

  /** The message that says what a document says. */
  encode(document, release) {
    const { phase, request_id: id } = document;
    const tree = this.#unfold(document.extensions?.[this.#table.extension] ?? {}, this.#table.home[phase]);
    const said = new Set();
    for (const key of this.#keys(release)) {
      const path = this.#path(key, phase);
      if (phase in (key.marks ?? {})) {
        put(tree, path, key.marks[phase]);
      } else if (key.member_in?.includes(phase) && !said.has(key.member)) {
        said.add(key.member);
        const value = look(document, key.member.split("."));
        if (value === undefined || this.#isImplied(key, phase, release, value, id)) continue;
        const native = this.#fromMember(key, value);
        if (native !== undefined) put(tree, path, native);
      }
    }
    const message = { request_id: id, body: tree.body };
    return Object.keys(tree.headers).length > 0 ? { ...message, headers: tree.headers } : message;
  }

  /** A transfer's id that follows from the request's, in a key that may be missing, stays a native one. */
  #isImplied(key, phase, release, value, requestId) {
    return key.member === "transfer.id" && !this.#isNeeded(key, phase, release) && value === derived(requestId);
  }

  #toMember(member, value) {
    if (member === "prefix" && Array.isArray(value) && value.every(isInteger))
      return { count: BigInt(value.length), packed: packed(value).toString("base64") };
    const said = member === "transfer.id" && isInteger(value) ? value.toString() : value;
    return this.#schema.acceptsMember(member, said) ? said : undefined;
  }

  #fromMember(key, value) {
    if (value === null) return null;
    if (key.member === "prefix") {
      const bytes = bytesOf(value);
      return bytes === null
        ? undefined
        : Array.from({ length: bytes.length / 4 }, (_, i) => BigInt(bytes.readUInt32LE(4 * i)));
    }
    const wanted = [key.form, ...(key.form.anyOf ?? [])].some((form) => form.type === "integer");
    const native = key.member === "transfer.id" && wanted ? BigInt(value) : value;
    return this.#schema.formProblem(native, key.form, []) === null ? native : undefined;
  }

  #fold(rest, home) {
    const escaped = (members) =>
      Object.fromEntries(
        Object.entries(members).map(([name, value]) => [name.startsWith("@") ? `@${name}` : name, value]),
      );
    const own = home.length === 0 ? rest.body : look(rest.body, home);
    const folded = isObject(own) ? escaped(own) : {};
    if (home.length === 0) rest.body = {};
    else if (isObject(own) && Object.keys(own).length > 0) take(rest, ["body", ...home]);
    if (Object.keys(rest.body).length > 0) folded["@body"] = rest.body;
    if (Object.keys(rest.headers).length > 0) folded["@headers"] = rest.headers;
    return folded;
  }

  #unfold(folded, home) {
    const { "@body": body = {}, "@headers": headers = {}, ...own } = copy(folded);
    const tree = { body, headers };
    for (const [name, value] of Object.entries(own))
      put(tree, ["body", ...home, name.startsWith("@@") ? name.slice(1) : name], value);
    return tree;
  }
}

function derived(requestId) {
  if (IDENTIFIER.test(requestId)) return requestId;
  return `sha256-${createHash("sha256").update(requestId).digest("hex").slice(0, 32)}`;
}

const USUAL = "kv_transfer_params";

/** The message with its native keys in the usual place, the carrier that had them, and where a problem is there. */
export function lifted(message, carriers) {
  const found = Object.hasOwn(message.body, USUAL) ? undefined : carriers.find((one) => isObject(spelt(message, one)));
  if (found === undefined) return { message, place: (problem) => problem };
  const tree = copy({ body: message.body });
  const way = found.place.split(".");
  const native = copy(spelt(message, found));
  take(tree, ["body", ...way]);
  tree.body[USUAL] = native;
  const place = (problem) =>
    problem.path[0] === USUAL ? { ...problem, path: [...way, ...problem.path.slice(1)] } : problem;
  return { message: { ...message, body: tree.body }, carrier: found, place };
}

/** The other way. */
export function lowered(message, carrier) {
  if (carrier === undefined || !isObject(message.body[USUAL])) return message;
  const { [USUAL]: native, ...rest } = message.body;
  const tree = { body: copy(rest) };
  put(tree, ["body", ...carrier.place.split(".")], carrier.text ? dump(native) : native);
  return { ...message, body: tree.body };
}

function spelt(message, { place, text }) {
  const value = look(message.body, place.split("."));
  if (!text) return value;
  try {
    return parse(value);
  } catch {
    return undefined;
  }
}
