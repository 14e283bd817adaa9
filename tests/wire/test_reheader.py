"""A body with a new header equals one that is encoded with that epoch and ack level."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.delta import AckLevel, Delta, Priority, create, sparse
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.reheader import with_header

ROWS = [Delta("a", create([1.0])), Delta("b", sparse([1], [0.5]))]


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from(AckLevel),
    st.sampled_from(AckLevel),
    st.sampled_from(Priority),
)
def test_new_header_equals_one_encoded_at_once(
    old_epoch: int, epoch: int, old_level: AckLevel, level: AckLevel, priority: Priority
) -> None:
    def encode_with(epoch: int, level: AckLevel) -> bytes:
        batch = encode_batch(ROWS, origin=7, base=3, epoch=epoch, ack_level=level, priority=priority)
        return bytes(batch.raw)

    reheadered = with_header(parse_batch(encode_with(old_epoch, old_level)), epoch=epoch, ack_level=level)
    assert bytes(reheadered.raw) == encode_with(epoch, level)
    assert (parse_batch(reheadered.raw).epoch, reheadered.ack_level) == (epoch, level)
