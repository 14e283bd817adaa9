//! What is known of vectors at ingest, the counterpart of `vector_heads.py`: heads, tombstones, dimensions.

use std::collections::hash_map::RandomState;
use std::collections::HashMap;
use std::hint::black_box;

use crate::body::{u32_at, u64_at, Body};
use crate::heads::{hash_of, HeadEntry, HeadTable, MISSING, NAMES_TOGETHER};
use crate::names::NAME_BYTES_MAX;
use crate::spec::kind;

/// The index of no writer.
const NO_WRITER: u32 = u32::MAX;
/// `Namespace::writer` if several origins have written.
const SEVERAL: u32 = u32::MAX - 1;

/// Separates vector ids in a checkpoint; the states of vectors in it, as in `heads.py`.
const SEPARATOR: u8 = 0;
const ALIVE: u8 = 0;
const DEAD: u8 = 1;

/// The known vectors of one namespace.
#[derive(Default)]
struct Namespace {
    name: String,
    table: HeadTable,
    /// Index of the only origin of all heads, or NO_WRITER, or SEVERAL.
    writer: u32,
    dimension: u32,
    /// (number of values, number of restored states that have it), in the order in which they were found.
    widths: Vec<(u32, u64)>,
    /// False once a head was dropped: a vector without a head may then exist.
    is_complete: bool,
    /// How many heads were dropped.
    dropped: u64,
}

impl Namespace {
    fn note_writer(&mut self, writer: u32) {
        if self.writer != writer {
            self.writer = if self.writer == NO_WRITER { writer } else { SEVERAL };
        }
    }

    /// None if it is not known whether the vector of an entry is alive.
    fn is_alive(&self, entry: u32) -> Option<bool> {
        if entry != MISSING {
            return Some(!self.table.head(entry).is_dead);
        }
        self.is_complete.then_some(false)
    }
}

/// Why a row cannot apply: row, reason, and two numbers for the text.
pub type Fault = (usize, &'static str, u64, u64);

/// One row of a batch, with the entry of its vector before the batch.
struct Row<'a> {
    /// Index of the namespace, or UNKNOWN.
    namespace: u32,
    /// Index of the namespace's name in the batch's table; the first one, if the table repeats a name.
    name: usize,
    key: &'a [u8],
    hash: u32,
    entry: u32,
}

/// Heads, tombstones and dimensions of vectors, changed only by appended batches.
pub struct Vectors {
    heads_max: usize,
    namespaces: Vec<Namespace>,
    indexes: HashMap<String, u32>,
    writers: Vec<u64>,
    writer_indexes: HashMap<u64, u32>,
    count: usize,
    is_complete: bool,
    hashes: RandomState,
}

/// A namespace that is not known yet.
const UNKNOWN: u32 = u32::MAX;

/// A dot with what it is the head of: (row, origin, counter).
pub type RowHead = (usize, u64, u64);

/// A body whose lengths do not agree.
#[derive(Debug)]
pub struct Malformed;

impl Vectors {
    /// Creates an empty table, which keeps up to `heads_max` heads.
    pub fn new(heads_max: usize) -> Vectors {
        Vectors {
            heads_max,
            namespaces: Vec::new(),
            indexes: HashMap::new(),
            writers: Vec::new(),
            writer_indexes: HashMap::new(),
            count: 0,
            is_complete: true,
            hashes: RandomState::new(),
        }
    }

    /// The number of heads.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The origins that have written, by index.
    pub fn writers(&self) -> &[u64] {
        &self.writers
    }

    /// True if a namespace that is not known has no vectors.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The bytes that all tables take.
    pub fn bytes(&self) -> usize {
        self.namespaces.iter().map(|known| known.table.bytes()).sum()
    }

    /// Returns origin and counter of a vector's last delta, and whether the vector is dead.
    pub fn head(&self, namespace: &str, vector_id: &str) -> Option<(u64, u64, bool)> {
        let head = self.head_at(namespace, vector_id)?;
        Some((self.writers[head.writer as usize], head.counter, head.is_dead))
    }

    /// Returns the head of each of these vectors, as (namespace, vector id), that another origin has changed last.
    pub fn other_heads(&self, origin: u64, vectors: &[(String, String)]) -> Vec<RowHead> {
        let own = self.writer_indexes.get(&origin).copied().unwrap_or(NO_WRITER);
        let heads = vectors.iter().map(|(namespace, vector_id)| self.head_at(namespace, vector_id));
        heads
            .enumerate()
            .filter_map(|(row, head)| head.map(|head| (row, head)))
            .filter(|(_, head)| head.writer != own)
            .map(|(row, head)| (row, self.writers[head.writer as usize], head.counter))
            .collect()
    }

    /// Returns name, dimension and completeness of each namespace, in the order in which they were added.
    pub fn namespaces(&self) -> Vec<(String, u32, bool)> {
        self.namespaces.iter().map(|known| (known.name.clone(), known.dimension, known.is_complete)).collect()
    }

    /// Returns the dimension of a namespace, and whether all its heads are stored.
    pub fn namespace(&self, name: &str) -> (u32, bool) {
        match self.index_of(name) {
            UNKNOWN => (0, self.is_complete),
            index => {
                let known = &self.namespaces[index as usize];
                (known.dimension, known.is_complete)
            }
        }
    }

    /// Notes that vectors may exist that have no head here.
    pub fn make_incomplete(&mut self) {
        self.is_complete = false;
        for known in &mut self.namespaces {
            known.is_complete = false;
        }
    }

    /// Sets the dimension of a namespace, which is added if it is new, and its completeness unless that is None.
    pub fn set_namespace(&mut self, name: &str, dimension: u32, is_complete: Option<bool>) {
        let index = self.add_namespace(name) as usize;
        self.namespaces[index].dimension = dimension;
        if let Some(is_complete) = is_complete {
            self.namespaces[index].is_complete = is_complete;
        }
    }

    /// Returns the first fault of a batch's rows; None if all apply.
    pub fn check(&self, raw: &[u8]) -> Result<Option<Fault>, Malformed> {
        let body = Body::read(raw).ok_or(Malformed)?;
        if body.kinds_mask & (kind::PARTIAL | kind::VECTORS) == 0 {
            return Ok(None);
        }
        let rows = self.rows(&body).ok_or(Malformed)?;
        Ok(self.find_fault(&body, &rows))
    }

    /// Updates heads, tombstones and dimensions by a batch.
    pub fn note_appended(&mut self, raw: &[u8], is_replica: bool) -> Result<(), Malformed> {
        let body = Body::read(raw).ok_or(Malformed)?;
        let rows = self.rows(&body).ok_or(Malformed)?;
        self.note(&body, rows, is_replica).ok_or(Malformed)
    }

    /// Returns the rows of a batch that change what another origin has changed, unseen.
    pub fn concurrent_rows<E: From<Malformed>>(
        &self,
        raw: &[u8],
        mut seen: impl FnMut(u64) -> Result<u64, E>,
    ) -> Result<Vec<RowHead>, E> {
        let body = Body::read(raw).ok_or(Malformed)?;
        let mut found = Vec::new();
        if !self.is_only_writer(&body).ok_or(Malformed)? {
            let rows = self.rows(&body).ok_or(Malformed)?;
            self.concurrent(body.origin, &rows, &mut seen, |row, head| {
                found.push((row, self.writers[head.writer as usize], head.counter));
            })?;
        }
        Ok(found)
    }

    /// Checks and notes a batch that names no parents. Returns how many of its rows change what another origin has
    /// changed, unseen; None, with nothing changed, if a row cannot apply.
    pub fn append<E: From<Malformed>>(
        &mut self,
        raw: &[u8],
        is_replica: bool,
        mut seen: impl FnMut(u64) -> Result<u64, E>,
    ) -> Result<Option<usize>, E> {
        let body = Body::read(raw).ok_or(Malformed)?;
        let rows = self.rows(&body).ok_or(Malformed)?;
        if self.find_fault(&body, &rows).is_some() {
            return Ok(None);
        }
        let mut concurrent = 0;
        if !self.is_only_writer(&body).ok_or(Malformed)? {
            self.concurrent(body.origin, &rows, &mut seen, |_, _| concurrent += 1)?;
        }
        self.note(&body, rows, is_replica).ok_or(Malformed)?;
        Ok(Some(concurrent))
    }

    /// Returns the first number of a namespace's heads, and the number after the last.
    pub fn head_range(&self, name: &str) -> (u64, u64) {
        match self.index_of(name) {
            UNKNOWN => (0, 0),
            index => {
                let known = &self.namespaces[index as usize];
                (known.dropped, known.dropped + known.table.len() as u64)
            }
        }
    }

    /// Calls `with` with vector id and head of the heads with these numbers, as far as they are still stored.
    pub fn visit_heads(&self, name: &str, first: u64, end: u64, mut with: impl FnMut(&[u8], HeadEntry)) {
        let index = self.index_of(name);
        if index == UNKNOWN {
            return;
        }
        let known = &self.namespaces[index as usize];
        for number in first.max(known.dropped)..end.min(known.dropped + known.table.len() as u64) {
            let entry = (number - known.dropped) as u32;
            with(known.table.key(entry), known.table.head(entry));
        }
    }

    /// Adds the heads of a checkpoint to a namespace: vector ids, separated by NUL, and for each the index of the
    /// writer, the counter and the state. Returns false if the columns do not fit each other, or a writer is unknown.
    pub fn restore_heads(
        &mut self,
        name: &str,
        keys: &[u8],
        writers: &[u8],
        counters: &[u8],
        states: &[u8],
    ) -> bool {
        let index = self.add_namespace(name) as usize;
        if writers.len() != 4 * states.len() || counters.len() != 8 * states.len() {
            return false;
        }
        let mut keys = keys.split(|byte| *byte == SEPARATOR);
        for (row, state) in states.iter().enumerate() {
            let Some(key) = keys.next() else { return false };
            let writer = u32_at(writers, 4 * row);
            if writer as usize >= self.writers.len() || key.len() > NAME_BYTES_MAX {
                return false;
            }
            let life = match *state {
                ALIVE => Some(true),
                DEAD => Some(false),
                _ => None,
            };
            self.put_head(index, key, writer, u64_at(counters, 8 * row), life);
        }
        let is_single = self.writers.len() == 1;
        let known = &mut self.namespaces[index];
        if !known.table.is_empty() {
            known.writer = if is_single { 0 } else { SEVERAL };
        }
        states.is_empty() || keys.next().is_none()
    }

    /// Restores the writers of a checkpoint, and whether namespaces that are not known have no vectors.
    pub fn restore_writers(&mut self, writers: Vec<u64>, is_complete: bool) {
        self.writer_indexes = writers.iter().zip(0..).map(|(origin, index)| (*origin, index)).collect();
        self.writers = writers;
        self.is_complete = is_complete;
    }

    /// Adds the state of a vector from a snapshot. `dot`: origin and counter. `width`: the number of its values.
    pub fn load_state(
        &mut self,
        namespace: &str,
        vector_id: &str,
        dot: (u64, u64),
        is_dead: bool,
        width: Option<u32>,
    ) {
        let writer = self.add_writer(dot.0);
        let index = self.add_namespace(namespace) as usize;
        self.namespaces[index].note_writer(writer);
        self.put_head(index, vector_id.as_bytes(), writer, dot.1, is_dead.then_some(false));
        let known = &mut self.namespaces[index];
        if let Some(width) = width {
            match known.widths.iter_mut().find(|(other, _)| *other == width) {
                Some((_, count)) => *count += 1,
                None => known.widths.push((width, 1)),
            }
            let most = known.widths.iter().map(|(_, count)| *count).max();
            let first = known.widths.iter().find(|(_, count)| Some(*count) == most);
            known.dimension = first.map_or(width, |(width, _)| *width);
        }
    }

    /// Drops heads if there are more than the bound.
    pub fn keep_bound(&mut self) {
        while self.count > self.heads_max {
            self.drop_oldest();
        }
    }
}

impl Vectors {
    fn index_of(&self, name: &str) -> u32 {
        self.indexes.get(name).copied().unwrap_or(UNKNOWN)
    }

    fn add_namespace(&mut self, name: &str) -> u32 {
        let index = self.index_of(name);
        if index != UNKNOWN {
            return index;
        }
        let added = self.namespaces.len() as u32;
        self.namespaces.push(Namespace {
            name: name.to_owned(),
            writer: NO_WRITER,
            is_complete: self.is_complete,
            ..Namespace::default()
        });
        self.indexes.insert(name.to_owned(), added);
        added
    }

    fn add_writer(&mut self, origin: u64) -> u32 {
        let next = self.writers.len() as u32;
        let index = *self.writer_indexes.entry(origin).or_insert(next);
        if index == next {
            self.writers.push(origin);
        }
        index
    }

    /// Looks up the vector of each row. None if the body is malformed.
    fn rows<'a>(&self, body: &Body<'a>) -> Option<Vec<Row<'a>>> {
        let names = body.namespaces()?;
        let mut known = Vec::with_capacity(names.len());
        let mut firsts: HashMap<&[u8], usize> = HashMap::new();
        for (index, name) in names.iter().enumerate() {
            let first = if names.len() == 1 { 0 } else { *firsts.entry(name).or_insert(index) };
            known.push((self.index_of(std::str::from_utf8(name).ok()?), first));
        }
        let mut rows = Vec::with_capacity(body.count);
        for row in 0..body.count {
            let key = body.key(row)?;
            let (namespace, name) = *known.get(body.namespace_index(row))?;
            rows.push(Row { namespace, name, key, hash: hash_of(&self.hashes, key), entry: MISSING });
        }
        for group in rows.chunks_mut(NAMES_TOGETHER) {
            self.look_up(group);
        }
        Some(rows)
    }

    /// Sets the entry of each row. First reads what all look-ups will read, a stage for all rows after the other:
    /// within a stage the reads overlap; in a look-up each waits for the one before.
    fn look_up(&self, rows: &mut [Row<'_>]) {
        let mut read = 0;
        let table = |row: &Row<'_>| self.namespaces.get(row.namespace as usize).map(|known| &known.table);
        for row in &mut *rows {
            row.entry = table(row).map_or(MISSING, |table| table.guess(row.hash));
        }
        for row in &*rows {
            read ^= table(row).map_or(0, |table| table.touch(row.entry));
        }
        for row in &*rows {
            read ^= table(row).map_or(0, |table| table.touch_key(row.entry));
        }
        black_box(read);
        for row in rows {
            row.entry = table(row).map_or(MISSING, |table| table.find(row.hash, row.key));
        }
    }

    fn is_alive(&self, row: &Row<'_>) -> Option<bool> {
        if row.namespace == UNKNOWN {
            return if self.is_complete { Some(false) } else { None };
        }
        self.namespaces[row.namespace as usize].is_alive(row.entry)
    }

    /// Finds the first row that cannot apply, as `VectorHeads.check_rows` does.
    fn find_fault(&self, body: &Body<'_>, rows: &[Row<'_>]) -> Option<Fault> {
        let mask = body.kinds_mask;
        if mask & (kind::PARTIAL | kind::VECTORS) == 0 {
            return None;
        }
        // A row may depend on an earlier row of the batch, if that can create or delete the row's vector.
        let depends = mask & kind::PARTIAL != 0 && mask & !kind::PARTIAL != 0;
        let mut life: HashMap<(usize, &[u8]), bool> = HashMap::new();
        let mut dimensions: Vec<Option<u32>> = Vec::new();
        let mut indices_at = 0; // where the row's indices start, which lie end to end
        for (number, row) in rows.iter().enumerate() {
            let (kind, index) = (body.kind(number), row.name);
            let width = body.width(number);
            if dimensions.len() <= index {
                dimensions.resize(index + 1, None);
            }
            let fixed = *dimensions[index].get_or_insert_with(|| match row.namespace {
                UNKNOWN => 0,
                known => self.namespaces[known as usize].dimension,
            });
            let bit = kind::bit(kind);
            if bit & kind::VECTORS != 0 {
                if fixed != 0 && width != fixed as usize {
                    return Some((number, "dimension", width as u64, u64::from(fixed)));
                }
                dimensions[index] = Some(width as u32);
            } else if bit & kind::PARTIAL != 0 {
                let earlier = life.get(&(index, row.key)).copied();
                if earlier.or_else(|| self.is_alive(row)) == Some(false) {
                    return Some((number, "unknown", 0, 0));
                }
                if bit & kind::SPARSES != 0 {
                    let highest = body.highest_index(indices_at, width);
                    if fixed > 0 && highest >= i64::from(fixed) {
                        return Some((number, "index", highest as u64, u64::from(fixed)));
                    }
                    indices_at += width;
                }
            }
            if depends && bit & (kind::FULL | 1 << kind::DELETE) != 0 {
                life.insert((index, row.key), kind != kind::DELETE);
            } else if depends && bit & kind::PARTIAL == 0 {
                // An unknown operation, which may create its vector.
                let was_dead = row.entry != MISSING && self.is_alive(row) == Some(false);
                life.entry((index, row.key)).or_insert(!was_dead);
            }
        }
        None
    }

    /// Calls `found` for each row whose vector was last changed by another origin's delta that `seen` does not
    /// include. `seen`: returns the highest counter of an origin that was seen.
    fn concurrent<E>(
        &self,
        origin: u64,
        rows: &[Row<'_>],
        seen: &mut impl FnMut(u64) -> Result<u64, E>,
        mut found: impl FnMut(usize, HeadEntry),
    ) -> Result<(), E> {
        let own = self.writer_indexes.get(&origin).copied().unwrap_or(NO_WRITER);
        let mut limits: HashMap<u32, u64> = HashMap::new();
        for (number, row) in rows.iter().enumerate() {
            if row.entry == MISSING {
                continue;
            }
            let head = self.namespaces[row.namespace as usize].table.head(row.entry);
            if head.writer == own {
                continue;
            }
            let limit = match limits.get(&head.writer) {
                Some(limit) => *limit,
                None => {
                    let limit = seen(self.writers[head.writer as usize])?;
                    limits.insert(head.writer, limit);
                    limit
                }
            };
            if head.counter > limit {
                found(number, head);
            }
        }
        Ok(())
    }

    /// True if all heads of the namespaces that a batch names are this origin's.
    fn is_only_writer(&self, body: &Body<'_>) -> Option<bool> {
        let own = self.writer_indexes.get(&body.origin).copied().unwrap_or(NO_WRITER);
        for name in body.namespaces()? {
            let index = self.index_of(std::str::from_utf8(name).ok()?);
            let writer = if index == UNKNOWN { NO_WRITER } else { self.namespaces[index as usize].writer };
            if writer != NO_WRITER && writer != own {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Writes the head of each row. None if the body is malformed.
    fn note(&mut self, body: &Body<'_>, mut rows: Vec<Row<'_>>, is_replica: bool) -> Option<()> {
        let writer = self.add_writer(body.origin);
        let mut known = Vec::new();
        for name in body.namespaces()? {
            let index = self.add_namespace(std::str::from_utf8(name).ok()?);
            self.namespaces[index as usize].note_writer(writer);
            known.push(index);
        }
        for (number, row) in rows.iter_mut().enumerate() {
            let namespace = &mut self.namespaces[known[body.namespace_index(number)] as usize];
            let (kind, counter) = (body.kind(number), body.counter(number));
            let bit = kind::bit(kind);
            let life = if kind == kind::DELETE && !is_replica {
                Some(false)
            } else if bit & kind::FULL != 0 || is_replica {
                // A forwarded delete may sort before the present head, so the vector may still be alive.
                Some(true)
            } else {
                None
            };
            let table = &mut namespace.table;
            if row.entry == MISSING {
                row.entry = table.find(row.hash, row.key); // an earlier row of the batch may have added it
            }
            if row.entry == MISSING {
                row.entry = table.insert(row.hash, row.key, writer, counter);
                self.count += 1;
            }
            table.write(row.entry, writer, counter, life);
            if namespace.dimension == 0 && bit & kind::VECTORS != 0 {
                namespace.dimension = body.width(number) as u32;
            }
        }
        self.keep_bound();
        Some(())
    }

    /// Drops about a quarter of the heads: those written first, in the largest namespaces.
    fn drop_oldest(&mut self) {
        let mut order: Vec<usize> = (0..self.namespaces.len()).collect();
        order.sort_by_key(|index| std::cmp::Reverse(self.namespaces[*index].table.len()));
        for index in order {
            if self.count <= 3 * self.heads_max / 4 {
                return;
            }
            let known = &mut self.namespaces[index];
            let dropped = (known.table.len() / 2).max(1).min(known.table.len());
            known.table.drop_oldest(dropped, &self.hashes);
            known.dropped += dropped as u64;
            known.is_complete = false;
            self.count -= dropped;
        }
    }

    /// Drops the head of a vector that is deleted; returns false if there is no such head. Heads after it change their
    /// numbers, so none may be copied meanwhile.
    pub fn forget(&mut self, namespace: &str, vector_id: &str) -> bool {
        let index = self.index_of(namespace);
        if index == UNKNOWN {
            return false;
        }
        let (table, key) = (&mut self.namespaces[index as usize].table, vector_id.as_bytes());
        let entry = table.find(hash_of(&self.hashes, key), key);
        if entry == MISSING || !table.head(entry).is_dead {
            return false;
        }
        table.drop_entry(entry, &self.hashes);
        self.count -= 1;
        true
    }

    fn head_at(&self, namespace: &str, vector_id: &str) -> Option<HeadEntry> {
        let index = self.index_of(namespace);
        if index == UNKNOWN {
            return None;
        }
        let table = &self.namespaces[index as usize].table;
        let key = vector_id.as_bytes();
        let entry = table.find(hash_of(&self.hashes, key), key);
        (entry != MISSING).then(|| table.head(entry))
    }
}

impl Vectors {
    fn put_head(&mut self, index: usize, key: &[u8], writer: u32, counter: u64, life: Option<bool>) {
        let hash = hash_of(&self.hashes, key);
        let table = &mut self.namespaces[index].table;
        let mut entry = table.find(hash, key);
        if entry == MISSING {
            entry = table.insert(hash, key, writer, counter);
            self.count += 1;
        }
        table.write(entry, writer, counter, life);
    }
}
