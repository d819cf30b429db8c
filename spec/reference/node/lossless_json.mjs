// JSON that is read without losing a byte: every value knows its own text, so that what is not changed stays as it came.
//
// It refuses what two readers may read differently: a name twice in one object, numbers that a double does not hold,
// half a surrogate pair, a byte order mark, bytes that are no UTF-8, and more than 256 levels.
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const WORD = /true|false|null/y;
const UTF8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });
const MAX_LEVELS = 256;

/** One value. `entries` are the members of an object or the items of a list, each with the text of the whole entry. */
class Value {
  constructor(kind, text, entries) { Object.assign(this, { kind, text, entries }); }

  /** Returns the member of this name, undefined if there is none. */
  get(name) { return this.kind === '{' ? this.entries.find((entry) => entry.name === name)?.value : undefined; }

  /** Returns it as JavaScript has it; integers of more than 53 bits lose digits. */
  value() { return JSON.parse(this.text); }

  /** Returns the text of an object with members replaced or added (text) or removed (null). */
  edit(changes) {
    const added = Object.entries(changes).filter(([name, text]) => text !== null && !this.get(name));
    const kept = this.entries.filter((entry) => changes[entry.name] !== null)
      .map((entry) => (entry.name in changes ? `${JSON.stringify(entry.name)}:${changes[entry.name]}` : entry.text));
    return `{${[...kept, ...added.map(([name, text]) => `${JSON.stringify(name)}:${text}`)].join(',')}}`;
  }

  /** Returns the text without the members, at any depth, for which `isUnwanted(path, name)` holds. */
  without(isUnwanted, path = '') {
    if (!this.entries) return this.text;
    const kept = this.entries.filter((entry) => this.kind === '[' || !isUnwanted(path, entry.name));
    const texts = kept.map((entry) => {
      const text = entry.value.without(isUnwanted, path ? `${path}.${entry.name}` : `${entry.name}`);
      return text === entry.value.text ? entry.text : entry.text.slice(0, -entry.value.text.length) + text;
    });
    const isSame = kept.length === this.entries.length && texts.every((text, at) => text === kept[at].text);
    return isSame ? this.text : this.kind + texts.join(',') + (this.kind === '{' ? '}' : ']');
  }
}

/** Reads text, or bytes in UTF-8. Throws SyntaxError, or TypeError for bytes that are none. */
export function parse(source) {
  const text = typeof source === 'string' ? source : UTF8.decode(source);
  let at = 0;
  const fail = () => { throw new SyntaxError(`no JSON at ${at}`); };
  const skip = () => { while (at < text.length && ' \t\r\n'.includes(text[at])) at++; };

  function string() {
    const begin = at;
    let escapes;
    do {
      at = text.indexOf('"', at + 1);
      if (at < 0) fail();
      for (escapes = 0; text[at - 1 - escapes] === '\\'; escapes++);
    } while (escapes % 2);
    const found = JSON.parse(text.slice(begin, ++at));
    if (!found.isWellFormed()) fail();
    return found;
  }

  function value(level) {
    const begin = at;
    const kind = text[at];
    let entries;
    if (kind === '{' || kind === '[') entries = container(kind, level);
    else if (kind === '"') string();
    else {
      const found = [NUMBER, WORD].find((form) => { form.lastIndex = at; return form.test(text); }) ?? fail();
      at = found.lastIndex;
      if (found === NUMBER && /[.eE]/.test(text.slice(begin, at)) && !Number.isFinite(Number(text.slice(begin, at)))) fail();
    }
    return new Value(kind, text.slice(begin, at), entries);
  }

  function container(kind, level) {
    const close = kind === '{' ? '}' : ']';
    const entries = [];
    const names = new Set();
    if (level === MAX_LEVELS) fail();
    for (at++, skip(); text[at] !== close; skip()) {
      if (entries.length && text[at++] !== ',') fail();
      skip();
      const begin = at;
      let name = entries.length;
      if (kind === '{') {
        if (text[at] !== '"' || names.has(name = string())) fail();
        names.add(name);
        skip();
        if (text[at++] !== ':') fail();
        skip();
      }
      const found = value(level + 1);
      entries.push({ name, value: found, text: text.slice(begin, at) });
    }
    at++;
    return entries;
  }

  skip();
  const found = value(0);
  skip();
  if (at !== text.length) fail();
  return found;
}
