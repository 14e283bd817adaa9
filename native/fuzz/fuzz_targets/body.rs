//! A body: the checks accept only what can be read, with and without a valid checksum.
#![no_main]

use delta_prop_core::body::Body;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    read(data);
    // Most mutations break the checksum, so the bytes are also tried with a valid one.
    if data.len() >= 4 {
        let mut raw = data[..data.len() - 4].to_vec();
        let crc = crc32c(&raw);
        raw.extend_from_slice(&crc.to_le_bytes());
        read(&raw);
    }
});

fn crc32c(raw: &[u8]) -> u32 {
    delta_prop_core::frames::crc_of([raw, &[]])
}

fn read(raw: &[u8]) {
    let Some(body) = Body::read(raw) else { return };
    let valid = body.verify();
    let names = body.namespaces();
    for row in 0..body.count {
        let key = body.key(row);
        let (start, end) = body.value_bounds(row);
        let _ = (body.kind(row), body.counter(row), body.width(row), body.highest_index(start, end.wrapping_sub(start) & 0xFFFF));
        if valid.is_some() {
            assert!(!key.expect("a valid body has ids").is_empty());
            assert!(start <= end);
            assert!(body.namespace_index(row) < names.as_ref().expect("a valid body has names").len());
        }
    }
}
