//! Encodes bodies of rows that have only a vector id and numbers, and packs vector ids.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

use super::batches::make_batch;
use crate::body::{padded, Body};
use crate::spec::*;

/// Vector ids end to end, and the end of each as u32.
type Packed<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Return vector ids end to end, and the end of each (u32, little-endian).
///
/// None if one is not text, is empty, longer than `bytes_max`, or not printable ASCII.
#[pyfunction]
pub fn pack_keys<'py>(keys: &Bound<'py, PyAny>, bytes_max: usize) -> PyResult<Option<Packed<'py>>> {
    let (py, mut text, mut ends) = (keys.py(), Vec::new(), Vec::new());
    let Ok(keys) = keys.downcast::<PyList>() else { return Ok(None) };
    for key in keys.iter() {
        let Ok(name) = key.downcast::<PyString>().map_err(PyErr::from).and_then(|name| name.to_str()) else {
            return Ok(None);
        };
        let is_printable = name.bytes().fold(true, |all, byte| all & (0x20..0x7F).contains(&byte));
        if name.is_empty() || name.len() > bytes_max || !is_printable {
            return Ok(None);
        }
        text.extend_from_slice(name.as_bytes());
        ends.extend_from_slice(&(text.len() as u32).to_le_bytes());
    }
    Ok((!ends.is_empty()).then(|| (PyBytes::new(py, &text), PyBytes::new(py, &ends))))
}

/// Copies the bytes of a buffer of float32, uint32 or bytes.
fn copy_buffer(source: &Bound<'_, PyAny>, into: &mut Vec<u8>) -> PyResult<()> {
    let py = source.py();
    if let Ok(numbers) = PyBuffer::<f32>::get(source) {
        let numbers = numbers.to_vec(py)?;
        into.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    } else if let Ok(numbers) = PyBuffer::<u32>::get(source) {
        let numbers = numbers.to_vec(py)?;
        into.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    } else {
        into.extend(PyBuffer::<u8>::get(source)?.to_vec(py)?);
    }
    Ok(())
}

/// The fields of a body's header from the attributes to the mask of kinds.
type Header = (u16, u32, u64, u32, u32, u64, u64, u64);

/// Return the Batch of rows with `width` numbers each; None if it is too large. `packed`: as `pack_keys` returns them.
///
/// The batch is `validated` if `body_checks.py` and `validate.py` would accept it.
#[pyfunction]
#[pyo3(signature = (header, packed, namespace, width, values, indices))]
pub fn encode_columns<'py>(
    header: Header,
    packed: Packed<'py>,
    namespace: &str,
    width: u32,
    values: &Bound<'py, PyAny>,
    indices: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = values.py();
    let (attributes, count, origin, epoch, schema, base, hybrid_time, kinds_mask) = header;
    let (text, ends) = (packed.0.as_bytes(), packed.1.as_bytes());
    let number_bytes = 4 * count as usize * width as usize;
    let number_columns = 1 + usize::from(indices.is_some());
    let columns_at = BODY_HEADER_BYTES + 8 + padded(4 * (3 + number_columns));
    let length = columns_at
        + padded(ends.len())
        + padded(text.len())
        + padded(2 + namespace.len())
        + number_columns * padded(number_bytes);
    if STAMP_BYTES + length + ALIGNMENT > FRAME_PAYLOAD_BYTES_MAX || namespace.len() > usize::from(u16::MAX) {
        return Ok(None);
    }
    let mut raw = Vec::with_capacity(padded(length + CRC_BYTES));
    raw.extend_from_slice(&[BODY_VERSION, (BODY_HEADER_BYTES / 8) as u8]);
    raw.extend_from_slice(&attributes.to_le_bytes());
    raw.extend_from_slice(&count.to_le_bytes());
    raw.extend_from_slice(&origin.to_le_bytes());
    raw.extend_from_slice(&epoch.to_le_bytes());
    raw.extend_from_slice(&schema.to_le_bytes());
    raw.extend_from_slice(&base.to_le_bytes());
    raw.extend_from_slice(&hybrid_time.to_le_bytes());
    raw.extend_from_slice(&kinds_mask.to_le_bytes());
    raw.extend_from_slice(&(if indices.is_none() { width } else { 0 }).to_le_bytes());
    raw.extend_from_slice(&(length as u32).to_le_bytes());
    raw.extend_from_slice(&0u64.to_le_bytes());
    let sparse = if indices.is_some() { 1 << column::INDICES } else { 0 };
    raw.extend_from_slice(&(column::REQUIRED | 1 << column::VALUES | sparse).to_le_bytes());
    for size in [ends.len(), text.len(), 2 + namespace.len()] {
        raw.extend_from_slice(&(size as u32).to_le_bytes());
    }
    for _ in 0..number_columns {
        raw.extend_from_slice(&(number_bytes as u32).to_le_bytes());
    }
    raw.resize(columns_at, 0);
    raw.extend_from_slice(ends);
    raw.resize(padded(raw.len()), 0);
    raw.extend_from_slice(text);
    raw.resize(padded(raw.len()), 0);
    raw.extend_from_slice(&(namespace.len() as u16).to_le_bytes());
    raw.extend_from_slice(namespace.as_bytes());
    raw.resize(padded(raw.len()), 0);
    for numbers in indices.into_iter().chain([values]) {
        for piece in numbers.try_iter()? {
            copy_buffer(&piece?, &mut raw)?;
        }
        raw.resize(padded(raw.len()), 0);
    }
    if raw.len() != length {
        return Ok(None); // the numbers are not as many as the rows need
    }
    raw.resize(padded(length + CRC_BYTES) - CRC_BYTES, 0);
    let crc = crc32c::crc32c(&raw);
    raw.extend_from_slice(&crc.to_le_bytes());
    let body = PyBytes::new(py, &raw);
    match Body::read(body.as_bytes()) {
        Some(read) => make_batch(body.as_any(), &read, read.verify_content()).map(Some),
        None => Ok(None),
    }
}
