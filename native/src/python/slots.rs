//! `Slots`, the slots of the vectors of a table for Python, and the fold of a batch into tables.

use std::collections::hash_map::RandomState;
use std::iter::from_fn;

use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use super::with_bytes;
use crate::body::Body;
use crate::fold::{rows, Columns, Outcome, Table};
use crate::names::{hash_of, Names, MISSING, NAME_BYTES_MAX, NAMES_TOGETHER};

/// The slots of vectors by vector id, and the columns of their table.
#[pyclass]
#[derive(Default)]
pub struct Slots {
    names: Names,
    hashes: RandomState,
    columns: Option<BoundColumns>,
}

/// The columns of a table, which numpy owns.
struct BoundColumns {
    heads: PyBuffer<i64>,
    forms: PyBuffer<u8>,
    flags: PyBuffer<u8>,
    numbers: PyBuffer<f32>,
    dimension: usize,
    extras: Py<PyDict>,
}

impl BoundColumns {
    /// Returns the columns; None unless each is contiguous and may be written.
    fn view<'a>(&'a self, py: Python<'a>) -> Option<Columns<'a>> {
        Some(Columns {
            heads: self.heads.as_mut_slice(py)?,
            forms: self.forms.as_mut_slice(py)?,
            flags: self.flags.as_mut_slice(py)?,
            numbers: self.numbers.as_mut_slice(py)?,
            dimension: self.dimension,
        })
    }
}

#[pymethods]
impl Slots {
    #[new]
    fn new() -> Slots {
        Slots::default()
    }

    /// Set the columns into which `fold_rows` folds. `extras`: a dict with the slots that have bytes or metadata.
    fn bind(
        &mut self,
        heads: PyBuffer<i64>,
        forms: PyBuffer<u8>,
        flags: PyBuffer<u8>,
        numbers: PyBuffer<f32>,
        extras: Py<PyDict>,
    ) {
        let dimension = numbers.shape().get(1).copied().unwrap_or(0);
        self.columns = Some(BoundColumns { heads, forms, flags, numbers, dimension, extras });
    }

    #[getter]
    fn used(&self) -> usize {
        self.names.end()
    }

    #[getter]
    fn bytes(&self) -> usize {
        self.names.bytes()
    }

    fn __len__(&self) -> usize {
        self.names.len()
    }

    fn __contains__(&self, vector_id: &str) -> bool {
        self.get(vector_id).is_some()
    }

    fn __getitem__(&self, vector_id: &str) -> PyResult<u32> {
        self.get(vector_id).ok_or_else(|| PyKeyError::new_err(vector_id.to_owned()))
    }

    fn get(&self, vector_id: &str) -> Option<u32> {
        let slot = self.names.find(hash_of(&self.hashes, vector_id.as_bytes()), vector_id.as_bytes());
        (slot != MISSING).then_some(slot)
    }

    fn add(&mut self, vector_id: &str) -> PyResult<u32> {
        let name = vector_id.as_bytes();
        if name.len() > NAME_BYTES_MAX {
            return Err(PyValueError::new_err(format!("a vector id of {} bytes: it is too long", name.len())));
        }
        let hash = hash_of(&self.hashes, name);
        match self.names.find(hash, name) {
            MISSING => Ok(self.names.insert(hash, name)),
            slot => Ok(slot),
        }
    }

    fn add_all(&mut self, vector_ids: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
        vector_ids.iter().map(|vector_id| self.add(vector_id.downcast::<PyString>()?.to_str()?)).collect()
    }

    fn remove(&mut self, slot: u32) -> PyResult<()> {
        let Some(name) = self.names.get(slot) else {
            return Err(PyKeyError::new_err(slot));
        };
        let hash = hash_of(&self.hashes, name);
        self.names.remove(hash, slot);
        Ok(())
    }

    fn id<'py>(&self, py: Python<'py>, slot: u32) -> Option<Bound<'py, PyString>> {
        self.names.get(slot).map(|name| PyString::new(py, &String::from_utf8_lossy(name)))
    }

    fn ids<'py>(&self, py: Python<'py>, start: u32, end: u32) -> Vec<Option<Bound<'py, PyString>>> {
        (start..end.min(self.names.end() as u32)).map(|slot| self.id(py, slot)).collect()
    }
}

/// Fold the leading rows of a batch; return how many were taken, and how many of these were folded.
///
/// `tables`: for each name in the batch's table of namespaces, an object with its `slots`, or None. `place`: offset
/// and Lamport number of the first row. `chosen`: the rows to fold, ascending; None for all. `adds`: a vector without
/// a slot gets one; else its row is skipped if it changes a part.
#[pyfunction]
#[pyo3(signature = (tables, raw, place, chosen, adds))]
pub fn fold_rows(
    tables: &Bound<'_, PyList>,
    raw: &Bound<'_, PyAny>,
    place: (i64, i64),
    chosen: Option<PyBuffer<isize>>,
    adds: bool,
) -> PyResult<(usize, usize)> {
    let py = raw.py();
    let chosen = chosen.as_ref().map(|buffer| buffer.as_slice(py).unwrap_or(&[]));
    with_bytes(raw, |raw| {
        let Some(body) = Body::read(raw) else { return Ok((0, 0)) };
        let mut wanted = chosen.map(|rows| rows.iter().map(ReadOnlyCell::get).peekable());
        let mut rows = rows(&body)
            .filter(|row| match &mut wanted {
                Some(wanted) => wanted.next_if_eq(&(row.number as isize)).is_some(),
                None => true,
            })
            .peekable();
        let (mut taken, mut folded) = (0, 0);
        while let Some(namespace) = rows.peek().map(|row| row.namespace) {
            let Ok(table) = tables.get_item(namespace) else { break };
            let slots = if table.is_none() { table } else { table.getattr(intern!(py, "slots"))? };
            let mut slots = slots.downcast::<Slots>().ok().and_then(|slots| slots.try_borrow_mut().ok());
            let mut table = Table { names: None, columns: None, adds };
            let mut extras = None;
            if let Some(Slots { names, hashes, columns }) = slots.as_deref_mut() {
                table.names = Some((names, hashes));
                table.columns = columns.as_ref().and_then(|columns| columns.view(py));
                extras = columns.as_ref().map(|columns| columns.extras.bind(py)).filter(|extras| !extras.is_empty());
            }
            let has_extras = |slot| extras.is_some_and(|extras| extras.contains(slot).unwrap_or(true));
            let group: Vec<_> =
                from_fn(|| rows.next_if(|row| row.namespace == namespace)).take(NAMES_TOGETHER).collect();
            for (row, hash) in group.iter().zip(table.read_ahead(&group)) {
                match table.take(row, hash, place, has_extras) {
                    Outcome::Folded => folded += 1,
                    Outcome::Skipped => {}
                    Outcome::Left => return Ok((taken, folded)),
                }
                taken += 1;
            }
        }
        Ok((taken, folded))
    })
}
