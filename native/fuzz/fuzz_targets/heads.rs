//! Bodies that change heads, one after the other: the counts agree, and the bound holds.
#![no_main]

use delta_prop_core::body::Body;
use delta_prop_core::vectors::{Malformed, Vectors};
use libfuzzer_sys::fuzz_target;

const HEADS_MAX: usize = 20;

fuzz_target!(|data: &[u8]| {
    let mut vectors = Vectors::new(HEADS_MAX);
    let mut rest = data;
    // Each body comes after its length.
    while let Some((length, tail)) = rest.split_first_chunk::<2>() {
        let size = usize::from(u16::from_le_bytes(*length)).min(tail.len());
        let (raw, next) = tail.split_at(size);
        rest = next;
        let _ = vectors.check(raw);
        let seen = |_| Ok::<u64, Malformed>(3);
        let _ = vectors.concurrent_rows(raw, seen);
        match Body::read(raw) {
            Some(body) if body.verify_content().is_some() => {
                let _ = vectors.append(raw, data.len() % 2 == 1, seen);
            }
            _ => {
                let _ = vectors.note_appended(raw, false);
            }
        }
        let (mut count, mut dead) = (0, None);
        for (name, _, _) in vectors.namespaces() {
            let (first, end) = vectors.head_range(&name);
            vectors.visit_heads(&name, first, end, |key, head| {
                assert!((head.writer as usize) < vectors.writers().len());
                count += 1;
                if head.is_dead {
                    dead = Some((name.clone(), String::from_utf8_lossy(key).into_owned()));
                }
            });
        }
        assert_eq!(count, vectors.count());
        assert!(count <= HEADS_MAX);
        if let Some((name, vector_id)) = dead {
            let was_there = vectors.head(&name, &vector_id).is_some();
            assert_eq!(vectors.forget(&name, &vector_id), was_there);
            assert!(vectors.head(&name, &vector_id).is_none());
        }
    }
});
