//! Frame headers and stamps.

use crate::body::{u16_at, u32_at, u64_at};
use crate::spec::*;

/// The bytes of a frame before its body.
pub const HEAD_BYTES: usize = HEADER_BYTES + STAMP_BYTES;

/// Extends a CRC32C by these bytes.
pub fn crc_of(parts: [&[u8]; 2]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(parts[0]), parts[1])
}

/// The header and stamp of a frame with an uncompressed batch.
pub struct Head {
    bytes: [u8; HEAD_BYTES],
    /// The sequence of the first row.
    pub sequence: u64,
    /// The bytes of the payload.
    pub length: usize,
}

impl Head {
    /// Reads a head.
    pub fn new(bytes: [u8; HEAD_BYTES]) -> Head {
        let big = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let sequence = u64::from(big(4)) << 32 | u64::from(big(8));
        Head { bytes, sequence, length: big(12) as usize }
    }

    /// The first four bytes: magic, version, type and flags.
    pub fn prefix(&self) -> [u8; 4] {
        [self.bytes[0], self.bytes[1], self.bytes[2], self.bytes[3]]
    }

    /// True if a producer's batch for this partition of a stream follows.
    pub fn is_from_producer(&self, stream: u32, partition: u16) -> bool {
        let (header, stamp) = self.bytes.split_at(HEADER_BYTES);
        let low = HEADER_BYTES + CRC_BYTES;
        // After the checksum come leader epoch (u32), stream (u32) and partition (u16); a log sets the rest.
        let mut rest = [0; STAMP_BYTES - CRC_BYTES];
        rest[4..8].copy_from_slice(&stream.to_le_bytes());
        rest[8..10].copy_from_slice(&partition.to_le_bytes());
        self.bytes[low..] == rest && crc_of([header, &rest]) == u32_at(stamp, 0)
    }
}

/// True if a frame with these first four bytes may be in a run.
pub fn may_be_in_run(prefix: [u8; 4]) -> bool {
    prefix[..3] == [MAGIC, VERSION, BATCH_FRAME] && prefix[3] & !(ACK_WANTED | HIGH_PRIORITY) == BATCHED
}

/// What a log writes before a body. Each field as in `stamp.py`.
pub struct LogStamp {
    /// The id of the log's stream.
    pub stream: u32,
    /// The number of the log in its stream.
    pub partition: u16,
    /// The entry point of the rows.
    pub source: u8,
    /// The share of the rows whose ids were known.
    pub known_ids: u8,
    /// Microseconds since 1970.
    pub time: u64,
    /// The Lamport number of the first row.
    pub lamport: u64,
    /// The checksum of the stamp before.
    pub previous_crc: u32,
    /// The checksum of the body.
    pub body_crc: u32,
    /// All rows below were synced when the stamp was written.
    pub synced_offset: u64,
}

impl LogStamp {
    /// Returns header and stamp of a frame, and the stamp's checksum. `body_bytes`: the size of the body.
    pub fn pack(&self, is_high: bool, offset: u64, body_bytes: usize) -> ([u8; HEAD_BYTES], u32) {
        let mut head = [0; HEAD_BYTES];
        let flags = BATCHED | if is_high { HIGH_PRIORITY } else { 0 };
        head[..4].copy_from_slice(&[MAGIC, VERSION, BATCH_FRAME, flags]);
        head[4..12].copy_from_slice(&offset.to_be_bytes());
        head[12..16].copy_from_slice(&((STAMP_BYTES + body_bytes) as u32).to_be_bytes());
        head[24..28].copy_from_slice(&self.stream.to_le_bytes());
        head[28..30].copy_from_slice(&self.partition.to_le_bytes());
        head[30..32].copy_from_slice(&[self.source, self.known_ids]);
        head[32..40].copy_from_slice(&self.time.to_le_bytes());
        head[40..48].copy_from_slice(&self.lamport.to_le_bytes());
        head[48..52].copy_from_slice(&self.previous_crc.to_le_bytes());
        head[52..56].copy_from_slice(&self.body_crc.to_le_bytes());
        head[56..64].copy_from_slice(&self.synced_offset.to_le_bytes());
        let (header, stamp) = head.split_at(HEADER_BYTES);
        let crc = crc_of([header, &stamp[CRC_BYTES..]]);
        head[HEADER_BYTES..HEADER_BYTES + CRC_BYTES].copy_from_slice(&crc.to_le_bytes());
        (head, crc)
    }
}

/// The fields of a frame in a log: offset, length of the payload; Lamport number, source, time, checksum of the stamp
/// before and of the body, synced offset; leader epoch, stream, partition, known ids, checksum of the stamp.
pub type LoggedHead = (u64, u32, (u64, u8, u64, u32, u32, u64), (u32, u32, u16, u8, u32));

/// Reads the head of an uncompressed frame in a log. None if it is another frame, or invalid.
pub fn read_logged_head(bytes: [u8; HEAD_BYTES]) -> Option<LoggedHead> {
    let head = Head::new(bytes);
    let (header, stamp) = bytes.split_at(HEADER_BYTES);
    let (source, known_ids, lamport, synced) = (bytes[30], bytes[31], u64_at(&bytes, 40), u64_at(&bytes, 56));
    let is_valid = may_be_in_run(head.prefix())
        && (STAMP_BYTES..=FRAME_PAYLOAD_BYTES_MAX).contains(&head.length)
        && source < SOURCES
        && known_ids < KNOWN_IDS
        && lamport <= COUNTER_MAX
        && synced <= COUNTER_MAX
        && crc_of([header, &stamp[CRC_BYTES..]]) == u32_at(stamp, 0);
    is_valid.then(|| {
        let numbers = (lamport, source, u64_at(&bytes, 32), u32_at(&bytes, 48), u32_at(&bytes, 52), synced);
        let log = (u32_at(&bytes, 20), u32_at(&bytes, 24), u16_at(&bytes, 28), known_ids, u32_at(stamp, 0));
        (head.sequence, head.length as u32, numbers, log)
    })
}
