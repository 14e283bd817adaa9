// Prints deltas as JSON lines. A file stores the cursor, so that a restart resumes where the last run stopped.
// The file is written after the line is printed, so a crash loses no line.
//
//     node subscribe.mjs --port 7373 --topic ns:docs --cursor cursor.json --count 10
//     node subscribe.mjs --port 7373 --stream orders --partition 2 --cursor cursor-2.json

import { readFileSync, renameSync, writeFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { Subscriber } from "./delta_prop.mjs";
import { OPERATIONS } from "./frames.mjs";

const { values: options } = parseArgs({
  options: {
    host: { type: "string", default: "127.0.0.1" },
    port: { type: "string", default: "7373" },
    topic: { type: "string", multiple: true, default: ["*"] },
    count: { type: "string", default: "Infinity" }, // deltas to print
    cursor: { type: "string" }, // a file; if it does not exist, the subscriber starts at the log's oldest delta
    credit: { type: "string", default: "1000" }, // maximum number of deltas in flight
    form: { type: "string", default: "batch" }, // or "delta"
    stream: { type: "string" }, // default: the stream `default`
    partition: { type: "string" }, // a number; it may be left out if the stream has only one
  },
});

const subscriber = new Subscriber({
  host: options.host,
  port: Number(options.port),
  token: process.env.DELTA_PROP_TOKEN,
  client: "subscribe.mjs",
  topics: options.topic,
  start: readCursor() ?? ["earliest"],
  credit: [Number(options.credit), 4 << 20],
  deltas: options.form === "delta",
  stream: options.stream,
  partition: options.partition && Number(options.partition),
});

let count = 0;
for await (const delta of subscriber) {
  console.log(JSON.stringify({
    offset: Number(delta.offset),
    lamport: Number(delta.lamport),
    vector_id: delta.vectorId,
    namespace: delta.namespace,
    op: OPERATIONS[delta.op] ?? delta.op,
    dot: [String(delta.origin), Number(delta.counter)],
    ...(delta.values && { values: [...delta.values] }),
    ...(delta.indices && { indices: [...delta.indices] }),
    ...(delta.data && { data: Buffer.from(delta.data).toString() }),
    ...(delta.topics && { topics: delta.topics }),
  }));
  writeCursor(subscriber.cursorAfter(delta));
  if (++count >= Number(options.count)) break;
}
console.error(JSON.stringify({ connections: subscriber.connections, ...subscriber.counts }));

function readCursor() {
  try {
    const [log, epoch, offset] = JSON.parse(readFileSync(options.cursor, "utf8"));
    return ["cursor", [Buffer.from(log, "hex"), epoch, offset]];
  } catch (error) {
    if (!options.cursor || error.code === "ENOENT") return null;
    throw error;
  }
}

function writeCursor([log, epoch, offset]) {
  if (!options.cursor) return;
  writeFileSync(`${options.cursor}.new`, JSON.stringify([Buffer.from(log).toString("hex"), epoch, Number(offset)]));
  renameSync(`${options.cursor}.new`, options.cursor);
}
