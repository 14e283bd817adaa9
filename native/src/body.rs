//! Bodies of batches: reads them, and checks those that have only common columns.
//!
//! A body that `check` returns is valid in each respect. One that it does not return may be valid nevertheless:
//! `body_checks.py` and `validate.py` then decide, and raise the error.

use std::ops::RangeInclusive;

use crate::spec::{attribute, column, kind, *};

/// Reads two bytes, little-endian.
pub fn u16_at(raw: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([raw[at], raw[at + 1]])
}

/// Reads four bytes, little-endian.
pub fn u32_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}

/// Reads eight bytes, little-endian.
pub fn u64_at(raw: &[u8], at: usize) -> u64 {
    u64::from(u32_at(raw, at)) | u64::from(u32_at(raw, at + 4)) << 32
}

const DIRECTORY_AT: usize = BODY_HEADER_BYTES + 8;
const SMALLEST_BYTES: usize = DIRECTORY_AT + CRC_BYTES;

/// Rounds up to the alignment of columns.
pub fn padded(length: usize) -> usize {
    length + (ALIGNMENT - length % ALIGNMENT) % ALIGNMENT
}

/// The fields of a body's header, and where its columns are.
#[derive(Clone)]
pub struct Body<'a> {
    raw: &'a [u8],
    /// Bits of `attribute`.
    pub attributes: u16,
    /// The number of rows.
    pub count: usize,
    /// The origin of all rows.
    pub origin: u64,
    /// The producer epoch.
    pub epoch: u32,
    /// The counter of the first row.
    pub base: u64,
    /// Bit k is set if a row has kind k.
    pub kinds_mask: u64,
    /// The dimension of all full vectors.
    pub dimension: u32,
    /// Bytes of the body without padding and checksum.
    pub length: usize,
    /// Bit k is set if column k is present.
    pub columns_mask: u64,
    bounds: [(u32, u32); column::COUNT],
}

impl<'a> Body<'a> {
    /// Reads header and directory. Returns None unless all lengths agree with the bytes.
    pub fn read(raw: &'a [u8]) -> Option<Body<'a>> {
        if raw.len() < SMALLEST_BYTES || raw.len() > FRAME_PAYLOAD_BYTES_MAX || raw.len() % ALIGNMENT != 0 {
            return None;
        }
        let mut body = Body {
            raw,
            attributes: u16_at(raw, 2),
            count: u32_at(raw, 4) as usize,
            origin: u64_at(raw, 8),
            epoch: u32_at(raw, 16),
            base: u64_at(raw, 24),
            kinds_mask: u64_at(raw, 40),
            dimension: u32_at(raw, 48),
            length: u32_at(raw, 52) as usize,
            columns_mask: u64_at(raw, BODY_HEADER_BYTES),
            bounds: [(0, 0); column::COUNT],
        };
        let columns = body.columns_mask.count_ones() as usize;
        let mut position = DIRECTORY_AT + padded(4 * columns);
        let is_known = body.columns_mask >> column::COUNT == 0;
        let has_length = body.length + CRC_BYTES <= raw.len() && raw.len() - CRC_BYTES - body.length < ALIGNMENT;
        let has_rows = 1 <= body.count && body.count <= BATCH_ROWS_MAX as usize;
        if !is_known || !has_length || !has_rows || body.kinds_mask == 0 {
            return None;
        }
        if DIRECTORY_AT + 4 * columns > body.length {
            return None;
        }
        let mut mask = body.columns_mask;
        for entry in 0..columns {
            let number = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            let size = u32_at(raw, DIRECTORY_AT + 4 * entry) as usize;
            let row_bytes = column::ROW_WIDTHS[number] as usize;
            if (row_bytes != 0 && size != row_bytes * body.count)
                || size % column::ENTRY_WIDTHS[number] as usize != 0
                || size > body.length
            {
                return None;
            }
            body.bounds[number] = (position as u32, (position + size) as u32);
            position += padded(size);
            if position > body.length {
                return None;
            }
        }
        (position == body.length).then_some(body)
    }

    /// Checks all of the body. Returns the highest index, -1 if there is none; None if the body is invalid, or has
    /// columns that are not common.
    pub fn verify(&self) -> Option<i64> {
        if self.header_is_valid() {
            self.verify_content()
        } else {
            None
        }
    }

    /// Checks the columns of a body whose header and checksum are valid, as `verify` does.
    pub fn verify_content(&self) -> Option<i64> {
        if self.names_are_valid() && self.kinds_are_valid() {
            self.numbers_are_valid()
        } else {
            None
        }
    }

    /// Reads a body, and checks all of it as `verify` does.
    pub fn check(raw: &'a [u8]) -> Option<(Body<'a>, i64)> {
        let body = Body::read(raw)?;
        body.verify().map(|highest| (body, highest))
    }

    /// The number of bytes, with padding and checksum.
    pub fn size(&self) -> usize {
        self.raw.len()
    }

    /// True if a column is present.
    pub fn has(&self, number: usize) -> bool {
        self.columns_mask >> number & 1 == 1
    }

    /// Returns the bytes of a column; none if it is absent.
    pub fn column(&self, number: usize) -> &'a [u8] {
        let (start, end) = self.bounds[number];
        &self.raw[start as usize..end as usize]
    }

    /// The checksum that the producer computed.
    pub fn crc(&self) -> u32 {
        u32_at(self.raw, self.raw.len() - CRC_BYTES)
    }

    /// True if the rows are control rows.
    pub fn is_control(&self) -> bool {
        self.attributes & attribute::CONTROL != 0
    }

    /// The kind of a row.
    pub fn kind(&self, row: usize) -> u8 {
        match self.column(column::KINDS) {
            [] => (63 - self.kinds_mask.leading_zeros()) as u8,
            kinds => kinds[row],
        }
    }

    /// The vector id of a row. None if there is none, or the ends do not rise.
    pub fn key(&self, row: usize) -> Option<&'a [u8]> {
        let ends = self.column(column::KEY_ENDS);
        let start = if row == 0 { 0 } else { u32_at(ends.get(4 * row - 4..4 * row)?, 0) };
        let end = u32_at(ends.get(4 * row..4 * row + 4)?, 0);
        self.column(column::KEYS).get(start as usize..end as usize)
    }

    /// The index of a row's namespace in the table.
    pub fn namespace_index(&self, row: usize) -> usize {
        match self.column(column::NAMESPACE_INDEX) {
            [] => 0,
            indexes => u16_at(indexes, 2 * row) as usize,
        }
    }

    /// The names in the table of namespaces. None if it ends within an entry.
    pub fn namespaces(&self) -> Option<Vec<&'a [u8]>> {
        let raw = self.column(column::NAMESPACES);
        let (mut names, mut position) = (Vec::new(), 0);
        while position < raw.len() {
            let size = u16::from_le_bytes([raw[position], *raw.get(position + 1)?]) as usize;
            names.push(raw.get(position + 2..position + 2 + size)?);
            position += 2 + size;
        }
        Some(names)
    }

    /// The counter of a row.
    pub fn counter(&self, row: usize) -> u64 {
        match self.column(column::COUNTERS) {
            [] => self.base.wrapping_add(row as u64),
            counters => u64_at(counters, 8 * row),
        }
    }

    /// The number of values of each row, if all have the same number.
    pub fn values_per_row(&self) -> Option<usize> {
        (!self.has(column::VALUE_ENDS)).then(|| self.column(column::VALUES).len() / 4 / self.count)
    }

    /// The position of a row's first value, and the position after its last.
    pub fn value_bounds(&self, row: usize) -> (usize, usize) {
        match self.values_per_row() {
            Some(width) => (row * width, (row + 1) * width),
            None => {
                let ends = self.column(column::VALUE_ENDS);
                let start = if row == 0 { 0 } else { u32_at(ends, 4 * row - 4) };
                (start as usize, u32_at(ends, 4 * row) as usize)
            }
        }
    }

    /// The number of values of a row; 0 if the ends fall.
    pub fn width(&self, row: usize) -> usize {
        let (start, end) = self.value_bounds(row);
        end.saturating_sub(start)
    }

    /// The highest of these indices, -1 if there are none.
    pub fn highest_index(&self, start: usize, count: usize) -> i64 {
        let indices = self.column(column::INDICES).get(4 * start..4 * (start + count)).unwrap_or(&[]);
        indices.chunks_exact(4).map(|index| i64::from(u32_at(index, 0))).max().unwrap_or(-1)
    }

    fn header_is_valid(&self) -> bool {
        let end = self.raw.len() - CRC_BYTES;
        let blobs = self.columns_mask >> column::BLOB_ENDS & 3;
        let mixed = self.columns_mask >> column::NAMESPACE_INDEX & 3;
        let announced = (mixed as u16 & 1) * attribute::MIXED_NAMESPACES
            | (mixed as u16 >> 1) * attribute::MIXED_KINDS;
        let flags = attribute::MIXED_KINDS | attribute::MIXED_NAMESPACES | attribute::RARE;
        self.raw[0] == BODY_VERSION
            && self.raw[1] as usize == BODY_HEADER_BYTES / 8
            && self.attributes & attribute::RESERVED == 0
            && 1 <= self.base
            && self.base <= COUNTER_MAX + 1 - self.count as u64
            && self.kinds_mask != 0
            && self.columns_mask & !column::COMMON == 0
            && self.columns_mask & column::REQUIRED == column::REQUIRED
            && (blobs == 0 || blobs == 3)
            && self.attributes & flags == announced
            && self.raw[self.length..end].iter().all(|byte| *byte == 0)
            && crc32c::crc32c(&self.raw[..end]) == self.crc()
    }

    fn names_are_valid(&self) -> bool {
        let (ends, text) = (self.column(column::KEY_ENDS), self.column(column::KEYS));
        let is_printable = text.iter().fold(true, |all, byte| all & (0x20..0x7F).contains(byte));
        let mut start = 0;
        for end in ends.chunks_exact(4).map(|end| u32_at(end, 0) as usize) {
            if end <= start || end - start > VECTOR_ID_BYTES_MAX || end > text.len() {
                return false;
            }
            if !is_printable && !name_is_valid(&text[start..end], VECTOR_ID_BYTES_MAX) {
                return false;
            }
            start = end;
        }
        let Some(names) = self.namespaces() else { return false };
        let count = names.len();
        start == text.len()
            && 1 <= count
            && count <= self.count
            && names.iter().all(|name| name_is_valid(name, NAMESPACE_BYTES_MAX))
            && (count == 1 || self.has(column::NAMESPACE_INDEX))
            && self.column(column::NAMESPACE_INDEX).chunks_exact(2).all(|index| (u16_at(index, 0) as usize) < count)
    }

    fn kinds_are_valid(&self) -> bool {
        let mask = self.kinds_mask;
        if mask & kind::GENERAL != 0 {
            return false;
        }
        let dimension_max = if mask & kind::VECTORS != 0 { DIMENSION_MAX } else { 0 };
        if self.dimension > dimension_max || (self.dimension == 0 && dimension_max > 0) {
            return false;
        }
        if !self.has(column::KINDS) {
            return mask & (mask - 1) == 0;
        }
        let kinds = self.column(column::KINDS);
        kinds.iter().all(|kind| *kind <= kind::MAX) && kinds.iter().fold(0, |seen, kind| seen | 1 << kind) == mask
    }

    /// Checks the sizes of all operands, and the numbers. Returns the highest index, -1 if there is none.
    fn numbers_are_valid(&self) -> Option<i64> {
        let (values, indices) = (self.column(column::VALUES), self.column(column::INDICES));
        let total = values.len() / 4;
        if !self.has(column::VALUE_ENDS) && total % self.count != 0 {
            return None;
        }
        let mut sparse = 0;
        if self.has(column::KINDS) || self.has(column::VALUE_ENDS) {
            let mut start = 0;
            for row in 0..self.count {
                let end = self.value_bounds(row).1;
                let kind = self.kind(row);
                if end < start || end > total || !self.count_is_valid(kind, end - start) {
                    return None;
                }
                if kind::SPARSES >> kind & 1 == 1 {
                    sparse += end - start;
                }
                start = end;
            }
            if start != total {
                return None;
            }
        } else {
            let kind = self.kind(0);
            if !self.count_is_valid(kind, total / self.count) {
                return None;
            }
            sparse = if kind::SPARSES >> kind & 1 == 1 { total } else { 0 };
        }
        if indices.len() / 4 != sparse || !self.blobs_are_valid() || !all_finite(values) {
            return None;
        }
        let highest = self.highest_index(0, sparse);
        (highest < i64::from(DIMENSION_MAX)).then_some(highest)
    }

    fn count_is_valid(&self, kind: u8, count: usize) -> bool {
        let is_vector = kind::bit(kind) & kind::VECTORS != 0;
        numbers_of(kind).is_some_and(|range| range.contains(&count))
            && (!is_vector || count == self.dimension as usize)
    }

    fn blobs_are_valid(&self) -> bool {
        let (ends, total) = (self.column(column::BLOB_ENDS), self.column(column::BLOBS).len());
        let mut start = 0;
        for (row, end) in ends.chunks_exact(4).map(|end| u32_at(end, 0) as usize).enumerate() {
            if end < start || end > total || end - start > bytes_max(self.kind(row)) {
                return false;
            }
            start = end;
        }
        start == total
    }
}

/// How many numbers an operation of a kind has. None for a kind that is checked in Python.
pub fn numbers_of(kind: u8) -> Option<RangeInclusive<usize>> {
    match kind {
        kind::CREATE | kind::DENSE => Some(1..=DIMENSION_MAX as usize),
        kind::SPARSE | kind::SPARSE_ADD => Some(0..=DELTA_BYTES_MAX as usize / 8),
        kind::SCALE | kind::OFFSET => Some(1..=1),
        _ => (kind <= kind::MAX && kind::bit(kind) & kind::GENERAL == 0).then_some(0..=0),
    }
}

/// The maximum number of bytes that an operation of a kind has.
pub fn bytes_max(kind: u8) -> usize {
    if kind < kind::OPAQUE {
        0
    } else {
        DELTA_BYTES_MAX as usize
    }
}

/// True if a name is UTF-8 of 1 to `bytes_max` bytes without control characters.
pub fn name_is_valid(name: &[u8], bytes_max: usize) -> bool {
    let is_control = |character: char| character < ' ' || ('\u{7f}'..='\u{9f}').contains(&character);
    let is_printable = name.iter().fold(true, |all, byte| all & (0x20..0x7F).contains(byte));
    (1..=bytes_max).contains(&name.len())
        && (is_printable || std::str::from_utf8(name).is_ok_and(|text| !text.chars().any(is_control)))
}

/// True if all of these float32 numbers are finite.
pub fn all_finite(numbers: &[u8]) -> bool {
    const EXPONENT: u32 = 0x7F80_0000;
    // Blocks without an early return are checked several numbers at a time.
    numbers.chunks(1024).all(|block| {
        !block.chunks_exact(4).fold(false, |found, number| found | (u32_at(number, 0) & EXPONENT == EXPONENT))
    })
}
