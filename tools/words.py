"""The rules of language, as functions over a checkout: `violations(root)` lists violations.

`names.txt` beside this file lists, one per line, names that are not used any more, and parts that names
avoid. The check reads source text and never imports it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tools import architecture

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTS = Path(__file__).with_name("names.txt")
FOLDERS = architecture.FOLDERS | {"benchmarks": "benchmarks"}
QUESTION_WORDS = {"What", "Who", "Whose", "How", "Where", "Whether", "Why"}
QUESTION_WORDS_MAX = 20
OVERUSED_LINES_MAX = 30
"""Maximum number of lines that contain the word told."""
# A changelog and a record of a decision use the names of their time.
HISTORY = ("changes/", "CHANGELOG.md", "docs/decisions/", "tools/names.txt")
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


@dataclass(frozen=True, slots=True)
class Lists:
    """Names and words to avoid, as `names.txt` lists them."""

    removed: list[str]
    """Qualified names that no file may define: `module.Class`, `module.Class.member`, or `module` itself."""
    words: list[str]
    """Identifiers that no file may contain: keys, settings, metrics, options."""
    avoided_parts: set[str]
    """Parts that an identifier avoids, e.g. `told`; two parts are joined by an underscore."""
    exceptions: dict[str, str]
    """By identifier with such a part, the reason why it stays."""


def read_lists(path: Path) -> Lists:
    """Read the lists; a line is `kind name [reason]`, and `#` starts a comment."""
    lists = Lists([], [], set(), {})
    for line in path.read_text("utf-8").splitlines():
        match line.partition("#")[0].split(maxsplit=2):
            case "renamed", name, *_:
                lists.removed.append(name)
            case "word", name, *_:
                lists.words.append(name)
            case "root", name, *_:
                lists.avoided_parts.add(name)
            case "stays", name, reason:
                lists.exceptions[name] = reason
            case [_, *_]:
                raise ValueError(f"{path.name}: {line!r}: write renamed, word, root, or stays with a reason")
    return lists


def violations(root: Path) -> list[str]:
    """List the violations of the rules of language in the checkout `root`, one line each."""
    lists = read_lists(LISTS)
    folders = (*FOLDERS.values(), "tests", "tools", "examples")
    files = [source for folder in folders for source in _read(root, folder)]
    definitions = {name: _find_definition(root, name) for name in lists.removed}
    found = [f"{path}: {name} was renamed: use the new name" for name, path in definitions.items() if path]
    found += _words_in_files(root, lists)
    found += _names_with_avoided_parts(files, lists)
    openings = [line for source in files for line in _question_openings(source)]
    if len(openings) > QUESTION_WORDS_MAX:
        found += [
            f"{len(openings)} docstrings open with a question word; the bound is {QUESTION_WORDS_MAX}:",
            *openings,
        ]
    lines = [line for source in files for line in _overused_lines(source)]
    if len(lines) > OVERUSED_LINES_MAX:
        found += [f"{len(lines)} lines contain told; the bound is {OVERUSED_LINES_MAX}:", *lines]
    return found


@dataclass(frozen=True, slots=True)
class Source:
    """One file of Python, read and parsed."""

    path: str
    """Relative to the checkout."""
    text: str
    tree: ast.Module


def _read(root: Path, folder: str) -> Iterator[Source]:
    for path in sorted((root / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        yield Source(path.relative_to(root).as_posix(), text, ast.parse(text))


def _find_definition(root: Path, name: str) -> str | None:
    """Return the file that defines a qualified name (a module, or a name or member inside one), or None."""
    package, *parts = name.split(".")
    path, depth = root / FOLDERS[package], 0
    for part in parts:
        if not (path / part).is_dir() and not (path / f"{part}.py").is_file():
            break
        path, depth = path / part, depth + 1
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    rest = parts[depth:]
    if not file.is_file():
        return None
    scope: list[ast.stmt] = ast.parse(file.read_text("utf-8")).body
    for i, part in enumerate(rest):
        if part not in _names_of(scope, with_members=i > 0):
            return None
        class_bodies = [s.body for s in scope if isinstance(s, ast.ClassDef) and s.name == part]
        scope = class_bodies[0] if class_bodies else []
    return file.relative_to(root).as_posix()


def _names_of(scope: list[ast.stmt], *, with_members: bool) -> set[str]:
    """Return the names that these statements define; `with_members`: also those that they set on `self`."""
    names = set[str]()
    for statement in scope:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {node.id for t in targets for node in ast.walk(t) if isinstance(node, ast.Name)}
        if with_members and isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {node.attr for node in ast.walk(statement) if _sets_member(node)}  # type: ignore[attr-defined]
    return names


def _sets_member(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _words_in_files(root: Path, lists: Lists) -> Iterator[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    pattern = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, lists.words)) + r")(?![\w-])")
    for name in listed.splitlines():
        if name.startswith(HISTORY):
            continue
        try:
            text = (root / name).read_text("utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for match in pattern.finditer(line):
                yield f"{name}:{number}: {match.group()} was renamed: use the new name"


def _names_with_avoided_parts(sources: list[Source], lists: Lists) -> Iterator[str]:
    names_found = set[str]()
    for source in sources:
        for name, line in _identifiers(source.tree):
            if name not in lists.exceptions and _has_avoided_part(name, lists.avoided_parts):
                yield f"{source.path}:{line}: {name} has a part to avoid: rename it, or list its reason"
            names_found.add(name)
    for name in sorted(set(lists.exceptions) - names_found):
        yield f"tools/names.txt: {name} does not occur: remove its line"


def _has_avoided_part(name: str, avoided_parts: set[str]) -> bool:
    parts = [part.lower() for part in _PART.findall(name)]
    return any(part in avoided_parts for part in parts) or any(
        f"{a}_{b}" in avoided_parts for a, b in pairwise(parts)
    )


def _identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each name that the module defines, locals too, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif _sets_member(node):
            yield node.attr, node.lineno  # type: ignore[attr-defined]


def _question_openings(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        for text in _docstrings(node):
            opening = (str(text.value).split() or [""])[0].strip(".,:;'")
            if opening in QUESTION_WORDS:
                yield f"{source.path}:{text.lineno}: opens with {opening}"


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstring of a module, class or function, and those that follow an attribute."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    documented = (
        ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
    )
    for before, statement in pairwise([node, *body]):
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as text) if isinstance(before, documented):
                yield text


def _overused_lines(source: Source) -> Iterator[str]:
    """Yield the lines that contain the word told."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search(r"(?<![a-zA-Z])told(?![a-zA-Z])", line):
            yield f"{source.path}:{number}: told: {line.strip()}"


if __name__ == "__main__":
    wrong = violations(Path(__file__).resolve().parent.parent)
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(1 if wrong else 0)
