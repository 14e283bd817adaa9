// The bytes of the eight 0xD3 frames: header, checksum, Delta maps, batches in columns, control frames.
// Rule: values in, bytes out, and back; no sockets, no clock. What is unsound throws `Unsound`.

import { pack, unpack } from "./msgpack.mjs";

export const TYPES = ["delta", "batch", "ack", "nack", "backpressure", "heartbeat", "subscribe", "unsubscribe"];
export const OPERATIONS = [
  "create", "sparse", "dense", "scale", "offset", "transform", "delete", "sparse_add", "opaque", "metadata",
];
export const HEADER_BYTES = 16;

const ACK_WANTED = 1, HIGH = 2, COMPRESSED = 4, BATCHED = 8;
const STAMP_BYTES = 48;
const BODY = HEADER_BYTES + STAMP_BYTES; // where a batch's body begins
const PARTITION_AT = 28; // in the stamp
const ROWS_MAX = 65_536;
const PAYLOAD_MAX = [1_310_720, 16_777_216, ...Array(6).fill(65_536)]; // by type
const TRANSACTIONAL = 0, CONTROL = 1, LEAPS = 8, STATES = 9; // attribute bits that no column decides
const NORMAL = 2;

/** Bytes that are not what the protocol says. `code` is the error code for a Nack. */
export class Unsound extends Error {
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

/** CRC32C (Castagnoli) of some bytes, or of several pieces one behind the other. */
export function crc32c(...pieces) {
  let crc = ~0;
  for (const piece of pieces) for (const byte of piece) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 0xff];
  return ~crc >>> 0;
}

// --- whole frames

/** The first frame of the buffer, `{ type, flags, sequence, payload, length }`; null where it is not all there. */
export function readFrame(buffer) {
  if (buffer.length < HEADER_BYTES) return null;
  const [magic, version, number, flags] = buffer;
  if (magic !== 0xd3) throw new Unsound(`the frame starts with byte 0x${magic.toString(16)}, not 0xd3`);
  if (version !== 1) throw new Unsound(`version ${version} is unknown; 1 is spoken here`, 2);
  const type = TYPES[number];
  if (!type) throw new Unsound(`frame type ${number} is unknown`);
  if (flags & 0xf0) throw new Unsound(`flags ${flags}: a reserved bit is set`, 3);
  const allowed = { delta: ACK_WANTED | HIGH, batch: ACK_WANTED | HIGH | COMPRESSED | BATCHED }[type] ?? 0;
  if (flags & ~allowed || (type === "batch") !== Boolean(flags & BATCHED)) {
    throw new Unsound(`flags ${flags} do not belong to a ${type}`);
  }
  const size = buffer.readUInt32BE(12);
  if (size > PAYLOAD_MAX[number]) throw new Unsound(`a ${type} of ${size} bytes; ${PAYLOAD_MAX[number]} at most`, 4);
  const length = HEADER_BYTES + size;
  if (buffer.length < length) return null;
  return { type, flags, sequence: buffer.readBigUInt64BE(4), payload: buffer.subarray(HEADER_BYTES, length), length };
}

/** What a whole frame says: its fields beside `type`, `sequence` and `length`. */
export function decode(bytes) {
  const frame = readFrame(bytes);
  if (frame?.length !== bytes.length) throw new Unsound(`${bytes.length} bytes are not one frame`);
  const { type, sequence, flags, payload, length } = frame;
  try {
    if (type === "batch") return { type, sequence, length, ackWanted: Boolean(flags & 1), ...decodeBatch(bytes) };
    if (type === "heartbeat" && !payload.length) return { type, sequence, length };
    const map = unsealed(bytes);
    if (type === "delta") return { type, sequence, length, ackWanted: Boolean(flags & 1), ...decodeDelta(map) };
    const fields = map.length ? unpack(map) : new Map();
    if (!(fields instanceof Map)) throw new Unsound("the payload is no map");
    for (const [key, value] of fields) if (value === null) fields.delete(key);
    return { type, sequence, length, ...Object.fromEntries(fields) };
  } catch (error) {
    throw error instanceof RangeError || error instanceof TypeError ? new Unsound(`${type}: ${error.message}`) : error;
  }
}

/** A frame from what `decode` gives. */
export function encode(frame) {
  const { type, sequence, length, ackWanted, ...fields } = frame;
  if (type === "batch") return encodeBatch(sequence, ackWanted, fields);
  if (type === "delta") return encodeDelta(sequence, ackWanted, fields);
  const said = Object.keys(fields).length > 0;
  if (type === "heartbeat" && !said) return framed(type, 0, sequence, Buffer.alloc(0));
  return sealed(type, 0, sequence, said ? pack(fields) : Buffer.alloc(0));
}

/** The same Delta or producer's batch with another sequence: the checksum of its header changes, all else stays. */
export function renumbered(bytes, sequence) {
  const copy = Buffer.from(bytes);
  copy.writeBigUInt64BE(BigInt(sequence), 4);
  return TYPES[copy[2]] === "batch" ? withStampCrc(copy) : withCrc(copy);
}

/** A frame of one map: behind it the checksum of header and map. */
function sealed(type, flags, sequence, map) {
  return withCrc(framed(type, flags, sequence, Buffer.concat([map, Buffer.alloc(4)])));
}

function withCrc(frame) {
  frame.writeUInt32LE(crc32c(frame.subarray(0, -4)), frame.length - 4);
  return frame;
}

function withStampCrc(frame) {
  frame.writeUInt32LE(stampCrc(frame), HEADER_BYTES);
  return frame;
}

const stampCrc = (frame) => crc32c(frame.subarray(0, HEADER_BYTES), frame.subarray(HEADER_BYTES + 4, BODY));

/** The map of a frame whose checksum is right. */
function unsealed(frame) {
  const end = frame.length - 4;
  if (end < HEADER_BYTES) throw new Unsound("the payload has no room for its checksum");
  if (crc32c(frame.subarray(0, end)) !== frame.readUInt32LE(end)) throw new Unsound("the frame's checksum is another", 5);
  return frame.subarray(HEADER_BYTES, end);
}

function framed(type, flags, sequence, payload) {
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
const BIG = new Set(["origin", "counter", "timestamp", "lamport"]);
const DOTS = new Set(["parents", "clock"]);

const bigDot = (item) => (Array.isArray(item) ? item.map(BigInt) : item);

function encodeDelta(sequence, ackWanted, delta) {
  const map = new Map();
  for (const [name, key] of Object.entries(DELTA_KEYS)) {
    const value = delta[name];
    if (value !== undefined) map.set(key, name === "values" || name === "indices" ? numberBytes(value) : value);
  }
  const flags = (ackWanted ? ACK_WANTED : 0) | ((delta.priority ?? NORMAL) < NORMAL ? HIGH : 0);
  return sealed("delta", flags, sequence, pack(map));
}

function decodeDelta(bytes) {
  const map = unpack(bytes);
  const delta = {};
  for (const [name, key] of Object.entries(DELTA_KEYS)) {
    const value = map.get(key);
    if (value === undefined || value === null) continue;
    if (name === "values") delta[name] = floats(value);
    else if (name === "indices") delta[name] = integers(value);
    else if (name === "expect") delta[name] = bigDot(value);
    else delta[name] = DOTS.has(name) ? value.map(bigDot) : BIG.has(name) ? BigInt(value) : value;
  }
  if (delta.vectorId === undefined || delta.op === undefined) throw new Unsound("the delta lacks vector_id or op");
  return delta;
}

// --- a batch in columns: { origin, epoch, base, rows, ... }

const COLUMNS = [
  "clock", "keyEnds", "keys", "namespaces", "namespaceIndex", "kinds", "ids", "counters", "parents", "rowOffsets",
  "times", "valueEnds", "indices", "values", "blobEnds", "blobs", "metadataEnds", "metadata", "tagNames", "tags",
  "expects", "stateOrigins", "stateCounters", "stateLamports", "stateIgnored",
];
// The attribute bit that says that a column is there.
const ATTRIBUTES = { ids: 2, parents: 3, clock: 4, kinds: 5, namespaceIndex: 6, rowOffsets: 7, counters: LEAPS };

function encodeBatch(sequence, ackWanted, batch) {
  const { rows } = batch;
  if (!(rows?.length >= 1 && rows.length <= ROWS_MAX)) throw new RangeError(`rows: 1 to ${ROWS_MAX} of them`);
  if (new Set(rows.map(({ id }) => id?.length)).size > 1) throw new RangeError("id: all rows of a batch have one, or none");
  const columns = columnsOf(batch);
  const present = COLUMNS.map((name, bit) => ({ name, bit, bytes: columns[name] })).filter(({ bytes }) => bytes);
  const table = Buffer.alloc(upTo8(8 + 4 * present.length));
  table.writeBigUInt64LE(present.reduce((mask, { bit }) => mask | (1n << BigInt(bit)), 0n));
  present.forEach(({ bytes }, i) => table.writeUInt32LE(bytes.length, 8 + 4 * i));
  const body = [Buffer.alloc(64), table];
  for (const { bytes } of present) body.push(bytes, Buffer.alloc(upTo8(bytes.length) - bytes.length));
  const bodyLength = body.reduce((sum, piece) => sum + piece.length, 0);
  writeBodyHeader(body[0], batch, present, bodyLength);

  body.push(Buffer.alloc(4)); // the body fills whole eights: 4 zeros and the checksum are one more
  const crc = Buffer.alloc(4);
  crc.writeUInt32LE(crc32c(...body));
  const priority = batch.priority ?? NORMAL;
  const flags = BATCHED | (ackWanted ? ACK_WANTED : 0) | (priority < NORMAL ? HIGH : 0);
  const frame = framed("batch", flags, sequence, Buffer.concat([Buffer.alloc(STAMP_BYTES), ...body, crc]));
  if (batch.stamp) writeStamp(frame, batch.stamp);
  else frame.writeUInt16LE(partitionOf(batch.origin), PARTITION_AT);
  return withStampCrc(frame);
}

function writeBodyHeader(header, batch, present, bodyLength) {
  const { rows } = batch;
  const has = new Set(present.map(({ name }) => name));
  const flag = (name, bit) => (batch[name] ? 1 << bit : 0);
  let attributes = flag("transactional", TRANSACTIONAL) | flag("control", CONTROL) | flag("states", STATES);
  for (const [name, bit] of Object.entries(ATTRIBUTES)) if (has.has(name)) attributes |= 1 << bit;
  attributes |= ((batch.ackLevel ?? 0) << 10) | ((batch.priority ?? NORMAL) << 12);
  const lengths = new Set(rows.filter(({ op }) => op === 0 || op === 2).map(({ values }) => values.length));
  header[0] = 1;
  header[1] = 8;
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

/** The bytes of each column that the rows need. */
function columnsOf({ rows, base, clock, control, timestamp = 0n }) {
  const all = (get, pieces = rows.map(get)) => Buffer.concat(pieces.map((piece) => piece ?? Buffer.alloc(0)));
  const any = (name) => rows.some((row) => row[name] !== undefined);
  const differ = (get) => rows.some((row) => get(row) !== get(rows[0]));
  const ends = (get, sum = 0) => numbers32(rows.map((row, i) => (sum += get(row, i)?.length ?? 0)));
  const column = (when, bytes) => (when ? bytes() : undefined);
  const names = (list) => Buffer.concat(list.flatMap((name) => [u16(Buffer.byteLength(name)), Buffer.from(name)]));

  const keys = rows.map(({ vectorId }) => Buffer.from(vectorId));
  const spaces = [...new Set(rows.map(namespaceOf))];
  const tags = [...new Set(rows.flatMap(({ topics = [] }) => topics))];
  const metadata = new Map(rows.filter((row) => row.metadata).map((row) => [row, pack(row.metadata)]));
  return {
    clock: column(clock?.length, () => numbers64(clock.flat())),
    keyEnds: column(!control, () => ends((_, i) => keys[i])),
    keys: column(!control, () => Buffer.concat(keys)),
    namespaces: column(!control, () => names(spaces)),
    namespaceIndex: column(spaces.length > 1, () => Buffer.concat(rows.map((row) => u16(spaces.indexOf(namespaceOf(row)))))),
    kinds: column(differ(({ op }) => op), () => Buffer.from(rows.map(({ op }) => op))),
    ids: column(any("id"), () => all(({ id }) => id)),
    counters: column(rows.some(({ counter }, i) => counter !== undefined && counter !== base + BigInt(i)),
      () => numbers64(rows.map(({ counter }) => counter))),
    parents: column(any("parents"), () => Buffer.concat(rows.flatMap(({ parents = [] }, i) =>
      parents.flatMap((parent) => parent.place ? [numbers32([i, 2, ...parent.place.slice(0, 2)]), numbers64([parent.place[2]])]
        : Array.isArray(parent) ? [numbers32([i, 0]), numbers64(parent)]
        : [numbers32([i, 1]), parent])))),
    rowOffsets: column(any("offset"), () => numbers64(rows.map(({ offset }) => offset))),
    times: column(rows.some((row) => (row.timestamp ?? timestamp) !== timestamp),
      () => numbers64(rows.map((row) => row.timestamp ?? timestamp))),
    valueEnds: column(differ(({ values }) => values?.length ?? 0), () => ends(({ values }) => values)),
    indices: column(any("indices"), () => all(({ indices }) => indices && numberBytes(indices))),
    values: column(any("values"), () => all(({ values }) => values && numberBytes(values))),
    blobEnds: column(rows.some(({ data }) => data?.length), () => ends(({ data }) => data)),
    blobs: column(rows.some(({ data }) => data?.length), () => all(({ data }) => data)),
    metadataEnds: column(metadata.size, () => ends((row) => metadata.get(row))),
    metadata: column(metadata.size, () => Buffer.concat([...metadata.values()])),
    tagNames: column(tags.length, () => names(tags)),
    tags: column(tags.length, () => numbers32(rows.flatMap(({ topics = [] }, i) => topics.flatMap((tag) => [i, tags.indexOf(tag)])))),
    expects: column(any("expect"), () => all(({ expect }, i) => expect && Buffer.concat([numbers32([i, 0]), numbers64(expect)]))),
    stateOrigins: column(any("state"), () => numbers64(rows.map(({ state }) => state.origin))),
    stateCounters: column(any("state"), () => numbers64(rows.map(({ state }) => state.counter))),
    stateLamports: column(any("state"), () => numbers64(rows.map(({ state }) => state.lamport))),
    stateIgnored: column(rows.some(({ state }) => state?.ignored), () => numbers64(rows.map(({ state }) => state.ignored))),
  };
}

function decodeBatch(frame) {
  if (frame[3] & COMPRESSED) throw new Unsound("the batch is compressed, which was not offered in the hello", 3);
  const crc = frame.length - 4;
  if (crc < BODY + 72) throw new Unsound("the batch is shorter than its fixed parts");
  if (crc32c(frame.subarray(BODY, crc)) !== frame.readUInt32LE(crc)) throw new Unsound("the body's checksum is another", 5);
  const header = frame.subarray(BODY);
  const attributes = header.readUInt16LE(2);
  const count = header.readUInt32LE(4);
  if (header[0] !== 1) throw new Unsound(`body version ${header[0]} is unknown`, 2);
  if (header[1] !== 8) throw new Unsound(`a body header of ${header[1]} x 8 bytes; 8 x 8 is known`);
  if (attributes >> 14) throw new Unsound(`attributes ${attributes}: a reserved bit is set`, 3);
  if (count < 1 || count > ROWS_MAX) throw new Unsound(`a batch of ${count} rows; 1 to ${ROWS_MAX} are allowed`);
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
  const columns = findColumns(header, header.readUInt32LE(52));
  if (columns.clock) batch.clock = pairs(longs(columns.clock));
  batch.rows = rowsOf(batch, count, header.readBigUInt64LE(40), columns, frame.readBigUInt64BE(4));
  return batch;
}

function findColumns(body, length) {
  if (length > body.length - 4) throw new Unsound(`a body of ${length} bytes in ${body.length - 4}`);
  const mask = body.readBigUInt64LE(64);
  if (mask >> BigInt(COLUMNS.length)) throw new Unsound(`columns ${mask.toString(16)}: some are unknown`);
  const present = COLUMNS.filter((_, bit) => (mask >> BigInt(bit)) & 1n);
  const columns = {};
  let at = upTo8(72 + 4 * present.length);
  present.forEach((name, i) => {
    const end = at + body.readUInt32LE(72 + 4 * i);
    if (end > length) throw new Unsound(`column ${name} ends behind the body`);
    columns[name] = body.subarray(at, end);
    at = upTo8(end);
  });
  return columns;
}

function rowsOf(batch, count, mask, columns, sequence) {
  const each = (name, size, read) => columns[name] && (sized(columns, name, count * size), read(columns[name]));
  const part = (name, ends, i) => columns[name]?.subarray(i ? ends[i - 1] : 0, ends[i]);
  const keyEnds = each("keyEnds", 4, integers) ?? [];
  const blobEnds = each("blobEnds", 4, integers);
  const metadataEnds = each("metadataEnds", 4, integers);
  const values = columns.values ? floats(columns.values) : new Float32Array();
  const valueEnds = each("valueEnds", 4, integers) ?? Array.from({ length: count }, (_, i) => ((i + 1) * values.length) / count);
  const indices = columns.indices && integers(columns.indices);
  const spaces = columns.namespaces ? nameTable(columns.namespaces) : [""];
  const spaceAt = each("namespaceIndex", 2, (bytes) => new Uint16Array(aligned(bytes)));
  const kinds = each("kinds", 1, (bytes) => bytes) ?? Array(count).fill(mask.toString(2).length - 1);
  const [counters, offsets, times] = ["counters", "rowOffsets", "times"].map((name) => each(name, 8, longs));
  const states = ["stateOrigins", "stateCounters", "stateLamports", "stateIgnored"].map((name) => each(name, 8, longs));
  let indexAt = 0;
  const rows = Array.from({ length: count }, (_, i) => {
    const op = kinds[i];
    const row = {
      vectorId: part("keys", keyEnds, i)?.toString() ?? "",
      namespace: spaces[spaceAt?.[i] ?? 0],
      op,
      counter: counters?.[i] ?? batch.base + BigInt(i),
    };
    const own = values.subarray(i ? valueEnds[i - 1] : 0, valueEnds[i]);
    if ([0, 1, 2, 3, 4, 7].includes(op)) row.values = own;
    if (op === 1 || op === 7) row.indices = indices.subarray(indexAt, (indexAt += own.length));
    if (op === 5 || op === 8 || op > 9) row.data = blobEnds ? part("blobs", blobEnds, i) : Buffer.alloc(0);
    if (columns.ids) row.id = columns.ids.subarray(16 * i, 16 * i + 16);
    if (offsets) row.offset = offsets[i];
    if (times) row.timestamp = times[i];
    const change = metadataEnds && part("metadata", metadataEnds, i);
    if (change?.length) row.metadata = unpack(change, { lastCounts: true }); // a log may hold such
    if (batch.states) row.state = { origin: states[0][i], counter: states[1][i], lamport: states[2][i], ignored: states[3]?.[i] ?? 0n };
    return row;
  });
  for (const [i, form, bytes] of entries(columns.parents, 24)) {
    const parent = form === 0 ? longs(bytes) : form === 1 ? bytes : { place: placeOf(bytes) }; // of the dot before
    (rows[i].parents ??= []).push(parent);
  }
  const tags = columns.tagNames ? nameTable(columns.tagNames) : [];
  for (const [i, tag] of entries(columns.tags, 8)) (rows[i].topics ??= []).push(tags[tag]);
  for (const [i, , bytes] of entries(columns.expects, 24)) rows[i].expect = longs(bytes);
  return rows;
}

/** Entries of a fixed size that begin with a row and another u32: `[row, number, the bytes behind them]`. */
function* entries(column, size) {
  for (let at = 0; column && at < column.length; at += size) {
    yield [column.readUInt32LE(at), column.readUInt32LE(at + 4), column.subarray(at + 8, at + size)];
  }
}

// --- the stamp

const STAMP_FIELDS = [ // name, offset in the frame, size
  ["crc", 16, 4], ["leaderEpoch", 20, 4], ["stream", 24, 4], ["partition", 28, 2], ["source", 30, 1], ["knownIds", 31, 1],
  ["appendTime", 32, 8], ["lamport", 40, 8], ["previousCrc", 48, 4], ["bodyCrc", 52, 4], ["syncedOffset", 56, 8],
];

/** The stamp that a log or a forwarder made; undefined of a producer's, which names its origin's partition alone. */
function readStamp(frame) {
  const stamp = {};
  for (const [name, at, size] of STAMP_FIELDS) {
    stamp[name] = size === 8 ? frame.readBigUInt64LE(at) : frame.readUIntLE(at, size);
  }
  if (stamp.crc !== stampCrc(frame)) throw new Unsound("the stamp's checksum is another", 5);
  const own = stamp.partition === partitionOf(frame.readBigUInt64LE(BODY + 8));
  const rest = [...frame.subarray(HEADER_BYTES + 4, PARTITION_AT), ...frame.subarray(PARTITION_AT + 2, BODY)];
  return own && rest.every((byte) => byte === 0) ? undefined : stamp;
}

function writeStamp(frame, stamp) {
  for (const [name, at, size] of STAMP_FIELDS.slice(1)) {
    if (size === 8) frame.writeBigUInt64LE(stamp[name], at);
    else frame.writeUIntLE(stamp[name], at, size);
  }
}

// --- numbers in bytes: all machines that run Node are little-endian, as columns are

const partitionOf = (origin) => Number((origin >> 4n) & 0xffffn);
const placeOf = (bytes) => [bytes.readUInt32LE(0), bytes.readUInt32LE(4), bytes.readBigUInt64LE(8)];
const upTo8 = (length) => (length + 7) & ~7;
const namespaceOf = ({ vectorId, namespace }) => namespace ?? (vectorId.includes(":") ? vectorId.split(":", 1)[0] : "default");
const aligned = (bytes) => bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
export const floats = (bytes) => new Float32Array(aligned(bytes));
export const integers = (bytes) => new Uint32Array(aligned(bytes));
const longs = (bytes) => [...new BigUint64Array(aligned(bytes))];
const pairs = (list) => Array.from({ length: list.length / 2 }, (_, i) => [list[2 * i], list[2 * i + 1]]);
const numberBytes = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength);
const numbers32 = (list) => numberBytes(Uint32Array.from(list));
const numbers64 = (list) => numberBytes(BigUint64Array.from(list));
const u16 = (number) => Buffer.of(number & 0xff, number >> 8);

function sized(columns, name, length) {
  if (columns[name].length !== length) throw new Unsound(`column ${name} has ${columns[name].length} bytes, not ${length}`);
}

function nameTable(bytes) {
  const names = [];
  for (let at = 0; at < bytes.length; ) {
    const end = at + 2 + bytes.readUInt16LE(at);
    names.push(bytes.subarray(at + 2, end).toString());
    at = end;
  }
  return names;
}
