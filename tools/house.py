"""Measures of the structure: how many modules, circles, callables and large classes the packages have.

`python -m tools.house` prints each measure with its bound; `measures(root)` returns them. It reads source
text and never imports it. The bounds only ever fall.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.architecture import FOLDERS, imports_of, module_name

if TYPE_CHECKING:
    from collections.abc import Iterator

ATTRIBUTES_MAX = 12
"""Attributes that a class has of its own before it counts as large."""


_LOG = re.compile(r"\b(Durable|Memory)?Log\b")


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure. `found`: what counts, one line each; `bound`: how many there may be."""

    name: str
    bound: int
    found: list[str]

    @property
    def is_within(self) -> bool:
        """True if no more than the bound was found."""
        return len(self.found) <= self.bound


@dataclass(frozen=True, slots=True)
class _Module:
    name: str
    path: str
    tree: ast.Module


def measures(root: Path) -> list[Measure]:
    """Measure the packages of a checkout."""
    modules = list(_modules(root))
    return [
        Measure("loose modules in delta_prop/", 8, _loose(modules)),
        Measure("circles of imports", 0, _circles(modules)),
        Measure("callables in constructors", 25, list(_callables(modules))),
        Measure(f"classes with more than {ATTRIBUTES_MAX} attributes", 40, list(_large(modules))),
        Measure("isinstance of a log outside broker", 0, list(_log_checks(modules))),
    ]


def _modules(root: Path) -> Iterator[_Module]:
    for folder in FOLDERS.values():
        for path in sorted((root / folder).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            yield _Module(module_name(place), place, ast.parse(path.read_text("utf-8")))


def _loose(modules: list[_Module]) -> list[str]:
    return [one.path for one in modules if re.fullmatch(r"delta_prop/(?!__)\w+\.py", one.path)]


def _circles(modules: list[_Module]) -> list[str]:
    """List the groups of modules, and of folders, that import each other at run time."""
    names = {one.name for one in modules}
    by_module = {one.name: _imported(one, names) for one in modules}
    folder_of = {one.name: _folder(one) for one in modules}
    by_folder: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for name, imported in by_module.items():
        by_folder[folder_of[name]] |= {folder_of[one] for one in imported}
    groups = [*_strongly_connected(by_module), *_strongly_connected(by_folder)]
    return [" ".join(sorted(group)) for group in groups if len(group) > 1]


def _folder(module: _Module) -> str:
    """Return the package that a module lies in; a package and a module at the top stand for themselves."""
    above = module.name.rpartition(".")[0]
    return module.name if module.path.endswith("__init__.py") or "." not in above else above


def _imported(module: _Module, names: set[str]) -> set[str]:
    found = set[str]()
    for one in imports_of(module.tree, module.name, module.path.endswith("__init__.py")):
        if one.is_typing_only:
            continue
        target = one.name if one.name in names else one.name.rpartition(".")[0]
        if target in names:
            found.add(target)
    return found


def _strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def _callables(modules: list[_Module]) -> Iterator[str]:
    for module, one in _classes(modules):
        if _is_value(one):
            continue
        for name, annotation in _constructor_parameters(one):
            if "Callable" in ast.unparse(annotation):
                yield f"{module.path}:{one.lineno}: {one.name}({name})"


def _constructor_parameters(one: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for statement in one.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = statement.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if argument.annotation is not None:
                    yield argument.arg, argument.annotation
        elif isinstance(statement, ast.AnnAssign) and any("dataclass" in text for text in _decorators(one)):
            yield ast.unparse(statement.target), statement.annotation


def _is_value(one: ast.ClassDef) -> bool:
    return any("frozen=True" in text for text in _decorators(one))


def _decorators(one: ast.ClassDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in one.decorator_list]


def _large(modules: list[_Module]) -> Iterator[str]:
    for module, one in _classes(modules):
        count = 0 if _is_value(one) else len(_attributes(one))
        if count > ATTRIBUTES_MAX:
            yield f"{module.path}:{one.lineno}: {one.name} has {count}"


def _attributes(one: ast.ClassDef) -> set[str]:
    """Return the attributes that a class declares, or sets on `self`; constants of an enum do not count."""
    if any(
        base in ast.unparse(ast.Tuple(one.bases)) for base in ("Enum", "IntFlag", "Protocol", "NamedTuple")
    ):
        return set()
    found = set[str]()
    for node in ast.walk(one):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            found |= {node.attr} if is_own else set()
    for statement in one.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.add(statement.target.id)
    return found


def _log_checks(modules: list[_Module]) -> Iterator[str]:
    for module in modules:
        if module.name.startswith(("delta_prop_broker", "delta_prop_simulations")):
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "isinstance":
                continue
            if _LOG.search(ast.unparse(node.args[1])):
                yield f"{module.path}:{node.lineno}: {ast.unparse(node)}"


def _classes(modules: list[_Module]) -> Iterator[tuple[_Module, ast.ClassDef]]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                yield module, node


def main() -> int:
    """Print each measure; with `--list` what counts. Return 1 if one is above its bound."""
    found = measures(Path(__file__).resolve().parent.parent)
    for one in found:
        print(f"{len(one.found):>5} of up to {one.bound:>3}  {one.name}")
        if "--list" in sys.argv:
            print("".join(f"       {line}\n" for line in one.found), end="")
    return 0 if all(one.is_within for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
