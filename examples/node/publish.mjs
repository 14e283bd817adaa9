// Publishes JSON lines from a file or standard input: `{"vector_id": "doc-1", "op": "create", "values": [1, 2]}`.
// A delta's counter is its line number, so each line has one effect even if the import is killed and restarted.
//
//     node publish.mjs --port 7373 --origin 123731970 facts.jsonl
//
// With the same file and the same origin, it resumes where it stopped. It prints one JSON line for each batch.

import { createReadStream } from "node:fs";
import { createInterface } from "node:readline";
import { parseArgs } from "node:util";
import { Producer, drawOrigin } from "./delta_prop.mjs";
import { OPERATIONS } from "./frames.mjs";

const BATCHES_IN_FLIGHT_MAX = 64;

const { values: options, positionals: [file] } = parseArgs({
  allowPositionals: true,
  options: {
    host: { type: "string", default: "127.0.0.1" },
    port: { type: "string", default: "7373" },
    origin: { type: "string" }, // a u64 for this import only; default: a new one
    batch: { type: "string", default: "100" }, // lines per batch
    form: { type: "string", default: "batch" }, // or "delta": one frame per line
  },
});

const producer = await Producer.open({
  host: options.host,
  port: Number(options.port),
  token: process.env.DELTA_PROP_TOKEN,
  client: "publish.mjs",
  origin: options.origin ? BigInt(options.origin) : drawOrigin(),
  form: options.form,
});
try {
  const watermark = producer.counter - 1n; // the log has the lines up to this number
  const inFlight = new Set();
  let rows = [], lineNumber = 0n, failure = null;

  async function send() {
    const outcome = producer.publish(rows);
    rows = [];
    const handled = outcome.then(({ counter, offset, duplicate }) => {
      console.log(JSON.stringify({ counter: Number(counter), offset: Number(offset), duplicate }));
    }).catch((error) => (failure ??= error)).finally(() => inFlight.delete(handled));
    inFlight.add(handled);
    if (inFlight.size >= BATCHES_IN_FLIGHT_MAX) await Promise.race(inFlight);
    if (failure) throw failure;
  }

  for await (const line of createInterface({ input: file ? createReadStream(file) : process.stdin })) {
    lineNumber += 1n;
    if (lineNumber <= watermark) continue;
    rows.push(parseRow(JSON.parse(line), lineNumber));
    if (rows.length >= Number(options.batch)) await send();
  }
  if (rows.length) await send();
  await Promise.all(inFlight);
  if (failure) throw failure;
  const { origin, connections, counts } = producer;
  console.error(JSON.stringify({ origin: String(origin), lines: Number(lineNumber), connections, ...counts }));
} finally {
  producer.close();
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
