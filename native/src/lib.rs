//! The native core of delta-prop: what is done for each row and each frame, without I/O and without a clock.
//!
//! `wire/delta_prop_wire/core.py` describes the boundary. The Python modules behind it are the definition: the core
//! gives the same results, and leaves to them whatever is invalid or unusual.

pub mod batches;
pub mod body;
pub mod encode;
pub mod frames;
pub mod heads;
pub mod spec;
pub mod vectors;

use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use body::Body;
use frames::{may_be_in_run, Head, LogStamp, LoggedHead, HEAD_BYTES};
use spec::{attribute, ACK_WANTED, COUNTER_MAX, HEADER_BYTES, STAMP_BYTES};

/// The version of the boundary; Python takes a core of this version only.
const BOUNDARY: u32 = 1;

/// Return the Batch of a body that is valid and has only common columns, else None.
#[pyfunction]
fn parse_batch<'py>(raw: &Bound<'py, PyBytes>) -> PyResult<Option<Bound<'py, PyAny>>> {
    match Body::check(raw.as_bytes()) {
        Some((body, highest)) => batches::make_batch(raw, &body, Some(highest)).map(Some),
        None => Ok(None),
    }
}

/// Return True if a body is valid and has only common columns.
#[pyfunction]
fn body_is_valid(raw: &[u8]) -> bool {
    Body::check(raw).is_some()
}

/// What the frames of a run have in common.
struct Run {
    prefix: [u8; 4],
    first_sequence: u64,
    next_sequence: u64,
    origin: u64,
    epoch: u32,
    attributes: u16,
    next_base: u64,
    rows: u64,
}

const MIXED: u16 = attribute::MIXED_KINDS | attribute::MIXED_NAMESPACES;
const PARTITION_SHIFT: u32 = 4;

impl Run {
    fn starting_with(head: &Head, body: &Body<'_>) -> Run {
        Run {
            prefix: head.prefix(),
            first_sequence: head.sequence,
            next_sequence: head.sequence,
            origin: body.origin,
            epoch: body.epoch,
            attributes: body.attributes,
            next_base: body.base,
            rows: 0,
        }
    }

    /// True if a frame continues the run.
    fn is_continued_by(&self, head: &Head, body: &Body<'_>) -> bool {
        head.prefix() == self.prefix
            && head.sequence == self.next_sequence
            && body.base == self.next_base
            && body.origin == self.origin
            && body.epoch == self.epoch
            && (body.attributes ^ self.attributes) & !MIXED == 0
    }

    fn add(&mut self, body: &Body<'_>) {
        let count = body.count as u64;
        self.next_sequence += count;
        self.next_base += count;
        self.rows += count;
    }
}

/// The frames taken: first sequence, whether an Ack is wanted, batches, rows, bytes; True if an invalid one follows.
type Taken<'py> = (u64, bool, Bound<'py, PyList>, u64, usize, bool);

/// Return the frames of a run at the start of `received`; None if there are none.
///
/// `limits`: maximum of frames, credit of rows, credit of bytes, maximum payload, lowest first sequence.
#[pyfunction]
fn take_run<'py>(
    received: &Bound<'py, PyAny>,
    limits: (usize, u64, u64, usize, u64),
) -> PyResult<Option<Taken<'py>>> {
    let py = received.py();
    let (frames_max, row_credit, byte_credit, payload_bytes_max, sequence_min) = limits;
    let buffer = PyBuffer::<u8>::get(received)?;
    let cells = buffer.as_slice(py).unwrap_or(&[]);
    let batches = PyList::empty(py);
    let (mut run, mut position, mut is_complete): (Option<Run>, usize, bool) = (None, 0, true);
    while cells.len() - position > HEAD_BYTES
        && batches.len() < frames_max
        && run.as_ref().map_or(0, |run| run.rows) < row_credit
        && (position as u64) < byte_credit
    {
        let head = Head::new(std::array::from_fn(|at| cells[position + at].get()));
        let end = position + HEADER_BYTES + head.length;
        if run.is_none() && head.sequence < sequence_min.max(1) || !may_be_in_run(head.prefix()) {
            break;
        }
        if head.length <= STAMP_BYTES || head.length > payload_bytes_max || end > cells.len() {
            break;
        }
        // The body is a separate object, so that a stored batch pins nothing else.
        let raw = copy_cells(py, &cells[position + HEAD_BYTES..end])?;
        let body = Body::read(raw.as_bytes());
        if let (Some(run), Some(body)) = (&run, &body) {
            if !run.is_continued_by(&head, body) {
                break;
            }
        }
        let Some((body, highest)) = body.and_then(|body| body.verify().map(|highest| (body, highest))) else {
            is_complete = false;
            break;
        };
        let partition = (body.origin >> PARTITION_SHIFT) as u16;
        if head.sequence.saturating_add(body.count as u64) > COUNTER_MAX || !head.is_from_producer(partition) {
            break;
        }
        run.get_or_insert_with(|| Run::starting_with(&head, &body)).add(&body);
        batches.append(batches::make_batch(&raw, &body, Some(highest))?)?;
        position = end;
    }
    Ok(run.filter(|run| run.rows > 0).map(|run| {
        let ack_wanted = run.prefix[3] & ACK_WANTED != 0;
        (run.first_sequence, ack_wanted, batches, run.rows, position, !is_complete)
    }))
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
/// offset.
#[pyfunction]
fn pack_logged_head<'py>(
    py: Python<'py>,
    body: (usize, u32, u16),
    offset: u64,
    stamp: (u8, u8, u64, u64, u32, u64),
) -> (Bound<'py, PyBytes>, u32) {
    let (size, body_crc, attributes) = body;
    let (source, known_ids, time, lamport, previous_crc, synced_offset) = stamp;
    let stamp = LogStamp { source, known_ids, time, lamport, previous_crc, body_crc, synced_offset };
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
fn delta_prop_core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("BOUNDARY", BOUNDARY)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(parse_batch, module)?)?;
    module.add_function(wrap_pyfunction!(body_is_valid, module)?)?;
    module.add_function(wrap_pyfunction!(take_run, module)?)?;
    module.add_function(wrap_pyfunction!(pack_logged_head, module)?)?;
    module.add_function(wrap_pyfunction!(unpack_logged_head, module)?)?;
    module.add_function(wrap_pyfunction!(batches::log_run, module)?)?;
    module.add_function(wrap_pyfunction!(encode::pack_keys, module)?)?;
    module.add_function(wrap_pyfunction!(encode::encode_columns, module)?)?;
    module.add_class::<vectors::Heads>()
}
