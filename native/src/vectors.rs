//! What is known of vectors at ingest: `Heads`, the native counterpart of `vector_heads.py`.

use std::collections::hash_map::RandomState;
use std::collections::HashMap;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::body::Body;
use crate::heads::{hash_of, HeadEntry, HeadTable, MISSING};
use crate::spec::kind;

/// The index of no writer.
const NO_WRITER: u32 = u32::MAX;
/// `Namespace::writer` if several origins have written.
const SEVERAL: u32 = u32::MAX - 1;

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
type Fault = (usize, &'static str, u64, u64);

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
#[pyclass]
pub struct Heads {
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

impl Heads {
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
        for row in &mut rows {
            if row.namespace != UNKNOWN {
                row.entry = self.namespaces[row.namespace as usize].table.find(row.hash, row.key);
            }
        }
        Some(rows)
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
            let bit = 1 << kind;
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
    fn concurrent<F>(&self, origin: u64, rows: &[Row<'_>], seen: &Bound<'_, PyAny>, mut found: F) -> PyResult<()>
    where
        F: FnMut(usize, HeadEntry),
    {
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
                    let limit = seen.call1((self.writers[head.writer as usize],))?.extract()?;
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
            let bit = 1u64 << kind;
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
        if self.count > self.heads_max {
            self.drop_oldest();
        }
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

/// Calls `with` with a body's bytes: those of a bytes object, or a copy of another buffer.
fn with_bytes<R>(raw: &Bound<'_, PyAny>, with: impl FnOnce(&[u8]) -> PyResult<R>) -> PyResult<R> {
    match raw.downcast::<PyBytes>() {
        Ok(bytes) => with(bytes.as_bytes()),
        Err(_) => with(&PyBuffer::<u8>::get(raw)?.to_vec(raw.py())?),
    }
}

fn malformed() -> PyErr {
    PyValueError::new_err("a body with lengths that do not agree: check it before it is appended")
}

#[pymethods]
impl Heads {
    #[new]
    fn new(heads_max: usize) -> Heads {
        Heads {
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
    #[getter]
    fn count(&self) -> usize {
        self.count
    }

    /// The number of origins that have written.
    #[getter]
    fn writer_count(&self) -> usize {
        self.writers.len()
    }

    /// The origins that have written, by index.
    #[getter]
    fn writers(&self) -> Vec<u64> {
        self.writers.clone()
    }

    /// True if a namespace that is not known has no vectors.
    #[getter]
    fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The bytes that all tables take.
    #[getter]
    fn bytes(&self) -> usize {
        self.namespaces.iter().map(|known| known.table.bytes()).sum()
    }

    /// Return origin and counter of a vector's last delta, and whether the vector is dead; None: no head.
    fn head(&self, namespace: &str, vector_id: &str) -> Option<(u64, u64, bool)> {
        let head = self.head_at(namespace, vector_id)?;
        Some((self.writers[head.writer as usize], head.counter, head.is_dead))
    }

    /// Return the (row, origin, counter) of each vector whose head is not of this origin.
    fn other_heads(&self, origin: u64, vectors: Vec<(String, String)>) -> Vec<(usize, u64, u64)> {
        let own = self.writer_indexes.get(&origin).copied().unwrap_or(NO_WRITER);
        let mut found = Vec::new();
        for (row, (namespace, vector_id)) in vectors.iter().enumerate() {
            if let Some(head) = self.head_at(namespace, vector_id) {
                if head.writer != own {
                    found.push((row, self.writers[head.writer as usize], head.counter));
                }
            }
        }
        found
    }

    /// Return dimension and completeness of each namespace, in the order in which they were added.
    fn namespaces(&self) -> Vec<(String, u32, bool)> {
        self.namespaces.iter().map(|known| (known.name.clone(), known.dimension, known.is_complete)).collect()
    }

    /// Return the dimension of a namespace, and whether all its heads are stored.
    fn namespace(&self, name: &str) -> (u32, bool) {
        match self.index_of(name) {
            UNKNOWN => (0, self.is_complete),
            index => {
                let known = &self.namespaces[index as usize];
                (known.dimension, known.is_complete)
            }
        }
    }

    /// Note that vectors may exist that have no head here.
    fn make_incomplete(&mut self) {
        self.is_complete = false;
        for known in &mut self.namespaces {
            known.is_complete = false;
        }
    }

    /// Set the dimension of a namespace, which is added if it is new; `is_complete`: unless None.
    fn set_namespace(&mut self, name: &str, dimension: u32, is_complete: Option<bool>) {
        let index = self.add_namespace(name) as usize;
        self.namespaces[index].dimension = dimension;
        if let Some(is_complete) = is_complete {
            self.namespaces[index].is_complete = is_complete;
        }
    }

    /// Return the first fault of a batch's rows: (row, reason, two numbers); None if all apply.
    fn check(&self, raw: &Bound<'_, PyAny>) -> PyResult<Option<Fault>> {
        with_bytes(raw, |raw| {
            let body = Body::read(raw).ok_or_else(malformed)?;
            if body.kinds_mask & (kind::PARTIAL | kind::VECTORS) == 0 {
                return Ok(None);
            }
            let rows = self.rows(&body).ok_or_else(malformed)?;
            Ok(self.find_fault(&body, &rows))
        })
    }

    /// Update heads, tombstones and dimensions by a batch.
    fn note_appended(&mut self, raw: &Bound<'_, PyAny>, is_replica: bool) -> PyResult<()> {
        with_bytes(raw, |raw| {
            let body = Body::read(raw).ok_or_else(malformed)?;
            let rows = self.rows(&body).ok_or_else(malformed)?;
            self.note(&body, rows, is_replica).ok_or_else(malformed)
        })
    }

    /// Return the rows of a batch that change what another origin has changed, unseen: (row, origin, counter).
    fn concurrent_rows(
        &self,
        raw: &Bound<'_, PyAny>,
        seen: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<(usize, u64, u64)>> {
        with_bytes(raw, |raw| {
            let body = Body::read(raw).ok_or_else(malformed)?;
            let mut found = Vec::new();
            if self.is_only_writer(&body).ok_or_else(malformed)? {
                return Ok(found);
            }
            let rows = self.rows(&body).ok_or_else(malformed)?;
            self.concurrent(body.origin, &rows, seen, |row, head| {
                found.push((row, self.writers[head.writer as usize], head.counter));
            })?;
            Ok(found)
        })
    }

    /// Check and note batches, up to the first with a row that cannot apply. Return how many were noted, and how
    /// many of their rows change what another origin has changed, unseen. The batches name no parents.
    fn append_run(
        &mut self,
        raws: &Bound<'_, PyList>,
        is_replica: bool,
        seen: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, usize)> {
        let mut concurrent = 0;
        for (number, raw) in raws.iter().enumerate() {
            let is_noted = with_bytes(&raw, |raw| {
                let body = Body::read(raw).ok_or_else(malformed)?;
                let rows = self.rows(&body).ok_or_else(malformed)?;
                if self.find_fault(&body, &rows).is_some() {
                    return Ok(false);
                }
                if !self.is_only_writer(&body).ok_or_else(malformed)? {
                    self.concurrent(body.origin, &rows, seen, |_, _| concurrent += 1)?;
                }
                self.note(&body, rows, is_replica).ok_or_else(malformed).map(|()| true)
            })?;
            if !is_noted {
                return Ok((number, concurrent));
            }
        }
        Ok((raws.len(), concurrent))
    }

    /// Return the first number of a namespace's heads, and the number after the last.
    fn head_range(&self, name: &str) -> (u64, u64) {
        match self.index_of(name) {
            UNKNOWN => (0, 0),
            index => {
                let known = &self.namespaces[index as usize];
                (known.dropped, known.dropped + known.table.len() as u64)
            }
        }
    }

    /// Return vector ids, indexes of writers, counters, and which are dead, of the heads with these numbers.
    fn copy_heads(&self, name: &str, first: u64, end: u64) -> (Vec<String>, Vec<u32>, Vec<u64>, Vec<bool>) {
        let mut columns = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let index = self.index_of(name);
        if index == UNKNOWN {
            return columns;
        }
        let known = &self.namespaces[index as usize];
        for number in first.max(known.dropped)..end.min(known.dropped + known.table.len() as u64) {
            let entry = (number - known.dropped) as u32;
            let head = known.table.head(entry);
            columns.0.push(String::from_utf8_lossy(known.table.key(entry)).into_owned());
            columns.1.push(head.writer);
            columns.2.push(head.counter);
            columns.3.push(head.is_dead);
        }
        columns
    }

    /// Add the heads of a checkpoint to a namespace. `heads`: vector id, index of the writer, counter.
    fn restore_heads(&mut self, name: &str, heads: Vec<(String, u32, u64)>, dead: Vec<String>) -> PyResult<()> {
        let index = self.add_namespace(name) as usize;
        for (vector_id, writer, counter) in heads {
            if writer as usize >= self.writers.len() {
                return Err(PyValueError::new_err("a head of an unknown writer: restore the writers first"));
            }
            self.put_head(index, &vector_id, writer, counter, Some(true));
        }
        for vector_id in dead {
            let key = vector_id.as_bytes();
            let table = &mut self.namespaces[index].table;
            let entry = table.find(hash_of(&self.hashes, key), key);
            if entry != MISSING {
                let head = table.head(entry);
                table.write(entry, head.writer, head.counter, Some(false));
            }
        }
        let is_single = self.writers.len() == 1;
        let known = &mut self.namespaces[index];
        if !known.table.is_empty() {
            known.writer = if is_single { 0 } else { SEVERAL };
        }
        Ok(())
    }

    /// Restore the writers of a checkpoint, and whether namespaces that are not known have no vectors.
    fn restore_writers(&mut self, writers: Vec<u64>, is_complete: bool) {
        self.writer_indexes = writers.iter().zip(0..).map(|(origin, index)| (*origin, index)).collect();
        self.writers = writers;
        self.is_complete = is_complete;
    }

    /// Add the state of a vector from a snapshot. `width`: the number of its values, None without.
    fn load_state(
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
        // As in a checkpoint, a vector that is alive now may have been noted as dead.
        self.put_head(index, vector_id, writer, dot.1, is_dead.then_some(false));
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

    /// Drop heads if there are more than the bound.
    fn keep_bound(&mut self) {
        if self.count > self.heads_max {
            self.drop_oldest();
        }
    }
}

impl Heads {
    fn put_head(&mut self, index: usize, vector_id: &str, writer: u32, counter: u64, life: Option<bool>) {
        let key = vector_id.as_bytes();
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
