// JSON as section 3 of spec.md wants it read: what is not plain is refused, and no digit is lost.
// An integer becomes a BigInt, a number with a fraction or an exponent a Number, so that 4, 4.0 and 2^64 - 1 stay apart.

export class NotJson extends Error {}

const SPACE = /[ \t\r\n]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const PLAIN = /[^"\\\u0000-\u001f]*/y;
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };
const WORDS = { true: true, false: false, null: null };
const MAX_BYTES = 16_777_216;
const MAX_LEVELS = 64;

const NAMES = Symbol("names");

/** The names of an object's members as they stand in its text; JavaScript itself puts numbers first. */
export const namesOf = (object) => object[NAMES] ?? Object.keys(object);

export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
export const isInteger = (value) => typeof value === "bigint";

/** The value that `text` (a string, or bytes in UTF-8) spells. */
export function parse(text, maxLevels = MAX_LEVELS) {
  const bytes = typeof text === "string" ? Buffer.from(text) : text;
  if (bytes.length > MAX_BYTES) throw new NotJson("too long");
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new NotJson("not UTF-8");
  }
  let at = 0;
  const take = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found !== null) at = pattern.lastIndex;
    return found;
  };
  const fail = (why) => {
    throw new NotJson(`${why} at ${at}`);
  };
  const expect = (character) => (text[at] === character ? (at += 1) : fail(`no ${character}`));

  function string() {
    expect('"');
    let found = "";
    for (;;) {
      found += take(PLAIN)[0];
      if (text[at] === '"') break;
      if (text[at] !== "\\") fail("a text without end, or with a control character");
      const escape = text[at + 1];
      if (escape === "u") {
        const digits = text.slice(at + 2, at + 6);
        if (!/^[0-9a-fA-F]{4}$/.test(digits)) fail("no four digits");
        found += String.fromCharCode(parseInt(digits, 16));
        at += 6;
      } else {
        if (!(escape in ESCAPES)) fail("an unknown escape");
        found += ESCAPES[escape];
        at += 2;
      }
    }
    at += 1;
    if (/\p{Surrogate}/u.test(found)) fail("a surrogate without its other half");
    return found;
  }

  function value(level) {
    take(SPACE);
    const first = text[at];
    if (first === '"') return string();
    if (first === "{" || first === "[") {
      if (level > maxLevels) fail("too deep");
      at += 1;
      return first === "{" ? object(level) : list(level);
    }
    for (const word of Object.keys(WORDS)) {
      if (text.startsWith(word, at)) {
        at += word.length;
        return WORDS[word];
      }
    }
    const number = take(NUMBER);
    if (number === null) fail("no value");
    if (number[1] === undefined && number[2] === undefined) return BigInt(number[0]);
    const double = Number(number[0]);
    return Number.isFinite(double) ? double : fail("a number that overflows");
  }

  function list(level) {
    const found = [];
    take(SPACE);
    if (text[at] === "]") return ((at += 1), found);
    for (;;) {
      found.push(value(level + 1));
      take(SPACE);
      if (text[at] === "]") return ((at += 1), found);
      expect(",");
    }
  }

  function object(level) {
    const found = Object.create(null);
    found[NAMES] = [];
    take(SPACE);
    if (text[at] === "}") return ((at += 1), found);
    for (;;) {
      take(SPACE);
      const name = string();
      if (name in found) fail("a key twice");
      take(SPACE);
      expect(":");
      found[name] = value(level + 1);
      found[NAMES].push(name);
      take(SPACE);
      if (text[at] === "}") return ((at += 1), found);
      expect(",");
    }
  }

  const found = value(1);
  take(SPACE);
  if (at !== text.length) fail("something behind it");
  return found;
}

/** Whether two values are equal as JSON: 1, 1.0 and true differ, the order of members does not count. */
export function same(one, other) {
  if (Array.isArray(one)) {
    return Array.isArray(other) && one.length === other.length && one.every((entry, i) => same(entry, other[i]));
  }
  if (isObject(one)) {
    const names = Object.keys(one);
    return (
      isObject(other) &&
      names.length === Object.keys(other).length &&
      names.every((name) => Object.hasOwn(other, name) && same(one[name], other[name]))
    );
  }
  return Object.is(one, other);
}

/** The text of a value, as `parse` reads it: no digit is lost, and a fraction stays one. */
export function dump(value) {
  if (isInteger(value)) return value.toString();
  if (Object.is(value, -0)) return "-0.0";
  if (typeof value === "number") return Number.isInteger(value) ? value.toExponential() : String(value);
  if (Array.isArray(value)) return `[${value.map(dump).join(",")}]`;
  if (!isObject(value)) return JSON.stringify(value);
  return `{${Object.keys(value)
    .map((name) => `${JSON.stringify(name)}:${dump(value[name])}`)
    .join(",")}}`;
}
