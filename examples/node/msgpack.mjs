// As much msgpack as the protocol's maps need: nil, booleans, integers, floats, str, bin, arrays and maps.
// Rule: nothing that comes in is trusted: depth, items and lengths are bounded before anything is allocated.

const DEPTH_MAX = 63;
const ITEMS_MAX = 131_072;

/** A number that is sent as a float even where it is whole; `2500` alone would be sent as an integer. */
export class Float extends Number {}

/**
 * The shortest form of a value. Integers are numbers or BigInts; text is a string, bytes are a Uint8Array; a map is
 * a Map or a plain object, and keeps its order.
 */
export function pack(value) {
  const parts = [];
  put(parts, value);
  return Buffer.concat(parts);
}

/**
 * The one value that the bytes hold: maps as Map, integers as numbers where those are exact, else as BigInt. A key that
 * stands twice in a map is refused; with `lastCounts` its last value counts.
 */
export function unpack(bytes, { lastCounts = false } = {}) {
  const reader = new Reader(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength), lastCounts);
  const value = reader.value(0);
  if (reader.at !== bytes.length) throw new RangeError(`msgpack: ${bytes.length - reader.at} bytes are left over`);
  return value;
}

// --- out

function put(parts, value) {
  if (value === null || value === undefined) return parts.push(Buffer.of(0xc0));
  switch (typeof value) {
    case "boolean":
      return parts.push(Buffer.of(value ? 0xc3 : 0xc2));
    case "bigint":
      return parts.push(integer(value));
    case "number":
      return parts.push(Number.isSafeInteger(value) ? integer(BigInt(value)) : float(value));
    case "string": {
      const text = Buffer.from(value, "utf8");
      return parts.push(text.length < 32 ? Buffer.of(0xa0 | text.length) : head(text.length, 0xd9, 0xda, 0xdb), text);
    }
  }
  if (value instanceof Float) return parts.push(float(Number(value)));
  if (value instanceof Uint8Array) return parts.push(head(value.length, 0xc4, 0xc5, 0xc6), Buffer.from(value));
  if (Array.isArray(value)) {
    parts.push(value.length < 16 ? Buffer.of(0x90 | value.length) : head(value.length, null, 0xdc, 0xdd));
    return value.forEach((item) => put(parts, item));
  }
  const entries = value instanceof Map ? [...value] : Object.entries(value);
  parts.push(entries.length < 16 ? Buffer.of(0x80 | entries.length) : head(entries.length, null, 0xde, 0xdf));
  for (const [key, item] of entries) {
    put(parts, key);
    put(parts, item);
  }
}

/** The first bytes of something with a length, in the shortest of up to three forms. */
function head(length, of8, of16, of32) {
  if (of8 !== null && length < 0x100) return Buffer.of(of8, length);
  const bytes = Buffer.alloc(length < 0x10000 ? 3 : 5);
  bytes[0] = length < 0x10000 ? of16 : of32;
  bytes.writeUIntBE(length, 1, bytes.length - 1);
  return bytes;
}

function float(value) {
  const bytes = Buffer.of(0xcb, 0, 0, 0, 0, 0, 0, 0, 0);
  bytes.writeDoubleBE(value, 1);
  return bytes;
}

function integer(value) {
  if (value >= 0n ? value < 128n : value >= -32n) return Buffer.of(Number(BigInt.asUintN(8, value)));
  const size = value >= 0n ? [1, 2, 4, 8].find((n) => value < 1n << BigInt(8 * n))
    : [1, 2, 4, 8].find((n) => value >= -(1n << BigInt(8 * n - 1)));
  if (!size) throw new RangeError(`msgpack: ${value} does not fit 64 bits`);
  const bytes = Buffer.alloc(9);
  bytes.writeBigUInt64BE(BigInt.asUintN(64, value), 1);
  bytes[8 - size] = (value >= 0n ? 0xcc : 0xd0) + Math.log2(size);
  return bytes.subarray(8 - size);
}

// --- in

class Reader {
  constructor(bytes, lastCounts) {
    this.bytes = bytes;
    this.lastCounts = lastCounts;
    this.at = 0;
    this.items = 0;
  }

  take(length) {
    if (length > this.bytes.length - this.at) throw new RangeError("msgpack: the bytes end too early");
    this.at += length;
    return this.bytes.subarray(this.at - length, this.at);
  }

  unsigned(size) {
    const taken = this.take(size);
    return size < 8 ? taken.readUIntBE(0, size) : small(taken.readBigUInt64BE());
  }

  signed(size) {
    const taken = this.take(size);
    return size < 8 ? taken.readIntBE(0, size) : small(taken.readBigInt64BE());
  }

  value(depth) {
    const first = this.unsigned(1);
    if (first < 0x80) return first;
    if (first < 0x90) return this.map(first & 15, depth);
    if (first < 0xa0) return this.array(first & 15, depth);
    if (first < 0xc0) return this.text(first & 31);
    if (first >= 0xe0) return first - 256;
    switch (first) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.take(this.unsigned(1 << (first - 0xc4)));
      case 0xca: return whole(this.take(4).readFloatBE());
      case 0xcb: return whole(this.take(8).readDoubleBE());
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return this.unsigned(1 << (first - 0xcc));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return this.signed(1 << (first - 0xd0));
      case 0xd9: case 0xda: case 0xdb: return this.text(this.unsigned(1 << (first - 0xd9)));
      case 0xdc: case 0xdd: return this.array(this.unsigned(first === 0xdc ? 2 : 4), depth);
      case 0xde: case 0xdf: return this.map(this.unsigned(first === 0xde ? 2 : 4), depth);
      default: throw new RangeError(`msgpack: the form 0x${first.toString(16)} has no place in the protocol`);
    }
  }

  text(length) {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(this.take(length));
  }

  array(length, depth) {
    this.enter(length, depth);
    return Array.from({ length }, () => this.value(depth + 1));
  }

  map(length, depth) {
    this.enter(2 * length, depth);
    const map = new Map();
    for (let i = 0; i < length; i++) {
      const key = this.value(depth + 1);
      if (typeof key !== "string") throw new RangeError("msgpack: a map's keys are text");
      if (map.has(key) && !this.lastCounts) throw new RangeError(`msgpack: the key ${key} stands twice`);
      map.set(key, this.value(depth + 1));
    }
    return map;
  }

  enter(items, depth) {
    this.items += items;
    if (depth >= DEPTH_MAX) throw new RangeError(`msgpack: deeper than ${DEPTH_MAX}`);
    if (this.items > ITEMS_MAX || items > this.bytes.length - this.at) throw new RangeError("msgpack: too many items");
  }
}

const small = (value) => (BigInt.asIntN(54, value) === value ? Number(value) : value);
const whole = (value) => (Number.isInteger(value) ? new Float(value) : value);
