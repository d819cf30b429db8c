// KV events in JSON, TensorRT-LLM's and Dynamo's: section 14 of spec.md.

import {
  absent,
  bounded,
  counted,
  Fault,
  hashes,
  label,
  MAX,
  optional,
  parentOf,
  place,
  said,
  U32,
  U64,
} from "./eventvalues.mjs";
import { isInteger, isObject, NotJson, parse } from "./json.mjs";
import { Schema } from "./schema.mjs";

// The types of section 14's table: members beside these say nothing, null is as absent where `maybe` says so.
const maybe = (type) => ({ anyOf: [{ type: "null" }, typeof type === "string" ? { type } : type] });
const object = (required, properties) => ({ type: "object", required, properties });
const list = (items) => ({ type: "array", items });
const whole = { type: "integer" };
const wholeOrText = { type: ["integer", "string"] };
const TRTLLM = {
  created: object([], {}),
  stored: object(["blocks"], {
    parent_hash: maybe(wholeOrText),
    blocks: list(
      object(["block_hash"], {
        block_hash: wholeOrText,
        tokens: list(object(["token_id"], { token_id: wholeOrText, token_extra_id: whole })),
        cache_level: whole,
        mm_keys: maybe(list(object(["hash"], { hash: { type: "string" }, start_offset: whole }))),
        cache_salt: maybe("string"),
        lora_id: maybe("integer"),
      }),
    ),
  }),
  removed: object(["block_hashes"], { block_hashes: list(wholeOrText) }),
  updated: object(["block_hash"], {
    block_hash: wholeOrText,
    cache_level: maybe(object(["new_value", "old_value"], { new_value: whole, old_value: whole })),
  }),
};
const DYNAMO = object([], {
  stored: maybe(
    object(["blocks"], {
      parent_hash: maybe("integer"),
      blocks: list(
        object(["block_hash", "tokens_hash"], {
          block_hash: whole,
          tokens_hash: whole,
          mm_extra_info: maybe(
            object(["mm_objects"], {
              mm_objects: list(object(["mm_hash"], { mm_hash: whole, offsets: list(list(whole)) })),
            }),
          ),
        }),
      ),
    }),
  ),
  removed: maybe(object(["block_hashes"], { block_hashes: list(whole) })),
});
const TYPES = new Schema({}, { exact: true });

function checkTypes(value, schema) {
  if (TYPES.faults(value, schema).length > 0) throw new Fault("type", "data");
}

const LEVELS = ["device", "host", "disk"];
const MAX_NUMBER = U64 - 1n; // the last one says that a replay is over

/** `read(event)` gives the source, the number and what has happened (null: unknown); a fault may know source and number. */
function readJson(text, read) {
  let message;
  try {
    message = parse(text, Infinity);
  } catch (error) {
    if (error instanceof NotJson) throw new Fault("json");
    throw error;
  }
  const listed = Array.isArray(message);
  const events = listed ? message : [message];
  if (events.length > MAX.events) throw new Fault("length");
  return events.map((event, i) => {
    const head = {};
    try {
      const found = read(event, head);
      return counted({ ...head, events: found ?? [] }, found === null ? 1n : 0n, []);
    } catch (error) {
      if (!(error instanceof Fault)) throw error;
      return counted({ ...head, events: [] }, 0n, [
        { path: [...(listed ? [i] : []), ...error.path], kind: error.kind },
      ]);
    }
  });
}

function trtllm(event, head) {
  Object.assign(head, { instance: "engine-a", rank: 0n });
  const { event_id: number, attention_dp_rank: rank, data, window_size: size, layer_group_id: layers } = event ?? {};
  if (!isInteger(number) || (!absent(rank) && !isInteger(rank))) throw new Fault("type");
  const own = [bounded(number, 0n, MAX_NUMBER, "event_id"), optional(rank, MAX.rank, "attention_dp_rank") ?? 0n];
  Object.assign(head, { rank: own[1], sequence: own[0] });
  if (!isObject(data) || typeof data.type !== "string") throw new Fault("type", "data");
  if (!Object.hasOwn(TRTLLM, data.type)) return null;
  checkTypes(data, TRTLLM[data.type]);
  checkTypes([size ?? 0n, layers ?? 0n], list(whole));
  const group = optional(layers, MAX.small, "layer_group_id") ?? optional(size, MAX.small, "window_size");
  const window = optional(size, MAX.small, "window_size") || undefined;
  const at = (level) => {
    bounded(level, 0n, 255n, "cache_level");
    return said({ medium: LEVELS[Math.min(Number(level), 2)], native: `level ${level}`, group });
  };
  switch (data.type) {
    case "created":
      return [{ type: "cleared" }];
    case "removed": {
      const gone = hashes(data.block_hashes, "block_hashes", true);
      return gone.length === 0
        ? []
        : [0n, 1n, 2n].map((level) => ({ type: "removed", place: at(level), hashes: gone }));
    }
    case "updated": {
      if (absent(data.cache_level)) return [];
      const moved = hashes([data.block_hash], "block_hash", true);
      return [
        { type: "removed", place: at(data.cache_level.old_value), hashes: moved },
        said({ type: "stored", place: at(data.cache_level.new_value), hashes: moved, window }),
      ];
    }
    default:
      return runsOf(data.blocks).reduce((events, run) => {
        const own = hashes(
          run.map((block) => block.block_hash),
          "blocks",
          true,
        );
        const before =
          events.length > 0 ? events.at(-1).hashes.at(-1) : parentOf(data.parent_hash, own, "parent_hash", true);
        return [...events, storedRun(run, own, before, at(run[0].cache_level ?? 0n), window)];
      }, []);
  }
}

/** Blocks that follow one another and differ in nothing that an event says once. */
function runsOf(blocks) {
  const alike = (block) =>
    [block.tokens?.length ?? 0, block.cache_level ?? 0n, block.cache_salt ?? null, block.lora_id ?? null].join("\n");
  const runs = [];
  for (const block of blocks) {
    if (runs.length > 0 && alike(runs.at(-1)[0]) === alike(block)) runs.at(-1).push(block);
    else runs.push([block]);
  }
  return runs;
}

function storedRun(run, own, parent, where, window) {
  const tokens = run.flatMap((block) => (block.tokens ?? []).map((token) => token.token_id));
  const extras = run.map((block) => {
    const found = (block.mm_keys ?? []).map((image) => [image.hash, image.start_offset ?? 0n]);
    const more = (block.tokens ?? []).map((token) => token.token_extra_id ?? 0n);
    if (more.some((one) => one !== 0n)) found.push(more);
    return found.length > 0 ? found : null;
  });
  const known = tokens.length > 0 && tokens.every(isInteger);
  return said({
    type: "stored",
    place: where,
    hashes: own,
    parent,
    tokens: known ? tokens.map((id) => bounded(id, 0n, U32, "tokens")) : undefined,
    block_size: BigInt(run[0].tokens?.length ?? 0) || undefined,
    extras: extras.some((one) => one !== null) ? extras : undefined,
    lora_id: run[0].lora_id ?? undefined,
    salt: label(run[0].cache_salt, "cache_salt"),
    window,
  });
}

function dynamo(event, head) {
  Object.assign(head, { instance: "", rank: 0n });
  const { worker_id: worker, storage_tier: tier, event: inner } = event ?? {};
  if (!isInteger(worker) || !isInteger(inner?.event_id)) throw new Fault("type");
  if (!absent(inner.dp_rank) && !isInteger(inner.dp_rank)) throw new Fault("type");
  if (!absent(tier) && typeof tier !== "string") throw new Fault("type");
  const instance = bounded(worker, 0n, U64, "worker_id").toString();
  const sequence = bounded(inner.event_id, 0n, MAX_NUMBER, "event_id");
  Object.assign(head, { instance, rank: optional(inner.dp_rank, MAX.rank, "dp_rank") ?? 0n, sequence });
  const { data } = inner;
  if (typeof data === "string") return data === "cleared" ? [{ type: "cleared" }] : null;
  if (!isObject(data)) throw new Fault("type", "data");
  const { stored, removed } = data;
  if (stored === undefined && removed === undefined) return null;
  checkTypes(data, DYNAMO);
  const events = [];
  const where = place(tier, null, null, null);
  if (!absent(stored)) {
    if (stored.blocks.length > 0) events.push(dynamoStored(stored, where));
  }
  if (!absent(removed)) {
    const gone = hashes(removed.block_hashes, "block_hashes");
    if (gone.length > 0) events.push({ type: "removed", place: where, hashes: gone });
  }
  return events;
}

function dynamoStored(stored, where) {
  const own = hashes(
    stored.blocks.map((block) => block.block_hash),
    "blocks",
  );
  const contents = hashes(
    stored.blocks.map((block) => block.tokens_hash),
    "tokens_hash",
  );
  const extras = stored.blocks.map((block) => {
    const found = (block.mm_extra_info?.mm_objects ?? []).map((one) => [one.mm_hash, one.offsets ?? []]);
    return found.length > 0 ? found : null;
  });
  return said({
    type: "stored",
    place: where,
    hashes: own,
    parent: parentOf(stored.parent_hash, own, "parent_hash"),
    extras: extras.some((one) => one !== null) ? extras : undefined,
    contents,
  });
}

export const readTrtllm = (text) => readJson(text, trtllm);
export const readDynamo = (text) => readJson(text, dynamo);
