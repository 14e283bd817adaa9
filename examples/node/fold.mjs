// Folds the deltas of one vector to its state, bit for bit, as the section "The fold" of the protocol page defines it.
// The functions are pure: they never change their arguments. A delta is an object as a Subscriber yields it.

import { OPERATIONS } from "./frames.mjs";
import { pack } from "./msgpack.mjs";

/** The kinds of a state, which are the operations of state rows. */
export const VECTOR = 0, ABSENT = 6, OPAQUE = 8;

const FLOAT32_MAX = 2 ** 128 - 2 ** 104;

/**
 * Returns the state that the deltas of one vector make, `{ op, values, data, metadata, last, ignored }`. The deltas may be
 * in any order and include duplicates. `last` has the Lamport number, origin and counter of the last delta; it is null if
 * there are no deltas.
 */
export function fold(deltas) {
  let state = { op: ABSENT, metadata: new Map(), last: null, ignored: 0 };
  const ids = new Set();
  for (const delta of [...deltas].sort(compareCanonical)) {
    if (state.last && compareCanonical(state.last, delta) === 0) continue; // a duplicate
    const { lamport, origin, counter, id } = delta;
    const idText = id && Buffer.from(id).toString("hex");
    const next = ids.has(idText) ? null : apply(state, delta); // of deltas with one id, only the first has an effect
    if (idText) ids.add(idText);
    const { ignored } = state;
    state = { ...(next ?? state), ignored: ignored + (next ? 0 : 1), last: { lamport, origin, counter } };
  }
  return state;
}

/** True if all numbers of a delta and of its metadata are finite. A server refuses any other delta. */
export function isFiniteDelta({ values = [], metadata = null }) {
  return values.every(Number.isFinite) && isFiniteValue(metadata);
}

/** Packs metadata in canonical form: msgpack in its shortest forms, the keys of each map in the order of their UTF-8. */
export function packCanonical(metadata) {
  return pack(sortKeys(metadata));
}

function compareCanonical(one, other) {
  for (const part of ["lamport", "origin", "counter"]) {
    if (one[part] !== other[part]) return one[part] < other[part] ? -1 : 1;
  }
  return 0;
}

/** Returns the content of the state after one more delta; null if the delta has no effect. */
function apply({ op, values, data, metadata }, delta) {
  const patched = delta.metadata ? mergePatch(metadata, delta.metadata) : metadata;
  switch (OPERATIONS[delta.op]) {
    case "create":
      return { op: VECTOR, values: delta.values, metadata: mergePatch(new Map(), delta.metadata ?? new Map()) };
    case "dense":
      return { op: VECTOR, values: delta.values, metadata: patched };
    case "opaque":
      return { op: OPAQUE, data: delta.data, metadata: patched };
    case "delete":
      return { op: ABSENT, metadata: new Map() };
    case "metadata":
      return op === ABSENT ? null : { op, values, data, metadata: patched };
    case "sparse": case "sparse_add": case "scale": case "offset": {
      const changed = op === VECTOR ? changeElements(values, delta) : null;
      return changed && { op, values: changed, metadata: patched };
    }
    default:
      return null; // a transform, or a kind of a later version
  }
}

// --- numbers

/** Returns a copy of a vector with a partial operation applied; null if an index is outside the vector. */
function changeElements(before, { op, values, indices }) {
  const after = Float32Array.from(before);
  switch (OPERATIONS[op]) {
    case "scale":
      return after.map((number) => clamp(number * values[0]));
    case "offset":
      return after.map((number) => clamp(number + values[0]));
  }
  if (indices.some((index) => index >= after.length)) return null;
  const adds = OPERATIONS[op] === "sparse_add";
  indices.forEach((index, i) => (after[index] = adds ? clamp(after[index] + values[i]) : values[i]));
  return after;
}

/**
 * Limits a product or sum to the range of float32. The caller's array rounds it to float32, once per operation. This
 * equals float32 arithmetic: in float64 a product of two float32 is exact, and a sum that is rounded first to float64
 * and then to float32 gives the same float32.
 */
function clamp(number) {
  return Math.min(Math.max(number, -FLOAT32_MAX), FLOAT32_MAX);
}

// --- metadata

/** Applies a JSON merge patch (RFC 7396): nil removes a member, a map merges into it, any other value replaces it. */
function mergePatch(target, patch) {
  const after = new Map(target);
  for (const [key, value] of patch) {
    if (value === null) after.delete(key);
    else if (!(value instanceof Map)) after.set(key, value);
    else after.set(key, mergePatch(after.get(key) instanceof Map ? after.get(key) : new Map(), value));
  }
  return after;
}

function sortKeys(value) {
  if (Array.isArray(value)) return value.map(sortKeys);
  if (!(value instanceof Map)) return value;
  const keys = [...value.keys()].sort((one, other) => Buffer.compare(Buffer.from(one), Buffer.from(other)));
  return new Map(keys.map((key) => [key, sortKeys(value.get(key))]));
}

function isFiniteValue(value) {
  if (Array.isArray(value)) return value.every(isFiniteValue);
  if (value instanceof Map) return [...value.values()].every(isFiniteValue);
  return !(typeof value === "number" || value instanceof Number) || Number.isFinite(Number(value));
}
