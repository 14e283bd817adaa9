//! A table of names: numbers them in the order in which they come, and finds the number of a name.
//!
//! Names lie end to end. An index of open addressing, with linear probing, leads from a hash to an entry. It doubles
//! at three quarters and moves to its new size a few slots at a time, so that no insertion takes long. The hash is
//! keyed by a secret, since clients choose the names.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

const SLOTS_MIN: usize = 8;
/// How many slots of the old index each insertion moves.
const SLOTS_MOVED: usize = 16;
/// The number of a name that has no entry.
pub const MISSING: u32 = u32::MAX;
/// The maximum bytes of a name.
pub const NAME_BYTES_MAX: usize = (1 << LENGTH_BITS) - 1;
/// How many names are best looked up together: so many that the processor's caches keep what each look-up reads.
pub const NAMES_TOGETHER: usize = 64;
/// A position of 48 bits fits beside a length of 16 bits.
const LENGTH_BITS: u32 = 16;
/// The place of an entry whose name was removed.
const REMOVED: u64 = u64::MAX;
/// From this many bytes of removed names on, the names are moved together if that halves them.
const UNUSED_BYTES_MIN: usize = 4096;

/// Names, by entry.
#[derive(Default)]
pub struct Names {
    /// Low 32 bits of the hash << 32 | entry + 1; 0 if the slot is free.
    slots: Vec<u64>,
    /// The index before it last doubled; empty once all its slots have moved.
    old_slots: Vec<u64>,
    moved: usize,
    /// Position << 16 | length; REMOVED if the entry is free.
    places: Vec<u64>,
    text: Vec<u8>,
    free: Vec<u32>,
    unused: usize,
}

impl Names {
    /// The number of entries, free ones included.
    pub fn end(&self) -> usize {
        self.places.len()
    }

    /// The number of names.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// True if there are no names.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes that the table takes.
    pub fn bytes(&self) -> usize {
        8 * (self.slots.capacity() + self.old_slots.capacity() + self.places.capacity())
            + 4 * self.free.capacity()
            + self.text.capacity()
    }

    /// The name of an entry; None if there is none.
    pub fn get(&self, entry: u32) -> Option<&[u8]> {
        let place = *self.places.get(entry as usize)?;
        let start = (place >> LENGTH_BITS) as usize;
        self.text.get(start..start + (place as usize & NAME_BYTES_MAX))
    }

    /// Finds the entry of a name with this hash, else MISSING.
    pub fn find(&self, hash: u32, name: &[u8]) -> u32 {
        let found = self.find_in(&self.slots, hash, name);
        if found == MISSING && !self.old_slots.is_empty() {
            return self.find_in(&self.old_slots, hash, name);
        }
        found
    }

    /// The entry in the slot at which the search for a name with this hash begins, most often that of the name; else
    /// MISSING.
    pub fn guess(&self, hash: u32) -> u32 {
        let at = hash as usize & self.slots.len().wrapping_sub(1);
        self.slots.get(at).map_or(MISSING, |slot| (*slot as u32).wrapping_sub(1))
    }

    /// Reads where the name of an entry lies.
    pub fn place(&self, entry: u32) -> u64 {
        self.places.get(entry as usize).copied().unwrap_or(0)
    }

    /// Reads the first byte of the name of an entry.
    pub fn first_byte(&self, entry: u32) -> u8 {
        self.text.get((self.place(entry) >> LENGTH_BITS) as usize).copied().unwrap_or(0)
    }

    fn find_in(&self, slots: &[u64], hash: u32, name: &[u8]) -> u32 {
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
            if (slot >> 32) as u32 == hash && self.get(entry) == Some(name) {
                return entry;
            }
            at = (at + 1) & mask;
        }
    }

    /// The entry that the next insertion returns.
    pub fn next(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.places.len() as u32)
    }

    /// Adds a name that has no entry, and returns its entry: the one freed last, or a new one.
    pub fn insert(&mut self, hash: u32, name: &[u8]) -> u32 {
        debug_assert!(name.len() <= NAME_BYTES_MAX);
        if (self.len() + 1) * 4 > self.slots.len() * 3 {
            self.grow();
        }
        let place = (self.text.len() as u64) << LENGTH_BITS | name.len() as u64;
        self.text.extend_from_slice(name);
        let entry = self.free.pop().unwrap_or(self.places.len() as u32);
        match self.places.get_mut(entry as usize) {
            Some(freed) => *freed = place,
            None => self.places.push(place),
        }
        put(&mut self.slots, u64::from(hash) << 32 | u64::from(entry + 1));
        self.move_slots(SLOTS_MOVED);
        entry
    }

    /// Removes the name with this hash from an entry that has one.
    pub fn remove(&mut self, hash: u32, entry: u32) {
        self.move_slots(usize::MAX);
        take(&mut self.slots, u64::from(hash) << 32 | u64::from(entry + 1));
        self.unused += self.places[entry as usize] as usize & NAME_BYTES_MAX;
        self.places[entry as usize] = REMOVED;
        self.free.push(entry);
        if self.unused > UNUSED_BYTES_MIN && 2 * self.unused > self.text.len() {
            self.compact();
        }
    }

    fn compact(&mut self) {
        let mut text = Vec::with_capacity(self.text.len() - self.unused);
        for place in self.places.iter_mut().filter(|place| **place != REMOVED) {
            let (start, length) = ((*place >> LENGTH_BITS) as usize, *place as usize & NAME_BYTES_MAX);
            *place = (text.len() as u64) << LENGTH_BITS | length as u64;
            text.extend_from_slice(&self.text[start..start + length]);
        }
        (self.text, self.unused) = (text, 0);
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
}

fn put(slots: &mut [u64], slot: u64) {
    let mask = slots.len() - 1;
    let mut at = (slot >> 32) as usize & mask;
    while slots[at] != 0 {
        at = (at + 1) & mask;
    }
    slots[at] = slot;
}

/// Takes a slot out, and moves those behind it up that would not be found past a gap.
fn take(slots: &mut [u64], slot: u64) {
    let mask = slots.len() - 1;
    let mut gap = (slot >> 32) as usize & mask;
    while slots[gap] != slot {
        gap = (gap + 1) & mask;
    }
    let mut at = gap;
    loop {
        at = (at + 1) & mask;
        let home = (slots[at] >> 32) as usize;
        if slots[at] == 0 {
            break;
        }
        if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
            slots[gap] = slots[at];
            gap = at;
        }
    }
    slots[gap] = 0;
}

/// Returns the hash of a name.
pub fn hash_of(hashes: &RandomState, name: &[u8]) -> u32 {
    let mut hasher = hashes.build_hasher();
    hasher.write(name);
    hasher.finish() as u32
}
