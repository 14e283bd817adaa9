"""Turns files into documents: one for each described function, class and module, heading and paragraph.

It reads texts that it is handed and touches no file. What cannot be parsed gives no documents, and is told.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DOCUMENT_CHARACTERS_MAX = 20_000
ID_CHARACTERS_MAX = 120
PARAGRAPH_CHARACTERS_MIN = 40
_SIGNATURE_CHARACTERS_MAX = 200
_NAME_CHARACTERS_MAX = 40

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Document:
    """One text that can be found: `id` is `module:name`, `signature` its first line, `text` what it says.

    `module` and `name` are the two halves of the id as words, `extra` further words that belong to it (names
    of arguments and methods). `line` is where it begins in its file.
    """

    id: str
    module: str
    name: str
    signature: str
    text: str
    extra: tuple[str, ...] = ()
    line: int = 1

    @property
    def private(self) -> bool:
        """Whether it is not meant for users of its module."""
        return any(is_private(part) for part in re.split(r"[.:]", self.id))


class NotParsed(Exception):
    """A file that is not Python as this interpreter knows it."""


def documents_of(path: str, text: str) -> list[Document]:
    """All documents of one file, in its order, each id once. Raises NotParsed."""
    found = _of_python(path, text) if path.endswith(".py") else _of_prose(path, text)
    documents: dict[str, Document] = {}
    for document in found:
        documents.setdefault(document.id, document)  # the first of several definitions of one name
    return list(documents.values())


def too_short(path: str, text: str) -> int:
    """How many paragraphs of a text are too short to be documents."""
    if path.endswith(".py"):
        return 0
    paragraphs = (paragraph for _, paragraph in _paragraphs(text) if _heading(paragraph) is None)
    return sum(len(one) < PARAGRAPH_CHARACTERS_MIN for one in paragraphs)


def is_private(name: str) -> bool:
    """Whether a name asks to be left alone: one underscore before it, or two without two behind."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def module_of(path: str) -> str:
    """`email/mime/base.py` is `email.mime.base`; a package goes by its folder's name."""
    inside = path.removesuffix(".py").replace("/", ".")
    return inside.removesuffix(".__init__") or inside


# --- Python


def _of_python(path: str, text: str) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last: nested too deep
        raise NotParsed(f"{path}: {error or 'nested too deep'}") from None
    module, lines = module_of(path), text.splitlines()
    described = ast.get_docstring(tree)
    if described:
        yield _document(module, "", f"module {module}", described)
    aliases = _bound_methods(tree)
    for qualified, node in _definitions(tree, ""):
        if text_of := ast.get_docstring(node):
            name = aliases.get(qualified, qualified)
            yield _document(
                module, name, _signature(node, lines), text_of, extra=_extra(node), line=node.lineno
            )


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    """Functions and classes that a user can reach by name: not those inside functions."""
    for child in _statements(node):
        if isinstance(child, _Definition):
            name = f"{prefix}{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, f"{name}.")


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a body, those under if, try and with among them."""
    blocks: list[list[ast.stmt]] = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(node, "handlers", [])]
    for statement in (one for block in blocks for one in block):
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _statements(statement)


def _bound_methods(tree: ast.Module) -> dict[str, str]:
    """`sample = _inst.sample`, where `_inst = Random()`, is the method `Random.sample` by a shorter name."""
    owners: dict[str, str] = {}
    found: dict[str, str] = {}
    for statement in _statements(tree):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        target, value = statement.targets[0].id, statement.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            owners[target] = value.func.id
        elif isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            owner = owners.get(value.value.id)
            if owner is not None:
                found.setdefault(f"{owner}.{value.attr}", target)
    return found


def _signature(node: _Definition, lines: list[str]) -> str:
    """The lines from `def` or `class` to the docstring, as one."""
    end = max(node.lineno, node.body[0].lineno - 1)
    joined = " ".join(" ".join(lines[node.lineno - 1 : end]).split())
    return joined[:_SIGNATURE_CHARACTERS_MAX].rstrip().removesuffix(":")


def _extra(node: _Definition) -> tuple[str, ...]:
    """Names of arguments, or of a class's public methods: what one would call it with."""
    if isinstance(node, ast.ClassDef):
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        return tuple(one.name for one in methods if not one.name.startswith("_"))
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return tuple(one.arg for one in every if one.arg not in ("self", "cls"))


# --- other text


def _of_prose(path: str, text: str) -> Iterator[Document]:
    """Paragraphs, each named after the heading above it and its number below that heading."""
    heading, number = "", 0
    for line, paragraph in _paragraphs(text):
        title = _heading(paragraph)
        if title is not None:
            heading, number = title, 0
        elif len(paragraph) >= PARAGRAPH_CHARACTERS_MIN:
            number += 1
            first = paragraph.partition("\n")[0].strip()
            name = f"{_slug(heading)}.{number}" if heading else str(number)
            signature = f"{heading}: {first}" if heading else first
            yield _document(
                path, name, signature[:_SIGNATURE_CHARACTERS_MAX], paragraph, extra=(heading,), line=line
            )


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    gathered: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip() and not (gathered and gathered[0].startswith("#")):
            gathered.append(line)
        elif gathered:
            yield number - len(gathered), "\n".join(gathered)
            gathered = [line] if line.strip() else []


def _heading(paragraph: str) -> str | None:
    """The title, where a paragraph is `# title`, `= title` or a title with a rule below it."""
    lines = paragraph.splitlines()
    if len(lines) == 1 and (marked := re.match(r"(?:#{1,6}|={1,6}|\*{1,6})\s+(\S.*)", lines[0])):
        return marked[1].strip("#= ")
    if len(lines) == 2 and re.fullmatch(r"([=\-~^\"#*+])\1{2,}\s*", lines[1]):
        return lines[0].strip()
    return None


def _slug(title: str) -> str:
    return "-".join(re.findall(r"\w+", title.lower()))[:_NAME_CHARACTERS_MAX]


def _document(
    module: str, name: str, signature: str, text: str, *, extra: Iterable[str] = (), line: int = 1
) -> Document:
    identity = f"{module}:{name}" if name else module
    if len(identity) > ID_CHARACTERS_MAX:  # the end tells more than the beginning
        identity = "…" + identity[1 - ID_CHARACTERS_MAX :]
    return Document(identity, module, name, signature, text[:DOCUMENT_CHARACTERS_MAX], tuple(extra), line)
