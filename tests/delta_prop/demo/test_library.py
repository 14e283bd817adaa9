"""Deltas of edited files: the smaller operation for each change, and no delta for unchanged documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from delta_prop.demo import library as library_module
from delta_prop.demo.corpus import ParseFailed
from delta_prop.demo.library import NAMESPACE, Library, append_words, smallest_change
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from delta_prop_wire.delta import Delta

SOURCE = (
    'def first():\n    """Opens a door."""\n\n\ndef second():\n    """Closes a window.\n\n    Slowly."""\n'
)


def library_of(**files: str) -> Library:
    library = Library()
    for name, text in files.items():
        library.add(f"{name}.py", text)
    library.learn()
    library.vectors(list(library.documents))
    return library


def ids_and_kinds(deltas: list[Delta]) -> list[tuple[str, int]]:
    return [(delta.vector_id, delta.operation.kind) for delta in deltas]


@pytest.mark.parametrize(
    ("changed", "kind"), [(1, Kind.SPARSE), (256, Kind.SPARSE), (257, Kind.DENSE), (1024, Kind.DENSE)]
)
def test_change_uses_the_smaller_operation(changed: int, kind: Kind) -> None:
    before = np.arange(1024, dtype=np.float32)
    after = before.copy()
    after[:changed] += 0.5
    operation = smallest_change(before, after)
    assert operation is not None
    assert operation.kind == kind
    state = apply(VectorState(True, before), operation)
    assert state.vector is not None
    assert np.array_equal(state.vector, after)
    assert smallest_change(after, after) is None


def test_edited_docstring_gives_one_sparse_delta() -> None:
    library = library_of(one=SOURCE)
    text = append_words(SOURCE, library.documents["one:second"], "lottery raffle")
    assert text == SOURCE.replace("Slowly.", "Slowly. lottery raffle")
    (delta,) = library.edit("one.py", text)
    assert (delta.vector_id, delta.namespace, delta.operation.kind) == ("one:second", NAMESPACE, Kind.SPARSE)
    assert delta.operation.indices is not None
    assert len(delta.operation.indices) == 8
    assert library.edit("one.py", text) == []


def test_file_edit_gives_a_delta_per_added_or_removed_document_only() -> None:
    library = library_of(one=SOURCE)
    assert library.edit("one.py", "\n\n" + SOURCE) == []
    added = SOURCE + '\n\ndef third():\n    """Paints a wall."""\n'
    assert ids_and_kinds(library.edit("one.py", added)) == [("one:third", Kind.CREATE)]
    assert ids_and_kinds(library.edit("one.py", SOURCE)) == [("one:third", Kind.DELETE)]
    assert ids_and_kinds(library.edit("one.py", None)) == [
        ("one:first", Kind.DELETE),
        ("one:second", Kind.DELETE),
    ]
    assert library.documents == {}
    assert ids_and_kinds(library.edit("new.py", SOURCE)) == [
        ("new:first", Kind.CREATE),
        ("new:second", Kind.CREATE),
    ]


def test_link_survives_an_edit_of_its_file() -> None:
    library = library_of(one=SOURCE)
    first, second = library.vectors(["one:first", "one:second"])
    delta = library.link("one:first", "one:second")
    assert delta is not None
    assert delta.operation.kind == Kind.SPARSE_ADD
    linked = apply(VectorState(True, first), delta.operation).vector
    assert linked is not None
    assert np.allclose(linked, library.vectors(["one:first"])[0])
    assert not np.array_equal(linked, first)
    assert library.edit("one.py", "\n" + SOURCE) == []
    (edit,) = library.edit("one.py", SOURCE.replace("Closes", "Shuts"))
    assert edit.vector_id == "one:second"
    assert not np.array_equal(second, library.vectors(["one:second"])[0])
    assert library.edit("one.py", None)[0].operation.kind == Kind.DELETE
    library.edit("one.py", SOURCE)
    assert np.array_equal(library.vectors(["one:first"])[0], first)


def test_half_written_python_changes_nothing() -> None:
    library = library_of(one=SOURCE)
    with pytest.raises(ParseFailed):
        library.edit("one.py", SOURCE + "def")
    assert list(library.documents) == ["one:first", "one:second"]
    assert library.edit("one.py", SOURCE) == []


def test_documents_are_bounded_and_skipped_ones_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "DOCUMENTS_MAX", 3)
    library = library_of(one=SOURCE, two=SOURCE)
    assert len(library.documents) == 3
    assert library.skipped_count == 1
    assert ids_and_kinds(library.edit("one.py", None)) == [
        ("one:first", Kind.DELETE),
        ("one:second", Kind.DELETE),
    ]


def test_edit_without_a_match_leaves_the_text_unchanged() -> None:
    library = library_of(one=SOURCE)
    assert append_words("nothing here", library.documents["one:first"], "x") == "nothing here"
