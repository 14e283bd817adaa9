// Folds the golden histories and compares the states with those beside them, byte by byte.
// Rule: prints one line for each history that differs, then a count; exit status 1 where one does.
//
//     node golden_folds.mjs [../../docs/protocol-golden-folds.json]

import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";
import { allFinite, canonical, fold } from "./fold.mjs";
import { floats, integers } from "./frames.mjs";
import { unpack } from "./msgpack.mjs";

const path = process.argv[2] ?? new URL("../../docs/protocol-golden-folds.json", import.meta.url);
const { histories } = JSON.parse(readFileSync(path, "utf8"));
let wrong = 0;
for (const { name, deltas, states } of histories) {
  const problems = [];
  const facts = new Map();
  for (const told of deltas) {
    const delta = read(told);
    if (allFinite(delta) === Boolean(told.refused)) problems.push(`delta ${told.counter} of ${told.origin} is judged otherwise`);
    if (!told.refused) facts.set(told.vector_id, [...(facts.get(told.vector_id) ?? []), delta]);
  }
  const found = Object.fromEntries([...facts].map(([vectorId, some]) => [vectorId, shown(fold(some))]));
  if (!isDeepStrictEqual(found, states)) problems.push(`${JSON.stringify(found)}, not ${JSON.stringify(states)}`);
  for (const problem of problems) console.log(`${name}: ${problem}`);
  wrong += problems.length > 0;
}
console.log(`${histories.length - wrong} of ${histories.length} golden histories folded`);
process.exitCode = wrong ? 1 : 0;

/** A delta of the file, as a Subscriber yields it. */
function read({ vector_id: vectorId, op, lamport, origin, counter, ...hex }) {
  const bytes = Object.fromEntries(
    ["values", "indices", "data", "id", "metadata"].filter((name) => name in hex).map((name) => [name, Buffer.from(hex[name], "hex")]),
  );
  return {
    vectorId, op, lamport: BigInt(lamport), origin: BigInt(origin), counter: BigInt(counter), ...bytes,
    values: bytes.values && floats(bytes.values),
    indices: bytes.indices && integers(bytes.indices),
    metadata: bytes.metadata && unpack(bytes.metadata, { lastCounts: true }),
  };
}

/** A state in the words of the file. */
function shown({ op, values, data, metadata, last, ignored }) {
  return {
    op,
    ...(values && { values: Buffer.from(values.buffer, values.byteOffset, values.byteLength).toString("hex") }),
    ...(data && { data: Buffer.from(data).toString("hex") }),
    metadata: canonical(metadata).toString("hex"),
    lamport: String(last.lamport), origin: String(last.origin), counter: String(last.counter),
    ignored,
  };
}
