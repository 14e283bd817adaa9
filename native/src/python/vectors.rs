//! `Heads`, the table of heads for Python. The methods are those of `Vectors`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::with_bytes;
use crate::vectors::{Fault, Malformed, RowHead, Vectors};

impl From<Malformed> for PyErr {
    fn from(_: Malformed) -> PyErr {
        PyValueError::new_err("a body with lengths that do not agree: check it before it is appended")
    }
}

/// Heads, tombstones and dimensions of vectors.
#[pyclass]
pub struct Heads(Vectors);

#[pymethods]
impl Heads {
    #[new]
    fn new(heads_max: usize) -> Heads {
        Heads(Vectors::new(heads_max))
    }

    #[getter]
    fn count(&self) -> usize {
        self.0.count()
    }

    #[getter]
    fn writer_count(&self) -> usize {
        self.0.writers().len()
    }

    #[getter]
    fn writers(&self) -> Vec<u64> {
        self.0.writers().to_vec()
    }

    #[getter]
    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    #[getter]
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn head(&self, namespace: &str, vector_id: &str) -> Option<(u64, u64, bool)> {
        self.0.head(namespace, vector_id)
    }

    fn other_heads(&self, origin: u64, vectors: Vec<(String, String)>) -> Vec<RowHead> {
        self.0.other_heads(origin, &vectors)
    }

    fn namespaces(&self) -> Vec<(String, u32, bool)> {
        self.0.namespaces()
    }

    fn namespace(&self, name: &str) -> (u32, bool) {
        self.0.namespace(name)
    }

    fn forget(&mut self, namespace: &str, vector_id: &str) -> bool {
        self.0.forget(namespace, vector_id)
    }

    fn make_incomplete(&mut self) {
        self.0.make_incomplete();
    }

    fn set_namespace(&mut self, name: &str, dimension: u32, is_complete: Option<bool>) {
        self.0.set_namespace(name, dimension, is_complete);
    }

    fn check(&self, raw: &Bound<'_, PyAny>) -> PyResult<Option<Fault>> {
        with_bytes(raw, |raw| Ok(self.0.check(raw)?))
    }

    fn note_appended(&mut self, raw: &Bound<'_, PyAny>, is_replica: bool) -> PyResult<()> {
        with_bytes(raw, |raw| Ok(self.0.note_appended(raw, is_replica)?))
    }

    fn concurrent_rows(&self, raw: &Bound<'_, PyAny>, seen: &Bound<'_, PyAny>) -> PyResult<Vec<RowHead>> {
        with_bytes(raw, |raw| self.0.concurrent_rows(raw, |origin| seen.call1((origin,))?.extract()))
    }

    /// Append batches up to the first with a row that cannot apply. Return how many were noted, and how many of
    /// their rows change what another origin has changed, unseen.
    fn append_run(
        &mut self,
        raws: &Bound<'_, PyList>,
        is_replica: bool,
        seen: &Bound<'_, PyAny>,
    ) -> PyResult<(usize, usize)> {
        let mut concurrent = 0;
        for (number, raw) in raws.iter().enumerate() {
            let added = with_bytes(&raw, |raw| {
                self.0.append(raw, is_replica, |origin| seen.call1((origin,))?.extract::<u64>())
            })?;
            match added {
                Some(rows) => concurrent += rows,
                None => return Ok((number, concurrent)),
            }
        }
        Ok((raws.len(), concurrent))
    }

    fn head_range(&self, name: &str) -> (u64, u64) {
        self.0.head_range(name)
    }

    /// Return vector ids, indexes of writers, counters, and which are dead, of the heads with these numbers.
    fn copy_heads(&self, name: &str, first: u64, end: u64) -> (Vec<String>, Vec<u32>, Vec<u64>, Vec<bool>) {
        let mut columns = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        self.0.visit_heads(name, first, end, |key, head| {
            columns.0.push(String::from_utf8_lossy(key).into_owned());
            columns.1.push(head.writer);
            columns.2.push(head.counter);
            columns.3.push(head.is_dead);
        });
        columns
    }

    fn restore_heads(
        &mut self,
        name: &str,
        keys: &[u8],
        writers: &[u8],
        counters: &[u8],
        states: &[u8],
    ) -> PyResult<()> {
        if self.0.restore_heads(name, keys, writers, counters, states) {
            return Ok(());
        }
        Err(PyValueError::new_err("heads whose columns do not fit each other, or of an unknown writer"))
    }

    fn restore_writers(&mut self, writers: Vec<u64>, is_complete: bool) {
        self.0.restore_writers(writers, is_complete);
    }

    fn load_state(
        &mut self,
        namespace: &str,
        vector_id: &str,
        dot: (u64, u64),
        is_dead: bool,
        width: Option<u32>,
    ) {
        self.0.load_state(namespace, vector_id, dot, is_dead, width);
    }

    fn keep_bound(&mut self) {
        self.0.keep_bound();
    }
}
