//! Packs rows that have only names, numbers and bytes, checks them, and encodes bodies of them.

use std::collections::HashMap;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::GILOnceCell;
use pyo3::types::{PyBytes, PyList, PyString};

use super::batches::make_batch;
use crate::body::{all_finite, bytes_max, name_is_valid, numbers_of, padded, u32_at, Body};
use crate::spec::*;

/// Types of numpy.
struct Numpy {
    array: Py<PyAny>,
    f32: Py<PyAny>,
    u32: Py<PyAny>,
}

static NUMPY: GILOnceCell<Numpy> = GILOnceCell::new();

impl Numpy {
    fn get(py: Python<'_>) -> PyResult<&Numpy> {
        NUMPY.get_or_try_init(py, || {
            let numpy = py.import("numpy")?;
            let dtype = |name: &str| PyResult::Ok(numpy.getattr("dtype")?.call1((name,))?.unbind());
            Ok(Numpy { array: numpy.getattr("ndarray")?.unbind(), f32: dtype("<f4")?, u32: dtype("<u4")? })
        })
    }
}

/// Valid rows of one namespace, kind and width.
#[pyclass(frozen)]
pub struct PackedRows {
    kind: u8,
    namespace: Py<PyString>,
    width: usize,
    keys: Py<PyList>,
    /// The vector ids, end to end.
    text: Vec<u8>,
    sizes: Vec<u32>,
    values: Option<Py<PyBytes>>,
    indices: Option<Py<PyBytes>>,
    data: Option<Py<PyBytes>>,
    highest_index: i64,
}

#[pymethods]
impl PackedRows {
    /// Kind, namespace and width.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> (u8, Bound<'py, PyString>, usize) {
        (self.kind, self.namespace.bind(py).clone(), self.width)
    }

    /// The number of bytes of the vector ids and the operands.
    #[getter]
    fn size(&self, py: Python<'_>) -> usize {
        let operands = [&self.values, &self.indices, &self.data];
        self.text.len() + operands.into_iter().map(|column| bytes_of(py, column).len()).sum::<usize>()
    }
}

fn bytes_of<'a>(py: Python<'a>, column: &'a Option<Py<PyBytes>>) -> &'a [u8] {
    column.as_ref().map_or(&[], |bytes| bytes.as_bytes(py))
}

impl PackedRows {
    /// Returns the rows if they are valid. `count`: the number of rows.
    fn new<'py>(
        kind: u8,
        namespace: &Bound<'py, PyAny>,
        keys: Bound<'py, PyList>,
        values: Option<Bound<'py, PyBytes>>,
        indices: Option<Bound<'py, PyBytes>>,
        data: Option<Bound<'py, PyBytes>>,
    ) -> PyResult<Option<PackedRows>> {
        let Ok(namespace) = namespace.downcast::<PyString>() else { return Ok(None) };
        if valid_text(namespace, NAMESPACE_BYTES_MAX).is_none() {
            return Ok(None);
        }
        let (mut text, mut sizes) = (Vec::new(), Vec::with_capacity(keys.len()));
        for key in keys.iter() {
            let Some(key) = valid_text(&key, VECTOR_ID_BYTES_MAX) else { return Ok(None) };
            text.extend_from_slice(key.as_bytes());
            sizes.push(key.len() as u32);
        }
        let numbers = values.as_ref().map_or(&[][..], |values| values.as_bytes());
        let indexes = indices.as_ref().map_or(&[][..], |indices| indices.as_bytes());
        let highest_index = indexes.chunks_exact(4).map(|index| i64::from(u32_at(index, 0))).max().unwrap_or(-1);
        let width = numbers.len() / 4 / sizes.len().max(1);
        let is_sparse = kind::SPARSES & kind::bit(kind) != 0;
        let is_valid = !sizes.is_empty()
            && sizes.len() <= BATCH_ROWS_MAX as usize
            && numbers_of(kind).is_some_and(|range| range.contains(&width))
            && data.as_ref().map_or(0, |data| data.as_bytes().len()) <= bytes_max(kind)
            && indices.is_some() == is_sparse
            && indexes.len() == if is_sparse { numbers.len() } else { 0 }
            && highest_index < i64::from(DIMENSION_MAX)
            && all_finite(numbers);
        Ok(is_valid.then(|| PackedRows {
            kind,
            namespace: namespace.clone().unbind(),
            width,
            keys: keys.unbind(),
            text,
            sizes,
            values: values.map(Bound::unbind),
            indices: indices.map(Bound::unbind),
            data: data.map(Bound::unbind),
            highest_index,
        }))
    }
}

/// Returns the text of a name, if it is a string and valid.
fn valid_text<'a>(name: &'a Bound<'_, PyAny>, bytes_max: usize) -> Option<&'a str> {
    let text = name.downcast::<PyString>().ok()?.to_str().ok()?;
    name_is_valid(text.as_bytes(), bytes_max).then_some(text)
}

/// Returns the bytes of an array with this type and number of dimensions.
fn array_bytes<'py>(
    array: &Bound<'py, PyAny>,
    dtype: &Py<PyAny>,
    dimensions: usize,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let py = array.py();
    let is_right = array.get_type().is(Numpy::get(py)?.array.bind(py))
        && array.getattr(intern!(py, "dtype"))?.is(dtype)
        && array.getattr(intern!(py, "ndim"))?.extract::<usize>()? == dimensions;
    if !is_right {
        return Ok(None);
    }
    Ok(Some(array.call_method0(intern!(py, "tobytes"))?.downcast_into()?))
}

/// Return the packed row of an operation; None unless it is valid. `values`, `indices`: the bytes of its arrays.
#[pyfunction]
pub fn pack_row<'py>(
    vector_id: Bound<'py, PyAny>,
    namespace: &Bound<'py, PyAny>,
    kind: &Bound<'py, PyAny>,
    values: Option<Bound<'py, PyBytes>>,
    indices: Option<Bound<'py, PyBytes>>,
    data: &Bound<'py, PyAny>,
) -> PyResult<Option<PackedRows>> {
    let (Ok(kind), Ok(data)) = (kind.extract(), data.downcast::<PyBytes>()) else { return Ok(None) };
    let data = (!data.as_bytes().is_empty()).then(|| data.clone());
    PackedRows::new(kind, namespace, PyList::new(namespace.py(), [vector_id])?, values, indices, data)
}

/// Return the packed rows of columns; None unless they are valid arrays of the right types.
#[pyfunction]
pub fn pack_columns<'py>(
    keys: &Bound<'py, PyAny>,
    matrix: &Bound<'py, PyAny>,
    indices: &Bound<'py, PyAny>,
    namespace: &Bound<'py, PyAny>,
    kind: &Bound<'py, PyAny>,
) -> PyResult<Option<PackedRows>> {
    let py = keys.py();
    let (Ok(keys), Ok(kind)) = (keys.downcast::<PyList>(), kind.extract::<u8>()) else { return Ok(None) };
    let numpy = Numpy::get(py)?;
    let Some(values) = array_bytes(matrix, &numpy.f32, 2)? else { return Ok(None) };
    let shape = matrix.getattr(intern!(py, "shape"))?;
    let mut index_bytes = None;
    if !indices.is_none() {
        index_bytes = array_bytes(indices, &numpy.u32, 2)?;
        if index_bytes.is_none() || !indices.getattr(intern!(py, "shape"))?.eq(&shape)? {
            return Ok(None);
        }
    }
    let has_numbers = kind::bit(kind) & (kind::VECTORS | kind::SPARSES) != 0;
    if !has_numbers || shape.get_item(0)?.extract::<usize>()? != keys.len() {
        return Ok(None);
    }
    PackedRows::new(kind, namespace, keys.get_slice(0, keys.len()), Some(values), index_bytes, None)
}

/// Attributes, origin, epoch, counter of the first row, and hybrid time of a batch.
type Header = (u16, u64, u32, u64, u64);

/// Return the Batch of packed rows; None if it is too large, or has invalid counters.
///
/// `clock`: the column of clock entries, or empty.
#[pyfunction]
pub fn encode_rows<'py>(
    rows: Vec<Bound<'py, PackedRows>>,
    header: Header,
    clock: &[u8],
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(first) = rows.first() else { return Ok(None) };
    let py = first.py();
    let rows: Vec<&PackedRows> = rows.iter().map(Bound::get).collect();
    let columns = Columns::new(py, &rows)?;
    let Some(body) = columns.body(py, &rows, header, clock)? else { return Ok(None) };
    let Some(read) = Body::read(body.as_bytes()) else { return Ok(None) };
    let highest = rows.iter().map(|packed| packed.highest_index).max().unwrap_or(-1);
    let keys = match rows[..] {
        [single] => single.keys.bind(py).clone(),
        _ => PyList::new(py, rows.iter().flat_map(|packed| packed.keys.bind(py).iter()).collect::<Vec<_>>())?,
    };
    let batch = make_batch(body.as_any(), &read, highest)?;
    batch.setattr(intern!(py, "keys"), keys)?; // saves decoding, and shares the strings of recurring names
    Ok(Some(batch))
}

/// The columns of a body that hold something of each row, as far as they are needed.
#[derive(Default)]
struct Columns {
    count: usize,
    key_ends: Vec<u8>,
    /// The table of namespaces, and each row's index in it.
    names: Vec<u8>,
    name_count: u16,
    namespaces: Vec<u8>,
    kinds: Vec<u8>,
    kinds_mask: u64,
    value_ends: Vec<u8>,
    has_widths: bool,
    blob_ends: Vec<u8>,
    dimension: usize,
}

impl Columns {
    fn new(py: Python<'_>, rows: &[&PackedRows]) -> PyResult<Columns> {
        let mut columns = Columns::default();
        let (mut key_end, mut value_end, mut blob_end) = (0u32, 0u32, 0u32);
        let (mut names, mut dimensions) = (HashMap::new(), Vec::new());
        for packed in rows {
            let name = packed.namespace.bind(py).to_str()?;
            let index = *names.entry(name).or_insert(columns.name_count);
            if index == columns.name_count {
                columns.name_count += 1;
                columns.names.extend_from_slice(&(name.len() as u16).to_le_bytes());
                columns.names.extend_from_slice(name.as_bytes());
            }
            let bit = kind::bit(packed.kind);
            columns.kinds_mask |= bit;
            columns.has_widths |= packed.width != rows[0].width;
            if bit & kind::VECTORS != 0 {
                dimensions.push(packed.width);
            }
            blob_end += bytes_of(py, &packed.data).len() as u32;
            for size in &packed.sizes {
                key_end += size;
                value_end += packed.width as u32;
                columns.key_ends.extend_from_slice(&key_end.to_le_bytes());
                columns.value_ends.extend_from_slice(&value_end.to_le_bytes());
                columns.blob_ends.extend_from_slice(&blob_end.to_le_bytes());
                columns.namespaces.extend_from_slice(&index.to_le_bytes());
                columns.kinds.push(packed.kind);
            }
        }
        columns.count = columns.kinds.len();
        let common = dimensions.first().filter(|first| dimensions.iter().all(|other| other == *first));
        columns.dimension = common.copied().unwrap_or(0);
        Ok(columns)
    }

    /// Returns the body; None if it is too large, or has invalid counters.
    fn body<'py>(
        &self,
        py: Python<'py>,
        rows: &[&PackedRows],
        header: Header,
        clock: &[u8],
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (mut attributes, origin, epoch, base, hybrid_time) = header;
        let of_all = |column: fn(&PackedRows) -> &Option<Py<PyBytes>>| {
            rows.iter().map(|packed| bytes_of(py, column(packed))).collect::<Vec<_>>()
        };
        let mut columns = Vec::with_capacity(11);
        if !clock.is_empty() {
            attributes |= attribute::CLOCK;
            columns.push((column::CLOCK, vec![clock]));
        }
        columns.push((column::KEY_ENDS, vec![&self.key_ends[..]]));
        columns.push((column::KEYS, rows.iter().map(|packed| &packed.text[..]).collect()));
        columns.push((column::NAMESPACES, vec![&self.names[..]]));
        if self.name_count > 1 {
            attributes |= attribute::MIXED_NAMESPACES;
            columns.push((column::NAMESPACE_INDEX, vec![&self.namespaces[..]]));
        }
        if self.kinds_mask & (self.kinds_mask - 1) != 0 {
            attributes |= attribute::MIXED_KINDS;
            columns.push((column::KINDS, vec![&self.kinds[..]]));
        }
        if self.has_widths {
            columns.push((column::VALUE_ENDS, vec![&self.value_ends[..]]));
        }
        if rows.iter().any(|packed| packed.indices.is_some()) {
            columns.push((column::INDICES, of_all(|packed| &packed.indices)));
        }
        if rows.iter().any(|packed| packed.values.is_some()) {
            columns.push((column::VALUES, of_all(|packed| &packed.values)));
        }
        if rows.iter().any(|packed| packed.data.is_some()) {
            columns.push((column::BLOB_ENDS, vec![&self.blob_ends[..]]));
            columns.push((column::BLOBS, of_all(|packed| &packed.data)));
        }
        let mask = columns.iter().fold(0u64, |mask, (number, _)| mask | 1 << number);
        let size_of = |pieces: &Vec<&[u8]>| pieces.iter().map(|piece| piece.len()).sum::<usize>();
        let columns_at = BODY_HEADER_BYTES + 8 + padded(4 * columns.len());
        let length = columns_at + columns.iter().map(|(_, pieces)| padded(size_of(pieces))).sum::<usize>();
        let fits = STAMP_BYTES + length + ALIGNMENT <= FRAME_PAYLOAD_BYTES_MAX && self.count <= BATCH_ROWS_MAX as usize;
        if !fits || base < 1 || base > COUNTER_MAX + 1 - self.count as u64 {
            return Ok(None);
        }
        let mut head = vec![BODY_VERSION, (BODY_HEADER_BYTES / 8) as u8];
        head.extend_from_slice(&attributes.to_le_bytes());
        head.extend_from_slice(&(self.count as u32).to_le_bytes());
        head.extend_from_slice(&origin.to_le_bytes());
        head.extend_from_slice(&epoch.to_le_bytes());
        head.extend_from_slice(&0u32.to_le_bytes());
        for number in [base, hybrid_time, self.kinds_mask] {
            head.extend_from_slice(&number.to_le_bytes());
        }
        head.extend_from_slice(&(self.dimension as u32).to_le_bytes());
        head.extend_from_slice(&(length as u32).to_le_bytes());
        head.extend_from_slice(&0u64.to_le_bytes());
        head.extend_from_slice(&mask.to_le_bytes());
        for (_, pieces) in &columns {
            head.extend_from_slice(&(size_of(pieces) as u32).to_le_bytes());
        }
        let size = padded(length + CRC_BYTES);
        let body = PyBytes::new_with(py, size, |raw| {
            raw[..head.len()].copy_from_slice(&head);
            let mut at = columns_at;
            for piece in columns.iter().flat_map(|(_, pieces)| pieces.iter().map(Some).chain([None])) {
                match piece {
                    Some(piece) => {
                        raw[at..at + piece.len()].copy_from_slice(piece);
                        at += piece.len();
                    }
                    None => at = padded(at), // the column ends
                }
            }
            let crc = crc32c::crc32c(&raw[..size - CRC_BYTES]);
            raw[size - CRC_BYTES..].copy_from_slice(&crc.to_le_bytes());
            Ok(())
        })?;
        Ok(Some(body))
    }
}
