// Which partition of a stream a vector is in: murmur2 of its namespace and its id, modulo the number of partitions.

const SEED = 0x9747b28c, M = 0x5bd1e995;

/** Returns the murmur2 of bytes as a signed 32-bit number. */
export function murmur2(bytes) {
  const end = bytes.length & ~3;
  let hash = SEED ^ bytes.length;
  for (let position = 0; position < end; position += 4) {
    let word = Math.imul(readU32(bytes, position, 4), M);
    word = Math.imul(word ^ (word >>> 24), M);
    hash = Math.imul(hash, M) ^ word;
  }
  if (end < bytes.length) hash = Math.imul(hash ^ readU32(bytes, end, bytes.length - end), M);
  hash = Math.imul(hash ^ (hash >>> 13), M);
  return hash ^ (hash >>> 15);
}

/** Returns the partition, of `count`, that has a row's vector. */
export function partitionOfRow(row, count) {
  const key = Buffer.from(`${namespaceOf(row)}\0${row.vectorId}`);
  return (murmur2(key) & 0x7fffffff) % count;
}

/** Returns the namespace of a row: its own, or the text before the first `:` of the vector id, or `default`. */
export function namespaceOf({ vectorId, namespace }) {
  return namespace ?? (vectorId.includes(":") ? vectorId.split(":", 1)[0] : "default");
}

function readU32(bytes, position, size) {
  let word = 0;
  for (let i = 0; i < size; i++) word |= bytes[position + i] << (8 * i);
  return word;
}
