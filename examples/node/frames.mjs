// The codec of the eight 0xD3 frames: header, checksum, Delta maps, batches in columns, control frames.
// It is pure: it uses no socket and no clock. Invalid bytes throw `InvalidFrame`.

import { pack, unpack } from "./msgpack.mjs";
import { namespaceOf } from "./partition.mjs";

export const TYPES = ["delta", "batch", "ack", "nack", "backpressure", "heartbeat", "subscribe", "unsubscribe"];
export const OPERATIONS = [
  "create", "sparse", "dense", "scale", "offset", "transform", "delete", "sparse_add", "opaque", "metadata",
];
export const HEADER_BYTES = 16;

const ACK_WANTED = 1, HIGH = 2, COMPRESSED = 4, BATCHED = 8; // flags in the header
const STAMP_BYTES = 48;
const BODY_AT = HEADER_BYTES + STAMP_BYTES; // where the body begins in a batch's frame
const STREAM_AT = 24; // where the stamp's stream is in a batch's frame,
const PARTITION_AT = 28; // and its partition
const ROWS_MAX = 65_536;
const PAYLOAD_MAX = [1_310_720, 16_777_216, ...Array(6).fill(65_536)]; // bytes, by the frame type's number
const TRANSACTIONAL = 0, CONTROL = 1, GAPS = 8, STATES = 9; // bit numbers in a batch's attributes
const NORMAL = 2; // the default priority; below it is higher

/** The error for bytes that violate the protocol. `code` is the error code for the Nack. */
export class InvalidFrame extends Error {
  constructor(message, code = 1) {
    super(message);
    this.code = code;
  }
}

// --- checksum

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = (byte >>> 1) ^ (byte & 1 ? 0x82f63b78 : 0);
  return byte;
});

/** Returns the CRC32C (Castagnoli) of one or more pieces, joined. */
export function crc32c(...pieces) {
  let crc = ~0;
  for (const piece of pieces) for (const byte of piece) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 0xff];
  return ~crc >>> 0;
}

// --- frames

/** Returns the buffer's first frame, `{ type, flags, sequence, payload, length }`; null if the buffer ends within it. */
export function readFrame(buffer) {
  if (buffer.length < HEADER_BYTES) return null;
  const [magic, version, number, flags] = buffer;
  if (magic !== 0xd3) throw new InvalidFrame(`byte 0 is 0x${magic.toString(16)}: start each frame with 0xd3`);
  if (version !== 1) throw new InvalidFrame(`frame version ${version} is not supported: send version 1`, 2);
  const type = TYPES[number];
  if (!type) throw new InvalidFrame(`frame type ${number} is unknown: send a type from 0 to 7`);
  if (flags & 0xf0) throw new InvalidFrame(`flags ${flags} have reserved bits set: send bits 4 to 7 as 0`, 3);
  const allowed = { delta: ACK_WANTED | HIGH, batch: ACK_WANTED | HIGH | COMPRESSED | BATCHED }[type] ?? 0;
  if (flags & ~allowed || (type === "batch") !== Boolean(flags & BATCHED)) {
    throw new InvalidFrame(`flags ${flags} on a ${type} frame: set only the flags of its type`);
  }
  const size = buffer.readUInt32BE(12);
  const max = PAYLOAD_MAX[number];
  if (size > max) throw new InvalidFrame(`a ${type} frame of ${size} bytes; the maximum is ${max}: send less at once`, 4);
  const length = HEADER_BYTES + size;
  if (buffer.length < length) return null;
  return { type, flags, sequence: buffer.readBigUInt64BE(4), payload: buffer.subarray(HEADER_BYTES, length), length };
}

/** Decodes one frame: `type`, `sequence`, `length`, and the fields of its type. */
export function decode(bytes) {
  const frame = readFrame(bytes);
  if (frame?.length !== bytes.length) throw new InvalidFrame(`${bytes.length} bytes: decode exactly one frame`);
  const { type, sequence, flags, payload, length } = frame;
  try {
    if (type === "batch") return { type, sequence, length, ackWanted: Boolean(flags & 1), ...decodeBatch(bytes) };
    if (type === "heartbeat" && !payload.length) return { type, sequence, length };
    const map = readMap(bytes);
    if (type === "delta") return { type, sequence, length, ackWanted: Boolean(flags & 1), ...decodeDelta(map) };
    const fields = map.length ? unpack(map) : new Map();
    if (!(fields instanceof Map)) throw new InvalidFrame(`the payload of a ${type} is not a map: send a msgpack map`);
    for (const [key, value] of fields) if (value === null) fields.delete(key);
    return { type, sequence, length, ...Object.fromEntries(fields) };
  } catch (error) {
    throw error instanceof RangeError || error instanceof TypeError ? new InvalidFrame(`${type}: ${error.message}`) : error;
  }
}

/** Encodes a frame that has the form in which `decode` returns frames. */
export function encode(frame) {
  const { type, sequence, length, ackWanted, ...fields } = frame;
  if (type === "batch") return encodeBatch(sequence, ackWanted, fields);
  if (type === "delta") return encodeDelta(sequence, ackWanted, fields);
  const hasFields = Object.keys(fields).length > 0;
  if (type === "heartbeat" && !hasFields) return buildFrame(type, 0, sequence, Buffer.alloc(0));
  return buildMapFrame(type, 0, sequence, hasFields ? pack(fields) : Buffer.alloc(0));
}

/** Returns a copy of an encoded Delta or producer's batch with another sequence, and with the checksum of the new header. */
export function withSequence(bytes, sequence) {
  const copy = Buffer.from(bytes);
  copy.writeBigUInt64BE(BigInt(sequence), 4);
  return TYPES[copy[2]] === "batch" ? writeStampCrc(copy) : writeCrc(copy);
}

/** Builds a frame of one map, with the checksum of header and map at its end. */
function buildMapFrame(type, flags, sequence, map) {
  return writeCrc(buildFrame(type, flags, sequence, Buffer.concat([map, Buffer.alloc(4)])));
}

function writeCrc(frame) {
  frame.writeUInt32LE(crc32c(frame.subarray(0, -4)), frame.length - 4);
  return frame;
}

function writeStampCrc(frame) {
  frame.writeUInt32LE(computeStampCrc(frame), HEADER_BYTES);
  return frame;
}

function computeStampCrc(frame) {
  return crc32c(frame.subarray(0, HEADER_BYTES), frame.subarray(HEADER_BYTES + 4, BODY_AT));
}

/** Verifies a frame's checksum, and returns the bytes of its map. */
function readMap(frame) {
  const end = frame.length - 4;
  if (end < HEADER_BYTES) throw new InvalidFrame(`a frame of ${frame.length} bytes: end the payload with a checksum`);
  checkCrc("frame", crc32c(frame.subarray(0, end)), frame.readUInt32LE(end));
  return frame.subarray(HEADER_BYTES, end);
}

function checkCrc(part, computed, stated) {
  if (computed === stated) return;
  const [found, expected] = [computed, stated].map((crc) => `0x${crc.toString(16).padStart(8, "0")}`);
  throw new InvalidFrame(`${part} checksum is ${found}; the frame states ${expected}: send the frame again`, 5);
}

function buildFrame(type, flags, sequence, payload) {
  const header = Buffer.of(0xd3, 1, TYPES.indexOf(type), flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  header.writeBigUInt64BE(BigInt(sequence), 4);
  header.writeUInt32BE(payload.length, 12);
  return Buffer.concat([header, payload]);
}

// --- a delta as a map

const DELTA_KEYS = {
  vectorId: "vector_id", namespace: "namespace", op: "op", values: "values", indices: "indices", data: "data", id: "id",
  origin: "origin", counter: "counter", parents: "parents", clock: "clock", timestamp: "timestamp",
  priority: "priority", source: "source", metadata: "metadata", topics: "topics", expect: "expect",
  ackLevel: "ack_level", lamport: "lamport", stream: "stream", partition: "partition",
};
const BIGINT_FIELDS = new Set(["origin", "counter", "timestamp", "lamport"]);
const DOT_LISTS = new Set(["parents", "clock"]);

const toBigDot = (item) => (Array.isArray(item) ? item.map(BigInt) : item);

function encodeDelta(sequence, ackWanted, delta) {
  const map = new Map();
  for (const [name, key] of Object.entries(DELTA_KEYS)) {
    const value = delta[name];
    if (value !== undefined) map.set(key, name === "values" || name === "indices" ? bytesOf(value) : value);
  }
  const flags = (ackWanted ? ACK_WANTED : 0) | ((delta.priority ?? NORMAL) < NORMAL ? HIGH : 0);
  return buildMapFrame("delta", flags, sequence, pack(map));
}

function decodeDelta(bytes) {
  const map = unpack(bytes);
  const delta = {};
  for (const [name, key] of Object.entries(DELTA_KEYS)) {
    const value = map.get(key);
    if (value === undefined || value === null) continue;
    if (name === "values") delta[name] = toFloats(value);
    else if (name === "indices") delta[name] = toIntegers(value);
    else if (name === "expect") delta[name] = toBigDot(value);
    else delta[name] = DOT_LISTS.has(name) ? value.map(toBigDot) : BIGINT_FIELDS.has(name) ? BigInt(value) : value;
  }
  for (const name of ["vectorId", "op"]) {
    if (delta[name] === undefined) throw new InvalidFrame(`${DELTA_KEYS[name]} is missing: send it in each Delta`);
  }
  return delta;
}

// --- a batch in columns: { origin, epoch, base, rows, ... }

const COLUMNS = [
  "clock", "keyEnds", "keys", "namespaces", "namespaceIndex", "kinds", "ids", "counters", "parents", "rowOffsets",
  "times", "valueEnds", "indices", "values", "blobEnds", "blobs", "metadataEnds", "metadata", "tagNames", "tags",
  "expects", "stateOrigins", "stateCounters", "stateLamports", "stateIgnored",
];
// The attribute's bit number for these columns: the bit is set if the column is present.
const ATTRIBUTES = { ids: 2, parents: 3, clock: 4, kinds: 5, namespaceIndex: 6, rowOffsets: 7, counters: GAPS };

function encodeBatch(sequence, ackWanted, batch) {
  const { rows } = batch;
  const count = rows?.length ?? 0;
  if (count < 1 || count > ROWS_MAX) throw new RangeError(`a batch of ${count} rows: send 1 to ${ROWS_MAX}`);
  const idLengths = new Set(rows.map(({ id }) => id?.length));
  if (idLengths.size > 1) throw new RangeError("id: some rows have none: give an id of 16 bytes to all rows, or to none");
  const columns = encodeColumns(batch);
  const present = COLUMNS.map((name, bit) => ({ name, bit, bytes: columns[name] })).filter(({ bytes }) => bytes);
  const table = Buffer.alloc(roundUpTo8(8 + 4 * present.length));
  table.writeBigUInt64LE(present.reduce((mask, { bit }) => mask | (1n << BigInt(bit)), 0n));
  present.forEach(({ bytes }, i) => table.writeUInt32LE(bytes.length, 8 + 4 * i));
  const body = [Buffer.alloc(64), table];
  for (const { bytes } of present) body.push(bytes, Buffer.alloc(roundUpTo8(bytes.length) - bytes.length));
  const bodyLength = body.reduce((sum, piece) => sum + piece.length, 0);
  writeBodyHeader(body[0], batch, present, bodyLength);

  body.push(Buffer.alloc(4)); // with the checksum, these zeros make the frame's length a multiple of 8
  const crc = Buffer.alloc(4);
  crc.writeUInt32LE(crc32c(...body));
  const priority = batch.priority ?? NORMAL;
  const flags = BATCHED | (ackWanted ? ACK_WANTED : 0) | (priority < NORMAL ? HIGH : 0);
  const frame = buildFrame("batch", flags, sequence, Buffer.concat([Buffer.alloc(STAMP_BYTES), ...body, crc]));
  if (batch.stamp) writeStamp(frame, batch.stamp);
  else {
    frame.writeUInt32LE(batch.stream ?? 0, STREAM_AT);
    frame.writeUInt16LE(partitionOf(batch.origin), PARTITION_AT);
  }
  return writeStampCrc(frame);
}

function writeBodyHeader(header, batch, present, bodyLength) {
  const { rows } = batch;
  const has = new Set(present.map(({ name }) => name));
  const flag = (name, bit) => (batch[name] ? 1 << bit : 0);
  let attributes = flag("transactional", TRANSACTIONAL) | flag("control", CONTROL) | flag("states", STATES);
  for (const [name, bit] of Object.entries(ATTRIBUTES)) if (has.has(name)) attributes |= 1 << bit;
  attributes |= ((batch.ackLevel ?? 0) << 10) | ((batch.priority ?? NORMAL) << 12);
  const lengths = new Set(rows.filter(({ op }) => op === 0 || op === 2).map(({ values }) => values.length));
  header[0] = 1; // the body's version
  header[1] = 8; // the length of this header, in units of 8 bytes
  header.writeUInt16LE(attributes, 2);
  header.writeUInt32LE(rows.length, 4);
  header.writeBigUInt64LE(batch.origin, 8);
  header.writeUInt32LE(batch.epoch, 16);
  header.writeBigUInt64LE(batch.base, 24);
  header.writeBigUInt64LE(batch.timestamp ?? 0n, 32);
  header.writeBigUInt64LE(rows.reduce((mask, { op }) => mask | (1n << BigInt(op)), 0n), 40);
  header.writeUInt32LE(lengths.size === 1 ? [...lengths][0] : 0, 48);
  header.writeUInt32LE(bodyLength, 52);
  header.writeBigUInt64LE(batch.previous ?? 0n, 56);
}

/** Returns the bytes of each column that the rows need. */
function encodeColumns({ rows, base, clock, control, timestamp = 0n }) {
  const join = (get, pieces = rows.map(get)) => Buffer.concat(pieces.map((piece) => piece ?? Buffer.alloc(0)));
  const anyHas = (name) => rows.some((row) => row[name] !== undefined);
  const differ = (get) => rows.some((row) => get(row) !== get(rows[0]));
  const ends = (get, sum = 0) => encodeU32(rows.map((row, i) => (sum += get(row, i)?.length ?? 0)));
  const column = (needed, encodeBytes) => (needed ? encodeBytes() : undefined);
  const encodeName = (name) => [encodeU16(Buffer.byteLength(name)), Buffer.from(name)];
  const encodeNames = (list) => Buffer.concat(list.flatMap(encodeName));

  const keys = rows.map(({ vectorId }) => Buffer.from(vectorId));
  const namespaces = [...new Set(rows.map(namespaceOf))];
  const tags = [...new Set(rows.flatMap(({ topics = [] }) => topics))];
  const metadata = new Map(rows.filter((row) => row.metadata).map((row) => [row, pack(row.metadata)]));
  return {
    clock: column(clock?.length, () => encodeU64(clock.flat())),
    keyEnds: column(!control, () => ends((_, i) => keys[i])),
    keys: column(!control, () => Buffer.concat(keys)),
    namespaces: column(!control, () => encodeNames(namespaces)),
    namespaceIndex: column(namespaces.length > 1,
      () => Buffer.concat(rows.map((row) => encodeU16(namespaces.indexOf(namespaceOf(row)))))),
    kinds: column(differ(({ op }) => op), () => Buffer.from(rows.map(({ op }) => op))),
    ids: column(anyHas("id"), () => join(({ id }) => id)),
    counters: column(rows.some(({ counter }, i) => counter !== undefined && counter !== base + BigInt(i)),
      () => encodeU64(rows.map(({ counter }) => counter))),
    parents: column(anyHas("parents"), () => Buffer.concat(rows.flatMap(({ parents = [] }, i) =>
      parents.flatMap((parent) => parent.place ? [encodeU32([i, 2, ...parent.place.slice(0, 2)]), encodeU64([parent.place[2]])]
        : Array.isArray(parent) ? [encodeU32([i, 0]), encodeU64(parent)]
        : [encodeU32([i, 1]), parent])))),
    rowOffsets: column(anyHas("offset"), () => encodeU64(rows.map(({ offset }) => offset))),
    times: column(rows.some((row) => (row.timestamp ?? timestamp) !== timestamp),
      () => encodeU64(rows.map((row) => row.timestamp ?? timestamp))),
    valueEnds: column(differ(({ values }) => values?.length ?? 0), () => ends(({ values }) => values)),
    indices: column(anyHas("indices"), () => join(({ indices }) => indices && bytesOf(indices))),
    values: column(anyHas("values"), () => join(({ values }) => values && bytesOf(values))),
    blobEnds: column(rows.some(({ data }) => data?.length), () => ends(({ data }) => data)),
    blobs: column(rows.some(({ data }) => data?.length), () => join(({ data }) => data)),
    metadataEnds: column(metadata.size, () => ends((row) => metadata.get(row))),
    metadata: column(metadata.size, () => Buffer.concat([...metadata.values()])),
    tagNames: column(tags.length, () => encodeNames(tags)),
    tags: column(tags.length,
      () => encodeU32(rows.flatMap(({ topics = [] }, i) => topics.flatMap((tag) => [i, tags.indexOf(tag)])))),
    expects: column(anyHas("expect"),
      () => join(({ expect }, i) => expect && Buffer.concat([encodeU32([i, 0]), encodeU64(expect)]))),
    stateOrigins: column(anyHas("state"), () => encodeU64(rows.map(({ state }) => state.origin))),
    stateCounters: column(anyHas("state"), () => encodeU64(rows.map(({ state }) => state.counter))),
    stateLamports: column(anyHas("state"), () => encodeU64(rows.map(({ state }) => state.lamport))),
    stateIgnored: column(rows.some(({ state }) => state?.ignored), () => encodeU64(rows.map(({ state }) => state.ignored))),
  };
}

function decodeBatch(frame) {
  if (frame[3] & COMPRESSED) throw new InvalidFrame("flag b2 (compressed): the hello names no codec: clear the flag", 3);
  const crcAt = frame.length - 4;
  if (crcAt < BODY_AT + 72) throw new InvalidFrame(`a batch of ${frame.length} bytes: send at least its fixed parts`);
  checkCrc("body", crc32c(frame.subarray(BODY_AT, crcAt)), frame.readUInt32LE(crcAt));
  const header = frame.subarray(BODY_AT);
  const attributes = header.readUInt16LE(2);
  const count = header.readUInt32LE(4);
  if (header[0] !== 1) throw new InvalidFrame(`body version ${header[0]} is not supported: send version 1`, 2);
  if (header[1] !== 8) throw new InvalidFrame(`a body header of ${8 * header[1]} bytes: send 64`);
  if (attributes >> 14) throw new InvalidFrame(`attributes ${attributes} have reserved bits set: send bits 14 and 15 as 0`, 3);
  if (count < 1 || count > ROWS_MAX) throw new InvalidFrame(`a batch of ${count} rows: send 1 to ${ROWS_MAX}`);
  const batch = {
    transactional: Boolean(attributes & (1 << TRANSACTIONAL)),
    control: Boolean(attributes & (1 << CONTROL)),
    states: Boolean(attributes & (1 << STATES)),
    ackLevel: (attributes >> 10) & 3,
    priority: (attributes >> 12) & 3,
    origin: header.readBigUInt64LE(8),
    epoch: header.readUInt32LE(16),
    base: header.readBigUInt64LE(24),
    timestamp: header.readBigUInt64LE(32),
    previous: header.readBigUInt64LE(56),
    stamp: readStamp(frame),
  };
  const columns = splitColumns(header, header.readUInt32LE(52));
  if (columns.clock) batch.clock = toPairs(toBigInts(columns.clock));
  batch.rows = decodeRows(batch, count, header.readBigUInt64LE(40), columns, frame.readBigUInt64BE(4));
  return batch;
}

function splitColumns(body, length) {
  const max = body.length - 4;
  if (length > max) throw new InvalidFrame(`body length ${length}: the frame has ${max} bytes of body: send the entire body`);
  const mask = body.readBigUInt64LE(64);
  if (mask >> BigInt(COLUMNS.length)) {
    throw new InvalidFrame(`columns mask 0x${mask.toString(16)}: send only columns 0 to ${COLUMNS.length - 1}`);
  }
  const present = COLUMNS.filter((_, bit) => (mask >> BigInt(bit)) & 1n);
  const columns = {};
  let position = roundUpTo8(72 + 4 * present.length);
  present.forEach((name, i) => {
    const end = position + body.readUInt32LE(72 + 4 * i);
    if (end > length) throw new InvalidFrame(`column ${name} ends after the body: make the body longer`);
    columns[name] = body.subarray(position, end);
    position = roundUpTo8(end);
  });
  return columns;
}

function decodeRows(batch, count, mask, columns, sequence) {
  // `readColumn` reads a column of one number per row; `bytesOfRow` takes a row's bytes out of a column.
  const readColumn = (name, size, read) => columns[name] && (checkSize(columns, name, count * size), read(columns[name]));
  const bytesOfRow = (name, ends, i) => columns[name]?.subarray(i ? ends[i - 1] : 0, ends[i]);
  const keyEnds = readColumn("keyEnds", 4, toIntegers) ?? [];
  const blobEnds = readColumn("blobEnds", 4, toIntegers);
  const metadataEnds = readColumn("metadataEnds", 4, toIntegers);
  const values = columns.values ? toFloats(columns.values) : new Float32Array();
  const equalEnds = () => Array.from({ length: count }, (_, i) => ((i + 1) * values.length) / count);
  const valueEnds = readColumn("valueEnds", 4, toIntegers) ?? equalEnds();
  const indices = columns.indices && toIntegers(columns.indices);
  const namespaces = columns.namespaces ? readNames(columns.namespaces) : [""];
  const namespaceIndex = readColumn("namespaceIndex", 2, (bytes) => new Uint16Array(copyBuffer(bytes)));
  // Without the column, all rows have the one kind whose bit is set in the mask.
  const kinds = readColumn("kinds", 1, (bytes) => bytes) ?? Array(count).fill(mask.toString(2).length - 1);
  const [counters, offsets, times] = ["counters", "rowOffsets", "times"].map((name) => readColumn(name, 8, toBigInts));
  const stateColumns = ["stateOrigins", "stateCounters", "stateLamports", "stateIgnored"].map((name) => readColumn(name, 8, toBigInts));
  let indexAt = 0;
  const rows = Array.from({ length: count }, (_, i) => {
    const op = kinds[i];
    const row = {
      vectorId: bytesOfRow("keys", keyEnds, i)?.toString() ?? "",
      namespace: namespaces[namespaceIndex?.[i] ?? 0],
      op,
      counter: counters?.[i] ?? batch.base + BigInt(i),
    };
    const ownValues = values.subarray(i ? valueEnds[i - 1] : 0, valueEnds[i]);
    if ([0, 1, 2, 3, 4, 7].includes(op)) row.values = ownValues;
    if (op === 1 || op === 7) row.indices = indices.subarray(indexAt, (indexAt += ownValues.length));
    if (op === 5 || op === 8 || op > 9) row.data = blobEnds ? bytesOfRow("blobs", blobEnds, i) : Buffer.alloc(0);
    if (columns.ids) row.id = columns.ids.subarray(16 * i, 16 * i + 16);
    if (offsets) row.offset = offsets[i];
    if (times) row.timestamp = times[i];
    const patch = metadataEnds && bytesOfRow("metadata", metadataEnds, i);
    if (patch?.length) row.metadata = unpack(patch, { lastWins: true }); // the patch may have duplicate keys
    if (batch.states) {
      const [origin, counter, lamport, ignored = 0n] = stateColumns.map((column) => column?.[i]);
      row.state = { origin, counter, lamport, ignored };
    }
    return row;
  });
  for (const [i, form, bytes] of readEntries(columns.parents, 24)) {
    const parent = form === 0 ? toBigInts(bytes) : form === 1 ? bytes : { place: readPlace(bytes) }; // of the parent before it
    (rows[i].parents ??= []).push(parent);
  }
  const tags = columns.tagNames ? readNames(columns.tagNames) : [];
  for (const [i, tag] of readEntries(columns.tags, 8)) (rows[i].topics ??= []).push(tags[tag]);
  for (const [i, , bytes] of readEntries(columns.expects, 24)) rows[i].expect = toBigInts(bytes);
  return rows;
}

/** Yields the entries of a column, of `size` bytes each, as `[row, number, bytes]`: two u32, then the remaining bytes. */
function* readEntries(column, size) {
  for (let position = 0; column && position < column.length; position += size) {
    yield [column.readUInt32LE(position), column.readUInt32LE(position + 4), column.subarray(position + 8, position + size)];
  }
}

// --- the stamp

const STAMP_FIELDS = [ // name, offset in the frame, size
  ["crc", 16, 4], ["leaderEpoch", 20, 4], ["stream", 24, 4], ["partition", 28, 2], ["source", 30, 1], ["knownIds", 31, 1],
  ["appendTime", 32, 8], ["lamport", 40, 8], ["previousCrc", 48, 4], ["bodyCrc", 52, 4], ["syncedOffset", 56, 8],
];

/** Returns the stamp of a log or a forwarder; undefined for the stamp of a producer, which has only a partition. */
function readStamp(frame) {
  const stamp = {};
  for (const [name, position, size] of STAMP_FIELDS) {
    stamp[name] = size === 8 ? frame.readBigUInt64LE(position) : frame.readUIntLE(position, size);
  }
  checkCrc("stamp", computeStampCrc(frame), stamp.crc);
  const ownPartition = stamp.partition === partitionOf(frame.readBigUInt64LE(BODY_AT + 8));
  const rest = [...frame.subarray(HEADER_BYTES + 4, PARTITION_AT), ...frame.subarray(PARTITION_AT + 2, BODY_AT)];
  return ownPartition && rest.every((byte) => byte === 0) ? undefined : stamp;
}

function writeStamp(frame, stamp) {
  for (const [name, position, size] of STAMP_FIELDS.slice(1)) {
    if (size === 8) frame.writeBigUInt64LE(stamp[name], position);
    else frame.writeUIntLE(stamp[name], position, size);
  }
}

// --- numbers in bytes: columns are little-endian, like every machine that runs Node

export const partitionOf = (origin) => Number((origin >> 4n) & 0xffffn);
const readPlace = (bytes) => [bytes.readUInt32LE(0), bytes.readUInt32LE(4), bytes.readBigUInt64LE(8)];
const roundUpTo8 = (length) => (length + 7) & ~7;
const copyBuffer = (bytes) => bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
export const toFloats = (bytes) => new Float32Array(copyBuffer(bytes));
export const toIntegers = (bytes) => new Uint32Array(copyBuffer(bytes));
const toBigInts = (bytes) => [...new BigUint64Array(copyBuffer(bytes))];
const toPairs = (list) => Array.from({ length: list.length / 2 }, (_, i) => [list[2 * i], list[2 * i + 1]]);
const bytesOf = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength);
const encodeU32 = (list) => bytesOf(Uint32Array.from(list));
const encodeU64 = (list) => bytesOf(BigUint64Array.from(list));
const encodeU16 = (number) => Buffer.of(number & 0xff, number >> 8);

function checkSize(columns, name, length) {
  const actual = columns[name].length;
  if (actual !== length) throw new InvalidFrame(`column ${name} has ${actual} bytes: send ${length}`);
}

function readNames(bytes) {
  const names = [];
  for (let position = 0; position < bytes.length; ) {
    const end = position + 2 + bytes.readUInt16LE(position);
    names.push(bytes.subarray(position + 2, end).toString());
    position = end;
  }
  return names;
}
