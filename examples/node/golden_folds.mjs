// Folds the golden histories, and compares the results with the golden states, byte by byte.
// It prints one line for each difference, then a count. The exit status is 1 if any history differs.
//
//     node golden_folds.mjs [../../docs/protocol-golden-folds.json]

import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";
import { fold, isFiniteDelta, packCanonical } from "./fold.mjs";
import { toFloats, toIntegers } from "./frames.mjs";
import { unpack } from "./msgpack.mjs";

const path = process.argv[2] ?? new URL("../../docs/protocol-golden-folds.json", import.meta.url);
const { histories } = JSON.parse(readFileSync(path, "utf8"));
let failures = 0;
for (const { name, deltas, states } of histories) {
  const problems = [];
  const accepted = new Map();
  for (const encoded of deltas) {
    const { vector_id: vectorId, origin, counter, refused } = encoded;
    const delta = decodeDelta(encoded);
    const expected = !refused;
    if (isFiniteDelta(delta) !== expected) problems.push(`isFiniteDelta of (${origin}, ${counter}) is not ${expected}`);
    if (!refused) accepted.set(vectorId, [...(accepted.get(vectorId) ?? []), delta]);
  }
  const folded = Object.fromEntries([...accepted].map(([vectorId, ownDeltas]) => [vectorId, encodeState(fold(ownDeltas))]));
  if (!isDeepStrictEqual(folded, states)) problems.push(`states are ${JSON.stringify(folded)}, not ${JSON.stringify(states)}`);
  for (const problem of problems) console.log(`${name}: ${problem}`);
  failures += problems.length > 0;
}
console.log(`${histories.length - failures} of ${histories.length} golden histories folded`);
process.exitCode = failures ? 1 : 0;

/** Decodes a delta of the file to an object as a Subscriber yields it. */
function decodeDelta({ vector_id: vectorId, op, lamport, origin, counter, ...hex }) {
  const names = ["values", "indices", "data", "id", "metadata"].filter((name) => name in hex);
  const bytes = Object.fromEntries(names.map((name) => [name, Buffer.from(hex[name], "hex")]));
  return {
    vectorId, op, lamport: BigInt(lamport), origin: BigInt(origin), counter: BigInt(counter), ...bytes,
    values: bytes.values && toFloats(bytes.values),
    indices: bytes.indices && toIntegers(bytes.indices),
    metadata: bytes.metadata && unpack(bytes.metadata, { lastWins: true }),
  };
}

/** Encodes a state as the file does. */
function encodeState({ op, values, data, metadata, last, ignored }) {
  return {
    op,
    ...(values && { values: Buffer.from(values.buffer, values.byteOffset, values.byteLength).toString("hex") }),
    ...(data && { data: Buffer.from(data).toString("hex") }),
    metadata: packCanonical(metadata).toString("hex"),
    lamport: String(last.lamport), origin: String(last.origin), counter: String(last.counter),
    ignored,
  };
}
