"""Converts files to documents: one for each function, class and module with a docstring, and each paragraph.

Texts are arguments: this module reads no file. A file that cannot be parsed raises ParseFailed.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

DOCUMENT_CHARACTERS_MAX = 20_000
ID_CHARACTERS_MAX = 120
PARAGRAPH_CHARACTERS_MIN = 40
_SIGNATURE_CHARACTERS_MAX = 200
_NAME_CHARACTERS_MAX = 40

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Document:
    """One searchable text. `id`: `module:name`. `signature`: the first line of the definition or paragraph.

    `text`: the docstring or paragraph. `extra`: more words to search for (names of arguments and methods).
    `line`: the number of the first line in the file.
    """

    id: str
    module: str
    name: str
    signature: str
    text: str
    extra: tuple[str, ...] = ()
    line: int = 1

    @property
    def is_private(self) -> bool:
        """True if the document is not meant for users of its module."""
        return any(is_private(part) for part in re.split(r"[.:]", self.id))


class ParseFailed(Exception):
    """The file is not valid Python for this interpreter."""


def documents_of(path: str, text: str) -> list[Document]:
    """Return all documents of one file, in the file's order, each id once. Raises ParseFailed."""
    parsed = _parse_python(path, text) if path.endswith(".py") else _parse_prose(path, text)
    documents: dict[str, Document] = {}
    for document in parsed:
        documents.setdefault(document.id, document)  # the first definition of a name counts
    return list(documents.values())


def count_short_paragraphs(path: str, text: str) -> int:
    """Count the paragraphs of a text that are too short for documents."""
    if path.endswith(".py"):
        return 0
    paragraphs = (paragraph for _, paragraph in _split_paragraphs(text) if _parse_heading(paragraph) is None)
    return sum(len(paragraph) < PARAGRAPH_CHARACTERS_MIN for paragraph in paragraphs)


def is_private(name: str) -> bool:
    """True if a name is private: it begins with an underscore and is not a dunder name."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def module_of(path: str) -> str:
    """Return a path's module: `email/mime/base.py` is `email.mime.base`; a package has its folder's name."""
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__") or name


# --- Python


def _parse_python(path: str, text: str) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deep
        raise ParseFailed(f"{path}: {error or 'nested too deep'}") from None
    module, lines = module_of(path), text.splitlines()
    docstring = ast.get_docstring(tree)
    if docstring:
        yield _make_document(module, "", f"module {module}", docstring)
    aliases = _find_bound_methods(tree)
    for qualified, node in _iter_definitions(tree, ""):
        if docstring := ast.get_docstring(node):
            name = aliases.get(qualified, qualified)
            yield _make_document(
                module,
                name,
                _read_signature(node, lines),
                docstring,
                extra=_extra_words_of(node),
                line=node.lineno,
            )


def _iter_definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    """Yield the qualified name and the node of each function and class, without those inside functions."""
    for child in _iter_statements(node):
        if isinstance(child, _Definition):
            name = f"{prefix}{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _iter_definitions(child, f"{name}.")


def _iter_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a body, including those under if, try and with."""
    blocks: list[list[ast.stmt]] = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(node, "handlers", [])]
    for statement in (statement for block in blocks for statement in block):
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _iter_statements(statement)


def _find_bound_methods(tree: ast.Module) -> dict[str, str]:
    """Map methods to aliases: `Random.sample` to `sample`, if `_inst = Random(); sample = _inst.sample`."""
    owners: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for statement in _iter_statements(tree):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        target, value = statement.targets[0].id, statement.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            owners[target] = value.func.id
        elif isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            owner = owners.get(value.value.id)
            if owner is not None:
                aliases.setdefault(f"{owner}.{value.attr}", target)
    return aliases


def _read_signature(node: _Definition, lines: list[str]) -> str:
    """Join the lines from `def` or `class` to the docstring."""
    end = max(node.lineno, node.body[0].lineno - 1)
    joined = " ".join(" ".join(lines[node.lineno - 1 : end]).split())
    return joined[:_SIGNATURE_CHARACTERS_MAX].rstrip().removesuffix(":")


def _extra_words_of(node: _Definition) -> tuple[str, ...]:
    """Return the names of a function's arguments, or of a class's public methods."""
    if isinstance(node, ast.ClassDef):
        methods = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
        return tuple(method.name for method in methods if not method.name.startswith("_"))
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return tuple(argument.arg for argument in arguments if argument.arg not in ("self", "cls"))


# --- other text


def _parse_prose(path: str, text: str) -> Iterator[Document]:
    """Yield paragraphs, each named after the last heading and the paragraph's number since that heading."""
    heading, number = "", 0
    for line, paragraph in _split_paragraphs(text):
        title = _parse_heading(paragraph)
        if title is not None:
            heading, number = title, 0
        elif len(paragraph) >= PARAGRAPH_CHARACTERS_MIN:
            number += 1
            first = paragraph.partition("\n")[0].strip()
            name = f"{_make_slug(heading)}.{number}" if heading else str(number)
            signature = f"{heading}: {first}" if heading else first
            yield _make_document(
                path, name, signature[:_SIGNATURE_CHARACTERS_MAX], paragraph, extra=(heading,), line=line
            )


def _split_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, paragraph); a line that begins with `#` is a paragraph."""
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip() and not (lines and lines[0].startswith("#")):
            lines.append(line)
        elif lines:
            yield number - len(lines), "\n".join(lines)
            lines = [line] if line.strip() else []


def _parse_heading(paragraph: str) -> str | None:
    """Return the title if a paragraph is `# title`, `= title` or a title with a rule below it, else None."""
    lines = paragraph.splitlines()
    if len(lines) == 1 and (marked := re.match(r"(?:#{1,6}|={1,6}|\*{1,6})\s+(\S.*)", lines[0])):
        return marked[1].strip("#= ")
    if len(lines) == 2 and re.fullmatch(r"([=\-~^\"#*+])\1{2,}\s*", lines[1]):
        return lines[0].strip()
    return None


def _make_slug(title: str) -> str:
    return "-".join(re.findall(r"\w+", title.lower()))[:_NAME_CHARACTERS_MAX]


def _make_document(
    module: str, name: str, signature: str, text: str, *, extra: Iterable[str] = (), line: int = 1
) -> Document:
    identity = f"{module}:{name}" if name else module
    if len(identity) > ID_CHARACTERS_MAX:  # the end of an id is more specific than its start
        identity = "…" + identity[1 - ID_CHARACTERS_MAX :]
    return Document(identity, module, name, signature, text[:DOCUMENT_CHARACTERS_MAX], tuple(extra), line)
