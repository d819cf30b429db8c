// MessagePack, after its specification: integers as BigInt, floats as Number, bytes as Buffer, maps as Map.

export class NotMessagePack extends Error {}

/** Text whose bytes are no UTF-8. */
export class BrokenText {}

/** A value of an extension type, which no event has. */
export class Extension {}

const MAX_LEVELS = 128;
const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** The one value that `bytes` are. */
export function unpack(bytes) {
  let at = 0;
  const take = (size) => {
    if (at + size > bytes.length) throw new NotMessagePack("cut short");
    at += size;
    return at - size;
  };
  const unsigned = (size) => bytes.readUIntBE(take(size), size);
  const binary = (size) => {
    const start = take(size);
    return bytes.subarray(start, start + size);
  };
  const text = (size) => {
    const found = binary(size);
    try {
      return UTF8.decode(found);
    } catch {
      return new BrokenText();
    }
  };
  const list = (size, level) => {
    const found = [];
    for (let i = 0; i < size; i += 1) found.push(value(level + 1));
    return found;
  };
  const map = (size, level) => {
    const found = new Map();
    for (let i = 0; i < size; i += 1) found.set(value(level + 1), value(level + 1));
    return found;
  };
  const extension = (size) => {
    take(1 + size);
    return new Extension();
  };

  function value(level) {
    if (level > MAX_LEVELS) throw new NotMessagePack("nested too deep");
    const first = bytes[take(1)];
    if (first < 0x80) return BigInt(first);
    if (first >= 0xe0) return BigInt(first - 0x100);
    if (first < 0x90) return map(first & 0x0f, level);
    if (first < 0xa0) return list(first & 0x0f, level);
    if (first < 0xc0) return text(first & 0x1f);
    const size = 1 << (first & 3); // of what follows, or of the length that follows
    switch (first) {
      case 0xc0:
        return null;
      case 0xc2:
      case 0xc3:
        return first === 0xc3;
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return binary(unsigned(size));
      case 0xc7:
      case 0xc8:
      case 0xc9:
        return extension(unsigned(1 << (first - 0xc7)));
      case 0xca:
        return bytes.readFloatBE(take(4));
      case 0xcb:
        return bytes.readDoubleBE(take(8));
      case 0xcc:
      case 0xcd:
      case 0xce:
        return BigInt(unsigned(size));
      case 0xcf:
        return bytes.readBigUInt64BE(take(8));
      case 0xd0:
      case 0xd1:
      case 0xd2:
        return BigInt(bytes.readIntBE(take(size), size));
      case 0xd3:
        return bytes.readBigInt64BE(take(8));
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8:
        return extension(1 << (first - 0xd4));
      case 0xd9:
      case 0xda:
      case 0xdb:
        return text(unsigned(1 << (first - 0xd9)));
      case 0xdc:
      case 0xdd:
        return list(unsigned(first === 0xdc ? 2 : 4), level);
      case 0xde:
      case 0xdf:
        return map(unsigned(first === 0xde ? 2 : 4), level);
      default:
        throw new NotMessagePack("a byte that begins nothing");
    }
  }

  const found = value(1);
  if (at !== bytes.length) throw new NotMessagePack("something behind it");
  return found;
}
