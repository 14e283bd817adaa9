//! Folds rows of a body into the columns of a table of vectors, as `vector_table.py` does.
//!
//! A row that is rare, invalid or without effect is left to Python, with nothing changed.

use std::cell::Cell;
use std::collections::hash_map::RandomState;
use std::hint::black_box;

use crate::body::{u32_at, Body};
use crate::names::{hash_of, Names, MISSING, NAME_BYTES_MAX};
use crate::spec::{attribute, column, kind};

/// The numbers of a head: Lamport number, origin, counter and offset.
const HEAD_NUMBERS: usize = 4;
const LAMPORT: usize = 0;
const OFFSET: usize = 3;

/// How many numbers of a vector share a line of the processor's caches.
const CACHE_LINE_NUMBERS: usize = 16;

const ABSENT: u8 = 0;
const VECTOR: u8 = 1;
/// Changed since it was last collected for the store; its norm is out of date.
const DIRTY_AND_STALE: u8 = 3;

const LEFT_COLUMNS: u64 = 1 << column::ROW_OFFSETS | 3 << column::METADATA_ENDS | 0xF << (column::COUNT - 4);
const LEFT_ATTRIBUTES: u16 = attribute::CONTROL | attribute::ROW_OFFSETS | attribute::STATE_ROWS;

/// A row of a body.
pub struct Row<'a> {
    /// Its position in the body.
    pub number: usize,
    /// The index of its namespace in the body's table.
    pub namespace: usize,
    kind: u8,
    key: &'a [u8],
    origin: u64,
    counter: u64,
    values: &'a [u8],
    indices: &'a [u8],
}

impl Row<'_> {
    /// True unless it defines the full state of its vector.
    fn is_partial(&self) -> bool {
        !matches!(self.kind, kind::CREATE | kind::DELETE)
    }
}

/// Yields the rows of a body, up to the first whose lengths do not agree; none if all must be left.
pub fn rows<'a>(body: &'a Body<'a>) -> impl Iterator<Item = Row<'a>> {
    let is_left = body.columns_mask & LEFT_COLUMNS != 0 || body.attributes & LEFT_ATTRIBUTES != 0;
    let (values, indices) = (body.column(column::VALUES), body.column(column::INDICES));
    let mut sparse = 0;
    (0..if is_left { 0 } else { body.count }).map_while(move |number| {
        let (kind, (start, end)) = (body.kind(number), body.value_bounds(number));
        let first = sparse;
        if kind::bit(kind) & kind::SPARSES != 0 {
            sparse += end.checked_sub(start)?;
        }
        Some(Row {
            number,
            kind,
            namespace: body.namespace_index(number),
            key: body.key(number)?,
            origin: body.origin,
            counter: body.counter(number),
            values: values.get(4 * start..4 * end)?,
            indices: indices.get(4 * first..4 * sparse)?,
        })
    })
}

/// The columns of a table of vectors, by slot.
pub struct Columns<'a> {
    /// Four numbers for each slot: Lamport number, origin, counter and offset of the last delta.
    pub heads: &'a [Cell<i64>],
    /// What each slot holds.
    pub forms: &'a [Cell<u8>],
    /// What changed in each slot.
    pub flags: &'a [Cell<u8>],
    /// `dimension` numbers for each slot.
    pub numbers: &'a [Cell<f32>],
    /// The dimension of the namespace.
    pub dimension: usize,
}

impl Columns<'_> {
    /// The number of slots.
    fn capacity(&self) -> usize {
        let slots = self.forms.len().min(self.flags.len()).min(self.heads.len() / HEAD_NUMBERS);
        slots.min(self.numbers.len().checked_div(self.dimension).unwrap_or(0))
    }

    /// Reads the head and the flags of a slot, if it exists.
    fn touch(&self, slot: u32) -> i64 {
        let slot = slot as usize;
        match (self.heads.get(HEAD_NUMBERS * slot), self.forms.get(slot), self.flags.get(slot)) {
            (Some(head), Some(form), Some(flags)) => head.get() ^ i64::from(form.get() ^ flags.get()),
            _ => 0,
        }
    }

    /// Reads a number of each cache line of the vector in a slot, if that exists.
    fn touch_numbers(&self, slot: u32) -> u32 {
        let start = self.dimension.saturating_mul(slot as usize);
        let numbers = self.numbers.get(start..start.saturating_add(self.dimension)).unwrap_or(&[]);
        numbers.iter().step_by(CACHE_LINE_NUMBERS).fold(0, |read, number| read ^ number.get().to_bits())
    }

    /// True if a row can be the first of a vector.
    fn can_begin(&self, row: &Row) -> bool {
        row.key.len() <= NAME_BYTES_MAX
            && match row.kind {
                kind::CREATE | kind::DENSE => row.values.len() == 4 * self.dimension,
                kind::DELETE => true,
                _ => false,
            }
    }

    /// Folds a row into a slot; False if it is left. `is_new`: the slot holds nothing yet.
    ///
    /// `has_extras`: returns True if a slot has bytes or metadata, which Python holds.
    fn fold(
        &self,
        slot: u32,
        row: &Row,
        place: (i64, i64),
        is_new: bool,
        has_extras: impl Fn(u32) -> bool,
    ) -> bool {
        let (number, has_extras, slot) = (row.number as i64, || has_extras(slot), slot as usize);
        let (offset, lamport) = (place.0.wrapping_add(number), place.1.wrapping_add(number));
        let head = [lamport, row.origin as i64, row.counter as i64, offset];
        let heads = &self.heads[HEAD_NUMBERS * slot..HEAD_NUMBERS * (slot + 1)];
        if !is_new && (heads[LAMPORT].get() >= lamport || heads[OFFSET].get() >= offset) {
            return false;
        }
        let form = if is_new { ABSENT } else { self.forms[slot].get() };
        let numbers = &self.numbers[self.dimension * slot..self.dimension * (slot + 1)];
        let is_folded = match row.kind {
            kind::CREATE if has_extras() => false,
            kind::DENSE if form > VECTOR => false,
            kind::CREATE | kind::DENSE => set_all(numbers, row.values),
            kind::DELETE => !has_extras(),
            _ if form != VECTOR => false,
            kind::SPARSE => change_some(numbers, row, |_, value| value),
            kind::SPARSE_ADD => change_some(numbers, row, |number, value| saturated(number + value)),
            kind::SCALE => change_all(numbers, row.values, |number, value| saturated(number * value)),
            kind::OFFSET => change_all(numbers, row.values, |number, value| saturated(number + value)),
            _ => false,
        };
        if is_folded {
            for (cell, number) in heads.iter().zip(head) {
                cell.set(number);
            }
            self.forms[slot].set(if row.kind == kind::DELETE { ABSENT } else { VECTOR });
            self.flags[slot].set(DIRTY_AND_STALE);
        }
        is_folded
    }
}

/// What became of a row.
pub enum Outcome {
    /// It was folded.
    Folded,
    /// It is for no vector of the table.
    Skipped,
    /// Nothing: Python decides.
    Left,
}

/// A table of vectors, as far as it exists.
pub struct Table<'a> {
    /// The vector ids by slot, and the key of their hashes.
    pub names: Option<(&'a mut Names, &'a RandomState)>,
    /// The columns; None until the dimension is known.
    pub columns: Option<Columns<'a>>,
    /// True if new vectors get slots; else rows that change a part of a vector without a slot are skipped.
    pub adds: bool,
}

impl Table<'_> {
    /// Returns the hash of each row's vector id, and reads what `take` will read, a stage for all rows after the
    /// other. Within a stage the reads overlap; in a look-up each waits for the one before.
    pub fn read_ahead(&self, rows: &[Row]) -> Vec<u32> {
        let Some((names, hashes)) = &self.names else { return vec![0; rows.len()] };
        let hashes: Vec<u32> = rows.iter().map(|row| hash_of(hashes, row.key)).collect();
        let slots: Vec<u32> = hashes.iter().map(|hash| names.guess(*hash)).collect();
        let mut read = 0;
        for slot in &slots {
            read ^= names.place(*slot) ^ self.columns.as_ref().map_or(0, |columns| columns.touch(*slot)) as u64;
        }
        for slot in &slots {
            read ^= u64::from(names.first_byte(*slot));
            read ^= u64::from(self.columns.as_ref().map_or(0, |columns| columns.touch_numbers(*slot)));
        }
        black_box(read);
        hashes
    }

    /// Folds a row. `hash`: of its vector id. `place`: offset and Lamport number of its body's first row.
    /// `has_extras`: as for `fold`.
    pub fn take(
        &mut self,
        row: &Row,
        hash: u32,
        place: (i64, i64),
        has_extras: impl Fn(u32) -> bool,
    ) -> Outcome {
        let found = self.names.as_ref().map_or(MISSING, |(names, _)| names.find(hash, row.key));
        let is_new = found == MISSING;
        if is_new && !self.adds && row.is_partial() {
            return Outcome::Skipped;
        }
        let (Some((names, _)), Some(columns)) = (&mut self.names, &self.columns) else { return Outcome::Left };
        if is_new && !(self.adds && columns.can_begin(row)) {
            return Outcome::Left;
        }
        let slot = if is_new { names.next() } else { found };
        if slot as usize >= columns.capacity() || !columns.fold(slot, row, place, is_new, has_extras) {
            return Outcome::Left;
        }
        if is_new {
            names.insert(hash, row.key);
        }
        Outcome::Folded
    }
}

fn set_all(numbers: &[Cell<f32>], values: &[u8]) -> bool {
    if values.len() != 4 * numbers.len() {
        return false;
    }
    for (cell, value) in numbers.iter().zip(values.chunks_exact(4)) {
        cell.set(number_at(value));
    }
    true
}

fn change_some(numbers: &[Cell<f32>], row: &Row, change: impl Fn(f32, f32) -> f32) -> bool {
    let indices = || row.indices.chunks_exact(4).map(|index| u32_at(index, 0) as usize);
    if row.indices.len() != row.values.len() || indices().any(|index| index >= numbers.len()) {
        return false;
    }
    for (index, value) in indices().zip(row.values.chunks_exact(4)) {
        numbers[index].set(change(numbers[index].get(), number_at(value)));
    }
    true
}

fn change_all(numbers: &[Cell<f32>], values: &[u8], change: impl Fn(f32, f32) -> f32) -> bool {
    if values.len() != 4 {
        return false;
    }
    let value = number_at(values);
    for cell in numbers {
        cell.set(change(cell.get(), value));
    }
    true
}

fn number_at(raw: &[u8]) -> f32 {
    f32::from_bits(u32_at(raw, 0))
}

fn saturated(number: f32) -> f32 {
    number.clamp(f32::MIN, f32::MAX)
}
