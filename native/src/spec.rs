//! The numbers of the protocol that the core needs. `delta_prop_wire.spec` and `layout` define them; a test compares.

/// The first byte of each frame.
pub const MAGIC: u8 = 0xD3;
/// The version of the frame header.
pub const VERSION: u8 = 1;
/// The bytes of a frame header.
pub const HEADER_BYTES: usize = 16;
/// The bytes of a stamp.
pub const STAMP_BYTES: usize = 48;
/// The bytes of a body's header.
pub const BODY_HEADER_BYTES: usize = 64;
/// The version of a body.
pub const BODY_VERSION: u8 = 1;
/// The bytes of a checksum.
pub const CRC_BYTES: usize = 4;
/// Columns start at multiples of this.
pub const ALIGNMENT: usize = 8;
/// The maximum payload of a frame.
pub const FRAME_PAYLOAD_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The maximum size of one delta.
pub const DELTA_BYTES_MAX: u32 = 1024 * 1024;
/// The maximum length of a vector id, in bytes of UTF-8.
pub const VECTOR_ID_BYTES_MAX: usize = 512;
/// The maximum length of a namespace, in bytes of UTF-8.
pub const NAMESPACE_BYTES_MAX: usize = 255;
/// Indices are below this.
pub const DIMENSION_MAX: u32 = 65_536;
/// The maximum number of rows of a batch.
pub const BATCH_ROWS_MAX: u32 = 65_536;
/// The maximum of counters and Lamport numbers.
pub const COUNTER_MAX: u64 = (1 << 63) - 1;
/// The number of entry points of deltas.
pub const SOURCES: u8 = 4;
/// The number of shares of known ids.
pub const KNOWN_IDS: u8 = 3;
/// The frame type of a batch.
pub const BATCH_FRAME: u8 = 1;
/// The flag of a frame that asks for an acknowledgement.
pub const ACK_WANTED: u8 = 1;
/// The flag of a frame of high priority.
pub const HIGH_PRIORITY: u8 = 2;
/// The flag of a frame that holds a batch.
pub const BATCHED: u8 = 8;

/// Bits of a body's attributes.
pub mod attribute {
    /// The rows are control rows.
    pub const CONTROL: u16 = 1 << 1;
    /// The rows have ids.
    pub const IDS: u16 = 1 << 2;
    /// Rows name parents.
    pub const PARENTS: u16 = 1 << 3;
    /// The batch has a clock.
    pub const CLOCK: u16 = 1 << 4;
    /// The rows have kinds of their own.
    pub const MIXED_KINDS: u16 = 1 << 5;
    /// The rows have namespaces of their own.
    pub const MIXED_NAMESPACES: u16 = 1 << 6;
    /// The rows have offsets of their own.
    pub const ROW_OFFSETS: u16 = 1 << 7;
    /// Counters may have gaps.
    pub const COUNTER_GAPS: u16 = 1 << 8;
    /// The rows are states, not changes.
    pub const STATE_ROWS: u16 = 1 << 9;
    /// The bits of the ack level start here.
    pub const ACK_LEVEL_SHIFT: u16 = 10;
    /// The bits of the priority start here.
    pub const PRIORITY_SHIFT: u16 = 12;
    /// Bits that are sent as 0.
    pub const RESERVED: u16 = 0xC000;
    /// What no batch of only common columns has.
    pub const RARE: u16 = IDS | PARENTS | CLOCK | CONTROL | ROW_OFFSETS | COUNTER_GAPS | STATE_ROWS;
}

/// Columns of a body, in the order in which they are stored.
pub mod column {
    /// The counters of other origins that changed.
    pub const CLOCK: usize = 0;
    /// The end of each vector id.
    pub const KEY_ENDS: usize = 1;
    /// The vector ids, end to end.
    pub const KEYS: usize = 2;
    /// The table of namespaces.
    pub const NAMESPACES: usize = 3;
    /// Each row's index in the table of namespaces.
    pub const NAMESPACE_INDEX: usize = 4;
    /// The kind of each row.
    pub const KINDS: usize = 5;
    /// The id of each row.
    pub const IDS: usize = 6;
    /// The counter of each row.
    pub const COUNTERS: usize = 7;
    /// The end of each row's numbers.
    pub const VALUE_ENDS: usize = 11;
    /// The indices of sparse rows.
    pub const INDICES: usize = 12;
    /// The numbers of all rows.
    pub const VALUES: usize = 13;
    /// The end of each row's bytes.
    pub const BLOB_ENDS: usize = 14;
    /// The bytes of all rows.
    pub const BLOBS: usize = 15;
    /// Offset of each row, of batches whose rows have offsets of their own.
    pub const ROW_OFFSETS: usize = 9;
    /// The end of each row's change of metadata.
    pub const METADATA_ENDS: usize = 16;
    /// The number of columns that this version knows.
    pub const COUNT: usize = 25;
    /// Bytes per row of the columns that have one entry per row, else 0.
    pub const ROW_WIDTHS: [u32; COUNT] =
        [0, 4, 0, 0, 2, 1, 16, 8, 0, 8, 8, 4, 0, 0, 4, 0, 4, 0, 0, 0, 0, 8, 8, 8, 8];
    /// Bytes per entry of the columns whose number of entries does not follow from the rows, else 1.
    pub const ENTRY_WIDTHS: [u32; COUNT] =
        [16, 1, 1, 1, 1, 1, 1, 1, 24, 1, 1, 1, 4, 4, 1, 1, 1, 1, 1, 8, 24, 1, 1, 1, 1];
    /// Columns of batches that differ only in kinds, namespaces and lengths of rows.
    pub const COMMON: u64 = 1 << KEY_ENDS
        | 1 << KEYS
        | 1 << NAMESPACES
        | 1 << NAMESPACE_INDEX
        | 1 << KINDS
        | 1 << VALUE_ENDS
        | 1 << INDICES
        | 1 << VALUES
        | 1 << BLOB_ENDS
        | 1 << BLOBS;
    /// Columns that each batch of deltas has.
    pub const REQUIRED: u64 = 1 << KEY_ENDS | 1 << KEYS | 1 << NAMESPACES;
}

/// Kinds of operations.
pub mod kind {
    /// Sets a new vector.
    pub const CREATE: u8 = 0;
    /// Sets some numbers of a vector.
    pub const SPARSE: u8 = 1;
    /// Replaces a vector.
    pub const DENSE: u8 = 2;
    /// Multiplies a vector.
    pub const SCALE: u8 = 3;
    /// Adds a number to a vector.
    pub const OFFSET: u8 = 4;
    /// Applies a named function.
    pub const TRANSFORM: u8 = 5;
    /// Deletes a vector.
    pub const DELETE: u8 = 6;
    /// Adds to some numbers of a vector.
    pub const SPARSE_ADD: u8 = 7;
    /// Sets bytes.
    pub const OPAQUE: u8 = 8;
    /// Changes metadata.
    pub const METADATA: u8 = 9;
    /// The highest number of a kind.
    pub const MAX: u8 = 63;

    /// The bit of a kind in a mask; 0 above the highest kind.
    pub fn bit(kind: u8) -> u64 {
        1u64.checked_shl(u32::from(kind)).unwrap_or(0)
    }

    /// Kinds that set a full vector of numbers.
    pub const VECTORS: u64 = 1 << CREATE | 1 << DENSE;
    /// Kinds that set everything, whether the vector existed or not.
    pub const FULL: u64 = VECTORS | 1 << OPAQUE;
    /// Kinds that need a living vector.
    pub const PARTIAL: u64 = 1 << SPARSE | 1 << SPARSE_ADD | 1 << SCALE | 1 << OFFSET | 1 << METADATA;
    /// Kinds whose operand is checked in Python: a transform's name, and metadata.
    pub const GENERAL: u64 = 1 << TRANSFORM | 1 << METADATA;
    /// Kinds whose numbers have indices.
    pub const SPARSES: u64 = 1 << SPARSE | 1 << SPARSE_ADD;
}
