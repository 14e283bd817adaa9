"""Measures of the structure: loose modules, circles of imports, callables in constructors, large classes,
and tests that depend on private names or replace parts of the code.

`python -m tools.house` prints each measure with its bound, with `--list` also what it counts, and exits with
status 1 if one is above its bound. It reads source text and never imports it. A bound only ever falls.
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
    from collections.abc import Iterable, Iterator

ATTRIBUTES_MAX = 12
"""Number of attributes of its own up to which a class is not large."""
LOOSE_MAX, CIRCLES_MAX, CALLABLES_MAX, LARGE_MAX, LOG_CHECKS_MAX = 3, 0, 13, 26, 0
PRIVATE_MAX, PATCHES_MAX = 238, 245
_LOG = re.compile(r"\b(Durable|Memory)?Log\b")
_PRIVATE = re.compile(r"_(?!_|asdict$|fields$|replace$)\w+")
"""Private names; those of named tuples are public."""
_PATCHES = re.compile(r"monkeypatch\.(setattr|setitem|delattr|delitem)")
_VALUE_BASES = re.compile(r"Enum|IntFlag|Protocol|NamedTuple|TypedDict")


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure. `cases`: what it counts, one line each; `bound`: how many there may be."""

    name: str
    bound: int
    cases: list[str]

    @property
    def is_within(self) -> bool:
        """True if there are no more cases than the bound."""
        return len(self.cases) <= self.bound


@dataclass(frozen=True, slots=True)
class _Module:
    name: str
    path: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def package(self) -> str:
        """The package that the module lies in; a package, and a module at the top, stand for themselves."""
        return self.name if self.is_package or "." not in self.name else self.name.rpartition(".")[0]

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


def measures(root: Path) -> list[Measure]:
    """Measure the packages of a checkout."""
    modules = list(_read_modules(root))
    tests = list(_read_tests(root))
    return [
        Measure("loose modules in delta_prop/", LOOSE_MAX, _loose_modules(modules)),
        Measure("circles of imports", CIRCLES_MAX, _circles(modules)),
        Measure("callables in constructors", CALLABLES_MAX, list(_callables(modules))),
        Measure(f"classes with over {ATTRIBUTES_MAX} attributes", LARGE_MAX, list(_large_classes(modules))),
        Measure("isinstance of a log outside broker/", LOG_CHECKS_MAX, list(_log_checks(modules))),
        Measure("private names used by tests", PRIVATE_MAX, list(_private_names(tests))),
        Measure("patches by tests", PATCHES_MAX, list(_patches(tests))),
    ]


def _read_modules(root: Path) -> Iterator[_Module]:
    for folder in FOLDERS.values():
        for path in sorted((root / folder).rglob("*.py")):
            relative_path = path.relative_to(root).as_posix()
            yield _Module(module_name(relative_path), relative_path, ast.parse(path.read_text("utf-8")))


def _read_tests(root: Path) -> Iterator[_Module]:
    for path in sorted((root / "tests").rglob("*.py")):
        yield _Module(path.stem, path.relative_to(root).as_posix(), ast.parse(path.read_text("utf-8")))


def _loose_modules(modules: Iterable[_Module]) -> list[str]:
    return [module.path for module in modules if re.fullmatch(r"delta_prop/(?!__)\w+\.py", module.path)]


def _circles(modules: list[_Module]) -> list[str]:
    """Return the groups of modules, and of packages, that import each other at run time."""
    names = {module.name for module in modules}
    package_of = {module.name: module.package for module in modules}
    by_module = {module.name: _imported_modules(module, names) for module in modules}
    by_package: dict[str, set[str]] = {package: set() for package in package_of.values()}
    for name, imported in by_module.items():
        by_package[package_of[name]] |= {package_of[other] for other in imported}
    groups = [*_strongly_connected(by_module), *_strongly_connected(by_package)]
    return [" ".join(sorted(group)) for group in groups if len(group) > 1]


def _imported_modules(module: _Module, names: set[str]) -> set[str]:
    imported = set[str]()
    for each in imports_of(module.tree, module.name, module.is_package):
        if not each.is_typing_only:
            target = each.name if each.name in names else each.name.rpartition(".")[0]
            imported |= {target} & names
    return imported


def _strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components (Tarjan, 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], index[target])
        if lowest[node] == index[node]:
            position = stack.index(node)
            components.append(set(stack[position:]))
            del stack[position:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def _callables(modules: Iterable[_Module]) -> Iterator[str]:
    for module in modules:
        for each in module.classes():
            if not _is_value(each):
                for name, annotation in _constructor_parameters(each):
                    if "Callable" in ast.unparse(annotation):
                        yield f"{module.path}:{each.lineno}: {each.name}({name})"


def _constructor_parameters(each: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    is_dataclass = any("dataclass" in decorator for decorator in _decorators(each))
    for statement in each.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = statement.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if argument.annotation is not None:
                    yield argument.arg, argument.annotation
        elif isinstance(statement, ast.AnnAssign) and is_dataclass:
            yield ast.unparse(statement.target), statement.annotation


def _large_classes(modules: Iterable[_Module]) -> Iterator[str]:
    for module in modules:
        for each in module.classes():
            count = 0 if _is_value(each) else len(_attributes(each))
            if count > ATTRIBUTES_MAX:
                yield f"{module.path}:{each.lineno}: {each.name} has {count}"


def _attributes(each: ast.ClassDef) -> set[str]:
    """Return the attributes that a class declares, or sets on `self`."""
    attributes = {
        statement.target.id
        for statement in each.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    for node in ast.walk(each):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            attributes |= {node.attr} if is_own else set()
    return attributes


def _is_value(each: ast.ClassDef) -> bool:
    """Return True if objects of the class only hold values: a frozen dataclass, a named tuple, an enum."""
    if any("frozen=True" in decorator for decorator in _decorators(each)):
        return True
    return any(_VALUE_BASES.search(ast.unparse(base)) for base in each.bases)


def _decorators(each: ast.ClassDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in each.decorator_list]


def _log_checks(modules: Iterable[_Module]) -> Iterator[str]:
    for module in modules:
        if module.name.startswith(("delta_prop_broker", "delta_prop_simulations")):
            continue
        for node in ast.walk(module.tree):
            match node:
                case ast.Call(ast.Name("isinstance"), [_, kind]) if _LOG.search(ast.unparse(kind)):
                    yield f"{module.path}:{node.lineno}: {ast.unparse(node)}"


def _private_names(tests: Iterable[_Module]) -> Iterator[str]:
    """Yield each use of another object's private attribute, and each import of a private name."""
    for module in tests:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in filter(_PRIVATE.fullmatch, names):
                yield f"{module.path}:{node.lineno}: {name}"


def _patches(tests: Iterable[_Module]) -> Iterator[str]:
    for module in tests:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _PATCHES.fullmatch(ast.unparse(node.func)):
                yield f"{module.path}:{node.lineno}: {ast.unparse(node)}"


def main() -> int:
    """Print each measure; return 1 if one is above its bound."""
    results = measures(Path(__file__).resolve().parent.parent)
    for measure in results:
        print(f"{len(measure.cases):>5} of up to {measure.bound:>3} {measure.name}")
        if "--list" in sys.argv or not measure.is_within:
            print("".join(f"      {case}\n" for case in measure.cases), end="")
    return 0 if all(measure.is_within for measure in results) else 1


if __name__ == "__main__":
    sys.exit(main())
