// Content keys and stored pages: sections 10 and 11 of spec.md.

import { createCipheriv, createHash, createHmac, timingSafeEqual } from "node:crypto";
import { packed } from "./documents.mjs";
import { xxh3 } from "./xxh3.mjs";

const FIELDS = [
  "model",
  "revision",
  "dtype",
  "layers",
  "kv_heads",
  "k_dim",
  "v_dim",
  "wire_layout",
  "page_tokens",
  "lora",
  "cache_salt",
];
const WIDTHS = { float32: 4, float16: 2, bfloat16: 2, float8_e4m3fn: 1, float8_e5m2: 1, uint8: 1 };
const HEADER = 256;
const HMAC_TAG = 0x100;
const GMAC_TAG = 0x200;

const sha256 = (...parts) => createHash("sha256").update(Buffer.concat(parts)).digest();
const hmac = (key, ...parts) => createHmac("sha256", key).update(Buffer.concat(parts)).digest();
const text = (value) => Buffer.from(value);
function u32(...values) {
  const bytes = Buffer.alloc(4 * values.length);
  values.forEach((value, i) => bytes.writeUInt32LE(Number(value), 4 * i));
  return bytes;
}
function u64(value) {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(BigInt(value));
  return bytes;
}

/** The named fields of a namespace, one after another. */
export const fieldsOf = (namespace, names) =>
  names.flatMap((name) => {
    const named = [u32(text(name).length), text(name)];
    if (namespace[name] === null) return [...named, Buffer.from([0])];
    const value = text(String(namespace[name]));
    return [...named, Buffer.from([1]), u32(value.length), value];
  });

export function namespaceDigest(namespace) {
  const whole = { ...namespace, wire_layout: "layer.kv.head.token.dim" };
  return sha256(text("kvparams namespace 1\n"), ...fieldsOf(whole, FIELDS));
}

/** The pages of a sequence: for each its tokens and its chain. */
export function pagesOf(namespace, ids, extras) {
  const size = Number(namespace.page_tokens);
  const pages = [];
  let before = namespaceDigest(namespace);
  for (let start = 0; start < ids.length; start += size) {
    const own = ids.slice(start, start + size);
    const end = start + own.length;
    const touching = extras
      .map((extra) => ({
        start: Number(extra.start),
        end: Number(extra.end),
        digest: Buffer.from(extra.digest, "hex"),
      }))
      .filter((extra) => extra.start < end && extra.end > start)
      .map((extra) =>
        Buffer.concat([
          u32(Math.max(extra.start, start) - start, Math.min(extra.end, end) - start),
          u64(Math.max(start - extra.start, 0)),
          u32(extra.digest.length),
          extra.digest,
        ]),
      )
      .sort(Buffer.compare);
    before = sha256(text("kvparams page 1\n"), before, u32(own.length), packed(own), u32(touching.length), ...touching);
    pages.push({ tokens: own.length, chain: before });
  }
  return pages;
}

export function keyOf(namespace, page, { layer_start, layer_end, head_start, head_end }) {
  const digest = namespaceDigest(namespace).subarray(0, 8).toString("hex");
  return `kv1.${digest}.${page.chain.toString("hex")}.${page.tokens}.L${layer_start}-${layer_end}.H${head_start}-${head_end}`;
}

const keyId = (key) => hmac(key, text("kvparams key id 1\n")).subarray(0, 8);
const covered = (page) =>
  Buffer.concat([page.subarray(0, 40), page.subarray(48, 152), page.subarray(168, 248), page.subarray(HEADER)]);

function tagOf(page, key, salt) {
  const flags = page.readUInt32LE(8);
  const whose = salt === null ? Buffer.from([0]) : Buffer.concat([Buffer.from([1]), text(salt)]);
  const tenant = hmac(key, text("kvparams tenant 1\n"), whose);
  const own = hmac(tenant, text("kvparams seal 1\n"), u32(flags), page.subarray(120, 152));
  if (flags === HMAC_TAG) return hmac(own, covered(page)).subarray(0, 16);
  const cipher = createCipheriv("aes-256-gcm", own, Buffer.alloc(12)).setAAD(covered(page));
  cipher.final();
  return cipher.getAuthTag();
}

/** The bytes of a header up to the payload's size, and what is expected of the rest. */
function identity(namespace, page, { layer_start, layer_end, head_start, head_end }) {
  const [layers, heads] = [layer_end - layer_start, head_end - head_start];
  const element = BigInt(WIDTHS[namespace.dtype]);
  return {
    tokens: page.tokens,
    rectangle: u32(layer_start, layer_end, head_start, head_end),
    bytes: BigInt(page.tokens) * layers * heads * (namespace.k_dim + namespace.v_dim) * element,
    namespace: namespaceDigest(namespace),
    chain: page.chain,
    salt: namespace.cache_salt,
  };
}

/** A whole stored page; with a tag where `sealed` and a key are given. */
export function write(namespace, page, rectangle, payload, sealed, key) {
  const wanted = identity(namespace, page, rectangle);
  const stored = Buffer.concat([Buffer.alloc(HEADER), payload]);
  stored.write("KVPG");
  stored.writeUInt16LE(1, 4);
  stored.writeUInt16LE(HEADER, 6);
  stored.writeUInt32LE(wanted.tokens, 12);
  wanted.rectangle.copy(stored, 16);
  stored.writeBigUInt64LE(wanted.bytes, 32);
  stored.writeBigUInt64LE(xxh3(payload), 40);
  wanted.namespace.copy(stored, 48);
  wanted.chain.copy(stored, 80);
  if (sealed !== undefined) {
    stored.writeUInt32LE(Number(sealed.flags), 8);
    keyId(key).copy(stored, 112);
    Buffer.from(sealed.random, "hex").copy(stored, 120);
    tagOf(stored, key, wanted.salt).copy(stored, 152);
  }
  stored.writeBigUInt64LE(xxh3(stored.subarray(0, 248)), 248);
  return stored;
}

/** Why a stored page is refused, or null: 1.0#11.4. */
export function refusal(namespace, page, rectangle, stored, keys) {
  const wanted = identity(namespace, page, rectangle);
  if (stored.length < HEADER) return "torn";
  if (stored.toString("latin1", 0, 4) !== "KVPG") return "malformed";
  if (stored.readUInt16LE(4) !== 1) return "version";
  if (stored.readBigUInt64LE(248) !== xxh3(stored.subarray(0, 248))) return "flipped_header";
  const flags = stored.readUInt32LE(8);
  if (stored.readUInt16LE(6) !== HEADER || ![0, HMAC_TAG, GMAC_TAG].includes(flags)) return "version";
  const key = keys.find((one) => keyId(one).equals(stored.subarray(112, 120)));
  if (flags === 0 && keys.length > 0) return "unsealed";
  if (flags !== 0 && key === undefined) return "locked";
  if (!stored.subarray(48, 80).equals(wanted.namespace)) return "namespace";
  if (!stored.subarray(80, 112).equals(wanted.chain)) return "prefix";
  if (stored.readUInt32LE(12) !== wanted.tokens || stored.readBigUInt64LE(32) !== wanted.bytes) return "length";
  if (!stored.subarray(16, 32).equals(wanted.rectangle)) return "rectangle";
  if (BigInt(stored.length - HEADER) !== wanted.bytes) return "torn";
  if (stored.readBigUInt64LE(40) !== xxh3(stored.subarray(HEADER))) return "flipped_payload";
  if (flags !== 0 && !timingSafeEqual(tagOf(stored, key, wanted.salt), stored.subarray(152, 168))) return "forged";
  return null;
}
