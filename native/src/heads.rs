//! A table of the heads of one namespace's vectors, in the order in which they were first written.
//!
//! Vector ids lie end to end; columns hold where each ends and its head. An index of open addressing, with linear
//! probing, leads from a hash to an entry. It doubles at three quarters and moves to its new size a few slots at a
//! time, so that no insertion takes long. The hash is keyed by a secret, since clients choose the ids.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

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
const SLOTS_MIN: usize = 8;
/// How many slots of the old index each insertion moves.
const SLOTS_MOVED: usize = 16;
/// The number of a vector that has no entry.
pub const MISSING: u32 = u32::MAX;
/// Up to this many bytes of ids, a position fits beside a length of 16 bits.
const LENGTH_BITS: u32 = 16;

/// Heads of the vectors of one namespace.
#[derive(Default)]
pub struct HeadTable {
    /// Low 32 bits of the hash << 32 | entry + 1; 0 if the slot is free.
    slots: Vec<u64>,
    /// The index before it last doubled; empty once all its slots have moved.
    old_slots: Vec<u64>,
    moved: usize,
    names: Vec<u64>,
    counters: Vec<u64>,
    writers: Vec<u32>,
    text: Vec<u8>,
    dead: usize,
}

impl HeadTable {
    /// The number of heads.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// True if there are no heads.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// True if some vector is dead.
    pub fn has_dead(&self) -> bool {
        self.dead > 0
    }

    /// The bytes that the table takes.
    pub fn bytes(&self) -> usize {
        8 * (self.slots.capacity() + self.old_slots.capacity() + self.names.capacity() + self.counters.capacity())
            + 4 * self.writers.capacity()
            + self.text.capacity()
    }

    /// The vector id of an entry.
    pub fn key(&self, entry: u32) -> &[u8] {
        let name = self.names[entry as usize];
        let start = (name >> LENGTH_BITS) as usize;
        &self.text[start..start + (name & ((1 << LENGTH_BITS) - 1)) as usize]
    }

    /// The head of an entry.
    pub fn head(&self, entry: u32) -> HeadEntry {
        let writer = self.writers[entry as usize];
        HeadEntry { writer: writer & !DEAD, counter: self.counters[entry as usize], is_dead: writer & DEAD != 0 }
    }

    /// Finds the entry of a vector id with this hash, else MISSING.
    pub fn find(&self, hash: u32, key: &[u8]) -> u32 {
        let found = self.find_in(&self.slots, hash, key);
        if found == MISSING && !self.old_slots.is_empty() {
            return self.find_in(&self.old_slots, hash, key);
        }
        found
    }

    fn find_in(&self, slots: &[u64], hash: u32, key: &[u8]) -> u32 {
        if slots.is_empty() {
            return MISSING;
        }
        let mask = slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let slot = slots[at];
            if slot == 0 {
                return MISSING;
            }
            let entry = slot as u32 - 1;
            if (slot >> 32) as u32 == hash && self.key(entry) == key {
                return entry;
            }
            at = (at + 1) & mask;
        }
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
        if (self.len() + 1) * 4 > self.slots.len() * 3 {
            self.grow();
        }
        let entry = self.len() as u32;
        self.names.push((self.text.len() as u64) << LENGTH_BITS | key.len() as u64);
        self.text.extend_from_slice(key);
        self.counters.push(counter);
        self.writers.push(writer);
        put(&mut self.slots, u64::from(hash) << 32 | u64::from(entry + 1));
        self.move_slots(SLOTS_MOVED);
        entry
    }

    fn grow(&mut self) {
        self.move_slots(usize::MAX);
        let size = (2 * self.slots.len()).max(SLOTS_MIN);
        self.old_slots = std::mem::replace(&mut self.slots, vec![0; size]);
        self.moved = 0;
    }

    fn move_slots(&mut self, count: usize) {
        if self.old_slots.is_empty() {
            return;
        }
        let end = self.moved.saturating_add(count).min(self.old_slots.len());
        for slot in &self.old_slots[self.moved..end] {
            if *slot != 0 {
                put(&mut self.slots, *slot);
            }
        }
        self.moved = end;
        if end == self.old_slots.len() {
            self.old_slots = Vec::new();
        }
    }

    /// Drops the oldest heads; the entries of the others move down by as many.
    pub fn drop_oldest(&mut self, count: usize, hashes: &RandomState) {
        let mut kept = HeadTable::default();
        for entry in count as u32..self.len() as u32 {
            let (key, head) = (self.key(entry), self.head(entry));
            let added = kept.insert(hash_of(hashes, key), key, head.writer, head.counter);
            if head.is_dead {
                kept.write(added, head.writer, head.counter, Some(false));
            }
        }
        *self = kept;
    }
}

fn put(slots: &mut [u64], slot: u64) {
    let mask = slots.len() - 1;
    let mut at = (slot >> 32) as usize & mask;
    while slots[at] != 0 {
        at = (at + 1) & mask;
    }
    slots[at] = slot;
}

/// Returns the hash of a vector id.
pub fn hash_of(hashes: &RandomState, key: &[u8]) -> u32 {
    let mut hasher = hashes.build_hasher();
    hasher.write(key);
    hasher.finish() as u32
}
