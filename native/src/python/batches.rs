//! Makes the Batch objects of Python from bodies that were checked.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::GILOnceCell;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::body::Body;
use crate::frames::{LogStamp, HEAD_BYTES};
use crate::spec::{attribute, column};

/// What is needed of `delta_prop_wire` to make batches.
struct Python {
    new_object: Py<PyAny>,
    batch: Py<PyAny>,
    logged_batch: Py<PyAny>,
    read_short_names: Py<PyAny>,
    short_names_bytes: usize,
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
            let layout = py.import("delta_prop_wire.layout")?;
            Ok(Python {
                read_short_names: layout.getattr("read_short_names")?.unbind(),
                short_names_bytes: layout.getattr("SHORT_NAMES_BYTES")?.extract()?,
                new_object: py.import("builtins")?.getattr("object")?.getattr("__new__")?.unbind(),
                batch: py.import("delta_prop_wire.batch")?.getattr("Batch")?.unbind(),
                logged_batch: py.import("delta_prop_wire.batch")?.getattr("LoggedBatch")?.unbind(),
                levels: members("AckLevel")?,
                priorities: members("Priority")?,
            })
        })
    }
}

const KEY_COLUMNS: u64 = column::REQUIRED;
const NUMBER_COLUMNS: u64 = 1 << column::INDICES | 1 << column::VALUES;
const BLOB_COLUMNS: u64 = 1 << column::BLOB_ENDS | 1 << column::BLOBS;

/// Returns the Batch of a valid body. `highest_index`: as `Body::check` returns it.
pub fn make_batch<'py>(
    raw: &Bound<'py, PyAny>,
    body: &Body<'_>,
    highest_index: i64,
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
    batch.setattr(intern!(py, "size"), HEAD_BYTES + body.size())?;
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
    let names = body.column(column::NAMESPACES);
    if !names.is_empty() && names.len() <= python.short_names_bytes {
        // One tuple for equal tables: routing compares them by identity.
        let names = python.read_short_names.bind(py).call1((PyBytes::new(py, names),))?;
        if names.len()? == 1 {
            batch.setattr(intern!(py, "namespace"), names.get_item(0)?)?;
        }
        batch.setattr(intern!(py, "namespace_names"), names)?;
    }
    batch.setattr(intern!(py, "validated"), true)?;
    batch.setattr(intern!(py, "highest_index"), highest_index)?;
    batch.setattr(intern!(py, "values_per_row"), body.values_per_row())?;
    Ok(batch)
}

/// Returns the LoggedBatch of a batch. `head`: header and stamp, as the log writes them.
fn make_logged<'py>(
    batch: &Bound<'py, PyAny>,
    head: &Bound<'py, PyBytes>,
    offset: u64,
    lamport: u64,
    count: u64,
    constants: &(Bound<'py, PyAny>, Bound<'py, PyAny>),
) -> PyResult<Bound<'py, PyAny>> {
    let py = batch.py();
    let python = Python::get(py)?;
    let logged = python.new_object.bind(py).call1((python.logged_batch.bind(py),))?;
    logged.setattr(intern!(py, "batch"), batch)?;
    logged.setattr(intern!(py, "offset"), offset)?;
    logged.setattr(intern!(py, "lamport"), lamport)?;
    logged.setattr(intern!(py, "source"), &constants.0)?;
    logged.setattr(intern!(py, "head"), head)?;
    logged.setattr(intern!(py, "known_ids"), &constants.1)?;
    logged.setattr(intern!(py, "count"), count)?;
    logged.setattr(intern!(py, "next_offset"), offset + count)?;
    Ok(logged)
}

/// What a log gives a run: offset and Lamport number of the first row, source, append time, checksum of the stamp
/// before, synced offset.
type Place = (u64, u64, u8, u64, u32, u64);

/// An entry of a segment's index: offset and position of a frame, checksum of the stamp before it.
type Entry = (u64, u64, u32);

/// The LoggedBatches, the parts to write, the size of all frames, the checksum of the last stamp, and the entries.
type Logged<'py> = (Bound<'py, PyList>, Bound<'py, PyList>, usize, u32, Vec<Entry>);

/// Give batches their offsets and stamps, one after the other; None unless each body is a bytes object.
///
/// `source`, `known_ids`: as members of their types. `index`: the size of the segment, the size from which on the
/// next frame has an entry, and the distance of entries. `log`: stream and partition.
#[pyfunction]
pub fn log_run<'py>(
    batches: &Bound<'py, PyList>,
    place: Place,
    source: Bound<'py, PyAny>,
    known_ids: Bound<'py, PyAny>,
    index: (u64, u64, u64),
    log: (u32, u16),
) -> PyResult<Option<Logged<'py>>> {
    let py = batches.py();
    let (mut offset, mut lamport, source_number, time, mut previous_crc, synced_offset) = place;
    let constants = (source, known_ids);
    let (logged, parts, mut size) = (PyList::empty(py), PyList::empty(py), 0);
    let (segment_size, mut due, step) = index;
    let mut entries = Vec::new();
    for batch in batches.iter() {
        let raw = batch.getattr(intern!(py, "raw"))?;
        let Ok(raw) = raw.downcast::<PyBytes>() else { return Ok(None) };
        let bytes = raw.as_bytes();
        let position = segment_size + size as u64;
        if position >= due {
            entries.push((offset, position, previous_crc));
            due = position + step;
        }
        let count: u64 = batch.getattr(intern!(py, "count"))?.extract()?;
        let body = Body::read(bytes).ok_or_else(|| PyValueError::new_err("a malformed body"))?;
        let stamp = LogStamp {
            stream: log.0,
            partition: log.1,
            source: source_number,
            known_ids: 0,
            time,
            lamport,
            previous_crc,
            body_crc: body.crc(),
            synced_offset,
        };
        let is_high = body.attributes >> attribute::PRIORITY_SHIFT & 3 <= 1;
        let (head, crc) = stamp.pack(is_high, offset, bytes.len());
        let head = PyBytes::new(py, &head);
        logged.append(make_logged(&batch, &head, offset, lamport, count, &constants)?)?;
        parts.append(head)?;
        parts.append(raw)?;
        size += HEAD_BYTES + bytes.len();
        offset += count;
        lamport += count;
        previous_crc = crc;
    }
    Ok(Some((logged, parts, size, previous_crc, entries)))
}
