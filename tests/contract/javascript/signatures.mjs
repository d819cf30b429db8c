// The canonical form and the signature: section 13 of spec.md.

import { createHmac, timingSafeEqual } from "node:crypto";
import { bytesOf, digestOf, packed } from "./documents.mjs";
import { isInteger, isObject } from "./json.mjs";

const LOWEST = -(2n ** 63n);
const HIGHEST = 2n ** 64n - 1n;
const MAX_LIFETIME = 3600n;

export class NotCanonical extends Error {}

/** The one text of a value; `fractions`: whether it may hold a number that is no integer. */
export function canonical(value, fractions = false) {
  if (isInteger(value)) {
    if (value < LOWEST || value > HIGHEST) throw new NotCanonical("an integer of more than 64 bits");
    return value.toString();
  }
  if (typeof value === "number") {
    if (!fractions || !Number.isFinite(value)) throw new NotCanonical("a fraction or an exponent");
    const double = Buffer.alloc(8);
    double.writeDoubleBE(value);
    return `d${double.toString("hex")}`;
  }
  if (typeof value === "string") return text(value);
  if (Array.isArray(value)) return `[${value.map((entry) => canonical(entry, fractions)).join(",")}]`;
  if (!isObject(value)) return JSON.stringify(value);
  const byBytes = (one, other) => Buffer.compare(Buffer.from(one), Buffer.from(other));
  const names = Object.keys(value).sort(byBytes);
  return `{${names.map((name) => `${text(name)}:${canonical(value[name], fractions)}`).join(",")}}`;
}

function text(value) {
  if (/\p{Surrogate}/u.test(value)) throw new NotCanonical("a surrogate without its other half");
  return JSON.stringify(value);
}

export function canonicalDocument(document) {
  const { prefix, signature, ...rest } = document;
  if (signature !== undefined) {
    const { value, ...others } = signature;
    rest.signature = others;
  }
  if (prefix === null) rest.prefix = null;
  else if (prefix !== undefined) {
    const bytes = bytesOf(prefix);
    const { count, packed, ids, digest, ...others } = Array.isArray(prefix) ? { count: BigInt(prefix.length) } : prefix;
    rest.prefix = { ...others, count, digest: bytes === null ? digest : digestOf(bytes) };
  }
  return canonical(rest);
}

export const canonicalNative = ({ kvparams, prompt_token_ids, ...others }) => canonical(others, true);

/** 1.0#13.14: whether the ids of a prompt beside a document begin with its prefix. */
function samePrompt({ prompt_token_ids: ids = null }, prefix) {
  if (ids === null) return true;
  const areIds = Array.isArray(ids) && ids.every((id) => isInteger(id) && id >= 0n && id < 2n ** 32n);
  if (!areIds || prefix === null) return false;
  const known = bytesOf(prefix);
  const count = known === null ? Number(prefix.count) : known.length / 4;
  if (ids.length < count) return false;
  return digestOf(packed(ids.slice(0, count))) === (known === null ? prefix.digest : digestOf(known));
}

/** The first reason of 1.0#13.8 for which a reader refuses, or null. */
export function refusal({ kv_transfer_params: carrier, keys, audience, instance, now, since, used = [] }, skew) {
  const { kvparams: document } = carrier;
  const signature = document?.signature;
  if (!isObject(signature)) return "unsigned";
  if (signature.alg !== "hmac-sha256") return "algorithm";
  const key = keys.find((one) => one.kid === signature.kid);
  const { iat, exp } = signature;
  if (key === undefined || iat + skew < key.not_before) return "key";
  if (key.not_after !== null && iat - skew >= key.not_after) return "key";
  let signed, native;
  try {
    signed = canonicalDocument(document);
    native = canonicalNative(carrier);
  } catch (error) {
    if (!(error instanceof NotCanonical)) throw error;
    return "uncanonical";
  }
  const value = createHmac("sha256", Buffer.from(key.secret, "hex"))
    .update(`kvparams signature 1\n${signed}`)
    .digest("hex");
  if (!equal(value, signature.value)) return "forged";
  if (!equal(digestOf(native), signature.native) || !samePrompt(carrier, document.prefix ?? null)) return "native";
  if (signature.aud !== audience) return "audience";
  const addressee = { prefill: document.producer?.id, decode: document.consumer?.id }[document.phase];
  if (instance !== undefined && addressee !== undefined && addressee !== instance) return "instance";
  if (exp - iat < 1n || exp - iat > MAX_LIFETIME) return "lifetime";
  if (iat > now + skew) return "early";
  if (exp <= now - skew) return "expired";
  const replayed = used.some(([kid, nonce]) => kid === signature.kid && nonce === signature.nonce);
  return replayed || iat - skew < since ? "replayed" : null;
}

const equal = (one, other) => one.length === other.length && timingSafeEqual(Buffer.from(one), Buffer.from(other));
