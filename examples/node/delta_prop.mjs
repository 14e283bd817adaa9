// A client for delta-prop: a `Producer` whose deltas have one effect each, a `Subscriber` that resumes where it was.
// Rule: every wait has a deadline, every buffer a bound; a connection that breaks is made again and nobody notices.

import { randomBytes } from "node:crypto";
import { once } from "node:events";
import net from "node:net";
import { performance } from "node:perf_hooks";
import { setTimeout as sleep } from "node:timers/promises";
import tls from "node:tls";
import { HEADER_BYTES, OPERATIONS, Unsound, decode, encode, readFrame, renumbered } from "./frames.mjs";

const HEARTBEAT_MS = 5_000; // and a peer that is silent for three times as long is gone
const HANDSHAKE_MS_MAX = 10_000;
const RETRY_MS_FIRST = 50;
const RETRY_MS_MAX = 5_000;
const STOP_MS_MAX = 60_000; // how long a stop holds that no other level ends
const SEQUENCE_HELLO = 1n;
const SEQUENCE_SUBSCRIBE = 2n;

const CODES = [
  "", "BAD_FRAME", "UNSUPPORTED_VERSION", "UNSUPPORTED_FLAG", "TOO_LARGE", "CHECKSUM", "UNAUTHORIZED", "UNKNOWN_TOPIC",
  "QUEUE_FULL", "RATE_LIMITED", "DEP_TIMEOUT", "FENCED", "CURSOR_TOO_OLD", "PROCESSING_FAILED", "INVALID_DELTA",
  "SHUTTING_DOWN", "DOT_REUSED", "UNKNOWN_ORIGIN", "CONFLICT", "PENDING_FULL", "LOG_FULL", "LOG_FAILED",
  "LEVEL_UNAVAILABLE", "OVERLAP", "BAD_REQUEST", "UNKNOWN_JOB", "JOB_DECIDED", "ID_REUSED", "OUTCOME_UNKNOWN",
];
// The same delta is sent again under the same dot.
const OPEN = new Set(["QUEUE_FULL", "RATE_LIMITED", "DEP_TIMEOUT", "SHUTTING_DOWN", "PENDING_FULL", "LOG_FULL", "LOG_FAILED"]);
// The connection is of no use any more, but another one may be.
const CONNECT_AGAIN = new Set([
  "SHUTTING_DOWN", "LOG_FAILED", "CHECKSUM", "UNKNOWN_ORIGIN", "RATE_LIMITED", "OUTCOME_UNKNOWN",
]);
const UNKNOWN_OFFSET = 2n ** 63n - 1n; // nobody knows where it is: no acknowledgement, as the log may have lost it

/** A Nack, as an error. `code` is its name; `retryAfterMs` is undefined where waiting does not help. */
export class Refused extends Error {
  constructor(nack) {
    super(`${CODES[nack.code] ?? nack.code}: ${nack.text ?? "no reason was given"}`);
    this.code = CODES[nack.code] || String(nack.code);
    this.retryAfterMs = nack.retry_after_ms;
    this.row = nack.row;
    this.field = nack.field;
    this.details = Object.fromEntries(nack.details ?? []);
  }
}

/** An origin for a new producer, of 44 random bits, for deltas of one priority. Keep it: it is the producer's name. */
export function newOrigin(priority = 2) {
  return ((randomBytes(8).readBigUInt64BE() >> 20n) << 20n) | BigInt(priority);
}

/** The binary form of a topic: `*`, `v:ID`, `ns:NAME`, `op:KIND`, `c:NAME`. */
export function topic(text) {
  if (text === "*") return Buffer.of(0);
  const [, form, name] = /^(v|ns|op|c):(.+)$/s.exec(text) ?? [];
  if (!form) throw new TypeError(`topic ${text}: it is one of *, v:ID, ns:NAME, op:KIND, c:NAME`);
  if (form !== "op") return Buffer.concat([Buffer.of({ v: 1, ns: 2, c: 4 }[form]), Buffer.from(name)]);
  const kind = OPERATIONS.includes(name) ? OPERATIONS.indexOf(name) : Number(name);
  if (!(kind < 64)) throw new TypeError(`topic ${text}: the operation is none of ${OPERATIONS.join(", ")}, 10 to 63`);
  return Buffer.of(3, kind);
}

// --- one connection

/** One connection, from its hello to its end: frames in, frames out, heartbeats. */
class Link {
  /** Connects and says hello. `onFrame(frame)` gets what comes then, `onEnd(error)` the end, once. */
  static async open({ host = "127.0.0.1", port = 7373, tls: secure, heartbeatMs, ...hello }, onFrame, onEnd) {
    const socket = secure ? tls.connect({ host, port, minVersion: "TLSv1.3", ...secure }) : net.connect({ host, port });
    const link = new Link(socket, heartbeatMs, onFrame, onEnd);
    const deadline = setTimeout(() => link.end(new Error("no answer to the hello in time")), HANDSHAKE_MS_MAX);
    try {
      link.welcome = await new Promise((resolve, reject) => {
        link.hello = { resolve, reject };
        link.send({ type: "subscribe", sequence: SEQUENCE_HELLO, request: "hello", version: 1, ...hello });
      });
      return link;
    } finally {
      clearTimeout(deadline);
    }
  }

  constructor(socket, heartbeatMs = HEARTBEAT_MS, onFrame, onEnd) {
    Object.assign(this, { socket, heartbeatMs, onFrame, onEnd, ended: false, pieces: [], size: 0, needed: HEADER_BYTES });
    this.heard = this.sent = performance.now();
    this.numbers = 0n; // of heartbeats
    socket.setNoDelay(true);
    socket.on("data", (bytes) => this.receive(bytes));
    socket.on("error", (error) => this.end(error));
    socket.on("close", () => this.end(new Error("the connection broke")));
    this.timer = setInterval(() => this.keepAlive(), heartbeatMs / 5);
  }

  send(frame) {
    const bytes = Buffer.isBuffer(frame) ? frame : encode(frame);
    this.sent = performance.now();
    if (!this.ended) this.socket.write(bytes);
  }

  /** Waits until what was sent is out of memory. */
  async drained() {
    if (this.socket.writableNeedDrain && !this.ended) {
      await Promise.race([once(this.socket, "drain"), once(this.socket, "close")]).catch(() => {});
    }
  }

  receive(bytes) {
    this.heard = performance.now();
    this.pieces.push(bytes);
    this.size += bytes.length;
    if (this.size < this.needed) return;
    let buffer = Buffer.concat(this.pieces);
    try {
      for (let frame; !this.ended && (frame = readFrame(buffer)); buffer = buffer.subarray(frame.length)) {
        this.take(decode(buffer.subarray(0, frame.length)));
      }
      this.pieces = [buffer];
      this.size = buffer.length;
      this.needed = HEADER_BYTES + (buffer.length < HEADER_BYTES ? 0 : buffer.readUInt32BE(12));
    } catch (error) {
      if (error instanceof Unsound) this.send({ type: "nack", sequence: 0n, code: error.code, text: error.message });
      this.end(error);
    }
  }

  take(frame) {
    if (frame.type === "heartbeat") this.echo = frame.sent_us;
    if (frame.type === "nack" && frame.sequence === 0n && frame.correlation_id === undefined) return this.end(new Refused(frame));
    if (!this.hello) return this.onFrame(frame);
    if (frame.type === "nack") return this.end(new Refused(frame));
    if (frame.type === "ack" && frame.request === "hello") {
      const welcome = Object.fromEntries(frame.response);
      this.credit = frame.credit ?? this.credit ?? [0, 0];
      if (frame.more) return;
      this.hello.resolve(welcome);
      this.hello = null;
    }
  }

  keepAlive() {
    const now = performance.now();
    if (now - this.heard > 3 * this.heartbeatMs) return this.end(new Error("the server has been silent for too long"));
    if (now - this.sent < this.heartbeatMs) return;
    this.numbers += 1n;
    const fields = { sent_us: Math.round(now * 1000), ...(this.echo === undefined ? {} : { echo_us: this.echo }) };
    this.send({ type: "heartbeat", sequence: this.numbers, ...fields });
  }

  end(error) {
    if (this.ended) return;
    this.ended = true;
    clearInterval(this.timer);
    this.socket.end();
    this.socket.destroySoon();
    if (this.hello) this.hello.reject(error);
    else this.onEnd(error);
  }
}

/** Something that keeps a connection: it is made again, with longer and longer waits, until it is closed. */
class Connected {
  constructor(options) {
    this.options = options;
    this.link = null;
    this.giveUpMs = options.giveUpMs ?? 60_000;
    this.closed = null; // an error, once it has ended
    this.connections = 0;
  }

  /** Connects; throws what no further attempt would change. */
  async connect() {
    const deadline = performance.now() + this.giveUpMs;
    for (let waitMs = RETRY_MS_FIRST; !this.closed; waitMs = Math.min(2 * waitMs, RETRY_MS_MAX)) {
      let link;
      try {
        link = await Link.open(this.hello(), (frame) => this.onFrame(frame), (error) => this.lost(error));
      } catch (error) {
        if (error instanceof Refused && !CONNECT_AGAIN.has(error.code)) throw error;
        if (performance.now() > deadline) throw error;
        await sleep(error.retryAfterMs ?? waitMs * (0.5 + Math.random()));
        continue;
      }
      if (link.ended) return; // already, and `lost` sees to it
      if (this.closed) return link.end(this.closed);
      this.connections += 1;
      this.link = link;
      return this.onWelcome(link);
    }
  }

  lost(error) {
    this.link = null;
    if (this.closed) return;
    if (error instanceof Refused && !CONNECT_AGAIN.has(error.code)) return this.fail(error);
    sleep(error.retryAfterMs ?? 0).then(() => this.connect()).catch((last) => this.fail(last));
  }

  /** The end, for good. Gives the error back. */
  fail(error) {
    if (this.closed) return this.closed;
    this.closed = error;
    this.link?.end(error);
    this.link = null;
    return error;
  }

  hello() {
    const { host, port, tls: secure, heartbeatMs, token, client } = this.options;
    return { host, port, tls: secure, heartbeatMs, ...(token && { token }), ...(client && { client }) };
  }
}

// --- publishing

/**
 * Publishes under one origin. Each `publish` becomes a batch (or, with `form: "delta"`, Delta frames) with dots of
 * its own, is kept until its outcome is told, and is sent again after a cut or a refusal that passes by itself.
 *
 *     const producer = await Producer.open({ port, origin });
 *     const { offset } = await producer.publish([{ vectorId: "doc-1", op: 0, values: Float32Array.of(1, 2) }]);
 *
 * Options: `host`, `port`, `tls`, `token`, `client`, `origin`, `priority` (2, normal), `ackLevel` (the highest that
 * the log grants), `form`, `giveUpMs` (60,000: how long it tries to connect, or to have one entry taken).
 */
export class Producer extends Connected {
  static async open(options) {
    const producer = new Producer(options);
    await producer.connect();
    return producer;
  }

  constructor(options) {
    super(options);
    this.origin = options.origin ?? newOrigin(options.priority);
    this.epoch = 0; // 0 asks for one; it is held from then on, for it is part of each batch's bytes
    this.counter = 0n; // of the next delta; known from the first welcome
    this.queue = []; // entries to be sent, in order
    this.flight = []; // entries that are sent and have no outcome yet, in order
    this.nextSequence = 1n; // on this connection; 0 would be the connection itself
    this.refusedUntil = 0; // nothing is sent before: of an open refusal,
    this.advisedUntil = 0; // of Backpressure,
    this.pacedUntil = 0; // of the rate in it
    this.rate = Infinity; // deltas a second
    this.counts = { frames: 0, resent: 0, nacks: 0, waitedForCredit: 0, slowed: 0 };
    this.wake = () => {};
  }

  /**
   * Publishes rows and gives `{ counter, offset, duplicate }`: their first dot and its place in the log. Throws
   * `Refused` where the server refused them for good. It is for the caller to bound how many are awaited.
   */
  async publish(rows, { clock } = {}) {
    if (this.closed) throw this.closed;
    const parts = this.options.form === "delta" ? rows.map((row) => [row]) : [rows];
    const outcomes = parts.map((part, i) => this.enter(part, i ? undefined : clock));
    return (await Promise.all(outcomes))[0];
  }

  enter(rows, clock) {
    const entry = { rows, clock, base: this.counter, count: rows.length, since: performance.now() };
    entry.bytes = this.encoded(entry);
    this.counter += BigInt(rows.length);
    this.queue.push(entry);
    this.wake();
    return new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
  }

  /** Encoded once, so that a repeat has the same bytes; its sequence alone is another. */
  encoded({ rows, base, clock }) {
    const { priority = 2, form } = this.options;
    const common = { sequence: 0n, ackWanted: true, origin: this.origin, clock, priority, ackLevel: this.ackLevel };
    if (form === "delta") return encode({ ...rows[0], ...common, type: "delta", counter: base });
    return encode({ ...common, type: "batch", epoch: this.epoch, base, rows });
  }

  hello() {
    return { ...super.hello(), origins: [[this.origin, this.epoch, 0]] };
  }

  onWelcome(link) {
    const [, epoch, watermark] = link.welcome.origins[0];
    const other = this.epoch && epoch !== this.epoch; // the server has lost its memory of this origin
    this.epoch = epoch;
    this.ackLevel ??= this.options.ackLevel ?? link.welcome.level ?? 0;
    this.counter ||= BigInt(watermark) + 1n;
    this.credit = link.credit.map(Number);
    this.refusedUntil = this.advisedUntil = this.pacedUntil = 0;
    this.rate = Infinity;
    this.nextSequence = 1n;
    this.counts.resent += this.flight.length;
    this.queue.unshift(...this.flight.splice(0)); // what has no outcome is sent again, before all else
    for (const entry of this.queue) if (other && entry.base > BigInt(watermark)) entry.bytes = this.encoded(entry);
    if (BigInt(watermark) + 1n < (this.queue[0]?.base ?? this.counter)) {
      throw this.fail(new Error(`the log has this origin up to counter ${watermark}: it has lost what it acknowledged`));
    }
    this.pump(link).catch((error) => link.end(error));
  }

  async pump(link) {
    while (this.link === link) {
      const waitMs = Math.max(this.refusedUntil, this.advisedUntil, this.pacedUntil) - performance.now();
      const entry = this.queue[0];
      if (!entry) await this.woken();
      else if (waitMs > 0) {
        this.counts.slowed += 1;
        await this.woken(waitMs);
      } else if (this.credit[0] <= 0 || this.credit[1] <= 0) {
        this.counts.waitedForCredit += 1;
        await this.woken();
      } else {
        this.dispatch(link, this.queue.shift());
        await link.drained();
      }
    }
  }

  dispatch(link, entry) {
    Object.assign(entry, { sequence: this.nextSequence, untold: entry.count, unknown: false });
    link.send(renumbered(entry.bytes, entry.sequence));
    this.nextSequence += BigInt(entry.count);
    this.credit[0] -= entry.count; // below 0, it may be: nothing more is sent until grants have brought it above
    this.credit[1] -= entry.bytes.length;
    this.counts.frames += 1;
    this.flight.push(entry);
    if (this.rate < Infinity) this.pacedUntil = performance.now() + (1000 * entry.count) / this.rate;
  }

  /** Until something changes, or for so long. */
  async woken(ms = 1_000) {
    let timer;
    await new Promise((resolve) => {
      this.wake = resolve;
      timer = setTimeout(resolve, ms);
    });
    clearTimeout(timer);
  }

  onFrame(frame) {
    if (frame.type === "ack") {
      for (const [first, last, offset, duplicate] of frame.ranges ?? []) {
        this.told(BigInt(first), BigInt(last), BigInt(offset), duplicate);
      }
      this.flight = this.flight.filter(({ untold }) => untold > 0);
      if (frame.credit) this.credit = this.credit.map((left, i) => left + Number(frame.credit[i]));
    } else if (frame.type === "nack") {
      this.refused(frame);
    } else if (frame.type === "backpressure") {
      this.rate = frame.level > 0 && frame.rate != null ? Math.max(Number(frame.rate), 1) : Infinity;
      const stopMs = Math.min(frame.retry_after_ms ?? STOP_MS_MAX, STOP_MS_MAX);
      this.advisedUntil = frame.level === 3 ? performance.now() + stopMs : 0;
      if (this.rate === Infinity) this.pacedUntil = 0;
    }
    this.wake();
  }

  /** Sequences `first` to `last` lie in the log from `offset` on. A frame with repeats needs several such ranges. */
  told(first, last, offset, duplicate) {
    for (const entry of this.flight) {
      const end = entry.sequence + BigInt(entry.count) - 1n;
      if (entry.sequence > last) break;
      if (end < first) continue;
      const from = first > entry.sequence ? first : entry.sequence;
      if (from === entry.sequence) entry.outcome = { counter: entry.base, offset: offset + (from - first), duplicate };
      entry.unknown ||= offset === UNKNOWN_OFFSET;
      entry.untold -= Number((last < end ? last : end) - from) + 1;
      if (entry.untold > 0) continue;
      if (entry.unknown) entry.reject(new Refused({ code: CODES.indexOf("OUTCOME_UNKNOWN"), text: "it may have happened" }));
      else entry.resolve(entry.outcome);
    }
  }

  refused(nack) {
    this.counts.nacks += 1;
    const error = new Refused(nack);
    const index = this.flight.findIndex(({ sequence }) => sequence === nack.sequence);
    if (index < 0) return;
    const [entry] = this.flight.splice(index, 1);
    if (OPEN.has(error.code)) {
      const now = performance.now();
      if (now - entry.since > this.giveUpMs) this.fail(error);
      this.refusedUntil = now + (error.retryAfterMs ?? RETRY_MS_FIRST);
      this.again(entry);
    } else if (error.code === "OVERLAP") this.again(this.cut(entry, BigInt(error.details.watermark)));
    else if (error.code === "UNKNOWN_ORIGIN" || (error.code === "OUTCOME_UNKNOWN" && error.retryAfterMs !== undefined)) {
      this.again(entry);
      this.link.end(error);
    } else {
      if (error.code === "FENCED") this.fail(error);
      entry.reject(error);
    }
  }

  /** Back into the queue, before all that comes after it. What is in flight behind it waits in the server for it. */
  again(entry) {
    if (this.closed) return entry.reject(this.closed);
    this.counts.resent += 1;
    const behind = this.queue.findIndex(({ base }) => base > entry.base);
    this.queue.splice(behind < 0 ? this.queue.length : behind, 0, entry);
  }

  /** The rows up to the watermark are done with: the rest is a batch of its own. */
  cut(entry, watermark) {
    const rows = entry.rows.slice(Number(watermark + 1n - entry.base));
    Object.assign(entry, { rows, count: rows.length, base: watermark + 1n });
    return Object.assign(entry, { bytes: this.encoded(entry) });
  }

  fail(error) {
    if (this.closed) return this.closed;
    super.fail(error);
    for (const entry of [...this.flight.splice(0), ...this.queue.splice(0)]) entry.reject(error);
    this.wake();
    return error;
  }

  /** Ends the connection. What has no outcome yet is rejected: await what was published before. */
  close() {
    this.fail(new Error("the producer is closed"));
  }
}

// --- subscribing

/**
 * Deltas from the log, as an async iterator over rows in the order of their offsets; each once.
 *
 *     for await (const delta of new Subscriber({ port, topics: ["ns:docs"], start: ["earliest"] })) ...
 *
 * What the loop has come back for is dealt with: it is acknowledged, gives credit for more, and `cursor` is behind
 * it. Keep the cursor beside what you did with the deltas, and `start: ["cursor", cursor]` goes on right there.
 */
export class Subscriber extends Connected {
  constructor(options) {
    super(options);
    this.window = options.credit ?? [1_000, 4 << 20];
    this.frames = []; // received, their rows not yet handed out
    this.cursor = null; // [log id, epoch, offset of the next delta to deal with]
    this.counts = { frames: 0, deltas: 0, heldMax: 0 };
    this.standby = false; // another member reads for the group
    this.member = randomBytes(16); // who this is there, over all connections
    this.wake = () => {};
  }

  onWelcome(link) {
    // What is here stays, is not asked for again, and gives its credit when it is dealt with.
    for (const frame of this.frames) frame.cost[0] = frame.rows.length;
    const held = this.frames.reduce(([n, b], { cost }) => [n + cost[0], b + cost[1]], [0, 0]);
    const { topics = ["*"], start = ["latest"], group, filter, deltas } = this.options;
    link.send({
      type: "subscribe",
      sequence: SEQUENCE_SUBSCRIBE,
      request: "subscribe",
      version: 1,
      subscription: 1,
      topics: topics.map(topic),
      start: this.position === undefined || !this.log ? start : ["cursor", [this.log[0], this.log[1], this.position]],
      credit: this.window.map((most, i) => Math.max(most - held[i], 0)),
      ...(group && { group, member: this.member }), ...(filter && { filter }), ...(deltas && { deltas }),
    });
  }

  onFrame(frame) {
    if (frame.type === "ack" && frame.request === "subscribe") this.granted(Object.fromEntries(frame.response));
    else if (frame.type === "nack") this.link.end(new Refused(frame));
    else if (frame.type === "batch" || frame.type === "delta") this.delivered(frame);
    const dealtWith = BigInt(frame.processed ?? 0);
    if (this.position !== undefined && dealtWith > this.position) this.position = dealtWith;
    if (this.frames.length === 0 && this.cursor) this.cursor = [this.log[0], this.log[1], this.position];
    this.wake();
  }

  granted({ start, standby = false, resets = 0 }) {
    const before = this.cursor && { resets: this.resets, offset: this.cursor[2] };
    const othersReadOn = this.options.group && before
      && (Number(resets) !== before.resets || BigInt(start[2]) > before.offset);
    if (standby || this.standby || othersReadOn) {
      for (const frame of this.frames.splice(0)) frame.rows.length = 0; // another reader's now
      this.position = undefined;
      this.cursor = null;
    }
    this.standby = standby;
    if (standby) return; // a second answer comes when this member is the one that reads
    this.resets = Number(resets);
    this.log = start;
    this.position ??= BigInt(start[2]); // the next offset that may come
    this.cursor ??= [start[0], start[1], this.position];
  }

  delivered(frame) {
    const rows = frame.type === "delta" ? [fromDelta(frame)] : fromBatch(frame);
    const fresh = rows.filter(({ offset }) => offset >= this.position);
    const last = frame.type === "delta" ? frame.sequence : lastOffset(frame);
    if (last >= this.position) this.position = last + 1n;
    this.counts.frames += 1;
    this.frames.push({ rows: fresh, cost: [frame.rows?.length ?? 1, frame.length], end: last + 1n });
    const held = this.frames.reduce((sum, { rows: left }) => sum + left.length, 0);
    this.counts.heldMax = Math.max(this.counts.heldMax, held);
  }

  /** Where to go on once this delta is dealt with, too. */
  after(delta) {
    return [this.log[0], this.log[1], delta.offset + 1n];
  }

  async *[Symbol.asyncIterator]() {
    await this.connect();
    try {
      while (!this.closed) {
        const frame = this.frames[0];
        if (!frame) {
          await new Promise((resolve) => (this.wake = resolve));
          continue;
        }
        while (frame.rows.length) {
          this.counts.deltas += 1;
          yield frame.rows[0];
          if (this.frames[0] !== frame) break; // the group went on without this member
          this.cursor = this.after(frame.rows.shift());
        }
        if (this.frames[0] !== frame) continue;
        this.frames.shift();
        this.acknowledge(frame);
      }
      throw this.closed;
    } finally {
      this.fail(new Error("the subscription has ended"));
    }
  }

  acknowledge({ cost, end }) {
    this.cursor = [this.log[0], this.log[1], this.frames.length ? end : this.position];
    this.link?.send({
      type: "ack",
      sequence: 0n,
      processed: this.cursor[2],
      ...(this.options.group && { cursor: this.cursor }),
      credit: cost,
    });
  }

  fail(error) {
    super.fail(error);
    this.wake();
  }
}

function fromDelta({ type, sequence, length, ackWanted, ...delta }) {
  return { ...delta, offset: sequence };
}

/** A batch's rows, with offset, dot and Lamport number. Control rows only fill places: nobody gets them. */
function fromBatch({ sequence, control, rows, stamp, origin }) {
  if (control) return [];
  return rows.map((row, i) => {
    const offset = row.offset ?? sequence + BigInt(i);
    return { ...row, origin, offset, lamport: stamp.lamport + (offset - sequence) };
  });
}

function lastOffset({ sequence, rows }) {
  return rows.at(-1).offset ?? sequence + BigInt(rows.length) - 1n;
}
