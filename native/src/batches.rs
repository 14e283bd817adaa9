//! Makes the Batch objects of Python from bodies that were checked.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::GILOnceCell;
use pyo3::types::{PyBytes, PyTuple};

use crate::body::Body;
use crate::frames::HEAD_BYTES;
use crate::spec::{attribute, column};

/// What is needed of `delta_prop_wire` to make batches.
struct Python {
    new_object: Py<PyAny>,
    batch: Py<PyAny>,
    levels: Py<PyTuple>,
    priorities: Py<PyTuple>,
}

static PYTHON: GILOnceCell<Python> = GILOnceCell::new();

impl Python {
    fn get(py: pyo3::Python<'_>) -> PyResult<&Python> {
        PYTHON.get_or_try_init(py, || {
            let delta = py.import("delta_prop_wire.delta")?;
            let members = |name: &str| -> PyResult<Py<PyTuple>> {
                let all = delta.getattr(name)?.try_iter()?.collect::<PyResult<Vec<_>>>()?;
                Ok(PyTuple::new(py, all)?.unbind())
            };
            Ok(Python {
                new_object: py.import("builtins")?.getattr("object")?.getattr("__new__")?.unbind(),
                batch: py.import("delta_prop_wire.batch")?.getattr("Batch")?.unbind(),
                levels: members("AckLevel")?,
                priorities: members("Priority")?,
            })
        })
    }
}

const KEY_COLUMNS: u64 = column::REQUIRED;
const NUMBER_COLUMNS: u64 = 1 << column::INDICES | 1 << column::VALUES;
const BLOB_COLUMNS: u64 = 1 << column::BLOB_ENDS | 1 << column::BLOBS;

/// Returns the Batch of a body. `highest_index`: as `Body::check` returns it; None if the body may be invalid.
pub fn make_batch<'py>(
    raw: &Bound<'py, PyBytes>,
    body: &Body<'_>,
    highest_index: Option<i64>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = raw.py();
    let python = Python::get(py)?;
    let batch = python.new_object.bind(py).call1((python.batch.bind(py),))?;
    let attributes = body.attributes;
    let columns = body.columns_mask;
    let mask = body.kinds_mask;
    let kind = (mask & (mask - 1) == 0).then(|| mask.trailing_zeros());
    let homogeneous = columns & !NUMBER_COLUMNS == KEY_COLUMNS || columns == KEY_COLUMNS | BLOB_COLUMNS;
    batch.setattr(intern!(py, "raw"), raw)?;
    batch.setattr(intern!(py, "size"), HEAD_BYTES + raw.as_bytes().len())?;
    batch.setattr(intern!(py, "attributes"), attributes)?;
    batch.setattr(intern!(py, "count"), body.count)?;
    batch.setattr(intern!(py, "origin"), body.origin)?;
    batch.setattr(intern!(py, "epoch"), body.epoch)?;
    batch.setattr(intern!(py, "base"), body.base)?;
    batch.setattr(intern!(py, "kinds_mask"), mask)?;
    batch.setattr(intern!(py, "dimension"), body.dimension)?;
    batch.setattr(intern!(py, "length"), body.length)?;
    batch.setattr(intern!(py, "columns_mask"), columns)?;
    batch.setattr(intern!(py, "kind"), kind)?;
    let level = usize::from(attributes >> attribute::ACK_LEVEL_SHIFT & 3);
    batch.setattr(intern!(py, "ack_level"), python.levels.bind(py).get_item(level)?)?;
    let priority = usize::from(attributes >> attribute::PRIORITY_SHIFT & 3);
    batch.setattr(intern!(py, "priority"), python.priorities.bind(py).get_item(priority)?)?;
    batch.setattr(intern!(py, "is_control"), false)?;
    batch.setattr(intern!(py, "has_gaps"), false)?;
    batch.setattr(intern!(py, "homogeneous"), homogeneous)?;
    batch.setattr(intern!(py, "crc"), body.crc())?;
    if let Some(highest_index) = highest_index {
        batch.setattr(intern!(py, "validated"), true)?;
        batch.setattr(intern!(py, "highest_index"), highest_index)?;
    }
    batch.setattr(intern!(py, "values_per_row"), body.values_per_row())?;
    Ok(batch)
}
