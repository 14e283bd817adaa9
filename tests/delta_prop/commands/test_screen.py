"""`top` computes rates from two samples, fits its columns to the screen and prints no control codes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.commands.screen import StatusSample, format_bytes, format_duration, render


def sink(name: str, applied: int, lag: int, **more: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "state": "idle",
        "applied_offset": applied,
        "lag": lag,
        "quarantined": 0,
        "reason": None,
    }
    return row | {"lag_s": 57.2 if lag else 0.0} | more


def connection(client: str | None, processed: int | None, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"client": client, "address": "127.0.0.1:5", "token": None, "seconds": 3.2}
    row |= {"pending_frames": 1, "subscribed": processed is not None, "processed": processed}
    lags = {"lag": None, "lag_s": None} if processed is None else {"lag": 1500 - processed, "lag_s": 1.6}
    return row | {"catching_up": False} | lags | more


def make_sample(
    at_s: float, deltas: int, *, sinks: Any = (), connections: Any = (), **more: Any
) -> StatusSample:
    server = {"deltas_in": deltas, "deltas_out": 2 * deltas, "bytes_in": 1024 * deltas, "bytes_out": 0}
    status: dict[str, Any] = {
        "version": "1.2.3",
        "reason": None,
        "uptime_s": 7500,
        "log": {
            "start_offset": 0,
            "next_offset": deltas,
            "high_watermark": deltas,
            "bytes": 2048,
            "bytes_max": 4096,
        },
        "queue": {"depth": 3, "capacity": 100},
        "pending": {"pending_deltas": 0},
        "pressure": {"level": "warn", "rate_limit": 250.0, "paced_by": "slow"},
        "accepted": deltas,
        "duplicates": 1,
        "refused": 0,
        "server": server | {"nacks": {"QUEUE_FULL": 2}},
        "connections": list(connections),
        "groups": [],
        "streams": [],
    }
    return StatusSample(at_s, status | more, list(sinks))


def draw(
    now: StatusSample, before: StatusSample | None = None, *, width: int = 120, height: int = 40
) -> list[str]:
    return render(now, before, name="h:1", width=width, height=height)


def test_full_screen_shows_log_sinks_and_connections() -> None:
    before = make_sample(10, 1000, sinks=[sink("a", 900, 100)])
    sinks = [sink("a", 1100, 400, quarantined=2, state="retrying", reason="the disk is full")]
    connections = [connection("importer", None, token="imp"), connection(None, 1400, catching_up=True)]
    assert draw(make_sample(12, 1500, sinks=sinks, connections=connections), before) == [
        "delta-prop 1.2.3 at h:1, up 2 h: ready",
        "log      default: offsets 0 to 1,500, high watermark 1,500; 2.0 KiB of 4.0 KiB",
        "in             250 deltas/s  250.0 KiB/s  accepted 1,500  duplicates 1  refused 0",
        "out            500 deltas/s        0 B/s  nacks: QUEUE_FULL 2",
        "queue    default: 3 of 100  waiting for dependencies 0  pressure: warn, up to 250/s, by slow",
        "",
        "sink                  state                 offset          lag  lag time   deltas/s  quarantined",
        "a                     retrying               1,100          400      57 s        100            2  "
        "the disk is full",
        "",
        "2 connections, 1 subscribed, 1 catching up",
        "client                address                 token            since    open          lag  lag time",
        "importer              127.0.0.1:5             imp                3 s       1            -         -",
        "-                     127.0.0.1:5             -                  3 s       1          100       2 s",
    ]


def test_groups_are_drawn_if_there_are_any() -> None:
    groups = [
        {"name": "indexer", "offset": 1400, "has_member": True, "lag": 100, "lag_s": 7.4},
        {"name": "away", "offset": 0, "has_member": False, "lag": 1500, "lag_s": 7300.0},
    ]
    lines = draw(make_sample(12, 1500, sinks=[sink("a", 1100, 400)], groups=groups))
    header_index = lines.index("group                 read for              offset          lag  lag time")
    assert lines[header_index + 1 : header_index + 3] == [
        "indexer               yes                    1,400          100       7 s",
        "away                  no                         0        1,500       2 h",
    ]
    for height in range(1, 30):
        assert (
            len(draw(make_sample(12, 1500, sinks=[sink("a", 1, 2)] * 5, groups=groups * 9), height=height))
            <= height
        )


def stream(name: str, *accepted: int) -> dict[str, Any]:
    numbers = {"start_offset": 10, "bytes": 4096}
    rows = [
        numbers | {"partition": number, "accepted": count, "next_offset": 10 + count}
        for number, count in enumerate(accepted)
    ]
    return {"name": name, "partitions": 1 if name == "default" else 40, "open": rows}


def test_open_partitions_of_other_streams_have_rows() -> None:
    before = make_sample(10, 1000, streams=[stream("default", 500), stream("orders", 200)])
    now = make_sample(12, 1500, streams=[stream("default", 700), stream("orders", 600, 200)])
    lines = draw(now, before)
    header_index = next(index for index, line in enumerate(lines) if line.startswith("partition "))
    assert lines[header_index : header_index + 4] == [
        "partition                     start           next          log       accepted  deltas/s",
        "orders/0                         10            610      4.0 KiB            600       200",
        "orders/1                         10            210      4.0 KiB            200         -",
        "",
    ]
    assert "closed   38 partitions are not open: their groups are not shown" in lines
    assert not any(line.startswith("default/") for line in lines), "the header has the numbers of that log"
    many = make_sample(12, 1500, sinks=[sink("a", 1, 2)] * 9, streams=[stream("orders", *range(40))])
    for height in range(1, 40):
        lines = draw(many, before, height=height)
        assert len(lines) <= height
    assert any(line.startswith("orders/39 ") for line in lines)
    assert not any(line.startswith("orders/0 ") for line in lines)
    assert "and " in "".join(lines)


def test_full_disk_is_shown_below_the_title() -> None:
    full = {"what": "disk", "reason": "the disk has 0 bytes left: make room"}
    lines = draw(
        make_sample(12, 1500, full=full, reason="the disk is full since 9:00, for 57 s: deltas are refused")
    )
    assert lines[0].endswith("not ready: the disk is full since 9:00, for 57 s: deltas are refused")
    assert lines[1] == "full     the disk has 0 bytes left: make room"


def test_first_sample_has_no_rates_and_restart_no_negative_ones() -> None:
    assert "- deltas/s" in draw(make_sample(1, 5))[2]
    assert draw(make_sample(2, 5), make_sample(1, 1000))[2].split()[1] == "0"


@pytest.mark.parametrize("more", [{}, {"log": {}}])
def test_starting_server_shows_why_it_is_not_ready(more: dict[str, Any]) -> None:
    status: dict[str, Any] = {"version": "1", "reason": "it is starting", "server": None, "connections": []}
    starting = StatusSample(1, status | more, [])
    assert draw(starting) == ["delta-prop 1 at h:1: not ready: it is starting"]
    assert draw(make_sample(2, 5), starting)[0].endswith("ready")


@settings(max_examples=25)
@given(
    sinks=st.integers(0, 50),
    connections=st.integers(0, 50),
    width=st.integers(20, 200),
    height=st.integers(12, 60),
    name=st.text(max_size=30),
)
def test_screen_never_exceeds_its_width_and_height(
    sinks: int, connections: int, width: int, height: int, name: str
) -> None:
    now = make_sample(
        2,
        1000,
        sinks=[sink(f"{name}{n}", 0, n) for n in range(sinks)],
        connections=[connection(name, n) for n in range(connections)],
    )
    lines = draw(now, make_sample(1, 0), width=width, height=height)
    assert len(lines) <= height
    assert all(len(line) <= width and line.isprintable() for line in lines)


def test_rows_with_most_lag_are_shown_if_too_many() -> None:
    sinks = [sink(f"s{n}", 0, n) for n in range(30)]
    lines = draw(
        make_sample(2, 1000, sinks=sinks, connections=[connection(f"p{n}", n) for n in range(30)]), height=24
    )
    assert any(line.startswith("s29 ") for line in lines)
    assert not any(line.startswith("s0 ") for line in lines)
    assert any(line.startswith("p0 ") for line in lines)
    shown = [sum(line.startswith(f"{kind}{n} ") for line in lines for n in range(30)) for kind in "sp"]
    assert [line for line in lines if line.startswith("and ")] == [
        f"and {30 - count:,} more" for count in shown
    ]


def test_bytes_and_durations_are_formatted_with_units() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 5 * 2**40, 2**60)] == [
        "0 B",
        "1,023 B",
        "1.5 KiB",
        "5.0 TiB",
        "1,048,576.0 TiB",
    ]
    assert [format_duration(s) for s in (1.2, 99, 150, 7200, 400_000)] == [
        "1 s",
        "99 s",
        "2 min",
        "2 h",
        "5 d",
    ]
