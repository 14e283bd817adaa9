"""Splitting files into documents: which texts become documents, with which names and line numbers."""

from __future__ import annotations

import pytest

from delta_prop.demo.corpus import (
    DOCUMENT_CHARACTERS_MAX,
    ID_CHARACTERS_MAX,
    ParseFailed,
    count_short_paragraphs,
    documents_of,
    module_of,
)

MODULE = '''"""What the module is for."""

import sys


class Generator:
    """Draws things."""

    def sample(self, population, k, *, counts=None):
        """Choose k of them."""

    def _hidden(self):
        """Not for users."""

    def silent(self):
        return 1


_inst = Generator()
sample = _inst.sample

if sys.platform == "win32":

    def place():
        """On Windows."""

else:

    async def place(
        one,
        two,
    ):
        """Elsewhere."""


def outer():
    """Has another inside."""

    def inner():
        """Nobody can reach this."""
'''


def test_each_documented_python_name_is_a_document() -> None:
    documents = {document.id: document for document in documents_of("pack/mod.py", MODULE)}
    assert list(documents) == [
        "pack.mod",
        "pack.mod:Generator",
        "pack.mod:sample",
        "pack.mod:Generator._hidden",
        "pack.mod:place",
        "pack.mod:outer",
    ]
    sample = documents["pack.mod:sample"]
    assert sample.signature == "def sample(self, population, k, *, counts=None)"
    assert sample.text == "Choose k of them."
    assert sample.extra == ("population", "k", "counts")
    assert MODULE.splitlines()[sample.line - 1].strip().startswith("def sample")
    assert documents["pack.mod:Generator"].extra == ("sample", "silent")


def test_first_definition_of_a_name_counts() -> None:
    (place,) = [document for document in documents_of("m.py", MODULE) if document.id == "m:place"]
    assert place.text == "On Windows."


def test_multiline_signature_becomes_one_line() -> None:
    text = 'def f(\n    one,\n    two=2,\n):\n    """Does."""\n'
    assert documents_of("m.py", text)[0].signature == "def f( one, two=2, )"


def test_private_names_are_marked() -> None:
    documents = {one.id: one.is_private for one in documents_of("pack/_inner.py", MODULE)}
    assert all(documents.values())
    documents = {one.id: one.is_private for one in documents_of("m.py", MODULE)}
    assert [name for name, is_private in documents.items() if is_private] == ["m:Generator._hidden"]


@pytest.mark.parametrize("text", ["def broken(:", "x = '\0'", "(" * 10_000, "-" * 50_000 + "1"])
def test_unparsable_python_raises_parse_failed(text: str) -> None:
    with pytest.raises(ParseFailed, match=r"m\.py"):
        documents_of("m.py", text)


def test_other_text_is_split_by_headings_and_paragraphs() -> None:
    long = "This paragraph is long enough to be worth finding."
    text = f"""# Getting *started*
{long}

Title with a rule
=================

short

{long}
It has two lines.

{long}
"""
    documents = documents_of("notes/read.me.md", text)
    assert [one.id for one in documents] == [
        "notes/read.me.md:getting-started.1",
        "notes/read.me.md:title-with-a-rule.1",
        "notes/read.me.md:title-with-a-rule.2",
    ]
    assert [one.line for one in documents] == [2, 9, 12]
    assert documents[1].signature == f"Title with a rule: {long}"


def test_short_paragraphs_are_counted() -> None:
    text = "# A heading\n\nshort\n\n" + "long enough to be worth finding " * 3 + "\n\nshort too\n"
    assert count_short_paragraphs("notes.md", text) == 2
    assert len(documents_of("notes.md", text)) == 1
    assert count_short_paragraphs("module.py", "short\n") == 0


def test_ids_and_texts_are_bounded() -> None:
    (document,) = documents_of("deep/" * 100 + "x.txt", "word " * 10_000)
    assert len(document.id) == ID_CHARACTERS_MAX
    assert document.id.endswith("x.txt:1")
    assert len(document.text) == DOCUMENT_CHARACTERS_MAX


def test_package_is_named_by_its_folder() -> None:
    assert module_of("email/mime/__init__.py") == "email.mime"
    assert module_of("os.py") == "os"
