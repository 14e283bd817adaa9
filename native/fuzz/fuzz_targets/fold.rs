//! Bodies that are folded into a table, one after the other: what is taken has a slot, and all numbers stay finite.
#![no_main]

use std::cell::Cell;
use std::collections::hash_map::RandomState;

use delta_prop_core::body::Body;
use delta_prop_core::fold::{rows, Columns, Outcome, Table};
use delta_prop_core::names::{hash_of, Names};
use libfuzzer_sys::fuzz_target;

const SLOTS: usize = 8;
const DIMENSION: usize = 3;

fn cells<T>(numbers: &mut [T]) -> &[Cell<T>] {
    Cell::from_mut(numbers).as_slice_of_cells()
}

fuzz_target!(|data: &[u8]| {
    let (mut names, hashes) = (Names::default(), RandomState::new());
    let (mut heads, mut numbers) = ([-1i64; 4 * SLOTS], [0f32; DIMENSION * SLOTS]);
    let (mut forms, mut flags) = ([0u8; SLOTS], [0u8; SLOTS]);
    let (heads, numbers) = (cells(&mut heads[..]), cells(&mut numbers[..]));
    let (forms, flags) = (cells(&mut forms[..]), cells(&mut flags[..]));
    let (mut rest, mut offset) = (data, 0);
    // Each body comes after its length.
    while let Some((length, tail)) = rest.split_first_chunk::<2>() {
        let size = usize::from(u16::from_le_bytes(*length)).min(tail.len());
        let (raw, next) = tail.split_at(size);
        rest = next;
        let Some(body) = Body::read(raw) else { continue };
        let is_valid = body.verify_content().is_some();
        let columns = Columns { heads, forms, flags, numbers, dimension: DIMENSION };
        let adds = offset % 3 != 2;
        let mut table = Table { names: Some((&mut names, &hashes)), columns: Some(columns), adds };
        let rows: Vec<_> = rows(&body).collect();
        for (row, hash) in rows.iter().zip(table.read_ahead(&rows)) {
            match table.take(row, hash, (offset, offset + 1), |slot| slot % 5 == 4) {
                Outcome::Folded | Outcome::Skipped => {}
                Outcome::Left => break,
            }
        }
        offset += 1 + body.count as i64;
        // Only an invalid body has numbers that are not finite.
        assert!(!is_valid || numbers.iter().all(|number| number.get().is_finite()));
        if !is_valid {
            numbers.iter().for_each(|number| number.set(1.0));
        }
        if offset % 4 == 1 && !names.is_empty() {
            let slot = (offset / 4) as u32 % names.end() as u32;
            if let Some(name) = names.get(slot) {
                let hash = hash_of(&hashes, name);
                names.remove(hash, slot);
                heads[4 * slot as usize..4 * (slot as usize + 1)].iter().for_each(|number| number.set(-1));
            }
        }
        assert!(names.end() <= SLOTS);
        let mut count = 0;
        for slot in 0..names.end() as u32 {
            if let Some(name) = names.get(slot) {
                assert_eq!(names.find(hash_of(&hashes, name), name), slot);
                count += 1;
            }
        }
        assert_eq!(count, names.len());
    }
});
