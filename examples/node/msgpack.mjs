// Packs and unpacks the types of msgpack that the protocol's maps use: nil, booleans, integers, floats, str, bin, arrays
// and maps. The input is untrusted: depth, items and lengths are checked before anything is allocated.

const DEPTH_MAX = 63;
const ITEMS_MAX = 131_072;

/** A number that is packed as a float even if it is whole: `2500` is packed as an integer, `new Float(2500)` as a float. */
export class Float extends Number {}

/**
 * Packs a value in its shortest form. Integers are numbers or BigInts, text is a string, bytes are a Uint8Array. A map is
 * a Map or an object, and keeps its order.
 */
export function pack(value) {
  const parts = [];
  packInto(parts, value);
  return Buffer.concat(parts);
}

/**
 * Unpacks bytes that hold one value. Maps become Map; integers become numbers if those are exact, else BigInts. A map with
 * a duplicate key throws; with `lastWins`, the last value of the key wins.
 */
export function unpack(bytes, { lastWins = false } = {}) {
  const reader = new Reader(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength), lastWins);
  const value = reader.value(0);
  const extra = bytes.length - reader.position;
  if (extra) throw new RangeError(`msgpack: extra ${extra} bytes: send one value`);
  return value;
}

// --- pack

function packInto(parts, value) {
  if (value === null || value === undefined) return parts.push(Buffer.of(0xc0));
  switch (typeof value) {
    case "boolean":
      return parts.push(Buffer.of(value ? 0xc3 : 0xc2));
    case "bigint":
      return parts.push(packInteger(value));
    case "number":
      return parts.push(Number.isSafeInteger(value) ? packInteger(BigInt(value)) : packFloat(value));
    case "string": {
      const text = Buffer.from(value, "utf8");
      return parts.push(text.length < 32 ? Buffer.of(0xa0 | text.length) : packHead(text.length, 0xd9, 0xda, 0xdb), text);
    }
  }
  if (value instanceof Float) return parts.push(packFloat(Number(value)));
  if (value instanceof Uint8Array) return parts.push(packHead(value.length, 0xc4, 0xc5, 0xc6), Buffer.from(value));
  if (Array.isArray(value)) {
    parts.push(value.length < 16 ? Buffer.of(0x90 | value.length) : packHead(value.length, null, 0xdc, 0xdd));
    return value.forEach((item) => packInto(parts, item));
  }
  const entries = value instanceof Map ? [...value] : Object.entries(value);
  parts.push(entries.length < 16 ? Buffer.of(0x80 | entries.length) : packHead(entries.length, null, 0xde, 0xdf));
  for (const [key, item] of entries) {
    packInto(parts, key);
    packInto(parts, item);
  }
}

/** Returns the format byte and the length of a value, in the shortest of up to three formats. */
function packHead(length, format8, format16, format32) {
  if (format8 !== null && length < 0x100) return Buffer.of(format8, length);
  const bytes = Buffer.alloc(length < 0x10000 ? 3 : 5);
  bytes[0] = length < 0x10000 ? format16 : format32;
  bytes.writeUIntBE(length, 1, bytes.length - 1);
  return bytes;
}

function packFloat(value) {
  const bytes = Buffer.of(0xcb, 0, 0, 0, 0, 0, 0, 0, 0);
  bytes.writeDoubleBE(value, 1);
  return bytes;
}

function packInteger(value) {
  if (value >= 0n ? value < 128n : value >= -32n) return Buffer.of(Number(BigInt.asUintN(8, value)));
  const size = value >= 0n ? [1, 2, 4, 8].find((n) => value < 1n << BigInt(8 * n))
    : [1, 2, 4, 8].find((n) => value >= -(1n << BigInt(8 * n - 1)));
  if (!size) throw new RangeError(`msgpack: integer ${value} has more than 64 bits: send a smaller one`);
  const bytes = Buffer.alloc(9);
  bytes.writeBigUInt64BE(BigInt.asUintN(64, value), 1);
  bytes[8 - size] = (value >= 0n ? 0xcc : 0xd0) + Math.log2(size);
  return bytes.subarray(8 - size);
}

// --- unpack

class Reader {
  constructor(bytes, lastWins) {
    this.bytes = bytes;
    this.lastWins = lastWins;
    this.position = 0;
    this.items = 0;
  }

  take(length) {
    const bytesLeft = this.bytes.length - this.position;
    if (length > bytesLeft) throw new RangeError("msgpack: the bytes end within a value: send all of it");
    this.position += length;
    return this.bytes.subarray(this.position - length, this.position);
  }

  unsigned(size) {
    const bytes = this.take(size);
    return size < 8 ? bytes.readUIntBE(0, size) : toNumberIfExact(bytes.readBigUInt64BE());
  }

  signed(size) {
    const bytes = this.take(size);
    return size < 8 ? bytes.readIntBE(0, size) : toNumberIfExact(bytes.readBigInt64BE());
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
      case 0xca: return markFloat(this.take(4).readFloatBE());
      case 0xcb: return markFloat(this.take(8).readDoubleBE());
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return this.unsigned(1 << (first - 0xcc));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return this.signed(1 << (first - 0xd0));
      case 0xd9: case 0xda: case 0xdb: return this.text(this.unsigned(1 << (first - 0xd9)));
      case 0xdc: case 0xdd: return this.array(this.unsigned(first === 0xdc ? 2 : 4), depth);
      case 0xde: case 0xdf: return this.map(this.unsigned(first === 0xde ? 2 : 4), depth);
      default: throw new RangeError(`msgpack: format byte 0x${first.toString(16)} is not allowed: send no extension types`);
    }
  }

  text(length) {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(this.take(length));
  }

  array(length, depth) {
    this.countItems(length, depth);
    return Array.from({ length }, () => this.value(depth + 1));
  }

  map(length, depth) {
    this.countItems(2 * length, depth);
    const map = new Map();
    for (let i = 0; i < length; i++) {
      const key = this.value(depth + 1);
      if (typeof key !== "string") throw new RangeError("msgpack: a key is not text: send text keys");
      if (map.has(key) && !this.lastWins) throw new RangeError(`msgpack: duplicate key ${key}: send each key once`);
      map.set(key, this.value(depth + 1));
    }
    return map;
  }

  countItems(items, depth) {
    this.items += items;
    if (depth >= DEPTH_MAX) throw new RangeError(`msgpack: more than ${DEPTH_MAX} levels: send a flatter value`);
    const bytesLeft = this.bytes.length - this.position;
    if (this.items > ITEMS_MAX) throw new RangeError(`msgpack: more than ${ITEMS_MAX} items: send fewer`);
    if (items > bytesLeft) throw new RangeError(`msgpack: ${items} items in ${bytesLeft} bytes: send the entire value`);
  }
}

const toNumberIfExact = (value) => (BigInt.asIntN(54, value) === value ? Number(value) : value);
const markFloat = (value) => (Number.isInteger(value) ? new Float(value) : value);
