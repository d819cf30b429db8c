// Hashes of blocks for routing: section 16 of spec.md.

import { createHash } from "node:crypto";
import { fieldsOf } from "./pages.mjs";

const modulo = (value) => BigInt.asUintN(64, value);

function mix(x) {
  x = modulo((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n);
  x = modulo((x ^ (x >> 27n)) * 0x94d049bb133111ebn);
  return x ^ (x >> 31n);
}

const stream = (k, n) => mix(modulo(k + (BigInt(n) + 1n) * 0x9e3779b97f4a7c15n));
const sha256 = (...parts) =>
  createHash("sha256")
    .update(Buffer.concat(parts.map((part) => Buffer.from(part))))
    .digest();
const asText = (number) => number.toString(16).padStart(16, "0");

/** The number of the namespace and the hashes of the full blocks, in hexadecimal. */
export function chain({ seed, block_size: size, namespace, token_ids: ids }) {
  const seedBytes = Buffer.alloc(8);
  seedBytes.writeBigUInt64LE(BigInt(`0x${seed}`));
  const sizeBytes = Buffer.alloc(4);
  sizeBytes.writeUInt32LE(Number(size));
  const digest = sha256("kvparams chain 1\n", seedBytes, sizeBytes);
  const [forWeights, forBlocks] = [digest.readBigUInt64LE(0), digest.readBigUInt64LE(8)];
  const fields = fieldsOf(namespace, ["model", "lora", "cache_salt"]);
  const number = sha256("kvparams chain namespace 1\n", seedBytes, ...fields).readBigUInt64LE(0);
  const weights = Array.from({ length: Math.min(Number(size), ids.length) }, (_, j) => stream(forWeights, j) | 1n);
  const hashes = [];
  let last = 0n;
  for (let i = 0; (i + 1) * Number(size) <= ids.length; i += 1) {
    const block = ids.slice(i * Number(size), (i + 1) * Number(size));
    const sum = block.reduce((before, id, j) => before + weights[j] * id, number + stream(forBlocks, i));
    last = modulo(last + mix(modulo(sum)));
    hashes.push(asText(last));
  }
  return { number: asText(number), hashes };
}
