// JSON Schema 2020-12, as far as schema.json uses it; a keyword that is not known here is an error, never ignored.

import { isInteger, isObject } from "./json.mjs";

const characters = (text) => [...text].length;
const isNumber = (value) => isInteger(value) || typeof value === "number";
const SAID = new Set(["$schema", "$id", "$defs", "title", "description"]);
const TYPES = {
  null: (value) => value === null,
  boolean: (value) => typeof value === "boolean",
  string: (value) => typeof value === "string",
  number: isNumber,
  integer: (value) => isInteger(value) || (typeof value === "number" && Number.isInteger(value)),
  array: Array.isArray,
  object: isObject,
};
// For each keyword the type that it is about, and when a value of this type breaks it.
const BOUNDS = {
  minimum: ["number", (value, bound) => value < bound],
  maximum: ["number", (value, bound) => value > bound],
  minLength: ["string", (value, bound) => characters(value) < bound],
  maxLength: ["string", (value, bound) => characters(value) > bound],
  pattern: ["string", (value, bound) => !new RegExp(bound, "u").test(value)],
  minItems: ["array", (value, bound) => value.length < bound],
  maxItems: ["array", (value, bound) => value.length > bound],
  maxProperties: ["object", (value, bound) => Object.keys(value).length > bound],
};

export class Schema {
  /**
   * @param root the schema
   * @param exact whether 1.0 is refused where an integer is wanted: a schema alone cannot say it
   * @param instead for some `$ref` a function that judges in its place: (value, path) => faults
   */
  constructor(root, { exact = false, instead = {} } = {}) {
    this.root = root;
    this.instead = instead;
    this.types = exact ? { ...TYPES, integer: isInteger } : TYPES;
  }

  /** What is wrong with `value`: a list of `{ path, keyword }`, and `value` where it stands at `path`. */
  faults(value, schema = this.root, path = []) {
    const found = [];
    const blame = (keyword, ...more) => found.push({ path: [...path, ...more], keyword, value });
    const judge = (part, under, ...more) => found.push(...this.faults(part, under, [...path, ...more]));
    for (const [keyword, said] of Object.entries(schema)) {
      if (keyword in BOUNDS) {
        const [type, broken] = BOUNDS[keyword];
        if (TYPES[type](value) && broken(value, said)) blame(keyword);
        continue;
      }
      switch (keyword) {
        case "$ref":
          found.push(...this.#referred(said, value, path));
          break;
        case "type":
          if (![said].flat().some((type) => this.types[type](value))) blame("type");
          break;
        case "enum":
          if (!said.includes(value)) blame("enum");
          break;
        case "required":
          if (isObject(value))
            said.filter((name) => !Object.hasOwn(value, name)).forEach((name) => blame("required", name));
          break;
        case "properties":
          if (isObject(value)) {
            for (const name of Object.keys(said)) if (Object.hasOwn(value, name)) judge(value[name], said[name], name);
          }
          break;
        case "additionalProperties":
          if (isObject(value)) {
            for (const name of Object.keys(value)) {
              if (!Object.hasOwn(schema.properties ?? {}, name)) judge(value[name], said, name);
            }
          }
          break;
        case "propertyNames":
          if (isObject(value)) for (const name of Object.keys(value)) judge(name, said, name);
          break;
        case "items":
          if (Array.isArray(value)) value.forEach((entry, index) => judge(entry, said, index));
          break;
        case "anyOf":
          found.push(...this.#nearest(value, said, path));
          break;
        case "oneOf":
          if (said.filter((branch) => this.faults(value, branch, path).length === 0).length !== 1) blame("oneOf");
          break;
        default:
          if (!SAID.has(keyword)) throw new Error(`schema.json uses ${keyword}, which is not known here`);
      }
    }
    return found;
  }

  #referred(reference, value, path) {
    if (reference in this.instead) return this.instead[reference](value, path);
    const target = reference
      .replace(/^#\//, "")
      .split("/")
      .reduce((schema, name) => schema[name], this.root);
    return this.faults(value, target, path);
  }

  /** Nothing if one branch accepts; otherwise what is wrong by the branch that is about values of this type. */
  #nearest(value, branches, path) {
    const all = branches.map((branch) => this.faults(value, branch, path));
    const isOther = (faults) => faults.some((one) => one.keyword === "type" && one.path.length === path.length);
    return (
      all.find((faults) => faults.length === 0) ??
      all.find((faults) => !isOther(faults)) ?? [{ path, keyword: "type", value }]
    );
  }
}
