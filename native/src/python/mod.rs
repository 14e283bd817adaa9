//! What Python calls.

mod batches;
mod encode;
mod slots;
mod vectors;

use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::body::Body;
use crate::frames::{self, Head, LogStamp, LoggedHead, HEAD_BYTES};
use crate::run::{Limits, Taker};
use crate::spec::attribute;

/// From this many bytes on, other threads run while a body is checked.
const LONG_BYTES: usize = 256 * 1024;

/// The version of the boundary; Python takes a core of this version only.
const BOUNDARY: u32 = 4;

/// Return the Batch of a body that is valid and has only common columns, else None.
#[pyfunction]
fn parse_batch<'py>(raw: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    with_bytes(raw, |bytes| match Body::check(bytes) {
        Some((body, highest)) => batches::make_batch(raw, &body, highest).map(Some),
        None => Ok(None),
    })
}

/// Return True if a body is valid and has only common columns.
#[pyfunction]
fn body_is_valid(raw: &Bound<'_, PyAny>) -> PyResult<bool> {
    with_bytes(raw, |bytes| Ok(Body::check(bytes).is_some()))
}

/// Calls `with` with a body's bytes: those of a bytes object, or a copy of another buffer.
fn with_bytes<R>(raw: &Bound<'_, PyAny>, with: impl FnOnce(&[u8]) -> PyResult<R>) -> PyResult<R> {
    match raw.downcast::<PyBytes>() {
        Ok(bytes) => with(bytes.as_bytes()),
        Err(_) => with(&PyBuffer::<u8>::get(raw)?.to_vec(raw.py())?),
    }
}

/// The frames taken: first sequence, whether an Ack is wanted, batches, rows, bytes.
type Taken<'py> = (u64, bool, Bound<'py, PyList>, u64, usize);

/// Return the frames of a run at the start of `received`; None if there are none.
///
/// `limits`: maximum of frames, credit of rows, credit of bytes, maximum payload, lowest first sequence.
#[pyfunction]
fn take_run<'py>(
    received: &Bound<'py, PyAny>,
    limits: (usize, u64, u64, usize, u64, u32),
) -> PyResult<Option<Taken<'py>>> {
    let py = received.py();
    let (frames_max, row_credit, byte_credit, payload_bytes_max, sequence_min, stream) = limits;
    let limits = Limits { frames_max, row_credit, byte_credit, payload_bytes_max, sequence_min, stream };
    let buffer = PyBuffer::<u8>::get(received)?;
    let cells = buffer.as_slice(py).unwrap_or(&[]);
    let (batches, mut taker) = (PyList::empty(py), Taker::default());
    while taker.may_continue(cells.len(), &limits) {
        let at = taker.size;
        let head = Head::new(std::array::from_fn(|index| cells[at + index].get()));
        let Some(size) = taker.next_size(&head, cells.len(), &limits) else { break };
        // The body is a separate object, so that a stored batch pins nothing else.
        let raw = copy_cells(py, &cells[at + HEAD_BYTES..at + size])?;
        let bytes = raw.as_bytes();
        let taken = if bytes.len() < LONG_BYTES {
            taker.take(&head, bytes, stream)
        } else {
            py.allow_threads(|| taker.take(&head, bytes, stream))
        };
        let Some((body, highest)) = taken else { break };
        batches.append(batches::make_batch(raw.as_any(), &body, highest)?)?;
    }
    Ok(taker.run.map(|run| (run.first_sequence, run.ack_wanted(), batches, run.rows, taker.size)))
}

fn copy_cells<'py>(py: Python<'py>, cells: &[ReadOnlyCell<u8>]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, cells.len(), |bytes| {
        for (byte, cell) in bytes.iter_mut().zip(cells) {
            *byte = cell.get();
        }
        Ok(())
    })
}

/// Return the 64 bytes that a log writes before a body, and the checksum of their stamp.
///
/// `body`: size, checksum and attributes. `stamp`: source, known ids, time, Lamport number, previous checksum, synced
/// offset. `log`: stream and partition.
#[pyfunction]
fn pack_logged_head<'py>(
    py: Python<'py>,
    body: (usize, u32, u16),
    offset: u64,
    stamp: (u8, u8, u64, u64, u32, u64),
    log: (u32, u16),
) -> (Bound<'py, PyBytes>, u32) {
    let (size, body_crc, attributes) = body;
    let (source, known_ids, time, lamport, previous_crc, synced_offset) = stamp;
    let (stream, partition) = log;
    let stamp = LogStamp {
        stream,
        partition,
        source,
        known_ids,
        time,
        lamport,
        previous_crc,
        body_crc,
        synced_offset,
    };
    let (head, crc) = stamp.pack(attributes >> attribute::PRIORITY_SHIFT & 3 <= 1, offset, size);
    (PyBytes::new(py, &head), crc)
}

/// Read the 64-byte head of an uncompressed frame of a log; None for any other or invalid one.
///
/// Returns offset and length; Lamport number, source, time, checksum of the stamp before and of the body, synced
/// offset; leader epoch, stream, partition, known ids, checksum.
#[pyfunction]
fn unpack_logged_head(raw: &Bound<'_, PyAny>) -> PyResult<Option<LoggedHead>> {
    let buffer = PyBuffer::<u8>::get(raw)?;
    let cells = buffer.as_slice(raw.py()).unwrap_or(&[]);
    if cells.len() < HEAD_BYTES {
        return Ok(None);
    }
    Ok(frames::read_logged_head(std::array::from_fn(|at| cells[at].get())))
}

/// The module.
#[pymodule]
pub fn delta_prop_core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("BOUNDARY", BOUNDARY)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(parse_batch, module)?)?;
    module.add_function(wrap_pyfunction!(body_is_valid, module)?)?;
    module.add_function(wrap_pyfunction!(take_run, module)?)?;
    module.add_function(wrap_pyfunction!(pack_logged_head, module)?)?;
    module.add_function(wrap_pyfunction!(unpack_logged_head, module)?)?;
    module.add_function(wrap_pyfunction!(batches::log_run, module)?)?;
    module.add_function(wrap_pyfunction!(slots::fold_rows, module)?)?;
    module.add_class::<slots::Slots>()?;
    module.add_function(wrap_pyfunction!(encode::pack_row, module)?)?;
    module.add_function(wrap_pyfunction!(encode::pack_columns, module)?)?;
    module.add_function(wrap_pyfunction!(encode::encode_rows, module)?)?;
    module.add_class::<encode::PackedRows>()?;
    module.add_class::<vectors::Heads>()
}
