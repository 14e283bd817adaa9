// Publishes JSON lines: `{"vector_id": "doc-1", "op": "create", "values": [1, 2]}`, from a file or standard input.
// Rule: the counter of a line is its number, so that an import which is killed and repeated has one effect.
//
//     node publish.mjs --port 7373 --origin 12345 facts.jsonl
//
// The same file under the same origin goes on where it stopped. It prints one JSON line for each batch.

import { createReadStream } from "node:fs";
import { createInterface } from "node:readline";
import { parseArgs } from "node:util";
import { Producer, newOrigin } from "./delta_prop.mjs";
import { OPERATIONS } from "./frames.mjs";

const BATCHES_AWAITED_MAX = 64;

const { values: options, positionals: [file] } = parseArgs({
  allowPositionals: true,
  options: {
    host: { type: "string", default: "127.0.0.1" },
    port: { type: "string", default: "7373" },
    origin: { type: "string" }, // a u64 that is this import's own; left out: a new one
    batch: { type: "string", default: "100" }, // lines of a batch
    form: { type: "string", default: "batch" }, // or "delta": one frame for each
  },
});

const producer = await Producer.open({
  host: options.host,
  port: Number(options.port),
  token: process.env.DELTA_PROP_TOKEN,
  client: "publish.mjs",
  origin: options.origin ? BigInt(options.origin) : newOrigin(),
  form: options.form,
});
try {
  const done = producer.counter - 1n;
  const awaited = new Set();
  let rows = [], number = 0n, failed = null;

  async function send() {
    const outcome = producer.publish(rows);
    rows = [];
    const told = outcome.then(({ counter, offset, duplicate }) => {
      console.log(JSON.stringify({ counter: Number(counter), offset: Number(offset), duplicate }));
    }).catch((error) => (failed ??= error)).finally(() => awaited.delete(told));
    awaited.add(told);
    if (awaited.size >= BATCHES_AWAITED_MAX) await Promise.race(awaited);
    if (failed) throw failed;
  }

  for await (const line of createInterface({ input: file ? createReadStream(file) : process.stdin })) {
    number += 1n;
    if (number <= done) continue;
    rows.push(row(JSON.parse(line)));
    if (rows.length >= Number(options.batch)) await send();
  }
  if (rows.length) await send();
  await Promise.all(awaited);
  if (failed) throw failed;
  console.error(JSON.stringify({ origin: String(producer.origin), lines: Number(number), connections: producer.connections, ...producer.counts }));
} finally {
  producer.close();
}

function row({ vector_id: vectorId, op, values, indices, data, ...rest }) {
  return {
    vectorId,
    op: OPERATIONS.indexOf(op),
    ...rest,
    ...(values && { values: Float32Array.from(values) }),
    ...(indices && { indices: Uint32Array.from(indices) }),
    ...(data !== undefined && { data: Buffer.from(data) }),
  };
}
