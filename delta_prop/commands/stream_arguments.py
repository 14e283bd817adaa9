"""Checks the arguments of `streams` before anything is opened or asked: names, numbers, ids, settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delta_prop.directory.log_positions import check_name_argument
from delta_prop_broker.catalogue.stream import (
    PARTITIONS_MAX,
    StreamSettings,
    check_partition_count,
    check_stream_name,
)
from delta_prop_broker.log.settings import COMPRESS
from delta_prop_wire.delta import namespace_of
from delta_prop_wire.errors import UsageError
from delta_prop_wire.packing import U32_MAX
from delta_prop_wire.spec import COUNTER_MAX, NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)

if TYPE_CHECKING:
    from argparse import Namespace

_NUMBER = re.compile(r"[+-]?[0-9A-Za-z.+-]+", re.ASCII)
"""Texts that may be a number; `int` and `float` also read spaces, underscores and digits of other scripts."""
_NUMBER_CHARACTERS_MAX = 100


def stream_name_of(options: Namespace) -> str:
    """Return the name of the stream to work on, which may be one of the service's. Raises UsageError."""
    return check_stream_name(options.name, allow_internal=True)


def creation_of(options: Namespace) -> CreateStream:
    """Return the request to create a stream. Raises UsageError."""
    check_stream_name(options.name)
    check_partition_count(options.partitions)
    settings = _read_settings(options.set)
    return CreateStream(options.name, options.partitions, settings, options.if_not_exists, options.dry_run)


def alteration_of(options: Namespace) -> AlterStream:
    """Return the request to change settings of a stream. Raises UsageError."""
    settings = _read_settings(options.set)
    if not settings:
        raise UsageError("nothing to alter: give --set NAME=VALUE, NAME= to reset one")
    return AlterStream(stream_name_of(options), settings, options.dry_run)


def deletion_of(options: Namespace) -> DeleteStream:
    """Return the request to delete a stream. Raises UsageError."""
    name = stream_name_of(options)
    if not (options.yes or options.dry_run):
        raise UsageError(
            f"stream {name!r:.80}: all its rows would be deleted for good: give --yes, or --dry-run"
        )
    return DeleteStream(name, options.dry_run)


def truncation_of(options: Namespace) -> TruncateStream:
    """Return the request to remove the rows below an offset. Raises UsageError."""
    _check_number("--before", options.before, COUNTER_MAX)
    _check_number("--partition", options.partition, PARTITIONS_MAX - 1)
    return TruncateStream(stream_name_of(options), options.before, options.partition, options.dry_run)


def erasure_of(options: Namespace) -> EraseVector:
    """Return the request to erase a vector, with its namespace. Raises UsageError."""
    name, vector_id = stream_name_of(options), options.vector
    check_name_argument("--vector", vector_id, VECTOR_ID_BYTES_MAX)
    namespace = namespace_of(vector_id) if options.namespace is None else options.namespace
    check_name_argument("--namespace", namespace, NAMESPACE_BYTES_MAX)
    _check_number("--timeout-s", options.timeout_s, U32_MAX // 1000)
    if not (options.yes or options.dry_run):
        raise UsageError(
            f"vector {vector_id!r:.80} of namespace {namespace!r:.80}: it would be deleted for good: give "
            "--yes, or --dry-run"
        )
    return EraseVector(name, vector_id, namespace, options.timeout_s * 1000, options.dry_run)


def _check_number(option: str, number: int, maximum: int) -> None:
    if number > maximum:
        raise UsageError(f"{option} {number!r:.40}: give up to {maximum}")


# --- settings


def _read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE: true, false, a number or a word; nothing for None. Raises UsageError."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text!r:.80}: give NAME=VALUE, such as retention_s=86400")
        if name == "partitions":
            raise UsageError(
                f"--set {text!r:.80}: a stream has its partitions for its life: give `streams create` their "
                "number with --partitions"
            )
        settings[name] = _parse_value(value)
    _check_settings(settings)
    return settings


def _check_settings(settings: dict[str, Any]) -> None:
    """Check settings as the service does, but for the codecs, of which it may have others installed."""
    compress = settings.get("compress")
    StreamSettings().changed(settings | ({"compress": None} if compress in COMPRESS else {}))


def _parse_value(text: str) -> bool | int | float | str | None:
    if not text:
        return None
    if text in ("true", "false"):
        return text == "true"
    if _NUMBER.fullmatch(text) and len(text) <= _NUMBER_CHARACTERS_MAX:
        for parse in (int, float):
            with suppress(ValueError):
                return parse(text)
    return text
