// Reads the golden frames, compares what they say with the values beside them, and encodes them to equal bytes.
// Rule: prints one line for each frame that differs, then a count; exit status 1 where one does.
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

// What each response says, by the name of its request.
const RESPONSES = {
  hello: ({ features, origins, log, level }) => ({
    features: features.length ? features : undefined,
    origins: origins.map(([origin, epoch, watermark]) => ({ origin, epoch, watermark })),
    log: place(log),
    level: LEVELS[level],
  }),
  subscribe: ({ start, standby, resets, ...rest }) => ({
    ...rest, start: place(start), standby: standby ?? false, resets: resets ?? 0,
  }),
  decide: ({ state, refused_rows, ...counts }) => ({
    ...counts,
    state: state.toUpperCase(),
    refused_rows: refused_rows?.map(([part, row, vector_id, code, text]) => ({ part, row, vector_id, code: CODES[code], text })),
  }),
  get: ({ state, dot: last, values = "", data = "", metadata = "", ...rest }) => ({
    ...rest, state: state.toUpperCase(), dot: last && dot(last), values, data, metadata,
  }),
  offsets: ({ offsets, log }) => ({ offsets, log: place(log) }),
  describe: ({ streams, requests, features, level }) => ({
    streams: streams.map(([name, stream, partitions]) => ({
      name,
      stream,
      partitions: partitions.map(([partition, start_offset, log]) => ({ partition, start_offset, log: place(log) })),
    })),
    requests: Object.fromEntries(requests),
    features,
    level: LEVELS[level],
  }),
};

const start = ([at, value]) => ({ at: at.toUpperCase(), value: Array.isArray(value) ? place(value) : value });

// What each request asks.
const REQUESTS = {
  hello: ({ origins, source, job, splits, ...rest }) => ({
    ...rest,
    splits: splits ?? false,
    origins: origins?.map(([origin, epoch, stream]) => ({ origin, epoch, stream })),
    job: job && { job: job[0], part: job[1], attempt: job[2] },
    source: SOURCES[source ?? 0],
  }),
  subscribe: ({ topics, start: from, credit, filter, deltas, partitions, stream, ...rest }) => {
    const only = filter && Object.fromEntries(filter);
    return {
      ...rest,
      topics: topics.map(topicText),
      start: start(from),
      credit: credit && amounts(credit),
      filter: only && { sources: only.sources.map((n) => SOURCES[n]), priorities: only.priorities.map((n) => PRIORITIES[n]) },
      deltas: deltas ?? false,
      stream: stream ?? 0,
      partitions: partitions?.map(([partition, at, given]) => ({ partition, start: at && start(at), credit: given && amounts(given) })),
    };
  },
  decide: ({ decide, parts, ...rest }) => ({
    ...rest,
    decision: decide.toUpperCase(),
    parts: parts?.map(([part, attempt, deltas, checksum]) => ({ part, attempt, deltas, checksum })),
  }),
  get: (rest) => rest,
  offsets: ({ starts, stream, partition }) => ({ starts: starts.map(start), stream: stream ?? 0, partition: partition ?? 0 }),
  describe: (rest) => rest,
};

const path = process.argv[2] ?? new URL("../../docs/protocol-golden.json", import.meta.url);
// JSON.parse would round integers above 2^53, so they are read as text, and compared as text.
const text = readFileSync(path, "utf8").replace(/(": )(\d{17,})(?=[,\n])/g, '$1"$2"');
let wrong = 0;
const { frames } = JSON.parse(text);
for (const { name, type, hex, fields } of frames) {
  const bytes = Buffer.from(hex, "hex");
  const frame = decode(bytes);
  const problems = [];
  if (frame.type.toUpperCase() !== type) problems.push(`it is a ${frame.type}`);
  const told = plain(meaning(frame));
  for (const key of new Set([...Object.keys(told), ...Object.keys(fields)])) {
    if (isDeepStrictEqual(told[key], fields[key])) continue;
    problems.push(`${key} is ${JSON.stringify(told[key])}, not ${JSON.stringify(fields[key])}`);
  }
  if (!encode(frame).equals(bytes)) problems.push(`encoded it is ${encode(frame).toString("hex")}`);
  for (const problem of problems) console.log(`${name}: ${problem}`);
  wrong += problems.length > 0;
}
console.log(`${frames.length - wrong} of ${frames.length} golden frames read and written`);
process.exitCode = wrong ? 1 : 0;

/** A decoded frame in the words of the golden file. */
function meaning({ type, sequence, length, ...rest }) {
  if (type === "delta") {
    const { ackWanted, ackLevel, lamport, stream = 0, partition, ...delta } = rest;
    const told = { ack_wanted: ackWanted, ack_level: LEVELS[ackLevel], lamport, stream, partition };
    return { sequence, delta: change(delta), ...told };
  }
  if (type === "batch") return batchMeaning(sequence, rest);
  if (type === "subscribe") return { sequence, request: request(rest) };
  return { sequence, ...control(type, rest) };
}

function batchMeaning(sequence, { rows, ackWanted, ...batch }) {
  const told = rows.map((row) => {
    const { state, offset, ...own } = row;
    const origin = state?.origin ?? batch.origin;
    const counter = state?.counter ?? row.counter;
    const common = { timestamp: batch.timestamp, priority: batch.priority, clock: batch.clock };
    return { ...change({ ...common, ...own, origin, counter }), offset };
  });
  const { crc, leaderEpoch, stream, partition, source, knownIds, ...stamped } = batch.stamp ?? {};
  const { appendTime, lamport, previousCrc, bodyCrc, syncedOffset } = stamped;
  const stamp = batch.stamp && {
    lamport, source: SOURCES[source], append_time: appendTime, previous_crc: previousCrc, body_crc: bodyCrc,
    synced_offset: syncedOffset, leader_epoch: leaderEpoch, stream, partition, crc,
    known_ids: KNOWN_IDS[knownIds],
  };
  return { sequence, batch: told, stamp, ack_wanted: ackWanted };
}

function change({ vectorId, op, values, indices, data, origin, counter, timestamp = 0, priority = 2, source = 0, ...rest }) {
  return {
    vector_id: vectorId,
    operation: { kind: op, values: values && [...values], indices: indices && [...indices], data: data ?? "" },
    ...rest,
    dot: { origin, counter },
    parents: rest.parents?.filter((parent) => !parent.place).map(dot),
    places: placesOf(rest.parents ?? []),
    clock: rest.clock?.map(dot),
    expect: rest.expect && dot(rest.expect),
    timestamp,
    priority: PRIORITIES[priority],
    source: SOURCES[source],
  };
}

function placesOf(parents) {
  const found = parents.filter((parent) => parent.place);
  return found.length ? found.map(({ place: [partition, epoch, offset] }) => ({ partition, epoch, offset })) : undefined;
}

function dot(item) {
  return Array.isArray(item) ? { origin: item[0], counter: item[1] } : item;
}

function control(type, { credit, ranges, cursor, request, response, more, stream, partition, code, level, ...rest }) {
  const ack = type === "ack" && { more: more ?? false, stream: stream ?? 0, partition: partition ?? 0 };
  return {
    ...rest,
    ...ack,
    credit: credit && amounts(credit),
    ranges: ranges?.map(([first, last, offset, duplicate]) => ({ first, last, offset, duplicate })),
    cursor: cursor && place(cursor),
    response: response && { name: request, ...RESPONSES[request](Object.fromEntries(response)) },
    code: code && (CODES[code] ?? `CODE_${code}`),
    level: type === "backpressure" ? PRESSURES[level] : level,
  };
}

function request({ request: name, version, ...rest }) {
  return { name, ...REQUESTS[name](rest) };
}

function topicText(bytes) {
  const rest = bytes.subarray(1).toString();
  return ["*", `v:${rest}`, `ns:${rest}`, `op:${OPERATIONS[bytes[1]]}`, `c:${rest}`][bytes[0]];
}

function amounts([deltas, bytes]) {
  return { deltas, bytes };
}

function place([log_id, epoch, next_offset]) {
  return { log_id, epoch, next_offset };
}

/** As JSON has it: bytes as hex, maps as objects, no integer that would be rounded, nothing that is absent. */
function plain(value) {
  if (typeof value === "bigint") return value <= Number.MAX_SAFE_INTEGER ? Number(value) : value.toString();
  if (value instanceof Number) return Number(value);
  if (value instanceof Uint8Array) return Buffer.from(value).toString("hex");
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  const entries = value instanceof Map ? [...value] : Object.entries(value);
  return Object.fromEntries(entries.filter(([, item]) => item !== undefined).map(([key, item]) => [key, plain(item)]));
}
