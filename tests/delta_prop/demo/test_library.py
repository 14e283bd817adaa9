"""Deltas of edited files: the smallest delta for a change, none where nothing changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from delta_prop.demo import library as module
from delta_prop.demo.corpus import ParseFailed
from delta_prop.demo.library import NAMESPACE, Library, append_words, smallest_change
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from delta_prop_wire.delta import Delta

ONE = 'def first():\n    """Opens a door."""\n\n\ndef second():\n    """Closes a window.\n\n    Slowly."""\n'


def filled(**files: str) -> Library:
    library = Library()
    for name, text in files.items():
        library.add(f"{name}.py", text)
    library.learn()
    library.vectors(list(library.documents))
    return library


def told(deltas: list[Delta]) -> list[tuple[str, int]]:
    return [(one.vector_id, one.operation.kind) for one in deltas]


@pytest.mark.parametrize(
    ("changed", "kind"), [(1, Kind.SPARSE), (256, Kind.SPARSE), (257, Kind.DENSE), (1024, Kind.DENSE)]
)
def test_a_change_is_sent_in_its_smaller_form_and_does_what_it_should(changed: int, kind: Kind) -> None:
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


def test_an_edited_docstring_gives_one_sparse_delta() -> None:
    library = filled(one=ONE)
    text = append_words(ONE, library.documents["one:second"], "lottery raffle")
    assert text == ONE.replace("Slowly.", "Slowly. lottery raffle")
    (delta,) = library.edit("one.py", text)
    assert (delta.vector_id, delta.namespace, delta.operation.kind) == ("one:second", NAMESPACE, Kind.SPARSE)
    assert delta.operation.indices is not None
    assert len(delta.operation.indices) == 8
    assert library.edit("one.py", text) == []


def test_moved_added_and_removed_documents() -> None:
    library = filled(one=ONE)
    assert library.edit("one.py", "\n\n" + ONE) == []
    added = ONE + '\n\ndef third():\n    """Paints a wall."""\n'
    assert told(library.edit("one.py", added)) == [("one:third", Kind.CREATE)]
    assert told(library.edit("one.py", ONE)) == [("one:third", Kind.DELETE)]
    assert told(library.edit("one.py", None)) == [("one:first", Kind.DELETE), ("one:second", Kind.DELETE)]
    assert library.documents == {}
    assert told(library.edit("new.py", ONE)) == [("new:first", Kind.CREATE), ("new:second", Kind.CREATE)]


def test_a_link_adds_what_the_embedding_says_and_survives_an_edit_of_the_file() -> None:
    library = filled(one=ONE)
    first, second = library.vectors(["one:first", "one:second"])
    delta = library.link("one:first", "one:second")
    assert delta is not None
    assert delta.operation.kind == Kind.SPARSE_ADD
    linked = apply(VectorState(True, first), delta.operation).vector
    assert linked is not None
    assert np.allclose(linked, library.vectors(["one:first"])[0])
    assert not np.array_equal(linked, first)
    assert library.edit("one.py", "\n" + ONE) == []
    (edit,) = library.edit("one.py", ONE.replace("Closes", "Shuts"))
    assert edit.vector_id == "one:second"
    assert not np.array_equal(second, library.vectors(["one:second"])[0])
    assert library.edit("one.py", None)[0].operation.kind == Kind.DELETE
    library.edit("one.py", ONE)
    assert np.array_equal(library.vectors(["one:first"])[0], first)


def test_half_written_python_changes_nothing() -> None:
    library = filled(one=ONE)
    with pytest.raises(ParseFailed):
        library.edit("one.py", ONE + "def")
    assert list(library.documents) == ["one:first", "one:second"]
    assert library.edit("one.py", ONE) == []


def test_documents_are_bounded_and_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOCUMENTS_MAX", 3)
    library = filled(one=ONE, two=ONE)
    assert len(library.documents) == 3
    assert library.skipped_count == 1
    assert told(library.edit("one.py", None)) == [("one:first", Kind.DELETE), ("one:second", Kind.DELETE)]


def test_an_edit_that_finds_no_place_leaves_the_text_as_it_is() -> None:
    library = filled(one=ONE)
    assert append_words("nothing here", library.documents["one:first"], "x") == "nothing here"
