// Canonical JSON and digests: the two things on which every client must agree with every node to the last byte.

import { createHash } from "node:crypto";

export const MAX_DEPTH = 128;

/** A number exactly as it was written: 1.10 must stay 1.10, and no double can say so. */
export class Literal {
  constructor(text) {
    this.text = text;
  }
}

const SPACE = /[ \t\r\n]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?/y;
// No control characters, and nothing that is escaped in a way that JSON does not know.
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const LONE_SURROGATE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/;

/** Reads JSON keeping every number as it was written; objects become Maps. Throws SyntaxError with the broken rule. */
export function parse(text, maxDepth = MAX_DEPTH) {
  let at = 0;
  const space = () => {
    SPACE.lastIndex = at;
    SPACE.exec(text);
    at = SPACE.lastIndex;
  };
  const fail = (rule) => {
    throw new SyntaxError(`${rule} (at ${at})`);
  };
  const match = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found === null) return null;
    at = pattern.lastIndex;
    return found[0];
  };
  const string = () => {
    const found = match(STRING) ?? fail("not valid JSON");
    const value = JSON.parse(found);
    if (LONE_SURROGATE.test(value)) fail("a lone surrogate is no character");
    return value;
  };
  const value = (depth) => {
    space();
    const char = text[at];
    if (char === "{" || char === "[") {
      if (depth === maxDepth) fail(`containers are nested deeper than ${maxDepth}`);
      at += 1;
      return char === "{" ? object(depth + 1) : array(depth + 1);
    }
    if (char === '"') return string();
    for (const [word, means] of [["true", true], ["false", false], ["null", null]]) {
      if (text.startsWith(word, at)) {
        at += word.length;
        return means;
      }
    }
    const literal = match(NUMBER) ?? fail("not valid JSON");
    if (!Number.isFinite(Number(literal))) fail("a number is too large: readers would take it for infinity");
    return new Literal(literal);
  };
  const object = (depth) => {
    const found = new Map();
    space();
    if (text[at] === "}") {
      at += 1;
      return found;
    }
    for (;;) {
      space();
      const key = string();
      if (found.has(key)) fail(`the key ${JSON.stringify(key)} appears twice in one object`);
      space();
      if (text[at] !== ":") fail("not valid JSON");
      at += 1;
      found.set(key, value(depth));
      space();
      const char = text[at];
      at += 1;
      if (char === "}") return found;
      if (char !== ",") fail("not valid JSON");
    }
  };
  const array = (depth) => {
    const found = [];
    space();
    if (text[at] === "]") {
      at += 1;
      return found;
    }
    for (;;) {
      found.push(value(depth));
      space();
      const char = text[at];
      at += 1;
      if (char === "]") return found;
      if (char !== ",") fail("not valid JSON");
    }
  };
  const found = value(0);
  space();
  if (at !== text.length) fail("not valid JSON: something follows the value");
  return found;
}

/** Writes what `parse` gave in canonical form: keys in the order of code points, no whitespace, few escapes. */
export function write(value) {
  if (value instanceof Literal) return value.text;
  if (Array.isArray(value)) return `[${value.map(write).join(",")}]`;
  if (value instanceof Map) {
    // The order of UTF-8 is that of code points; that of JavaScript's strings is not, beyond U+FFFF.
    const keys = [...value.keys()].sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)));
    return `{${keys.map((key) => `${JSON.stringify(key)}:${write(value.get(key))}`).join(",")}}`;
  }
  return JSON.stringify(value);
}

/** Gives the canonical form of a JSON text. */
export function canonicalize(text) {
  return write(parse(text));
}

/** Gives the canonical form of a JavaScript value; what has no JSON form is refused, not turned into null. */
export function canonicalValue(value) {
  const text = JSON.stringify(value, (key, each) => {
    if (typeof each === "number" && !Number.isFinite(each)) throw new SyntaxError(`${each} is not a JSON number`);
    if (["undefined", "function", "symbol"].includes(typeof each)) throw new SyntaxError(`${typeof each} has no JSON form`);
    return each;
  });
  return canonicalize(text);
}

/** Tells whether objects of a media type are JSON, and so canonical; all others are opaque bytes. */
export function isJson(mediaType) {
  const bare = mediaType.split(";", 1)[0].trim().toLowerCase();
  return bare === "application/json" || bare.endsWith("+json");
}

/** Gives the digest of a fact: of subject, predicate, artifact digest (empty without one) and object, NUL between. */
export function factDigest(subject, predicate, artifactDigest, object) {
  const sha256 = createHash("sha256");
  sha256.update(`${subject}\0${predicate}\0${artifactDigest ?? ""}\0`).update(object);
  return `sha256:${sha256.digest("hex")}`;
}
