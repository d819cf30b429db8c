// XXH3 with 64 bits and seed 0, after the description in xxHash's own repository (doc/xxhash_spec.md).

const SECRET = Buffer.from(
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e" +
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a" +
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f" +
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e",
  "hex",
);
const MASK = (1n << 64n) - 1n;
const LOW = (1n << 32n) - 1n;
const [A1, A2, A3] = [0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const [B1, B2, B3, B4, B5] = [
  0x9e3779b185ebca87n,
  0xc2b2ae3d27d4eb4fn,
  0x165667b19e3779f9n,
  0x85ebca77c2b2ae63n,
  0x27d4eb2f165667c5n,
];

const u32 = (bytes, at) => BigInt(bytes.readUInt32LE(at));
const u64 = (bytes, at) => bytes.readBigUInt64LE(at);
const shifted = (value, by) => value ^ (value >> by);
const rotated = (value, by) => ((value << by) | (value >> (64n - by))) & MASK;
const swapped = (value) => {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(value);
  return bytes.readBigUInt64BE();
};
const folded = (one, other) => {
  const product = one * other;
  return (product & MASK) ^ (product >> 64n);
};
const avalanche = (value) => shifted((shifted(value, 37n) * 0x165667919e3779f9n) & MASK, 32n);
const avalanche64 = (value) => {
  value = (shifted(value, 33n) * B2) & MASK;
  return shifted((shifted(value, 29n) * B3) & MASK, 32n);
};
const mixed = (bytes, at, secret) =>
  folded(u64(bytes, at) ^ u64(SECRET, secret), u64(bytes, at + 8) ^ u64(SECRET, secret + 8));

export function xxh3(bytes) {
  const size = bytes.length;
  if (size <= 16) return short(bytes, size);
  if (size <= 128) {
    let sum = (BigInt(size) * B1) & MASK;
    for (let i = (size - 1) >> 5; i >= 0; i -= 1) {
      sum += mixed(bytes, 16 * i, 32 * i) + mixed(bytes, size - 16 * (i + 1), 32 * i + 16);
    }
    return avalanche(sum & MASK);
  }
  return size <= 240 ? middle(bytes, size) : long(bytes, size);
}

function short(bytes, size) {
  if (size > 8) {
    const low = u64(bytes, 0) ^ u64(SECRET, 24) ^ u64(SECRET, 32);
    const high = u64(bytes, size - 8) ^ u64(SECRET, 40) ^ u64(SECRET, 48);
    return avalanche((BigInt(size) + swapped(low) + high + folded(low, high)) & MASK);
  }
  if (size >= 4) {
    let value = (u32(bytes, size - 4) + (u32(bytes, 0) << 32n)) ^ u64(SECRET, 8) ^ u64(SECRET, 16);
    value = ((value ^ rotated(value, 49n) ^ rotated(value, 24n)) * 0x9fb21c651e98df25n) & MASK;
    value = ((value ^ ((value >> 35n) + BigInt(size))) * 0x9fb21c651e98df25n) & MASK;
    return shifted(value, 28n);
  }
  if (size > 0) {
    const [first, middle, last] = [bytes[0], bytes[size >> 1], bytes[size - 1]].map(BigInt);
    const value = (first << 16n) | (middle << 24n) | last | (BigInt(size) << 8n);
    return avalanche64(value ^ u32(SECRET, 0) ^ u32(SECRET, 4));
  }
  return avalanche64(u64(SECRET, 56) ^ u64(SECRET, 64));
}

function middle(bytes, size) {
  let sum = (BigInt(size) * B1) & MASK;
  for (let i = 0; i < 8; i += 1) sum += mixed(bytes, 16 * i, 16 * i);
  sum = avalanche(sum & MASK);
  for (let i = 8; i < size >> 4; i += 1) sum += mixed(bytes, 16 * i, 16 * (i - 8) + 3);
  return avalanche((sum + mixed(bytes, size - 16, 136 - 17)) & MASK);
}

function long(bytes, size) {
  const sums = [A3, B1, B2, B3, B4, A2, B5, A1];
  const stripe = (at, secret) => {
    for (let i = 0; i < 8; i += 1) {
      const value = u64(bytes, at + 8 * i);
      const key = value ^ u64(SECRET, secret + 8 * i);
      sums[i ^ 1] = (sums[i ^ 1] + value) & MASK;
      sums[i] = (sums[i] + (key & LOW) * (key >> 32n)) & MASK;
    }
  };
  const stripes = (SECRET.length - 64) / 8; // of 64 bytes, in a block
  const last = Math.floor((size - 1) / 64); // the last whole stripe ends before the last byte
  for (let i = 0; i < last; i += 1) {
    stripe(64 * i, 8 * (i % stripes));
    if (i % stripes === stripes - 1) {
      sums.forEach((sum, j) => {
        sums[j] = ((shifted(sum, 47n) ^ u64(SECRET, SECRET.length - 64 + 8 * j)) * A1) & MASK;
      });
    }
  }
  stripe(size - 64, SECRET.length - 64 - 7);
  let merged = (BigInt(size) * B1) & MASK;
  for (let i = 0; i < 8; i += 2) {
    merged += folded(sums[i] ^ u64(SECRET, 11 + 8 * i), sums[i + 1] ^ u64(SECRET, 19 + 8 * i));
  }
  return avalanche(merged & MASK);
}
