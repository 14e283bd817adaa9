"""A service that cannot be reached with the options is reported on the driver, in one line with its fix."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StringType, StructType

from delta_prop.client import Unreachable
from delta_prop.spark import system
from delta_prop.spark.columns import READ_SCHEMA
from delta_prop.spark.data_source.reading import OffsetRange, Reader
from delta_prop.spark.data_source.sending import producer_of
from delta_prop.spark.data_source.source import DeltaPropSource
from delta_prop.spark.options import read_options, write_options
from delta_prop.spark.service_checks import check_on_driver
from delta_prop_wire.errors import Refused, UsageError
from tests.delta_prop.client.threaded_service import served
from tests.delta_prop.platform.networks import files
from tests.delta_prop.server.tokens import table

if TYPE_CHECKING:
    from pathlib import Path

NOW_US = 1_900_000_000_000_000
"""A time after all times in the tests."""

URL = "delta://127.0.0.1:1"
WRITE_SCHEMA = StructType().add("vector_id", StringType()).add("op", StringType())


@pytest.fixture
def unknown_hosts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make name resolution fail with the error code in the returned list."""
    error_codes = [socket.EAI_NONAME]

    def resolve(host: str, _: object) -> list[object]:
        if host.startswith("127."):
            return []
        raise socket.gaierror(error_codes[0], "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return error_codes


def test_unknown_host_is_reported_on_the_driver(unknown_hosts: list[int]) -> None:
    expected = "option url 'nonsense:7373': host 'nonsense' is unknown here .Name or service not known"
    for call in (
        lambda source: source.reader(READ_SCHEMA),
        lambda source: source.streamReader(READ_SCHEMA),
        lambda source: source.writer(READ_SCHEMA, overwrite=False),
        lambda source: source.streamWriter(READ_SCHEMA, overwrite=False),
    ):
        with pytest.raises(UsageError, match=expected):
            call(DeltaPropSource({"url": "delta://nonsense:7373"}))
    check_on_driver(read_options({"url": "nonsense:7373,127.0.0.1:7373"}, {}, NOW_US).remote)
    unknown_hosts[0] = socket.EAI_AGAIN  # a temporary failure of name resolution
    check_on_driver(read_options({"url": "nonsense:7373"}, {}, NOW_US).remote)


def test_invalid_host_name_is_refused() -> None:
    with pytest.raises(UsageError, match="it is not a valid host name"):
        check_on_driver(read_options({"url": "x" * 64 + ".org:7373"}, {}, NOW_US).remote)


def test_tls_files_are_checked_on_the_driver(tmp_path: Path) -> None:
    (tmp_path / "odd.pem").write_text("no certificate")
    for option, name, expected in (
        ("tlsCa", "none.pem", "none.pem': No such file or directory: name a file that exists on the dr"),
        ("tlsCa", "", "Is a directory: name a file"),
        ("tlsCa", "a\0b", "embedded null byte: name a file"),
    ):
        with pytest.raises(UsageError, match=f"option {option} '.*{expected}"):
            DeltaPropSource({"url": URL, option: f"{tmp_path}/{name}"}).reader(READ_SCHEMA)
    with pytest.raises(
        UsageError, match=r"option tlsCa: TLS cannot use .*odd.pem: .*: give certificates and keys"
    ):
        DeltaPropSource({"url": URL, "tlsCa": f"{tmp_path}/odd.pem"}).reader(READ_SCHEMA)
    made_files = files()
    options = {
        "url": URL,
        "tlsCa": made_files.authority,
        "tlsCertificate": made_files.client,
        "tlsKey": made_files.client_key,
    }
    assert isinstance(DeltaPropSource(options).reader(READ_SCHEMA), Reader)
    with pytest.raises(
        UsageError, match=r"option tlsCa, option tlsCertificate, option tlsKey: TLS cannot use .*: "
    ):
        DeltaPropSource(options | {"tlsKey": made_files.server_key}).reader(READ_SCHEMA)


def test_service_without_jobs_is_reported_before_a_task_stages() -> None:
    def write(**options: str) -> None:
        DeltaPropSource({"producer": "p", **options}).writer(WRITE_SCHEMA, overwrite=False)

    with served() as in_memory:
        with pytest.raises(UsageError, match="the service has no jobs: keep its log in a directory"):
            write(url=in_memory.address)
        write(url=in_memory.address, staged="false")
    with pytest.raises(Unreachable, match=r"has answered for 0\.2 s .*: start the service or correct the ad"):
        write(url=in_memory.address, openTimeoutSeconds="0.2")


TOKENS = table("reader", "reads", subscribe=True, namespaces=["*"]) + table(
    "writer", "writes", publish=True, namespaces=["*"]
)


def test_token_without_publish_is_refused_before_a_task_starts(tmp_path: Path) -> None:
    with served(propagator={"data": str(tmp_path)}, tokens=TOKENS) as service:

        def open_writer(kind: str, **options: str) -> None:
            source = DeltaPropSource({"producer": "p", "url": service.address, **options})
            (source.streamWriter if kind == "stream" else source.writer)(WRITE_SCHEMA, overwrite=False)

        for kind, more in (("staged", {}), ("direct", {"staged": "false"}), ("stream", {})):
            with pytest.raises(Refused, match="UNAUTHORIZED: this token may read, not publish: give"):
                open_writer(kind, token="reads", **more)
            for wrong in ({}, {"token": "wrong"}):
                with pytest.raises(Refused, match="UNAUTHORIZED"):
                    open_writer(kind, **wrong, **more)
            open_writer(kind, token="writes", **more)


def test_stream_starts_while_its_service_is_unreachable() -> None:
    source = DeltaPropSource({"producer": "p", "url": URL, "openTimeoutSeconds": "0.2"})
    source.streamWriter(WRITE_SCHEMA, overwrite=False)


def test_file_missing_on_a_worker_is_reported_by_the_task(tmp_path: Path) -> None:
    options = {"url": URL, "tlsCa": str(tmp_path / "gone.pem")}
    expected = (
        f"option tlsCa '.*gone.pem': No such file or directory on the worker {system.HOST}, while the dr"
    )
    with pytest.raises(UsageError, match=expected):
        Reader(read_options(options, {}, NOW_US), READ_SCHEMA).read(OffsetRange(0, 1, bytes(16), 1))
    with pytest.raises(UsageError, match=expected):
        producer_of(write_options(options, {}), "job/0")
