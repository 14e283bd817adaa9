// What the deltas of one fact make of it, to the bit: "The fold" of the protocol page.
// Rule: values in, values out; what is given is never changed. A delta is what a Subscriber yields.

import { OPERATIONS } from "./frames.mjs";
import { pack } from "./msgpack.mjs";

/** What a state is: the operation of its state row. */
export const VECTOR = 0, ABSENT = 6, OPAQUE = 8;

const MAX = 2 ** 128 - 2 ** 104; // the largest float32

/**
 * The state that the deltas of one fact give, in whatever order and however often they came:
 * `{ op, values, data, metadata, last, ignored }`. `last` has the Lamport number, origin and counter of the last delta;
 * null where there is none.
 */
export function fold(deltas) {
  let state = { op: ABSENT, metadata: new Map(), last: null, ignored: 0 };
  const ids = new Set();
  for (const delta of [...deltas].sort(canonically)) {
    if (state.last && canonically(state.last, delta) === 0) continue; // the same delta again
    const { lamport, origin, counter, id } = delta;
    const name = id && Buffer.from(id).toString("hex");
    const after = ids.has(name) ? null : apply(state, delta); // of those with one id the first one counts
    if (name) ids.add(name);
    const { ignored } = state;
    state = { ...(after ?? state), ignored: ignored + (after ? 0 : 1), last: { lamport, origin, counter } };
  }
  return state;
}

/** True if all numbers of a delta are finite, those in its metadata too. A server refuses any other. */
export function allFinite({ values = [], metadata = null }) {
  return values.every(Number.isFinite) && finite(metadata);
}

/** Metadata as bytes to compare: msgpack in its shortest forms, the names of each map in order of their UTF-8. */
export function canonical(metadata) {
  return pack(sorted(metadata));
}

function canonically(one, other) {
  for (const part of ["lamport", "origin", "counter"]) {
    if (one[part] !== other[part]) return one[part] < other[part] ? -1 : 1;
  }
  return 0;
}

/** The content after one more delta; null where it has no effect. */
function apply({ op, values, data, metadata }, delta) {
  const patched = delta.metadata ? merged(metadata, delta.metadata) : metadata;
  switch (OPERATIONS[delta.op]) {
    case "create":
      return { op: VECTOR, values: delta.values, metadata: merged(new Map(), delta.metadata ?? new Map()) };
    case "dense":
      return { op: VECTOR, values: delta.values, metadata: patched };
    case "opaque":
      return { op: OPAQUE, data: delta.data, metadata: patched };
    case "delete":
      return { op: ABSENT, metadata: new Map() };
    case "metadata":
      return op === ABSENT ? null : { op, values, data, metadata: patched };
    case "sparse": case "sparse_add": case "scale": case "offset": {
      const changed = op === VECTOR ? change(values, delta) : null;
      return changed && { op, values: changed, metadata: patched };
    }
    default:
      return null; // a transform, or a kind of a later version
  }
}

// --- numbers

/** A vector with some elements set, added to, or all changed; null where an index lies outside. */
function change(before, { op, values, indices }) {
  const after = Float32Array.from(before);
  switch (OPERATIONS[op]) {
    case "scale":
      return after.map((number) => bounded(number * values[0]));
    case "offset":
      return after.map((number) => bounded(number + values[0]));
  }
  if (indices.some((index) => index >= after.length)) return null;
  const adds = OPERATIONS[op] === "sparse_add";
  indices.forEach((index, i) => (after[index] = adds ? bounded(after[index] + values[i]) : values[i]));
  return after;
}

/**
 * A product or sum that stays within float32's range; the array that takes it rounds it, once an operation. In float64
 * a product of two float32 is exact, and a sum, rounded once more, is the same number.
 */
function bounded(number) {
  return Math.min(Math.max(number, -MAX), MAX);
}

// --- metadata

/** A JSON merge patch (RFC 7396), applied: nil removes, a map merges, all else replaces. */
function merged(target, patch) {
  const after = new Map(target);
  for (const [name, value] of patch) {
    if (value === null) after.delete(name);
    else if (!(value instanceof Map)) after.set(name, value);
    else after.set(name, merged(after.get(name) instanceof Map ? after.get(name) : new Map(), value));
  }
  return after;
}

function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (!(value instanceof Map)) return value;
  const names = [...value.keys()].sort((one, other) => Buffer.compare(Buffer.from(one), Buffer.from(other)));
  return new Map(names.map((name) => [name, sorted(value.get(name))]));
}

function finite(value) {
  if (Array.isArray(value)) return value.every(finite);
  if (value instanceof Map) return [...value.values()].every(finite);
  return !(typeof value === "number" || value instanceof Number) || Number.isFinite(Number(value));
}
