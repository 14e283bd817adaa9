// A client for delta-prop: a `Producer` whose deltas each have one effect, and a `Subscriber` that resumes at its cursor.
// Every wait has a deadline and every buffer a bound. A client reconnects by itself after its connection breaks.

import { randomBytes } from "node:crypto";
import { once } from "node:events";
import net from "node:net";
import { performance } from "node:perf_hooks";
import { setTimeout as sleep } from "node:timers/promises";
import tls from "node:tls";
import { HEADER_BYTES, InvalidFrame, OPERATIONS, decode, encode, partitionOf, readFrame, withSequence } from "./frames.mjs";

const HEARTBEAT_MS = 5_000; // a peer that is silent for three times as long has timed out
const HANDSHAKE_TIMEOUT_MS = 10_000;
const RETRY_BACKOFF_MS = 50;
const RETRY_BACKOFF_MAX_MS = 5_000;
const STOP_MS_MAX = 60_000; // how long a stop by Backpressure lasts if no other pressure level ends it

// The names of the error codes; the index is the code.
const CODES = [
  "", "BAD_FRAME", "UNSUPPORTED_VERSION", "UNSUPPORTED_FLAG", "TOO_LARGE", "CHECKSUM", "UNAUTHORIZED", "UNKNOWN_TOPIC",
  "QUEUE_FULL", "RATE_LIMITED", "DEP_TIMEOUT", "FENCED", "CURSOR_TOO_OLD", "PROCESSING_FAILED", "INVALID_DELTA",
  "SHUTTING_DOWN", "DOT_REUSED", "UNKNOWN_ORIGIN", "CONFLICT", "PENDING_FULL", "LOG_FULL", "LOG_FAILED",
  "LEVEL_UNAVAILABLE", "OVERLAP", "BAD_REQUEST", "UNKNOWN_JOB", "JOB_DECIDED", "ID_REUSED", "OUTCOME_UNKNOWN",
  "NOT_LEADER", "NO_QUORUM", "WRONG_PARTITION", "UNKNOWN_STREAM", "STALE_GENERATION", "STREAM_MOVED", "QUOTA_EXCEEDED",
];
// After these codes the producer resends the same delta under the same dot.
const RETRYABLE = new Set([
  "QUEUE_FULL", "RATE_LIMITED", "DEP_TIMEOUT", "SHUTTING_DOWN", "PENDING_FULL", "LOG_FULL", "LOG_FAILED",
  "QUOTA_EXCEEDED",
]);
// These codes end a connection, but a new connection may succeed.
const RECONNECTABLE = new Set([
  "SHUTTING_DOWN", "LOG_FAILED", "CHECKSUM", "UNKNOWN_ORIGIN", "RATE_LIMITED", "OUTCOME_UNKNOWN",
]);
// The offset in an Ack for a delta that the log may have lost: treat its outcome as unknown.
const UNKNOWN_OFFSET = 2n ** 63n - 1n;

/** A Nack as an error. `code` is the name of the error code; `retryAfterMs` is undefined if a retry cannot succeed. */
export class Refused extends Error {
  constructor(nack) {
    super(`${CODES[nack.code] ?? nack.code}: ${nack.text ?? "the server gave no reason"}`);
    this.code = CODES[nack.code] || String(nack.code);
    this.retryAfterMs = nack.retry_after_ms;
    this.row = nack.row;
    this.field = nack.field;
    this.details = Object.fromEntries(nack.details ?? []);
  }
}

/** The error for options that cannot work with this server. */
export class UsageError extends Error {}

/** Returns an origin for a new producer: 44 random bits and the priority. Store it, because it identifies the producer. */
export function drawOrigin(priority = 2) {
  return ((randomBytes(8).readBigUInt64BE() >> 20n) << 20n) | BigInt(priority);
}

/** Returns the origin of the same producer and priority in another partition: bits 4 to 19 are the partition's number. */
export function originIn(partition, origin) {
  return (origin & ~0xffff0n) | (BigInt(partition) << 4n);
}

/** Asks a server for a stream, and returns `{ name, id, count }`: its id, and its number of partitions. */
export async function findStream({ stream, ...options }) {
  const asker = new StreamAsker({ ...options, stream });
  await asker.connect();
  asker.fail(new Error("the stream was found"));
  return asker.found;
}

/** Returns the binary form of a topic: `*`, `v:ID`, `ns:NAME`, `op:KIND`, `c:NAME`. */
export function encodeTopic(text) {
  if (text === "*") return Buffer.of(0);
  const [, prefix, name] = /^(v|ns|op|c):(.+)$/s.exec(text) ?? [];
  if (!prefix) throw new TypeError(`topic ${text}: unknown form: use *, v:ID, ns:NAME, op:KIND or c:NAME`);
  if (prefix !== "op") return Buffer.concat([Buffer.of({ v: 1, ns: 2, c: 4 }[prefix]), Buffer.from(name)]);
  const kind = OPERATIONS.includes(name) ? OPERATIONS.indexOf(name) : Number(name);
  if (!(Number.isInteger(kind) && kind >= 0 && kind < 64)) {
    throw new TypeError(`topic ${text}: unknown operation: use ${OPERATIONS.join(", ")} or a number from 10 to 63`);
  }
  return Buffer.of(3, kind);
}

// --- one connection

/** One connection, from its hello to its end: frames in both directions, and heartbeats. */
class Connection {
  /**
   * Connects and sends the hello that `greet` builds; before that, `greet` may ask the server. Calls `onFrame` with each
   * frame after the welcome, and `onEnd` once with the error.
   */
  static async open({ host = "127.0.0.1", port = 7373, tls: secure, heartbeatMs }, greet, onFrame, onEnd) {
    const socket = secure ? tls.connect({ host, port, minVersion: "TLSv1.3", ...secure }) : net.connect({ host, port });
    const connection = new Connection(socket, heartbeatMs, onFrame, onEnd);
    const timedOut = () => connection.end(new Error(`no welcome within ${HANDSHAKE_TIMEOUT_MS} ms: check host and port`));
    const deadline = setTimeout(timedOut, HANDSHAKE_TIMEOUT_MS);
    try {
      const hello = await greet(connection);
      connection.welcome = await connection.request("hello", hello, { isLast: true });
      return connection;
    } catch (error) {
      connection.end(error);
      throw error;
    } finally {
      clearTimeout(deadline);
    }
  }

  constructor(socket, heartbeatMs = HEARTBEAT_MS, onFrame, onEnd) {
    Object.assign(this, { socket, heartbeatMs, onFrame, onEnd, ended: false });
    this.isOpening = true; // until the answer to the last hello
    this.requests = 0n; // how many were sent
    // The received bytes that are not handled yet, and how many bytes the next frame needs.
    Object.assign(this, { chunks: [], bytesReceived: 0, bytesNeeded: HEADER_BYTES });
    this.receivedAt = this.sentAt = performance.now();
    this.heartbeats = 0n;
    socket.setNoDelay(true);
    socket.on("data", (bytes) => this.receive(bytes));
    socket.on("error", (error) => this.end(error));
    socket.on("close", () => this.end(new Error("the connection was closed")));
    this.timer = setInterval(() => this.keepAlive(), heartbeatMs / 5);
  }

  send(frame) {
    const bytes = Buffer.isBuffer(frame) ? frame : encode(frame);
    this.sentAt = performance.now();
    if (!this.ended) this.socket.write(bytes);
  }

  sendRequest(name, fields) {
    this.requests += 1n;
    this.send({ type: "subscribe", sequence: this.requests, request: name, version: 1, ...fields });
  }

  /** Sends a request while the connection opens, and returns the fields of the answer. `isLast`: it opens the connection. */
  request(name, fields, { isLast = false } = {}) {
    if (this.ended) throw this.error;
    return new Promise((resolve, reject) => {
      this.pending = { name, isLast, resolve, reject };
      this.sendRequest(name, fields);
    });
  }

  /** Waits until the socket's send buffer has capacity. */
  async waitForDrain() {
    if (this.socket.writableNeedDrain && !this.ended) {
      await Promise.race([once(this.socket, "drain"), once(this.socket, "close")]).catch(() => {});
    }
  }

  receive(bytes) {
    this.receivedAt = performance.now();
    this.chunks.push(bytes);
    this.bytesReceived += bytes.length;
    if (this.bytesReceived < this.bytesNeeded) return;
    let buffer = Buffer.concat(this.chunks);
    try {
      for (let frame; !this.ended && (frame = readFrame(buffer)); buffer = buffer.subarray(frame.length)) {
        this.handle(decode(buffer.subarray(0, frame.length)));
      }
      this.chunks = [buffer];
      this.bytesReceived = buffer.length;
      this.bytesNeeded = HEADER_BYTES + (buffer.length < HEADER_BYTES ? 0 : buffer.readUInt32BE(12));
    } catch (error) {
      if (error instanceof InvalidFrame) this.send({ type: "nack", sequence: 0n, code: error.code, text: error.message });
      this.end(error);
    }
  }

  handle(frame) {
    if (frame.type === "heartbeat") this.echoUs = frame.sent_us;
    const refusesConnection = frame.type === "nack" && frame.sequence === 0n && frame.correlation_id === undefined;
    if (refusesConnection) return this.end(new Refused(frame));
    if (!this.isOpening) return this.onFrame(frame);
    if (frame.type === "nack") return this.end(new Refused(frame));
    if (frame.type === "ack" && frame.request === this.pending?.name) {
      this.credit = frame.credit ?? this.credit ?? [0, 0];
      if (frame.more) return;
      const { isLast, resolve } = this.pending;
      this.pending = null;
      this.isOpening = !isLast;
      resolve(Object.fromEntries(frame.response));
    }
  }

  keepAlive() {
    const now = performance.now();
    if (now - this.receivedAt > 3 * this.heartbeatMs) {
      return this.end(new Error(`the server sent nothing for ${3 * this.heartbeatMs} ms: check the network`));
    }
    if (now - this.sentAt < this.heartbeatMs) return;
    this.heartbeats += 1n;
    const fields = { sent_us: Math.round(now * 1000), ...(this.echoUs === undefined ? {} : { echo_us: this.echoUs }) };
    this.send({ type: "heartbeat", sequence: this.heartbeats, ...fields });
  }

  end(error) {
    if (this.ended) return;
    this.ended = true;
    this.error = error;
    clearInterval(this.timer);
    this.socket.end();
    this.socket.destroySoon();
    if (this.isOpening) this.pending?.reject(error);
    else this.onEnd(error);
  }
}

/** Reconnects after its connection ends, with exponential backoff, until it is closed. */
class ReconnectingClient {
  constructor(options) {
    const { partition = 0 } = options;
    if (!(Number.isInteger(partition) && partition >= 0)) throw new UsageError(`partition ${partition}: give a number from 0 on`);
    this.options = options;
    this.connection = null;
    this.timeoutMs = options.timeoutMs ?? 60_000;
    this.closed = null; // the final error, once the client is closed
    this.connections = 0;
  }

  /** Connects. Throws an error at once if a retry cannot succeed, or the last error after `timeoutMs`. */
  async connect() {
    const deadline = performance.now() + this.timeoutMs;
    for (let waitMs = RETRY_BACKOFF_MS; !this.closed; waitMs = Math.min(2 * waitMs, RETRY_BACKOFF_MAX_MS)) {
      let connection;
      try {
        const handlers = [(frame) => this.onFrame(frame), (error) => this.onEnd(error)];
        connection = await Connection.open(this.options, (opening) => this.greet(opening), ...handlers);
      } catch (error) {
        if (error instanceof UsageError || (error instanceof Refused && !RECONNECTABLE.has(error.code))) throw error;
        if (performance.now() > deadline) throw error;
        await sleep(error.retryAfterMs ?? waitMs * (0.5 + Math.random()));
        continue;
      }
      if (connection.ended) return; // `onEnd` has scheduled the next attempt already
      if (this.closed) return connection.end(this.closed);
      this.connections += 1;
      this.connection = connection;
      return this.onWelcome(connection);
    }
  }

  onEnd(error) {
    this.connection = null;
    if (this.closed) return;
    if (error instanceof Refused && !RECONNECTABLE.has(error.code)) return this.fail(error);
    sleep(error.retryAfterMs ?? 0).then(() => this.connect()).catch((last) => this.fail(last));
  }

  /** Closes the client with a final error, and returns this error. */
  fail(error) {
    if (this.closed) return this.closed;
    this.closed = error;
    this.connection?.end(error);
    this.connection = null;
    return error;
  }

  /**
   * Returns the hello to send. A stream is known by its name: the first time, this asks for its id and its number of
   * partitions, which a connection does after a hello that names no stream.
   */
  async greet(connection) {
    const { stream, partition } = this.options;
    if (stream === undefined && partition === undefined) return this.hello();
    this.found ??= await this.describe(connection, stream ?? "default");
    const { name, count } = this.found;
    if (partition === undefined && count > 1) throw new UsageError(`stream ${name} has ${count} partitions: name one`);
    if (partition >= count) throw new UsageError(`partition ${partition}: stream ${name} has ${count}: name 0 to ${count - 1}`);
    return { ...this.hello(), stream: this.found.id, partition: partition ?? 0 };
  }

  async describe(connection, name) {
    await connection.request("hello", commonHello(this.options));
    const { streams } = await connection.request("describe", { stream: name });
    const [[, id, , count = 1]] = streams;
    return { name, id, count };
  }

  /** Returns the fields of the hello, except the stream and the partition. */
  hello() {
    return commonHello(this.options);
  }
}

function commonHello({ token, client }) {
  return { ...(token && { token }), ...(client && { client }) };
}

/** Finds a stream, and does no more. */
class StreamAsker extends ReconnectingClient {
  async greet(connection) {
    this.found = await this.describe(connection, this.options.stream);
    return this.hello();
  }

  onFrame() {}

  onWelcome() {}
}

// --- publishing

/**
 * Publishes under one origin. Each `publish` sends a batch (or, with `form: "delta"`, Delta frames) with dots of its own.
 * The producer stores the batch until its outcome is known, and resends it after a reconnect or a retryable refusal.
 *
 *     const producer = await Producer.open({ port, origin });
 *     const { offset } = await producer.publish([{ vectorId: "doc-1", op: 0, values: Float32Array.of(1, 2) }]);
 *
 * Options: `host`, `port`, `tls`, `token`, `client`, `origin`, `priority` (2, normal), `ackLevel` (default: the highest
 * that the log grants), `form`, `timeoutMs` (60,000: a producer closes if it cannot connect for this long, or if a batch
 * is still refused after this time), `stream` (its name) and `partition` (it may be left out if there is only one).
 */
export class Producer extends ReconnectingClient {
  static async open(options) {
    const producer = new Producer(options);
    await producer.connect();
    return producer;
  }

  constructor(options) {
    super(options);
    this.origin = options.origin ?? drawOrigin(options.priority);
    if (options.stream !== undefined || options.partition !== undefined) {
      this.origin = originIn(options.partition ?? 0, this.origin);
    }
    this.epoch = 0; // 0 requests a new epoch; later hellos name the granted epoch, which each encoded batch contains
    this.counter = 0n; // of the next delta; known from the first welcome
    this.queue = []; // entries to send, in order
    this.inFlight = []; // entries that were sent and have no outcome yet, in order
    this.nextSequence = 1n; // of this connection; a Nack with 0 is about the connection itself
    // The producer sends nothing before any of these times:
    this.refusedUntil = 0; // the time to retry of the last retryable refusal,
    this.stoppedUntil = 0; // the end of a stop by Backpressure,
    this.pacedUntil = 0; // the next send at the rate of Backpressure
    this.rate = Infinity; // deltas per second
    this.counts = { frames: 0, resent: 0, nacks: 0, creditWaits: 0, pacingWaits: 0 };
    this.wake = () => {};
  }

  /**
   * Publishes rows and returns `{ counter, offset, duplicate }`: the first counter and its offset in the log. Throws
   * `Refused` if the refusal is final. The caller limits the number of calls in flight.
   */
  async publish(rows, { clock } = {}) {
    if (this.closed) throw this.closed;
    const parts = this.options.form === "delta" ? rows.map((row) => [row]) : [rows];
    const outcomes = parts.map((part, i) => this.enqueue(part, i ? undefined : clock));
    return (await Promise.all(outcomes))[0];
  }

  enqueue(rows, clock) {
    const entry = { rows, clock, base: this.counter, count: rows.length, enqueuedAt: performance.now() };
    entry.bytes = this.encodeEntry(entry);
    this.counter += BigInt(rows.length);
    this.queue.push(entry);
    this.wake();
    return new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
  }

  /** Encodes an entry once, because a resend must have the same bytes; only the sequence changes. */
  encodeEntry({ rows, base, clock }) {
    const { priority = 2, form } = this.options;
    const { id: stream } = this.found ?? {};
    const common = { sequence: 0n, ackWanted: true, origin: this.origin, clock, priority, ackLevel: this.ackLevel, stream };
    if (form === "delta") {
      const partition = stream === undefined ? undefined : partitionOf(this.origin);
      return encode({ ...rows[0], ...common, partition, type: "delta", counter: base });
    }
    return encode({ ...common, type: "batch", epoch: this.epoch, base, rows });
  }

  hello() {
    return { ...super.hello(), origins: [[this.origin, this.epoch, this.found?.id ?? 0]] };
  }

  onWelcome(connection) {
    const [, epoch, watermark] = connection.welcome.origins[0];
    const epochChanged = this.epoch && epoch !== this.epoch; // the server no longer knows this origin
    this.epoch = epoch;
    this.ackLevel ??= this.options.ackLevel ?? connection.welcome.default_level ?? connection.welcome.level ?? 0;
    this.counter ||= BigInt(watermark) + 1n;
    this.credit = connection.credit.map(Number);
    this.refusedUntil = this.stoppedUntil = this.pacedUntil = 0;
    this.rate = Infinity;
    this.nextSequence = 1n;
    this.counts.resent += this.inFlight.length;
    // Entries without an outcome are resent, together with entries that were refused, in the order of their counters.
    this.queue.unshift(...this.inFlight.splice(0));
    this.queue.sort((one, other) => (one.base < other.base ? -1 : 1));
    for (const entry of this.queue) {
      if (epochChanged && entry.base > BigInt(watermark)) entry.bytes = this.encodeEntry(entry);
    }
    if (BigInt(watermark) + 1n < (this.queue[0]?.base ?? this.counter)) {
      const problem = `watermark ${watermark} of origin ${this.origin}: the log lost acknowledged deltas`;
      throw this.fail(new Error(`${problem}: restore the log, or publish these deltas under a new origin`));
    }
    this.sendQueue(connection).catch((error) => connection.end(error));
  }

  /** Sends queued entries while this connection is open, as fast as credit and Backpressure allow. */
  async sendQueue(connection) {
    while (this.connection === connection) {
      const waitMs = Math.max(this.refusedUntil, this.stoppedUntil, this.pacedUntil) - performance.now();
      const entry = this.queue[0];
      if (!entry) await this.waitForWake();
      else if (waitMs > 0) {
        this.counts.pacingWaits += 1;
        await this.waitForWake(waitMs);
      } else if (this.credit[0] <= 0 || this.credit[1] <= 0) {
        this.counts.creditWaits += 1;
        await this.waitForWake();
      } else {
        this.sendEntry(connection, this.queue.shift());
        await connection.waitForDrain();
      }
    }
  }

  sendEntry(connection, entry) {
    Object.assign(entry, { sequence: this.nextSequence, rowsWithoutOutcome: entry.count, isUnknown: false });
    connection.send(withSequence(entry.bytes, entry.sequence));
    this.nextSequence += BigInt(entry.count);
    this.credit[0] -= entry.count; // the balance may go below 0, and then the producer waits for grants
    this.credit[1] -= entry.bytes.length;
    this.counts.frames += 1;
    this.inFlight.push(entry);
    if (this.rate < Infinity) this.pacedUntil = performance.now() + (1000 * entry.count) / this.rate;
  }

  /** Waits for the next call of `wake`, up to `ms` milliseconds. */
  async waitForWake(ms = 1_000) {
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
        this.onRange(BigInt(first), BigInt(last), BigInt(offset), duplicate);
      }
      this.inFlight = this.inFlight.filter(({ rowsWithoutOutcome }) => rowsWithoutOutcome > 0);
      if (frame.credit) this.credit = this.credit.map((left, i) => left + Number(frame.credit[i]));
    } else if (frame.type === "nack") {
      this.onNack(frame);
    } else if (frame.type === "backpressure") {
      this.rate = frame.level > 0 && frame.rate != null ? Math.max(Number(frame.rate), 1) : Infinity;
      const stopMs = Math.min(frame.retry_after_ms ?? STOP_MS_MAX, STOP_MS_MAX);
      this.stoppedUntil = frame.level === 3 ? performance.now() + stopMs : 0;
      if (this.rate === Infinity) this.pacedUntil = 0;
    }
    this.wake();
  }

  /** Handles one range of an Ack: sequences `first` to `last` have offsets from `offset` on. An entry may lie in several. */
  onRange(first, last, offset, duplicate) {
    for (const entry of this.inFlight) {
      const end = entry.sequence + BigInt(entry.count) - 1n;
      if (entry.sequence > last) break;
      if (end < first) continue;
      const from = first > entry.sequence ? first : entry.sequence;
      if (from === entry.sequence) entry.outcome = { counter: entry.base, offset: offset + (from - first), duplicate };
      entry.isUnknown ||= offset === UNKNOWN_OFFSET;
      entry.rowsWithoutOutcome -= Number((last < end ? last : end) - from) + 1;
      if (entry.rowsWithoutOutcome > 0) continue;
      const code = CODES.indexOf("OUTCOME_UNKNOWN");
      if (entry.isUnknown) entry.reject(new Refused({ code, text: "the log no longer has these dots: read the vectors" }));
      else entry.resolve(entry.outcome);
    }
  }

  onNack(nack) {
    this.counts.nacks += 1;
    const error = new Refused(nack);
    const index = this.inFlight.findIndex(({ sequence }) => sequence === nack.sequence);
    if (index < 0) return;
    const [entry] = this.inFlight.splice(index, 1);
    if (RETRYABLE.has(error.code)) {
      const now = performance.now();
      if (now - entry.enqueuedAt > this.timeoutMs) this.fail(error);
      this.refusedUntil = now + (error.retryAfterMs ?? RETRY_BACKOFF_MS);
      this.requeue(entry);
    } else if (error.code === "OVERLAP") this.requeue(this.dropAccepted(entry, BigInt(error.details.watermark)));
    else if (error.code === "UNKNOWN_ORIGIN" || (error.code === "OUTCOME_UNKNOWN" && error.retryAfterMs !== undefined)) {
      this.requeue(entry);
      this.connection.end(error);
    } else {
      if (error.code === "FENCED") this.fail(error);
      entry.reject(error);
    }
  }

  /** Puts an entry back into the queue, in counter order. The server keeps later entries pending until this one arrives. */
  requeue(entry) {
    if (this.closed) return entry.reject(this.closed);
    this.counts.resent += 1;
    const index = this.queue.findIndex(({ base }) => base > entry.base);
    this.queue.splice(index < 0 ? this.queue.length : index, 0, entry);
  }

  /** Removes the rows up to the watermark from an entry, because the log has them, and encodes the remaining rows. */
  dropAccepted(entry, watermark) {
    const rows = entry.rows.slice(Number(watermark + 1n - entry.base));
    Object.assign(entry, { rows, count: rows.length, base: watermark + 1n });
    return Object.assign(entry, { bytes: this.encodeEntry(entry) });
  }

  fail(error) {
    if (this.closed) return this.closed;
    super.fail(error);
    for (const entry of [...this.inFlight.splice(0), ...this.queue.splice(0)]) entry.reject(error);
    this.wake();
    return error;
  }

  /** Closes the connection. Rejects calls without an outcome, so await these first. */
  close() {
    this.fail(new Error("the producer is closed: open another one"));
  }
}

// --- subscribing

/**
 * Subscribes to deltas from the log. It is an async iterator over rows in offset order, and yields each row once.
 *
 *     for await (const delta of new Subscriber({ port, topics: ["ns:docs"], start: ["earliest"] })) ...
 *
 * When the loop asks for the next row, the last one counts as processed: `cursor` moves past it. A frame whose rows are
 * all processed is acknowledged, and returns its credit. Store the cursor with your results, and pass it as
 * `start: ["cursor", cursor]` to resume there.
 */
export class Subscriber extends ReconnectingClient {
  constructor(options) {
    super(options);
    this.window = options.credit ?? [1_000, 4 << 20]; // deltas and bytes
    this.frames = []; // received frames with rows that are not processed yet
    this.cursor = null; // [log id, epoch, next offset to process]
    this.counts = { frames: 0, deltas: 0, bufferedMax: 0 };
    this.standby = false; // true while another member reads for the group
    this.member = randomBytes(16); // identifies this group member across reconnects
    this.wake = () => {};
  }

  onWelcome(connection) {
    // Buffered frames stay. Their unprocessed rows count against the new credit until they are processed.
    for (const frame of this.frames) frame.cost[0] = frame.rows.length;
    const buffered = this.frames.reduce(([n, b], { cost }) => [n + cost[0], b + cost[1]], [0, 0]);
    const { topics = ["*"], start = ["latest"], group, filter, deltas } = this.options;
    connection.sendRequest("subscribe", {
      subscription: 1,
      topics: topics.map(encodeTopic),
      start: this.nextOffset === undefined || !this.log ? start : ["cursor", [this.log[0], this.log[1], this.nextOffset]],
      credit: this.window.map((max, i) => Math.max(max - buffered[i], 0)),
      ...(group && { group, member: this.member }), ...(filter && { filter }), ...(deltas && { deltas }),
    });
  }

  onFrame(frame) {
    if (frame.type === "ack" && frame.request === "subscribe") this.onSubscribed(Object.fromEntries(frame.response));
    else if (frame.type === "nack") this.connection.end(new Refused(frame));
    else if (frame.type === "batch" || frame.type === "delta") this.onDelivery(frame);
    const processed = BigInt(frame.processed ?? 0);
    if (this.nextOffset !== undefined && processed > this.nextOffset) this.nextOffset = processed;
    if (this.frames.length === 0 && this.cursor) this.cursor = [this.log[0], this.log[1], this.nextOffset];
    this.wake();
  }

  onSubscribed({ start, standby = false, resets = 0 }) {
    const before = this.cursor && { resets: this.resets, offset: this.cursor[2] };
    const groupMoved = this.options.group && before
      && (Number(resets) !== before.resets || BigInt(start[2]) > before.offset);
    if (standby || this.standby || groupMoved) {
      for (const frame of this.frames.splice(0)) frame.rows.length = 0; // another member reads these rows
      this.nextOffset = undefined;
      this.cursor = null;
    }
    this.standby = standby;
    if (standby) return; // the server sends a second response when this member becomes the reader
    this.resets = Number(resets);
    this.log = start;
    this.nextOffset ??= BigInt(start[2]); // rows below it are duplicates
    this.cursor ??= [start[0], start[1], this.nextOffset];
  }

  onDelivery(frame) {
    const rows = frame.type === "delta" ? [rowOfDelta(frame)] : rowsOfBatch(frame);
    const newRows = rows.filter(({ offset }) => offset >= this.nextOffset);
    const last = frame.type === "delta" ? frame.sequence : lastOffset(frame);
    if (last >= this.nextOffset) this.nextOffset = last + 1n;
    this.counts.frames += 1;
    // `cost`: the credit that the frame has spent, in deltas and bytes. `end`: the offset after its rows.
    this.frames.push({ rows: newRows, cost: [frame.rows?.length ?? 1, frame.length], end: last + 1n });
    const buffered = this.frames.reduce((sum, { rows: left }) => sum + left.length, 0);
    this.counts.bufferedMax = Math.max(this.counts.bufferedMax, buffered);
  }

  /** Returns the cursor at which to resume once a delta is processed. */
  cursorAfter(delta) {
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
          if (this.frames[0] !== frame) break; // another member of the group took over
          this.cursor = this.cursorAfter(frame.rows.shift());
        }
        if (this.frames[0] !== frame) continue;
        this.frames.shift();
        this.acknowledge(frame);
      }
      throw this.closed;
    } finally {
      this.fail(new Error("the subscription was closed: create another Subscriber"));
    }
  }

  acknowledge({ cost, end }) {
    this.cursor = [this.log[0], this.log[1], this.frames.length ? end : this.nextOffset];
    this.connection?.send({
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

function rowOfDelta({ type, sequence, length, ackWanted, ...delta }) {
  return { ...delta, offset: sequence };
}

/** Returns a batch's rows, each with its offset, dot and Lamport number. Control rows are never delivered. */
function rowsOfBatch({ sequence, control, rows, stamp, origin }) {
  if (control) return [];
  return rows.map((row, i) => {
    const offset = row.offset ?? sequence + BigInt(i);
    return { ...row, origin, offset, lamport: stamp.lamport + (offset - sequence) };
  });
}

function lastOffset({ sequence, rows }) {
  return rows.at(-1).offset ?? sequence + BigInt(rows.length) - 1n;
}
