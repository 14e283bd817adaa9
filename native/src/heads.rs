//! A table of the heads of one namespace's vectors, in the order in which they were first written.

use std::collections::hash_map::RandomState;

use crate::names::Names;
pub use crate::names::{hash_of, MISSING, NAMES_TOGETHER};

/// The head of a vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeadEntry {
    /// Index of the origin in the list of writers.
    pub writer: u32,
    /// Counter of the last delta.
    pub counter: u64,
    /// True if that deleted the vector.
    pub is_dead: bool,
}

const DEAD: u32 = 1 << 31;

/// Heads of the vectors of one namespace.
#[derive(Default)]
pub struct HeadTable {
    names: Names,
    counters: Vec<u64>,
    writers: Vec<u32>,
    dead: usize,
}

impl HeadTable {
    /// The number of heads.
    pub fn len(&self) -> usize {
        self.counters.len()
    }

    /// True if there are no heads.
    pub fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }

    /// True if some vector is dead.
    pub fn has_dead(&self) -> bool {
        self.dead > 0
    }

    /// The bytes that the table takes.
    pub fn bytes(&self) -> usize {
        self.names.bytes() + 8 * self.counters.capacity() + 4 * self.writers.capacity()
    }

    /// The vector id of an entry.
    pub fn key(&self, entry: u32) -> &[u8] {
        self.names.get(entry).unwrap_or_default()
    }

    /// The head of an entry.
    pub fn head(&self, entry: u32) -> HeadEntry {
        let writer = self.writers[entry as usize];
        HeadEntry { writer: writer & !DEAD, counter: self.counters[entry as usize], is_dead: writer & DEAD != 0 }
    }

    /// Finds the entry of a vector id with this hash, else MISSING.
    pub fn find(&self, hash: u32, key: &[u8]) -> u32 {
        self.names.find(hash, key)
    }

    /// The entry that a search for a vector id with this hash finds most often; else MISSING.
    pub fn guess(&self, hash: u32) -> u32 {
        self.names.guess(hash)
    }

    /// Reads the head of an entry, and where its vector id lies.
    pub fn touch(&self, entry: u32) -> u64 {
        let writer = self.writers.get(entry as usize).copied().unwrap_or(0);
        let counter = self.counters.get(entry as usize).copied().unwrap_or(0);
        self.names.place(entry) ^ counter ^ u64::from(writer)
    }

    /// Reads the first byte of the vector id of an entry.
    pub fn touch_key(&self, entry: u32) -> u64 {
        u64::from(self.names.first_byte(entry))
    }

    /// Writes the head of an entry. `life`: Some(false) if the vector is dead now, None if that does not change.
    pub fn write(&mut self, entry: u32, writer: u32, counter: u64, life: Option<bool>) {
        let at = entry as usize;
        let was_dead = self.writers[at] & DEAD != 0;
        let is_dead = life.map_or(was_dead, |is_alive| !is_alive);
        self.writers[at] = writer | if is_dead { DEAD } else { 0 };
        self.counters[at] = counter;
        self.dead = self.dead + usize::from(is_dead) - usize::from(was_dead);
    }

    /// Adds a vector id that has no entry, and returns its entry.
    pub fn insert(&mut self, hash: u32, key: &[u8], writer: u32, counter: u64) -> u32 {
        self.counters.push(counter);
        self.writers.push(writer);
        self.names.insert(hash, key)
    }

    /// Drops the oldest heads; the entries of the others move down by as many.
    pub fn drop_oldest(&mut self, count: usize, hashes: &RandomState) {
        self.keep(count as u32..self.len() as u32, hashes);
    }

    /// Drops one head; the entries after it move down.
    pub fn drop_entry(&mut self, dropped: u32, hashes: &RandomState) {
        self.keep((0..self.len() as u32).filter(|entry| *entry != dropped), hashes);
    }

    fn keep(&mut self, entries: impl Iterator<Item = u32>, hashes: &RandomState) {
        let mut kept = HeadTable::default();
        for entry in entries {
            let (key, head) = (self.key(entry), self.head(entry));
            let added = kept.insert(hash_of(hashes, key), key, head.writer, head.counter);
            if head.is_dead {
                kept.write(added, head.writer, head.counter, Some(false));
            }
        }
        *self = kept;
    }
}
