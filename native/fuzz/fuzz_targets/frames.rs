//! Bytes from a socket: a run takes whole frames only, within its bounds; a head of a log is read or refused.
#![no_main]

use delta_prop_core::frames::{read_logged_head, Head, HEAD_BYTES};
use delta_prop_core::run::{Limits, Taker};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits =
    Limits { frames_max: 8, row_credit: 100, byte_credit: 4_000, payload_bytes_max: 1 << 20, sequence_min: 1, stream: 0 };

fuzz_target!(|data: &[u8]| {
    if let Some(head) = data.first_chunk::<HEAD_BYTES>() {
        let _ = read_logged_head(*head);
    }
    let mut taker = Taker::default();
    let mut frames = 0;
    while taker.may_continue(data.len(), &LIMITS) {
        let at = taker.size;
        let head = Head::new(data[at..at + HEAD_BYTES].try_into().expect("checked by may_continue"));
        let Some(size) = taker.next_size(&head, data.len(), &LIMITS) else { break };
        if taker.take(&head, &data[at + HEAD_BYTES..at + size], 0).is_none() {
            break;
        }
        frames += 1;
        assert_eq!(taker.size, at + size);
    }
    assert!(frames <= LIMITS.frames_max);
    assert!(taker.size <= data.len());
});
