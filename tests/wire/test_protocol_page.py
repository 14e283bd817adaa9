"""The protocol page agrees with the code: golden bytes, codes, limits, columns, the worked example."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import msgpack
import pytest

from delta_prop.delivery import group_cursor
from delta_prop.server.job_rules import JOB_BYTES_MAX
from delta_prop.server.settings import PORT, ServerSettings
from delta_prop.server.subscription_set import SUBSCRIPTIONS_MAX
from delta_prop.server.subscription_set import TOPICS_MAX as TOPICS_OF_A_CONNECTION_MAX
from delta_prop_wire import connection, control, control_values, header, requests, spec
from delta_prop_wire.bounds import BYTES_MAX, NUMBERS_MAX
from delta_prop_wire.codec import decode
from delta_prop_wire.compression import BODY_BYTES_MIN
from delta_prop_wire.connection import Connection
from delta_prop_wire.control_rows import LOG_TYPES, ControlType
from delta_prop_wire.delta import Kind, make_origin, producer_id_of
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frames import Ack, Credit, Welcome
from delta_prop_wire.layout import Column
from delta_prop_wire.message_rules import RULES, MessageKind, Phase, Role, Speaker
from delta_prop_wire.spec import FINAL, RETRYABLE, ErrorCode, FrameType
from delta_prop_wire.topics import Topic

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "protocol.md").read_text(encoding="utf-8")
ERRORS = (DOCS / "errors.md").read_text(encoding="utf-8")
GOLDEN_FILE = json.loads((DOCS / "protocol-golden.json").read_text(encoding="utf-8"))
GOLDEN = GOLDEN_FILE["frames"]


def test_page_shows_the_golden_bytes() -> None:
    blocks = re.findall(r"\*\*([^*\n]+)\*\* \(\w+\)\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert [(name, "".join(text.split())) for name, text in blocks] == [
        (e["name"], e["hex"]) for e in (*GOLDEN, *GOLDEN_FILE["compressed"])
    ]


def test_each_frame_has_golden_bytes_and_a_section() -> None:
    for kind in FrameType:
        assert kind.name in {entry["type"] for entry in GOLDEN}
        assert f"\n## {kind.name.capitalize()}\n" in PAGE
        assert f"| {int(kind)} | [{kind.name.capitalize()}](" in PAGE


def test_worked_example_makes_the_golden_delta() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/protocol.md", "exec"), {})
    (expected,) = (entry["hex"] for entry in GOLDEN if entry["name"] == "delta")
    assert printed.getvalue().strip() == expected
    decode(bytes.fromhex(expected))


def test_annotated_batch_is_the_golden_batch() -> None:
    (raw,) = (bytes.fromhex(entry["hex"]) for entry in GOLDEN if entry["name"] == "batch")
    table = PAGE[PAGE.index("### A batch, taken apart") : PAGE.index("## Golden bytes")]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", table, re.MULTILINE)
    assert len(rows) > 25
    for position_text, cell in rows:
        position = int(position_text)
        for text in re.findall(r"`([0-9a-f ]+)`", cell):
            if cell.startswith("13"):  # 13 lengths, which the last cell of the row lists
                continue
            count = re.match(rf".*?(\d+) × `{text}`", cell)
            part = bytes.fromhex(text) * (int(count[1]) if count and text == "00" else 1)
            if cell.startswith("20 bytes"):
                position += 20
            assert raw[position : position + len(part)] == part, (position_text, cell)
            position += len(part)


def test_golden_frames_of_a_producer_need_rising_sequences() -> None:
    raw = {entry["name"]: bytes.fromhex(entry["hex"]) for entry in GOLDEN}
    server = Connection(Role.SERVER)
    server.receive(raw["hello that says nothing"])
    server.next_event()
    server.send(Ack(0, correlation_id=1, response=Welcome(), credit=Credit(100, 100_000)))
    server.receive(raw["delta"] + raw["delta with all fields"] + raw["batch"])
    sequences = [server.next_event().sequence for _ in range(2)]  # type: ignore[union-attr]
    assert sequences == [5, 6]
    with pytest.raises(
        ProtocolError, match="sequence 5 is not above 6,"
    ) as caught:  # a duplicate of an earlier sequence
        server.next_event()
    assert caught.value.code is ErrorCode.BAD_FRAME
    assert "one that repeats or falls is a BAD_FRAME" in PAGE


@pytest.mark.parametrize("code", ErrorCode)
def test_each_error_code_is_explained(code: ErrorCode) -> None:
    row = re.search(rf"^\| {int(code)} \| \[{code.name}\]\(errors.md#(\w+)\) \| (.+?) \|", PAGE, re.MULTILINE)
    assert row
    assert row[1] == code.name.lower()
    assert row[2] == ("void" if code in FINAL else "open" if code in RETRYABLE else "–")
    section = re.search(rf"^## {code.name}\n(.*?)(?=^## |\Z)", ERRORS, re.DOTALL | re.MULTILINE)
    assert section
    assert f"Code {int(code)}; dot" in section[1]
    state = "void" if code in FINAL else "open" if code in RETRYABLE else "untouched"
    assert re.match(rf"\s*Code {int(code)}; dots? {state}", section[1])
    for part in ("**Cause.**", "**Fix.**", "**Example.**"):
        assert part in section[1]


@pytest.mark.parametrize("kind", ControlType)
def test_each_type_of_control_rows_is_in_the_table(kind: ControlType) -> None:
    table = PAGE[PAGE.index("### Control rows") : PAGE.index("### States")]
    (row,) = re.findall(rf"^\| {int(kind)} \| ([a-z ]+).*\| (.*) \|$", table, re.MULTILINE)
    assert row[0].strip() == kind.name.lower().replace("_", " ")
    assert (row[1] == "0") == (kind in LOG_TYPES)


def test_table_of_retryable_errors_matches_the_code() -> None:
    row = next(line for line in ERRORS.splitlines() if line.startswith("| [QUEUE_FULL]"))
    assert set(re.findall(r"\[(\w+)\]", row)) == {code.name for code in RETRYABLE}


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("payload of a Batch", spec.FRAME_PAYLOAD_BYTES_MAX),
        ("payload of a Delta", header.DELTA_PAYLOAD_BYTES_MAX),
        ("payload of any other frame", header.CONTROL_PAYLOAD_BYTES_MAX),
        ("a delta's values", spec.DELTA_BYTES_MAX),
        ("rows of a batch", spec.BATCH_ROWS_MAX),
        ("vector id", spec.VECTOR_ID_BYTES_MAX),
        ("namespace", spec.NAMESPACE_BYTES_MAX),
        ("custom topic |", spec.TOPIC_BYTES_MAX),
        ("name of a transform", spec.TRANSFORM_NAME_BYTES_MAX),
        ("pairs of a sparse", NUMBERS_MAX[Kind.SPARSE]),
        ("an index", spec.DIMENSION_MAX - 1),
        ("data of an opaque", BYTES_MAX[Kind.OPAQUE]),
        ("depth of metadata", spec.METADATA_DEPTH_MAX),
        ("custom topics of a delta", spec.TOPICS_PER_DELTA_MAX),
        ("parents of a delta", spec.PARENTS_PER_DELTA_MAX),
        ("entries of a clock", spec.CLOCK_ENTRIES_MAX),
        ("metadata change", spec.METADATA_BYTES_MAX),
        ("dimension", spec.DIMENSION_MAX),
        ("ranges of an Ack", control.RANGES_MAX),
        ("ranges of an Ack", requests.ORIGINS_MAX),
        ("topics of a Subscribe", requests.TOPICS_MAX),
        ("parts of a decision", requests.PARTS_MAX),
        ("refused rows of a job", requests.REFUSED_ROWS_MAX),
        ("refused rows of a job", requests.REFUSED_ID_BYTES_MAX),
        ("refused rows of a job", requests.REFUSED_TEXT_BYTES_MAX),
        ("features", requests.FEATURES_MAX),
        ("features", requests.FEATURE_BYTES_MAX),
        ("token, text", requests.TOKEN_BYTES_MAX),
        ("token, text", control.TEXT_BYTES_MAX),
        ("group", group_cursor.NAME_BYTES_MAX),
        ("group", control_values.NAME_BYTES_MAX),
        ("`client`, job, name of a request, field", control_values.NAME_BYTES_MAX),
        ("`client`, job, name of a request, field", JOB_BYTES_MAX),
        ("`wait_ms_max`", requests.WAIT_MS_MAX),
        ("name of a stream", requests.STREAM_NAME_BYTES_MAX),
        ("partitions of a stream", requests.STREAM_PARTITIONS_MAX),
        ("streams, and ranges of a stream", requests.PARTITIONS_MAX),
        ("settings of a stream", requests.SETTINGS_MAX),
        ("settings of a stream", requests.SETTING_BYTES_MAX),
    ],
)
def test_each_limit_is_documented(label: str, number: int) -> None:
    limits = PAGE[PAGE.index("## Limits") : PAGE.index("## A worked example")]
    (row,) = (line for line in limits.splitlines() if line.startswith(f"| {label}"))
    assert str(number) in row.replace(",", "")


CLOSING = {ErrorCode.BAD_FRAME, ErrorCode.UNSUPPORTED_VERSION, ErrorCode.UNSUPPORTED_FLAG, ErrorCode.CHECKSUM}
"""Codes that always close the connection."""


def test_table_of_error_code_contexts_matches_the_code() -> None:
    section = PAGE[PAGE.index("### Where each code occurs") : PAGE.index("## Limits")]
    rows = re.findall(r"^\| ([A-Z_]+) \| (.+) \|$", section, re.MULTILINE)
    assert [name for name, _ in rows] == [code.name for code in ErrorCode]
    refusals = {refusal.code for table in RULES.values() for refusal in table.values() if refusal is not None}
    for name, cells in rows:
        code = ErrorCode[name]
        producer, forwarder, staged, *requests, connection_itself = cells.split(" | ")
        assert len(requests) == 3
        if code in CLOSING:
            assert {producer, forwarder, staged, *requests, connection_itself} == {"closes"}
        assert producer.startswith("void") == (code in FINAL)
        assert not forwarder.startswith("void"), (
            "a forwarded delta becomes void, though another service accepted it"
        )
        assert staged.startswith("ends the attempt") == (code in FINAL and staged != "–")
        for cell in (producer, forwarder, staged):
            assert (cell == "open") == (code in RETRYABLE and cell != "–"), (name, cell)
        assert {*requests} <= {"refused", "closes", "–"}
        assert {*connection_itself.split(", or ")} <= {"closes", "ends its subscriptions", "stays open", "–"}
        if code in refusals:  # the table forbids the message to this speaker or in this phase
            assert {cell.split(", ")[-1] for cell in (producer, *requests)} == {"closes"}


def test_minimum_compressed_size_is_documented() -> None:
    assert f"below {BODY_BYTES_MIN:,} bytes" in PAGE


@pytest.mark.parametrize("column", Column)
def test_each_column_is_documented_with_its_number(column: Column) -> None:
    assert f"| {int(column)} | {column.name.lower().replace('_', ' ')} |" in PAGE


@pytest.mark.parametrize("kind", Kind)
def test_each_operation_is_documented(kind: Kind) -> None:
    assert f"| {int(kind)} | {kind.name.lower()} |" in PAGE


def test_documented_topics_are_valid() -> None:
    section = PAGE[PAGE.index("\n## Topics") : PAGE.index("## Error codes")]
    forms = re.findall(r"^\| `(.+?)`.*?\| `(\d\d)`", section, re.MULTILINE)
    assert len(forms) == 5
    for text, kind in forms:
        assert Topic.parse(text).to_bytes()[:1] == bytes.fromhex(kind)


MESSAGE_ROWS = {
    "hello": ["HELLO"],
    "Subscribe, Unsubscribe": ["SUBSCRIBE", "UNSUBSCRIBE"],
    "a decision": ["DECIDE"],
    "a query": ["QUERY"],
    "Delta or Batch, with a producer": ["DELTA", "BATCH"],
    "Batch with a forwarder": ["LOGGED_BATCH"],
    "Delta with a Lamport": ["LOGGED_DELTA", "SLICED_BATCH"],
    "Ack that answers a hello": ["WELCOME"],
    "other Ack": ["ACK", "BACKPRESSURE"],
    "Heartbeat": ["HEARTBEAT"],
    "Nack": ["NACK"],
}
CLIENT_PHASES = (Phase.OPENING, Phase.GREETED, Phase.OPEN)


def test_table_of_message_rules_matches_the_code() -> None:
    section = PAGE[PAGE.index("### Allowed messages") : PAGE.index("### Credits")]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    assert len(rows) == len(MESSAGE_ROWS)
    kinds = []
    for label, *cells in rows:
        (names,) = (names for start, names in MESSAGE_ROWS.items() if label.startswith(start))
        for kind in (MessageKind[name] for name in names):
            kinds.append(kind)
            for cell, phase in zip(cells[:3], CLIENT_PHASES, strict=True):
                client, forwarder = (
                    RULES[speaker, phase][kind] is None for speaker in (Speaker.CLIENT, Speaker.FORWARDER)
                )
                assert client == cell.startswith("yes"), (label, cell)
                assert cell != "–" or not forwarder
                assert cell.startswith("only a [forwarder]") == (forwarder and not client)
            allowed = [phase for phase in Phase if RULES[Speaker.SERVER, phase][kind] is None]
            assert (cells[3] == "–") == (not allowed)
            assert (cells[3] == "at any time") == (allowed == [*Phase])
    assert sorted(kinds, key=str) == sorted(MessageKind, key=str)


def test_documented_times_are_the_server_defaults() -> None:
    s = ServerSettings()
    section = PAGE[PAGE.index("### Times") : PAGE.index("### Pressure")]
    for row, expected in (
        ("from connecting to a hello", f"{s.handshake_timeout_s:g} s"),
        ("sending nothing", f"{s.heartbeat_interval_s:g} s"),
        ("receiving no whole frame", f"{s.peer_timeout_s:g} s"),
        ("a frame that has begun", f"{s.receive_rate_min // 1024} KiB a second; slower than that, 15 s"),
        ("a client that takes nothing", f"{s.send_timeout_s:g} s"),
    ):
        (line,) = (line for line in section.splitlines() if line.startswith(f"| {row}"))
        assert expected in line
    assert f"port {PORT}" in PAGE
    assert f"credit [{s.producer_deltas_credit}, {s.producer_bytes_credit}]" in PAGE


def test_connection_bounds_are_documented() -> None:
    assert f"At most {SUBSCRIPTIONS_MAX} subscriptions and {TOPICS_OF_A_CONNECTION_MAX:,} topics" in PAGE
    assert f"at most {connection.REQUESTS_MAX} may wait" in PAGE
    assert f"pages of up to {requests.ORIGINS_MAX:,}" in PAGE


@pytest.mark.parametrize("name", requests.known_requests())
def test_each_request_has_a_section(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `request` | text | yes |"))
    assert f"`{name}`" in row
    assert f"\n#### {name}\n" in PAGE


def test_producer_id_of_a_name_is_documented() -> None:
    assert f"id `{producer_id_of('importer'):#x}`" in PAGE
    assert f"origin `{make_origin(producer_id_of('importer'), 2):#x}`" in PAGE


def test_golden_keys_are_in_the_order_of_the_tables() -> None:
    """An encoder that follows the tables then makes the golden bytes."""
    for entry in GOLDEN:
        raw = bytes.fromhex(entry["hex"])
        section = entry["type"].capitalize()
        if section == "Batch" or len(raw) == header.HEADER_BYTES:
            continue
        text = re.search(rf"^## {section}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
        assert text
        members = msgpack.unpackb(raw[header.HEADER_BYTES : -spec.CRC_BYTES])
        tables = text[1]
        if section == "Subscribe":  # the table of every request, then those of this one
            own = re.search(
                rf"^#### {members['request']}\n(.*?)(?=^#### |\Z)", tables, re.DOTALL | re.MULTILINE
            )
            assert own
            tables = tables[: tables.index("\n### ")] + own[1]
        documented = [
            key
            for cell in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", tables, re.MULTILINE)
            for key in re.findall(r"`(\w+)`", cell)
        ]
        keys = list(members)
        positions = [documented.index(key) for key in keys]
        assert positions == sorted(positions), entry["name"]


def test_links_have_targets() -> None:
    anchors = {page.name: anchors_of(page.read_text()) for page in DOCS.glob("*.md")}
    for name, text in (("errors.md", ERRORS), ("protocol.md", PAGE)):
        for target in re.findall(r"\]\(([^)]+)\)", text):
            page, _, anchor = target.partition("#")
            if not page.startswith("https://"):
                assert (DOCS / (page or name)).exists(), target
                assert not anchor or anchor in anchors[page or name], target


def anchors_of(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
