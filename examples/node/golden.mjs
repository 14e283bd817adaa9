// Decodes the golden frames, compares their fields with the golden values, and checks that encoding gives the same bytes.
// It prints one line for each difference, then a count. The exit status is 1 if any frame differs.
//
//     node golden.mjs [../../docs/protocol-golden.json]

import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";
import { decode, encode } from "./frames.mjs";

const CODES = { 8: "QUEUE_FULL", 14: "INVALID_DELTA", 15: "SHUTTING_DOWN", 23: "OVERLAP", 24: "BAD_REQUEST" };
const PRIORITIES = ["CRITICAL", "HIGH", "NORMAL", "LOW"];
const SOURCES = ["LOCAL", "REPLICA", "IMPORT", "TRANSFORM"];
const LEVELS = ["MEMORY", "LOGGED", "DURABLE", "QUORUM"];
const KNOWN_IDS = ["NONE", "SOME", "ALL"];
const PRESSURES = ["OK", "WARN", "THROTTLE", "STOP"];
const OPERATIONS = ["create", "sparse", "dense", "scale", "offset", "transform", "delete"];

// Converts the fields of each response, by the name of its request.
const RESPONSES = {
  hello: ({ features, origins, log, level, default_level, ...rest }) => ({
    ...rest,
    features: features?.length ? features : undefined,
    origins: origins?.length ? origins.map(([origin, epoch, watermark]) => ({ origin, epoch, watermark })) : undefined,
    log: toCursor(log),
    level: LEVELS[level],
    default_level: LEVELS[default_level],
  }),
  subscribe: ({ start, standby, resets, ...rest }) => ({
    ...rest, start: toCursor(start), standby: standby ?? false, resets: resets ?? 0,
  }),
  decide: ({ state, refused_rows, ...counts }) => ({
    ...counts,
    state: state.toUpperCase(),
    refused_rows: refused_rows?.map(([part, row, vector_id, code, text]) => ({ part, row, vector_id, code: CODES[code], text })),
  }),
  get: ({ state, dot: last, values = "", data = "", metadata = "", ...rest }) => ({
    ...rest, state: state.toUpperCase(), dot: last && toDot(last), values, data, metadata,
  }),
  offsets: ({ offsets, log }) => ({ offsets, log: toCursor(log) }),
  describe: ({ streams, requests, features, level }) => ({
    streams: streams.map(([name, stream, partitions, count, settings]) => ({
      name,
      stream,
      partitions: partitions.length
        ? partitions.map(([partition, start_offset, log]) => ({ partition, start_offset, log: toCursor(log) }))
        : undefined,
      count: count ?? 1,
      settings,
    })),
    requests: Object.fromEntries(requests),
    features: features.length ? features : undefined,
    level: LEVELS[level],
  }),
};

const toStart = ([at, value]) => ({ at: at.toUpperCase(), value: Array.isArray(value) ? toCursor(value) : value });

// Converts the fields of each request.
const REQUESTS = {
  hello: ({ origins, source, job, splits, stream, partition, ...rest }) => ({
    ...rest,
    stream: stream ?? 0,
    partition: partition ?? 0,
    splits: splits ?? false,
    origins: origins?.map(([origin, epoch, stream]) => ({ origin, epoch, stream })),
    job: job && { job: job[0], part: job[1], attempt: job[2] },
    source: SOURCES[source ?? 0],
  }),
  subscribe: ({ topics, start: from, credit, filter, deltas, partitions, stream, ...rest }) => {
    const filters = filter && Object.fromEntries(filter);
    return {
      ...rest,
      topics: topics.map(formatTopic),
      start: toStart(from),
      credit: credit && toCredit(credit),
      filter: filters && {
        sources: filters.sources.map((n) => SOURCES[n]),
        priorities: filters.priorities.map((n) => PRIORITIES[n]),
      },
      deltas: deltas ?? false,
      stream: stream ?? 0,
      partitions: partitions?.map(([partition, at, granted]) => ({
        partition, start: at && toStart(at), credit: granted && toCredit(granted),
      })),
    };
  },
  decide: ({ decide, parts, ...rest }) => ({
    ...rest,
    decision: decide.toUpperCase(),
    parts: parts?.map(([part, attempt, deltas, checksum]) => ({ part, attempt, deltas, checksum })),
  }),
  get: (rest) => rest,
  offsets: ({ starts, stream, partition }) => ({ starts: starts.map(toStart), stream: stream ?? 0, partition: partition ?? 0 }),
  describe: ({ ranges, ...rest }) => ({ ...rest, ranges: ranges ?? false }),
  create_stream: ({ if_not_exists, ...rest }) => ({ ...changeFields(rest), if_not_exists: if_not_exists ?? false }),
  alter_stream: changeFields,
  delete_stream: changeFields,
  erase_vector: ({ namespace, timeout_ms, ...rest }) => ({
    ...changeFields(rest), namespace: namespace ?? null, timeout_ms: timeout_ms ?? 30_000,
  }),
  truncate_stream: ({ partition, ...rest }) => ({ ...changeFields(rest), partition: partition ?? 0 }),
};

const path = process.argv[2] ?? new URL("../../docs/protocol-golden.json", import.meta.url);
// JSON.parse would round integers above 2^53, so long integers are quoted here, and compared as text.
const text = readFileSync(path, "utf8").replace(/(": )(\d{17,})(?=[,\n])/g, '$1"$2"');
let failures = 0;
const { frames } = JSON.parse(text);
for (const { name, type, hex, fields } of frames) {
  const bytes = Buffer.from(hex, "hex");
  const frame = decode(bytes);
  const problems = [];
  if (frame.type.toUpperCase() !== type) problems.push(`type is ${frame.type.toUpperCase()}, not ${type}`);
  const decoded = toJson(fieldsOf(frame));
  for (const key of new Set([...Object.keys(decoded), ...Object.keys(fields)])) {
    if (isDeepStrictEqual(decoded[key], fields[key])) continue;
    problems.push(`${key} is ${JSON.stringify(decoded[key])}, not ${JSON.stringify(fields[key])}`);
  }
  if (!encode(frame).equals(bytes)) problems.push(`encode gives ${encode(frame).toString("hex")}, not ${hex}`);
  for (const problem of problems) console.log(`${name}: ${problem}`);
  failures += problems.length > 0;
}
console.log(`${frames.length - failures} of ${frames.length} golden frames read and written`);
process.exitCode = failures ? 1 : 0;

/** Returns a decoded frame's fields under the names of the golden file. */
function fieldsOf({ type, sequence, length, ...rest }) {
  if (type === "delta") {
    const { ackWanted, ackLevel, lamport, stream = 0, partition, ...delta } = rest;
    const others = { ack_wanted: ackWanted, ack_level: LEVELS[ackLevel], lamport, stream, partition };
    return { sequence, delta: deltaFields(delta), ...others };
  }
  if (type === "batch") return batchFields(sequence, rest);
  if (type === "subscribe") return { sequence, request: requestFields(rest) };
  return { sequence, ...controlFields(type, rest) };
}

function batchFields(sequence, { rows, ackWanted, ...batch }) {
  const deltas = rows.map((row) => {
    const { state, offset, ...own } = row;
    const origin = state?.origin ?? batch.origin;
    const counter = state?.counter ?? row.counter;
    const common = { timestamp: batch.timestamp, priority: batch.priority, clock: batch.clock };
    return { ...deltaFields({ ...common, ...own, origin, counter }), offset };
  });
  const { crc, leaderEpoch, stream, partition, source, knownIds, ...stamped } = batch.stamp ?? {};
  const { appendTime, lamport, previousCrc, bodyCrc, syncedOffset } = stamped;
  const stamp = batch.stamp && {
    lamport, source: SOURCES[source], append_time: appendTime, previous_crc: previousCrc, body_crc: bodyCrc,
    synced_offset: syncedOffset, leader_epoch: leaderEpoch, stream, partition, crc,
    known_ids: KNOWN_IDS[knownIds],
  };
  return { sequence, batch: deltas, stamp, ack_wanted: ackWanted };
}

function deltaFields({ vectorId, op, values, indices, data, origin, counter, timestamp = 0, priority = 2, source = 0, ...rest }) {
  return {
    vector_id: vectorId,
    operation: { kind: op, values: values && [...values], indices: indices && [...indices], data: data ?? "" },
    ...rest,
    dot: { origin, counter },
    parents: rest.parents?.filter((parent) => !parent.place).map(toDot),
    places: placesOf(rest.parents ?? []),
    clock: rest.clock?.map(toDot),
    expect: rest.expect && toDot(rest.expect),
    timestamp,
    priority: PRIORITIES[priority],
    source: SOURCES[source],
  };
}

function placesOf(parents) {
  const parentsWithPlace = parents.filter((parent) => parent.place);
  if (!parentsWithPlace.length) return undefined;
  return parentsWithPlace.map(({ place: [partition, epoch, offset] }) => ({ partition, epoch, offset }));
}

function toDot(item) {
  return Array.isArray(item) ? { origin: item[0], counter: item[1] } : item;
}

function controlFields(type, { credit, ranges, cursor, request, response, more, stream, partition, code, level, ...rest }) {
  const ack = type === "ack" && { more: more ?? false, stream: stream ?? 0, partition: partition ?? 0 };
  return {
    ...rest,
    ...ack,
    credit: credit && toCredit(credit),
    ranges: ranges?.map(([first, last, offset, duplicate]) => ({ first, last, offset, duplicate })),
    cursor: cursor && toCursor(cursor),
    response: response && { name: request, ...RESPONSES[request](Object.fromEntries(response)) },
    code: code && (CODES[code] ?? `CODE_${code}`),
    level: type === "backpressure" ? PRESSURES[level] : level,
  };
}

function requestFields({ request: name, version, ...rest }) {
  return { name, ...REQUESTS[name](rest) };
}

function changeFields({ name, dry_run, ...rest }) {
  return { ...rest, stream: name, dry_run: dry_run ?? false };
}

function formatTopic(bytes) {
  const rest = bytes.subarray(1).toString();
  return ["*", `v:${rest}`, `ns:${rest}`, `op:${OPERATIONS[bytes[1]]}`, `c:${rest}`][bytes[0]];
}

function toCredit([deltas, bytes]) {
  return { deltas, bytes };
}

function toCursor([log_id, epoch, next_offset]) {
  return { log_id, epoch, next_offset };
}

/** Converts a value to JSON: bytes to hex, maps to objects, integers above 2^53 to text. Drops undefined members. */
function toJson(value) {
  if (typeof value === "bigint") return value <= Number.MAX_SAFE_INTEGER ? Number(value) : value.toString();
  if (value instanceof Number) return Number(value);
  if (value instanceof Uint8Array) return Buffer.from(value).toString("hex");
  if (Array.isArray(value)) return value.map(toJson);
  if (value === null || typeof value !== "object") return value;
  const entries = value instanceof Map ? [...value] : Object.entries(value);
  return Object.fromEntries(entries.filter(([, item]) => item !== undefined).map(([key, item]) => [key, toJson(item)]));
}
