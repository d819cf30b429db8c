// KV events: section 14 of spec.md; here the form in MessagePack.

import { isInteger } from "./json.mjs";
import { readDynamo, readTrtllm } from "./jsonevents.mjs";
import { NotMessagePack, unpack } from "./msgpack.mjs";
import {
  absent,
  bounded,
  counted,
  Fault,
  hashes,
  label,
  LOWEST,
  MAX,
  optional,
  parentOf,
  place,
  said,
  U32,
  U64,
} from "./eventvalues.mjs";

const MEMBERS = {
  BlockStored: [
    ...["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"],
    ...[
      "group_idx",
      "kv_cache_spec_kind",
      "kv_cache_spec_sliding_window",
      "locality",
      "ownership",
      "session_id",
      "cache_salt",
    ],
  ],
  BlockRemoved: ["block_hashes", "medium", "group_idx", "locality", "ownership"],
  AllBlocksCleared: ["ownership"],
};
const REQUIRED = { BlockStored: 4, BlockRemoved: 1, AllBlocksCleared: 0 };

/** The members of an event, by name; null for an event of an unknown type. */
function membersOf(event) {
  if (!Array.isArray(event) && !(event instanceof Map)) throw new Fault("type");
  if (event instanceof Map && [...event.keys()].some((name) => typeof name !== "string")) throw new Fault("type");
  const type = Array.isArray(event) ? event[0] : event.get("type");
  if (type === undefined) throw new Fault("missing", "type");
  if (typeof type !== "string") throw new Fault("type", "type");
  if (!Object.hasOwn(MEMBERS, type)) return null;
  const found = { type };
  MEMBERS[type].forEach((name, i) => {
    found[name] = Array.isArray(event) ? event[i + 1] : event.get(name);
    if (found[name] === undefined && i < REQUIRED[type]) throw new Fault("missing", name);
  });
  return found;
}

function tokensOf(ids, blocks, size) {
  if (!Array.isArray(ids)) throw new Fault("type", "token_ids");
  if (ids.length > MAX.blocks) throw new Fault("length", "token_ids");
  const pairs = Array.isArray(ids[0]);
  const chain = ids.map((id) => (pairs ? id : [id, undefined]));
  if (
    chain.some(
      (pair) => !Array.isArray(pair) || pair.length !== 2 || !isInteger(pair[0]) || (pairs && !isInteger(pair[1])),
    )
  ) {
    throw new Fault("type", "token_ids");
  }
  if (pairs && chain.some((pair, i) => i > 0 && chain[i - 1][1] !== pair[0])) throw new Fault("conflict", "token_ids");
  const tokens = chain.map((pair) => bounded(pair[0], 0n, U32, "token_ids"));
  if (tokens.length === 0) return {};
  if (tokens.length !== blocks * Number(size)) return { dropped: true };
  return { tokens, following: pairs ? bounded(chain.at(-1)[1], 0n, U32, "token_ids") : undefined };
}

function extrasOf(value, blocks) {
  if (absent(value)) return undefined;
  if (!Array.isArray(value)) throw new Fault("type", "extra_keys");
  const plain = (one) =>
    ["string", "bigint", "number", "boolean"].includes(typeof one) || one === null || Buffer.isBuffer(one);
  const written = (one) =>
    Array.isArray(one) ? one.map(written) : Buffer.isBuffer(one) ? { hex: one.toString("hex") } : one;
  const found = value.map((entry) => {
    if (entry === null) return null;
    if (!Array.isArray(entry)) throw new Fault("type", "extra_keys");
    if (!entry.every((one) => plain(one) || (Array.isArray(one) && one.every(plain))))
      throw new Fault("type", "extra_keys");
    return entry.length > 0 ? written(entry) : null;
  });
  if (found.every((entry) => entry === null)) return undefined;
  if (found.length !== blocks) throw new Fault("conflict", "extra_keys");
  return found;
}

function fromMembers(event) {
  if (event.type === "AllBlocksCleared") return said({ type: "cleared", owner: label(event.ownership, "ownership") });
  const where = place(event.medium, event.group_idx, event.ownership, event.locality);
  const blocks = hashes(event.block_hashes, "block_hashes");
  if (blocks.length === 0) return null;
  if (event.type === "BlockRemoved") return { type: "removed", place: where, hashes: blocks };
  const parent = parentOf(event.parent_block_hash, blocks, "parent_block_hash");
  const size = bounded(event.block_size, 0n, MAX.block, "block_size");
  const { tokens, following, dropped } = tokensOf(event.token_ids, blocks.length, size);
  return said({
    type: "stored",
    place: where,
    hashes: blocks,
    parent: dropped ? undefined : parent,
    tokens,
    block_size: size || undefined,
    following,
    extras: extrasOf(event.extra_keys, blocks.length),
    lora: label(event.lora_name, "lora_name"),
    lora_id: absent(event.lora_id) ? undefined : bounded(event.lora_id, LOWEST, U64, "lora_id"),
    salt: label(event.cache_salt, "cache_salt"),
    kind: label(event.kv_cache_spec_kind, "kv_cache_spec_kind"),
    window: optional(event.kv_cache_spec_sliding_window, MAX.small, "kv_cache_spec_sliding_window"),
    session: label(event.session_id, "session_id"),
  });
}

function readMessagePack(payload, instance, sequence) {
  let message;
  try {
    message = unpack(payload);
  } catch (error) {
    if (error instanceof NotMessagePack) throw new Fault("value");
    throw error;
  }
  if (!Array.isArray(message)) throw new Fault("type");
  if (message.length < 2) throw new Fault("missing");
  const [time, events, rank] = message;
  if (typeof time !== "number" && !isInteger(time)) throw new Fault("type", 0);
  if (!Number.isFinite(Number(time))) throw new Fault("value", 0);
  if (!Array.isArray(events)) throw new Fault("type", 1);
  if (events.length > MAX.events) throw new Fault("length", 1);
  const batch = {
    instance,
    rank: absent(rank) ? 0n : bounded(rank, 0n, MAX.rank, 2),
    sequence,
    time: Number(time),
    events: [],
  };
  let unknown = 0n;
  const problems = [];
  events.forEach((event, i) => {
    try {
      const members = membersOf(event);
      const made = members === null ? null : fromMembers(members);
      if (members === null) unknown += 1n;
      else if (made !== null) batch.events.push(made);
    } catch (error) {
      if (!(error instanceof Fault)) throw error;
      problems.push({ path: [1, i, ...error.path], kind: error.kind });
    }
  });
  return [counted(batch, unknown, problems)];
}

/** `{ batches }` of a message, or `{ problems }`. */
export function readEvents({ form, payload, text }) {
  const forms = {
    msgpack: () => readMessagePack(Buffer.from(payload, "hex"), "engine-a", 7n),
    trtllm: () => readTrtllm(text),
    dynamo: () => readDynamo(text),
  };
  try {
    return { batches: forms[form]() };
  } catch (error) {
    if (!(error instanceof Fault)) throw error;
    return { problems: [{ path: error.path, kind: error.kind }] };
  }
}
