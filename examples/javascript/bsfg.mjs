// A whole BSFG client without any dependency: a durable producer, a consumer, artifacts; JSON over HTTPS.
//
// README.md beside it says every rule that a client in any language must keep, and why.

import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { mkdir, open, readFile, readdir, rename, stat, unlink } from "node:fs/promises";
import http from "node:http";
import https from "node:https";
import { basename, dirname, join, resolve } from "node:path";
import { MAX_DEPTH, canonicalValue, canonicalize, factDigest, isJson, parse, write } from "./canonical.mjs";

const JSON_TYPE = "application/json";
const JSON_LINES = "application/x-ndjson";
const BACKOFF_FIRST_MS = 100;
const BACKOFF_MAX_MS = 5000;
const BATCH_FACTS = 500;
const BATCH_BYTES = 1 << 20;

/** What is wrong with one fact: to send it again cannot help, the others are still worth sending. */
const OF_ONE_FACT = new Set([
  "artifact_missing", "conflicting_duplicate", "digest_mismatch", "fact_too_large", "hash_collision",
  "implausible_time", "invalid_fact", "message_too_large", "signature_invalid", "signature_missing",
]);

/** An error with the stable code of the product, whether the same request may succeed later, and what to do. */
export class BsfgError extends Error {
  constructor(code, message, { retryable = false, hint = "", status = 0, details = {} } = {}) {
    super(message);
    Object.assign(this, { name: "BsfgError", code, retryable, hint, status, details });
  }
}

const unreachable = (message) => new BsfgError("peer_unreachable", message, { retryable: true });

/** Pauses that double, with jitter, so that many clients do not come back at the same moment. */
class Backoff {
  failures = 0;

  next() {
    const whole = Math.min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** Math.min(this.failures, 30));
    this.failures += 1;
    return whole * (0.5 + Math.random() / 2);
  }
}

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** Does something until it succeeds, is refused for good, or `patienceMs` have passed. */
async function insist(work, { patienceMs = Infinity, isOver = () => false, onProblem = () => {} } = {}) {
  const backoff = new Backoff();
  const ends = Date.now() + patienceMs;
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof BsfgError) || !error.retryable || Date.now() >= ends || isOver()) throw error;
      onProblem(error);
      await sleep(backoff.next());
    }
  }
}

/** The HTTP port of a node. `ca`, `cert` and `key` are PEM texts; without them only loopback is dialled, in plaintext. */
export class Node {
  constructor({ host = "localhost", port = 9080, ca, cert, key, serverName, timeoutMs = 30000 }) {
    if (!(ca && cert && key) && !["localhost", "127.0.0.1", "::1"].includes(host)) {
      throw new BsfgError("invalid_argument", `${host} is not on loopback, so it needs TLS: ca, cert and key`);
    }
    const secure = Boolean(ca && cert && key);
    this.timeoutMs = timeoutMs;
    this.module = secure ? https : http;
    const tls = secure ? { ca, cert, key, servername: serverName ?? host, minVersion: "TLSv1.3" } : {};
    this.agent = new this.module.Agent({ keepAlive: true, ...tls });
    this.where = { host, port, agent: this.agent, ...tls };
  }

  /** Asks, and gives status, headers and the answer as a stream; errors of the node are thrown. */
  async ask(method, path, { body, headers = {}, waitMs = 0 } = {}) {
    const answer = await new Promise((done, failed) => {
      const asked = this.module.request({ ...this.where, method, path, headers }, done);
      asked.setTimeout(this.timeoutMs + waitMs, () => asked.destroy(new Error("no answer in time")));
      asked.on("error", (error) => failed(unreachable(error.message)));
      if (body !== undefined && typeof body.pipe === "function") body.on("error", failed).pipe(asked);
      else asked.end(body);
    });
    if (answer.statusCode < 400) return answer;
    const text = await readAll(answer);
    let found;
    try {
      found = JSON.parse(text);
    } catch {
      throw unreachable(`what answered with status ${answer.statusCode} is no node`);
    }
    const { code = "remote_error", detail = "", retryable = false, hint = "", details = {} } = found;
    throw new BsfgError(code, detail, { retryable, hint, details, status: answer.statusCode });
  }

  /** Asks, and gives the answer as a text and as what that says; what is no JSON is no answer of a node. */
  async json(method, path, options = {}) {
    const text = await readAll(await this.ask(method, path, options));
    try {
      return { text, found: JSON.parse(text) };
    } catch {
      throw unreachable("what answered is no node");
    }
  }

  close() {
    this.agent.destroy();
  }
}

async function readAll(answer) {
  const parts = [];
  try {
    for await (const part of answer) parts.push(part);
  } catch (error) {
    throw unreachable(error.message);
  }
  if (!answer.complete) throw unreachable("the node broke off in the middle of an answer");
  return Buffer.concat(parts).toString("utf8");
}

/** Writes a path; the last part, an id or a key, may hold slashes. */
function pathOf(parts, query = {}) {
  const last = parts.length - 1;
  const written = parts.map((part, at) =>
    at === last ? part.split("/").map(encodeURIComponent).join("/") : encodeURIComponent(part));
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  return `/v1/${written.join("/")}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

/** Writes a file so that it is there whole or not at all, also after a power loss. */
async function writeDurably(path, data) {
  const file = await open(`${path}.new`, "w", 0o600);
  try {
    await file.writeFile(data);
    await file.sync();
  } finally {
    await file.close();
  }
  await rename(`${path}.new`, path);
  await syncFolder(dirname(path));
}

async function syncFolder(path) {
  const folder = await open(path, "r");
  try {
    await folder.sync();
  } finally {
    await folder.close();
  }
}

/** Lists the facts in a folder of an outbox. */
async function numbered(path) {
  return (await readdir(path)).filter((name) => /^[0-9]{12}\.json$/.test(name));
}

/** Writes a fact as one line of JSON: what is sent now and, unchanged, whenever it is sent again. */
export function messageLine({ subject, predicate, object, objectJson, objectBytes, artifact, artifactDigest }, envelope) {
  const head = { produced_at_unix_ms: Date.now() };
  const names = {
    messageId: "message_id", fromZone: "from_zone", toZone: "to_zone", producedAtUnixMs: "produced_at_unix_ms",
    correlationId: "correlation_id", causationId: "causation_id", labels: "labels", mediaType: "object_media_type",
    schema: "object_schema", signature: "signature",
  };
  for (const [name, value] of Object.entries(envelope)) {
    if (!(name in names)) throw new BsfgError("invalid_argument", `an envelope has no field ${name}`);
    if (value !== undefined) head[names[name]] = value;
  }
  const fact = { subject, predicate };
  if (artifactDigest !== undefined) fact.artifact_digest = artifactDigest;
  if (artifact !== undefined) fact.artifact = artifact;
  try {
    if (objectBytes !== undefined) {
      fact.object_base64 = Buffer.from(objectBytes).toString("base64");
    } else {
      fact.object_json = objectJson !== undefined ? canonicalize(objectJson) : canonicalValue(object ?? null);
    }
  } catch (error) {
    throw new BsfgError("invalid_fact", `object: ${error.message}`);
  }
  return JSON.stringify({ envelope: head, fact });
}

/**
 * A producer with an outbox: `send` resolves when the fact is on this machine's disk. One loop sends in order and
 * removes a fact when the node has answered for it. A fact keeps its id and every byte however often it is sent.
 */
export class Producer {
  constructor(node, { stream, toZone, outbox, onProblem = () => {}, onRefused = () => {} }) {
    Object.assign(this, { node, stream, toZone, outbox, onProblem, onRefused });
    this.problem = null;
    this.closing = false;
    this.waiting = [];
    this.number = 0;
  }

  /** Takes up what an earlier process left, and begins to send. */
  async start() {
    const refused = join(this.outbox, "refused");
    await mkdir(refused, { recursive: true, mode: 0o700 });
    for (const folder of [this.outbox, dirname(resolve(this.outbox))]) await syncFolder(folder);
    const names = (await numbered(this.outbox)).sort();
    this.waiting = names;
    // A number that was refused is not given again: what is kept under it would be replaced.
    const taken = [...names, ...(await numbered(refused))].map((name) => Number(name.slice(0, 12)));
    this.number = taken.reduce((most, number) => Math.max(most, number + 1), 0);
    this.sending = this.#sendAll();
    return this;
  }

  /** Makes a fact durable here. Derive `messageId` from the event, never from the clock or from chance. */
  async send(fact, { messageId, stream = this.stream, ...envelope } = {}) {
    if (this.closing) throw new BsfgError("storage_closed", "the producer is closed");
    const line = messageLine(fact, { toZone: this.toZone, messageId, ...envelope });
    const name = `${String(this.number++).padStart(12, "0")}.json`;
    await writeDurably(join(this.outbox, name), JSON.stringify({ stream, line }));
    // Sends may end in another order than they began; the outbox is emptied in the order of its names.
    this.waiting.push(name);
    this.waiting.sort();
    this.wake?.();
  }

  /** Resolves when the outbox is empty. */
  async drain() {
    while (this.waiting.length) await sleep(20);
  }

  /** Ends; what is still in the outbox is sent by the next process. */
  async close() {
    this.closing = true;
    this.wake?.();
    await this.sending;
  }

  async #sendAll() {
    const backoff = new Backoff();
    while (!this.closing) {
      if (!this.waiting.length) {
        await new Promise((done) => {
          this.wake = done;
        });
        continue;
      }
      try {
        await this.#send(await this.#next());
        this.problem = null;
        backoff.failures = 0;
      } catch (error) {
        // Also what an operator must mend (a right, a certificate): the facts are safe on disk meanwhile.
        this.problem = error;
        this.onProblem(error);
        await sleep(backoff.next());
      }
    }
  }

  async #next() {
    const batch = [];
    let size = 0;
    for (const name of this.waiting.slice(0, BATCH_FACTS)) {
      const { stream, line } = JSON.parse(await readFile(join(this.outbox, name), "utf8"));
      size += line.length;
      if (batch.length && (stream !== batch[0].stream || size > BATCH_BYTES)) break;
      batch.push({ name, stream, line });
    }
    return batch;
  }

  async #send(batch) {
    const path = pathOf(["streams", batch[0].stream, "facts"]);
    const many = batch.length > 1;
    try {
      const { found } = await this.node.json("POST", path, {
        body: batch.map(({ line }) => line).join("\n"),
        headers: { "Content-Type": many ? JSON_LINES : JSON_TYPE },
      });
      for (const [at, { result, offset, message_id: id }] of found.results.entries()) {
        // A repeat ("already_exists") is success. Another body under the id is not, and nothing of it was stored.
        if (result === "conflict") {
          await this.#refuse(batch[at], new BsfgError("conflicting_duplicate", `${id} is taken at offset ${offset}`));
        }
      }
    } catch (error) {
      if (!OF_ONE_FACT.has(error.code)) throw error;
      if (many) {
        // One is wrong, and nothing of the whole was stored.
        for (const each of batch) await this.#send([each]);
        return;
      }
      await this.#refuse(batch[0], error);
    }
    for (const { name } of batch) await unlink(join(this.outbox, name));
    const gone = new Set(batch.map(({ name }) => name));
    this.waiting = this.waiting.filter((name) => !gone.has(name));
  }

  /** Keeps aside what can never be sent, with the reason, before it leaves the outbox. */
  async #refuse({ name, stream, line }, error) {
    const { code, message, hint } = error;
    await writeDurably(join(this.outbox, "refused", name), JSON.stringify({ code, message, hint, stream, line }));
    this.onRefused(error, JSON.parse(line));
  }
}

/** Gives the facts of a durable consumer in order, at least once, each verified; and what is missing, with the reason. */
export class Consumer {
  constructor(node, name, { batchFacts = 100, waitMs = 5000, patienceMs = Infinity, onProblem = () => {} } = {}) {
    Object.assign(this, { node, name, batchFacts, waitMs, patienceMs, onProblem });
    this.logId = undefined;
    this.gapsToken = "";
    this.committed = -1;
    this.handed = -1;
    this.ranges = [];
    this.refusals = [];
    this.closing = false;
  }

  /**
   * Yields `{kind: "entry", offset, key, digest, subject, predicate, objectJson | objectBytes, envelope, artifact, …}`
   * and `{kind: "gap", first, last, reason, …}`. Confirm both. It ends when nothing came for `idleMs`.
   */
  async *items({ idleMs = Infinity } = {}) {
    this.handed = -1;
    let since = Date.now();
    while (!this.closing) {
      const left = idleMs - (Date.now() - since);
      const found = await this.#fetch(Math.max(0, Math.min(this.waitMs, left)));
      for (const item of found) yield item;
      if (found.length) since = Date.now();
      else if (left <= 0) return;
    }
  }

  /** Notes that an item was handled, and that what came of it is durable. It is sent before the next fetch. */
  confirm(item) {
    // A gap that counts another zone's offsets has no place among ours.
    if (item.kind === "gap" && item.origin_zone !== undefined && item.origin_zone !== null) return;
    const [first, last] = item.kind === "gap" ? [item.first, item.last] : [item.offset, item.offset];
    if (last > this.committed) this.ranges.push([Math.max(first, this.committed + 1), last]);
  }

  /** Passes an entry that can never be handled; the node keeps a gap record with the reason. */
  refuse(entry, reason, detail = "") {
    this.refusals.push({ first: entry.offset, last: entry.offset, reason, detail });
    this.confirm(entry);
  }

  /** Sends what was confirmed. */
  async flush() {
    if (!this.ranges.length) return;
    const ranges = joined(this.ranges);
    const body = JSON.stringify({ ranges, refusals: this.refusals, log_id: this.logId });
    this.ranges = [];
    this.refusals = [];
    const headers = { "Content-Type": JSON_TYPE };
    const path = pathOf(["consumers", this.name, "confirm"]);
    const { found } = await this.#insist(() => this.node.json("POST", path, { body, headers }));
    this.committed = found.cursor_advanced_to;
  }

  async close() {
    await this.flush();
    this.closing = true;
  }

  #insist(work) {
    return insist(work, { patienceMs: this.patienceMs, isOver: () => this.closing, onProblem: this.onProblem });
  }

  async #fetch(waitMs) {
    await this.flush();
    // What was handed out and is not confirmed is passed over; an older node gives it again, so that it must not fill
    // the whole answer.
    const limit = Math.min(100000, this.batchFacts + Math.max(0, this.handed - this.committed));
    const after = this.handed > this.committed ? this.handed : undefined;
    const query = { limit, wait_ms: Math.round(waitMs), gaps_after: this.gapsToken, after };
    const path = pathOf(["consumers", this.name, "facts"], query);
    // Read twice: as values for what is whole numbers and texts, and with literals for what the digest covers.
    const { text, found } = await this.#insist(() => this.node.json("GET", path, { waitMs }));
    const literal = parse(text, MAX_DEPTH + 8).get("entries");
    if (this.logId !== undefined && this.logId !== found.log_id) {
      throw new BsfgError("foreign_log", `the node's log is now ${found.log_id}, it was ${this.logId}`);
    }
    if (this.logId !== undefined && (found.start <= this.committed || found.end <= this.handed)) {
      throw new BsfgError("foreign_log", `the node's log went back: it starts at ${found.start}, ends at ${found.end}`);
    }
    this.logId = found.log_id;
    this.gapsToken = found.gaps_token;
    if (after === undefined) this.committed = Math.max(this.committed, found.start - 1);
    const gaps = found.gaps.map((gap) => ({ kind: "gap", ...gap }));
    const told = gaps.filter((gap) => gap.origin_zone !== undefined && gap.origin_zone !== null);
    const placed = [
      ...gaps.filter((gap) => !told.includes(gap)),
      ...found.entries.map((entry, at) => verified(entry, literal[at])),
    ].filter((item) => lastOf(item) > this.handed).sort((a, b) => firstOf(a) - firstOf(b));
    this.handed = Math.max(this.handed, ...placed.map(lastOf));
    if (!placed.length && found.next_offset > found.start) await sleep(Math.min(waitMs, BACKOFF_FIRST_MS));
    return [...told, ...placed];
  }
}

const firstOf = (item) => (item.kind === "gap" ? item.first : item.offset);
const lastOf = (item) => (item.kind === "gap" ? item.last : item.offset);

function joined(ranges) {
  const result = [];
  for (const [first, last] of [...ranges].sort((a, b) => a[0] - b[0])) {
    const before = result.at(-1);
    if (before !== undefined && first <= before[1] + 1) before[1] = Math.max(before[1], last);
    else result.push([first, last]);
  }
  return result;
}

/** Makes an entry of its JSON form, and checks its digest over the object as it was written. */
function verified(entry, literal) {
  const { envelope, fact, digest, offset } = entry;
  const json = isJson(envelope.object_media_type ?? JSON_TYPE);
  const objectJson = json ? write(literal.get("fact").get("object")) : undefined;
  const objectBytes = json ? Buffer.from(objectJson) : Buffer.from(fact.object_base64, "base64");
  if (!digest.startsWith("sha256:")) {
    throw new BsfgError("hasher_unknown", `the digest at offset ${offset} is not SHA-256, which is all that is known here`);
  }
  if (factDigest(fact.subject, fact.predicate, fact.artifact_digest, objectBytes) !== digest) {
    throw new BsfgError("digest_mismatch", `the fact at offset ${offset} does not match its digest`);
  }
  return {
    kind: "entry", offset, digest, envelope, objectJson, objectBytes, artifact: fact.artifact, origin: entry.origin,
    key: `${envelope.from_zone}/${envelope.message_id}`, subject: fact.subject, predicate: fact.predicate,
    appendedAtUnixMs: entry.appended_at_unix_ms,
  };
}

/** Uploads a file. It must be there before the fact that names it by the digest that this gives. */
export async function upload(node, bucket, key, path, mediaType = "application/octet-stream", options = {}) {
  const sha256 = createHash("sha256");
  for await (const piece of createReadStream(path)) sha256.update(piece);
  const digest = `sha256:${sha256.digest("hex")}`;
  const headers = { "Content-Type": mediaType, "Content-Length": (await stat(path)).size };
  const to = pathOf(["objects", bucket, key], { digest });
  return (await insist(() => node.json("PUT", to, { body: createReadStream(path), headers }), options)).found;
}

/** Downloads an artifact by its digest; goes on where it broke off, and gives the file its name when it is right. */
export async function download(node, digest, path, options = {}) {
  const part = join(dirname(path), `${basename(path)}.${digest.slice(7, 19)}.part`);
  await insist(async () => {
    const file = await open(part, "a");
    let isEmpty = false;
    try {
      const begun = (await file.stat()).size;
      const headers = begun ? { Range: `bytes=${begun}-` } : {};
      let answer;
      try {
        answer = await node.ask("GET", pathOf(["artifacts", digest]), { headers });
      } catch (error) {
        // Nothing follows what is here: either it is all, or it is something else; the digest will tell.
        if (error.status === 416) return;
        isEmpty = begun === 0;
        throw error;
      }
      if (begun && answer.statusCode !== 206) await file.truncate(0);
      try {
        for await (const piece of answer) await file.write(piece);
      } catch (error) {
        throw unreachable(error.message);
      }
      if (!answer.complete) throw unreachable("the node broke off in the middle of an artifact");
      await file.sync();
    } finally {
      await file.close();
      if (isEmpty) await unlink(part);
    }
  }, options);
  const sha256 = createHash("sha256");
  for await (const piece of createReadStream(part)) sha256.update(piece);
  if (`sha256:${sha256.digest("hex")}` !== digest) {
    await unlink(part);
    throw new BsfgError("digest_mismatch", `what came for ${digest} is something else`);
  }
  await rename(part, path);
  await syncFolder(dirname(path));
}
