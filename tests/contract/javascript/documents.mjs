// Documents, what carries them, and the trio: sections 2, 3, 5 to 9 of spec.md, and schema.json.

import { createHash } from "node:crypto";
import { isInteger, isObject, namesOf, NotJson, parse } from "./json.mjs";
import { Schema } from "./schema.mjs";

const KINDS = {
  required: "missing",
  type: "type",
  enum: "value",
  pattern: "value",
  minimum: "range",
  maximum: "range",
  minLength: "length",
  maxLength: "length",
  minItems: "length",
  maxItems: "length",
  maxProperties: "length",
  oneOf: "conflict",
};
const MAX_LEVELS = 32;
const MAX_MEMBERS = 256;
const MAX_NAME = 256;
const TRIO = { prefix_prompt_ids: "prefix", kvcache_load_keys: "load_keys", kvcache_store_keys: "store_keys" };
const MAX_PROMPTS = 1024;

const problem = (kind, ...path) => ({ path, kind });
const below = (path, start) => start.every((name, i) => path[i] === name);

/** Makes problems from what a schema finds wrong. */
function problemsOf(faults) {
  // 1.0#7.1: nothing is judged in what has too many entries or members
  const large = faults.filter(({ keyword }) => keyword === "maxItems" || keyword === "maxProperties");
  const judged = faults.filter(
    (one) => !large.some(({ path }) => path.length < one.path.length && below(one.path, path)),
  );
  const found = judged.map((fault) => {
    if (fault.keyword !== "enum") return { path: fault.path, kind: KINDS[fault.keyword] };
    if (typeof fault.value !== "string") return { path: fault.path, kind: "type" };
    if (fault.path[0] !== "must_understand") return { path: fault.path, kind: "value" };
    const named = fault.value.length > 0 && [...fault.value].length <= MAX_NAME;
    return { path: fault.path, kind: named ? "critical" : "length" };
  });
  // 1.0#7.5: what is too long is not also of a wrong form
  const all = found.filter(
    (one) => one.kind !== "value" || !found.some((other) => other.kind === "length" && same(other.path, one.path)),
  );
  // 1.0#7.3: a conflict is judged where the members in themselves are right
  return all.filter(
    (one) => one.kind !== "conflict" || !all.some((other) => other !== one && below(other.path, one.path)),
  );
}

const same = (one, other) => one.length === other.length && below(one, other);

export const digestOf = (bytes) => `sha256:${createHash("sha256").update(bytes).digest("hex")}`;

/** The bytes of token ids: 4 for each, little-endian. */
export function packed(ids) {
  const bytes = Buffer.alloc(4 * ids.length);
  ids.forEach((id, i) => bytes.writeUInt32LE(Number(id), 4 * i));
  return bytes;
}

/** The bytes of a prefix; null where it is a digest. */
export function bytesOf(prefix) {
  if (Array.isArray(prefix)) return packed(prefix);
  if (typeof prefix.packed === "string") return Buffer.from(prefix.packed, "base64");
  return Array.isArray(prefix.ids) ? packed(prefix.ids) : null;
}

export class Reader {
  #alone;
  #schema;
  #root;

  constructor(schema) {
    this.#root = schema;
    this.#alone = new Schema(schema);
    this.#schema = new Schema(schema, {
      exact: true,
      instead: {
        "#/$defs/json": (value, path) => this.#kept(value, path, 1).slice(0, 1),
        "#/$defs/token_ids": (value, path) => this.#schema.faults(value, schema.$defs.token_ids, path).slice(0, 1),
      },
    });
  }

  /** Whether the schema alone accepts a document. */
  schemaAccepts(document) {
    return this.#alone.faults(document).length === 0;
  }

  /** The first thing that is wrong with a native value, by a form of dialects.json; null if nothing is. */
  formProblem(value, { spells, ...form }, path) {
    const [found] = problemsOf(this.#schema.faults(value, form, path));
    if (found !== undefined || spells === undefined) return found ?? null;
    const number = BigInt(value);
    return number < spells.minimum || number > spells.maximum ? { path, kind: "range" } : null;
  }

  /** Whether a member of the document, with dots between the levels, can have this value. */
  acceptsMember(name, value) {
    const document = {
      version: "1.0",
      request_id: "r",
      transfer: { id: "t", attempt: 1n },
      phase: "prefill",
      mode: "store",
    };
    const path = name.split(".");
    const holder = path.length === 1 ? document : (document[path[0]] ??= {});
    holder[path.at(-1)] = value;
    return this.problems(document).length === 0;
  }

  /** What is wrong with a parsed document. */
  problems(document) {
    const faults = this.#schema.faults(document);
    if (isObject(document) && faults.some((one) => one.path[0] === "version" && one.keyword === "pattern")) {
      return [problem("version", "version")]; // 1.0#6.2
    }
    const found = problemsOf(faults);
    if (!isObject(document)) return found;
    const crowded = [[[], document], ...namesOf(document).map((name) => [[name], document[name]])].filter(
      ([, part]) => isObject(part) && namesOf(part).length > MAX_MEMBERS,
    );
    if (crowded.length > 0) return crowded.map(([path]) => problem("length", ...path)); // 1.0#7.2
    const conflict = (member) => {
      if (!found.some((one) => one.path[0] === member)) found.push(problem("conflict", member));
    };
    const { usage, prefix } = document;
    if (isObject(usage) && isInteger(usage.prompt_tokens) && usage.cached_tokens > usage.prompt_tokens)
      conflict("usage");
    if (isObject(prefix)) {
      const whole = !found.some((one) => one.path[0] === "prefix");
      if (whole && (bytesOf(prefix)?.length ?? 4 * Number(prefix.count)) !== 4 * Number(prefix.count))
        conflict("prefix");
    }
    return found;
  }

  /** A value that nobody here knows: 1.0#5.6, with the faults in the order of the text. */
  #kept(value, path, level) {
    const nested = isObject(value) || Array.isArray(value);
    if (nested && level > MAX_LEVELS) return [{ path, keyword: "maxItems" }];
    const { items, additionalProperties, propertyNames, ...own } = this.#root.$defs.json;
    const found = this.#alone.faults(value, own, path);
    if (!nested || found.length > 0) return found;
    if (Array.isArray(value)) return value.flatMap((entry, i) => this.#kept(entry, [...path, i], level + 1));
    return namesOf(value).flatMap((name) => [
      ...this.#alone.faults(name, propertyNames, path),
      ...this.#kept(value[name], [...path, name], level + 1),
    ]);
  }

  /** `{ document }` (null: there is none), `{ documents }` for a trio, or `{ problems }`. */
  readCarrier(carrier, requestId, transferId) {
    if (typeof carrier === "string") {
      try {
        carrier = parse(carrier);
      } catch (error) {
        if (!(error instanceof NotJson)) throw error;
        return { problems: [problem("json")] };
      }
    }
    if (carrier === null) return { document: null };
    if (!isObject(carrier)) return { problems: [problem("type")] };
    if ("kvparams" in carrier) {
      const problems = this.problems(carrier.kvparams).map(({ path, kind }) => problem(kind, "kvparams", ...path));
      return problems.length > 0 ? { problems } : { document: carrier.kvparams };
    }
    if (!Object.keys(TRIO).some((name) => name in carrier)) return { document: null };
    const found = this.readTrio(carrier, requestId, transferId);
    return found.several ? { problems: [problem("conflict")] } : found;
  }

  readTrio(trio, requestId, transferId) {
    const members = Object.entries(trio).filter(([name]) => Object.hasOwn(TRIO, name));
    if (members.length === 0) return { problems: [problem("missing")] };
    const several = members.some(
      ([, value]) =>
        Array.isArray(value) && (value.some(Array.isArray) || (value.length > 0 && value.every((one) => one === null))),
    );
    if (!several)
      return this.#prompts(
        [Object.fromEntries(members)],
        requestId,
        () => transferId,
        ([name, ...rest]) => [name, ...rest],
      );
    const size = Math.max(...members.map(([, value]) => (Array.isArray(value) ? value.length : 0)));
    if (size > MAX_PROMPTS) return { problems: [problem("length")] };
    const uneven = members.filter(([, value]) => !Array.isArray(value) || value.length !== size);
    if (uneven.length > 0) return { problems: uneven.map(([name]) => problem("conflict", name)) };
    const prompts = Array.from({ length: size }, (_, i) =>
      Object.fromEntries(members.map(([name, value]) => [name, value[i]])),
    );
    const found = this.#prompts(
      prompts,
      requestId,
      (i) => `${transferId}-${i}`,
      ([name, ...rest], i) => [name, i, ...rest],
    );
    return { ...found, several: found.problems === undefined };
  }

  #prompts(prompts, requestId, transferId, pathOf) {
    const problems = prompts.flatMap((prompt, i) =>
      Object.entries(prompt).flatMap(([name, value]) => {
        if (value === null) return [];
        const schema = this.#root.$defs[name === "prefix_prompt_ids" ? "token_ids" : "keys"];
        const faults = this.#schema.faults(value, schema, [name]);
        const first = name === "prefix_prompt_ids" ? faults.slice(0, 1) : faults;
        return problemsOf(first).map(({ path, kind }) => ({ path: pathOf(path, i), kind }));
      }),
    );
    if (problems.length > 0) return { problems };
    const documents = prompts.map((prompt, i) => {
      const [load, store] = [prompt.kvcache_load_keys ?? [], prompt.kvcache_store_keys ?? []];
      const document = {
        version: "1.0",
        request_id: requestId,
        transfer: { id: transferId(i), attempt: 1n },
        phase: load.length > 0 && store.length === 0 ? "decode" : "prefill",
        mode: "store",
      };
      for (const [name, value] of Object.entries(prompt)) {
        const ids = name === "prefix_prompt_ids" && value !== null;
        document[TRIO[name]] = ids ? { count: BigInt(value.length), packed: packed(value).toString("base64") } : value;
      }
      return document;
    });
    return { documents };
  }
}
