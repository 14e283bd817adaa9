"""Error output for an exception group: one line per failure; a defect keeps its traceback."""

from __future__ import annotations

import pytest

from delta_prop import cli
from delta_prop_wire.errors import UsageError


@pytest.mark.parametrize(
    ("failures", "status", "lines"),
    [
        ([UsageError("one"), UsageError("two")], 2, ["delta-prop: one", "delta-prop: two"]),
        ([OSError("one"), UsageError("two")], 1, ["delta-prop: one", "delta-prop: two"]),
        ([OSError("same"), OSError("same")], 1, ["delta-prop: same"]),
    ],
)
def test_each_failure_is_printed_once(
    failures: list[Exception], status: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", failures)])
    assert cli._report_error(nested) == status
    assert capsys.readouterr().err.splitlines() == lines


def test_unexpected_error_is_raised_and_not_printed() -> None:
    with pytest.raises(ExceptionGroup):
        cli._report_error(ExceptionGroup("outer", [OSError("one"), ValueError("a defect")]))
