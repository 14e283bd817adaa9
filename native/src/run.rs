//! Runs: frames that arrived together, with batches of one origin, whose sequences and counters continue.

use crate::body::Body;
use crate::frames::{may_be_in_run, Head, HEAD_BYTES};
use crate::spec::{attribute, ACK_WANTED, COUNTER_MAX, HEADER_BYTES, STAMP_BYTES};

/// The bounds of a run.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Maximum number of frames.
    pub frames_max: usize,
    /// A frame may be taken while fewer rows than this are.
    pub row_credit: u64,
    /// A frame may be taken while fewer bytes than this are.
    pub byte_credit: u64,
    /// Maximum payload of a frame.
    pub payload_bytes_max: usize,
    /// The lowest sequence of the first row, at least 1.
    pub sequence_min: u64,
    /// The stream that the frames are for.
    pub stream: u32,
}

/// What the frames of a run have in common.
pub struct Run {
    prefix: [u8; 4],
    /// The sequence of the first row.
    pub first_sequence: u64,
    next_sequence: u64,
    origin: u64,
    epoch: u32,
    attributes: u16,
    next_base: u64,
    /// The number of rows.
    pub rows: u64,
}

const MIXED: u16 = attribute::MIXED_KINDS | attribute::MIXED_NAMESPACES;
const PARTITION_SHIFT: u32 = 4;

impl Run {
    /// True if an acknowledgement is wanted.
    pub fn ack_wanted(&self) -> bool {
        self.prefix[3] & ACK_WANTED != 0
    }

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

/// The frames that were taken.
#[derive(Default)]
pub struct Taker {
    /// None before the first frame.
    pub run: Option<Run>,
    /// The number of bytes.
    pub size: usize,
    frames: usize,
}

impl Taker {
    /// Returns the size of the next frame, if it is complete and may be taken. `received`: the number of bytes.
    pub fn next_size(&self, head: &Head, received: usize, limits: &Limits) -> Option<usize> {
        let size = HEADER_BYTES + head.length;
        let is_allowed = may_be_in_run(head.prefix())
            && STAMP_BYTES < head.length
            && head.length <= limits.payload_bytes_max
            && (self.run.is_some() || head.sequence >= limits.sequence_min);
        (is_allowed && size <= received - self.size).then_some(size)
    }

    /// True if the bounds allow a further frame, and `received` bytes may hold one.
    pub fn may_continue(&self, received: usize, limits: &Limits) -> bool {
        received - self.size > HEAD_BYTES
            && self.frames < limits.frames_max
            && self.run.as_ref().map_or(0, |run| run.rows) < limits.row_credit
            && (self.size as u64) < limits.byte_credit
    }

    /// Takes the next frame, of this stream. Returns its body and highest index; None if the run ends before it.
    pub fn take<'a>(&mut self, head: &Head, raw: &'a [u8], stream: u32) -> Option<(Body<'a>, i64)> {
        let body = Body::read(raw)?;
        if self.run.as_ref().is_some_and(|run| !run.is_continued_by(head, &body)) {
            return None;
        }
        let highest = body.verify()?;
        let partition = (body.origin >> PARTITION_SHIFT) as u16;
        let ends_in_range = head.sequence.saturating_add(body.count as u64) <= COUNTER_MAX;
        if !ends_in_range || !head.is_from_producer(stream, partition) {
            return None;
        }
        self.run.get_or_insert_with(|| Run::starting_with(head, &body)).add(&body);
        self.frames += 1;
        self.size += HEAD_BYTES + raw.len();
        Some((body, highest))
    }
}
