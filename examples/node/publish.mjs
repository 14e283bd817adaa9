// Publishes JSON lines from a file or standard input: `{"vector_id": "doc-1", "op": "create", "values": [1, 2]}`.
// A delta's counter is its line number, so each line has one effect even if the import is killed and restarted.
//
//     node publish.mjs --port 7373 --origin 123731970 facts.jsonl
//     node publish.mjs --port 7373 --origin 123731970 --stream orders facts.jsonl
//
// With the same file and the same origin, it resumes where it stopped. It prints one JSON line for each batch.
// In a stream of several partitions, each line goes to the partition of its vector, over a connection for each.

import { createReadStream } from "node:fs";
import { createInterface } from "node:readline";
import { parseArgs } from "node:util";
import { Producer, drawOrigin, findStream } from "./delta_prop.mjs";
import { OPERATIONS } from "./frames.mjs";
import { partitionOfRow } from "./partition.mjs";

const BATCHES_IN_FLIGHT_MAX = 64;

const { values: options, positionals: [file] } = parseArgs({
  allowPositionals: true,
  options: {
    host: { type: "string", default: "127.0.0.1" },
    port: { type: "string", default: "7373" },
    origin: { type: "string" }, // a u64 for this import only; default: a new one
    batch: { type: "string", default: "100" }, // lines per batch
    form: { type: "string", default: "batch" }, // or "delta": one frame per line
    stream: { type: "string" }, // default: the stream `default`
    partition: { type: "string" }, // a number; default: that of each line's vector
  },
});

const connect = {
  host: options.host,
  port: Number(options.port),
  token: process.env.DELTA_PROP_TOKEN,
  client: "publish.mjs",
  stream: options.stream,
};
const origin = options.origin ? BigInt(options.origin) : drawOrigin();

// For each partition: its producer, the rows of its next batch, and how many lines it has. A line's counter is its number
// among the lines of its partition.
const parts = [];
const inFlight = new Set();
let lineNumber = 0, failure = null;
try {
  for (const partition of await choosePartitions()) {
    const producer = await Producer.open({ ...connect, partition, origin, form: options.form });
    parts.push({ producer, rows: [], lines: 0n, watermark: producer.counter - 1n }); // the log has lines up to the watermark
  }
  for await (const line of createInterface({ input: file ? createReadStream(file) : process.stdin })) {
    lineNumber += 1;
    const row = parseRow(JSON.parse(line), lineNumber);
    const part = parts[partitionOfRow(row, parts.length)];
    part.lines += 1n;
    if (part.lines <= part.watermark) continue;
    part.rows.push(row);
    if (part.rows.length >= Number(options.batch)) await send(part);
  }
  for (const part of parts) if (part.rows.length) await send(part);
  await Promise.all(inFlight);
  if (failure) throw failure;
  const connections = parts.reduce((sum, { producer }) => sum + producer.connections, 0);
  const counts = Object.fromEntries(Object.keys(parts[0].producer.counts).map((name) =>
    [name, parts.reduce((sum, { producer }) => sum + producer.counts[name], 0)]));
  console.error(JSON.stringify({ origin: String(parts[0].producer.origin), lines: lineNumber, connections, ...counts }));
} finally {
  for (const { producer } of parts) producer.close();
}

/** Returns the numbers of the partitions to publish to; undefined for the only one. */
async function choosePartitions() {
  if (options.partition !== undefined) return [Number(options.partition)];
  if (options.stream === undefined) return [undefined];
  const { count } = await findStream(connect);
  return Array.from({ length: count }, (_, partition) => partition);
}

async function send(part) {
  const outcome = part.producer.publish(part.rows);
  part.rows = [];
  const handled = outcome.then(({ counter, offset, duplicate }) => {
    const partition = parts.length > 1 ? { partition: parts.indexOf(part) } : {};
    console.log(JSON.stringify({ ...partition, counter: Number(counter), offset: Number(offset), duplicate }));
  }).catch((error) => (failure ??= error)).finally(() => inFlight.delete(handled));
  inFlight.add(handled);
  if (inFlight.size >= BATCHES_IN_FLIGHT_MAX) await Promise.race(inFlight);
  if (failure) throw failure;
}

function parseRow({ vector_id: vectorId, op, values, indices, data, ...rest }, lineNumber) {
  if (!OPERATIONS.includes(op)) throw new TypeError(`line ${lineNumber}: op ${op}: unknown: use ${OPERATIONS.join(", ")}`);
  return {
    vectorId,
    op: OPERATIONS.indexOf(op),
    ...rest,
    ...(values && { values: Float32Array.from(values) }),
    ...(indices && { indices: Uint32Array.from(indices) }),
    ...(data !== undefined && { data: Buffer.from(data) }),
  };
}
