"""The rules of the architecture, as functions over a checkout: `violations(root)` lists violations.

The check reads source text and never imports it, so that it can check any tree, even a broken one.
`python -m tools.architecture` prints the violations of this checkout; its exit status is 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Each package, and the other packages that it may import.
ARROWS = {
    "delta_prop_wire": set[str](),
    "delta_prop_broker": {"delta_prop_wire"},
    "delta_prop_sinks": {"delta_prop_wire"},
    "delta_prop": {"delta_prop_wire", "delta_prop_broker", "delta_prop_sinks"},
    "delta_prop_simulations": {"delta_prop_wire", "delta_prop_broker", "delta_prop_sinks", "delta_prop"},
}
FOLDERS = {
    "delta_prop_wire": "wire/delta_prop_wire",
    "delta_prop_broker": "broker/delta_prop_broker",
    "delta_prop_sinks": "sinks/delta_prop_sinks",
    "delta_prop": "delta_prop",
    "delta_prop_simulations": "simulations/delta_prop_simulations",
}
# Importable only from the folder of a checkout; an installed wheel lacks them.
CHECKOUT_ONLY = {"wire", "broker", "sinks", "simulations", "tests", "benchmarks", "tools", "examples", "docs"}

# Modules without input, output and clock: `now` is an argument. Their imports at run time are pure as well.
# So are the modules whose docstring says *Pure*.
PURE = (
    "wire/delta_prop_wire/*",
    "*/ports.py",
    "broker/delta_prop_broker/catalogue/*",
    "broker/delta_prop_broker/corruption.py",
    "broker/delta_prop_broker/disk.py",
    "broker/delta_prop_broker/log_clock.py",
    "broker/delta_prop_broker/log/*",
    "broker/delta_prop_broker/readonly/*",
    "broker/delta_prop_broker/recovery/*",
    "broker/delta_prop_broker/retention/*",
    "broker/delta_prop_broker/segments/*",
    "delta_prop/delivery/backpressure/*",
    "delta_prop/producing/*",
    "delta_prop/client/counts.py",
    "delta_prop/client/errors.py",
    "delta_prop/directory/log_positions.py",
    "delta_prop/partition/ingest/*",
    "delta_prop/partition/order/*",
    "delta_prop/calls/outcomes.py",
)
IMPURE = {"anyio", "trio", "sniffio"}  # and everything in BANNED_MODULES

# Modules whose public names load on first use: only these may import by a computed name.
LAZY = (
    "delta_prop/__init__.py",
    "delta_prop/client/__init__.py",
    "delta_prop/spark/__init__.py",
    "sinks/delta_prop_sinks/__init__.py",
    "delta_prop/sinks.py",
)

# The bans of pyproject.toml, where ruff reads them: modules and names for clocks, random numbers, files,
# sockets and threads; and SYSTEM, the only modules that may use them. Ruff cannot ban a builtin.
_LINT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
_BANNED = _LINT["flake8-tidy-imports"]["banned-api"]
BANNED_MODULES = {name for name in _BANNED if "." not in name}
BANNED_NAMES = {name for name in _BANNED if "." in name} | {"builtins.open"}
SYSTEM = tuple(
    pattern
    for pattern, rules in _LINT["per-file-ignores"].items()
    if "TID251" in rules and not pattern.endswith("/**")
)
# Calls on a path, recognized by their name, since a syntax tree has no types.
FILE_METHODS = {"read_bytes", "read_text", "touch", "unlink", "write_bytes", "write_text", "tofile"}

# Third-party packages, and the only files that may import them.
_SPARK = ("delta_prop/spark/*", "delta_prop/commands/spark_*")
_NATIVE = (
    "wire/delta_prop_wire/native_core.py",
    "delta_prop/partition/core/native_heads.py",
    "delta_prop/platform/core_choice.py",
)
HOMES = {
    "delta_prop_core": _NATIVE,
    "pandas": _SPARK,
    "py4j": _SPARK,
    "pyarrow": _SPARK,
    "pyspark": _SPARK,
}

COMPUTED = "?"  # the name of an import that is computed at run time

FILE_LINES_MAX = 650
FUNCTION_LINES_MAX = 70


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One line that violates one rule."""

    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.what}"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: module, or module and attribute."""

    name: str
    line: int
    is_typing_only: bool  # under `if TYPE_CHECKING`
    is_lazy: bool  # inside a function


def violations(root: Path) -> list[Violation]:
    """Check every rule on every Python file of the checkout."""
    found: list[Violation] = []
    declared = declared_imports(root)
    texts = {path: path.read_text() for path in source_files(root)}
    trees = {path: ast.parse(text, path) for path, text in texts.items()}
    pure = {path.relative_to(root).as_posix() for path, tree in trees.items() if says_pure(tree)}
    for path, tree in trees.items():
        text, relative_path = texts[path], path.relative_to(root).as_posix()
        nodes = list(ast.walk(tree))
        found += check_lengths_and_docstring(relative_path, text, tree, nodes)
        package = package_of(relative_path)
        if package is not None:
            imports = list(imports_of(tree, module_name(relative_path), path.name == "__init__.py"))
            found += check_arrows(relative_path, package, imports)
            found += check_purity(relative_path, imports, pure)
            found += check_third_parties(relative_path, imports, *declared)
            if not matches(relative_path, SYSTEM):
                found += check_ports(relative_path, nodes, imports)
    return sorted(found)


def source_files(root: Path) -> Iterator[Path]:
    """Yield the Python files of a checkout, without environments and caches."""
    for path in sorted(root.rglob("*.py")):
        if not any(part.startswith(".") for part in path.relative_to(root).parts):
            yield path


def package_of(relative_path: str) -> str | None:
    """Return the package that a file belongs to; None for tests, benchmarks, tools and examples."""
    return next((name for name, folder in FOLDERS.items() if relative_path.startswith(folder + "/")), None)


def module_name(relative_path: str) -> str:
    """Return the dotted name under which a file of a package is imported."""
    package = package_of(relative_path)
    assert package is not None
    inside = (
        relative_path.removeprefix(FOLDERS[package]).removesuffix(".py").removesuffix("__init__").strip("/")
    )
    return ".".join([package, *inside.split("/")]) if inside else package


def matches(relative_path: str, patterns: Iterable[str]) -> bool:
    """Return True if one of the patterns matches the file; `*` spans folders too."""
    return any(fnmatch(relative_path, pattern) for pattern in patterns)


def check_lengths_and_docstring(
    relative_path: str, text: str, tree: ast.Module, nodes: list[ast.AST]
) -> Iterator[Violation]:
    """Check the module docstring, and the length of files and functions."""
    lines = len(text.splitlines())
    if lines > FILE_LINES_MAX:
        yield Violation(relative_path, lines, "length", f"{lines} lines; a file has up to {FILE_LINES_MAX}")
    if not (ast.get_docstring(tree) or "").strip():
        yield Violation(relative_path, 1, "docstring", "the module has no docstring: write one")
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if function_lines > FUNCTION_LINES_MAX:
                what = f"{node.name} has {function_lines} lines; a function has up to {FUNCTION_LINES_MAX}"
                yield Violation(relative_path, node.lineno, "length", what)


def check_arrows(relative_path: str, package: str, imports: Iterable[Import]) -> Iterator[Violation]:
    """Check that imports follow ARROWS, and that none names a folder that only a checkout has."""
    for one in imports:
        top = one.name.partition(".")[0]
        if one.name == COMPUTED and not matches(relative_path, LAZY):
            yield Violation(relative_path, one.line, "arrow", "an import by a computed name hides its target")
        elif top in CHECKOUT_ONLY:
            yield Violation(
                relative_path, one.line, "arrow", f"'{one.name}' is missing from an installed wheel"
            )
        elif top in ARROWS and top != package and top not in ARROWS[package]:
            yield Violation(relative_path, one.line, "arrow", f"{package} must not import {top}")


def says_pure(tree: ast.Module) -> bool:
    """Return True if the docstring of a module says that the module is pure."""
    return re.search(r"\bPure\b", ast.get_docstring(tree) or "") is not None


def check_purity(relative_path: str, imports: Iterable[Import], pure: set[str]) -> Iterator[Violation]:
    """Check that a pure module imports nothing that waits or does input and output, even indirectly.

    Modules are pure by PURE, or because they say so: `pure` has the paths of these.
    """
    if relative_path not in pure and not matches(relative_path, PURE):
        return
    for one in imports:
        top = one.name.partition(".")[0]
        if top in IMPURE | BANNED_MODULES:
            yield Violation(relative_path, one.line, "purity", f"a pure module imports '{one.name}'")
        elif top in ARROWS and not one.is_typing_only and not is_pure(one.name, pure):
            yield Violation(
                relative_path, one.line, "purity", f"a pure module imports '{one.name}', which is not pure"
            )


def is_pure(name: str, pure: set[str]) -> bool:
    """Return True if an imported name of ours, a module or a name in one, is in a pure module."""
    package, *inside = name.split(".")
    relative_path = "/".join([FOLDERS[package], *inside])
    return any(
        one in pure or matches(one, PURE)
        for one in (relative_path + ".py", relative_path + "/", relative_path.rpartition("/")[0] + ".py")
    )


def check_third_parties(
    relative_path: str, imports: Iterable[Import], core: set[str], extras: set[str]
) -> Iterator[Violation]:
    """Check that third-party imports are declared, and that functions import those of extras."""
    for one in imports:
        top = one.name.partition(".")[0]
        known = {COMPUTED, *ARROWS, *CHECKOUT_ONLY, *core, *sys.stdlib_module_names}
        if one.is_typing_only or top in known:
            continue
        home = HOMES.get(top)
        if home is not None:
            if not matches(relative_path, home):
                what = f"only {', '.join(home)} may import '{top}'"
                yield Violation(relative_path, one.line, "dependency", what)
        elif top not in extras:
            yield Violation(relative_path, one.line, "dependency", f"pyproject.toml does not declare '{top}'")
        elif not one.is_lazy:
            yield Violation(
                relative_path, one.line, "dependency", f"'{top}' is an extra; import it inside the function"
            )


def declared_imports(root: Path) -> tuple[set[str], set[str]]:
    """Return the import names of the core dependencies, and of the extras."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = [one for group in project.get("optional-dependencies", {}).values() for one in group]
    return {import_name(one) for one in project["dependencies"]}, {import_name(one) for one in extras}


def import_name(requirement: str) -> str:
    """Return the import name of a requirement: pybloom_live of `pybloom-live>=4.0`."""
    end = next((i for i, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")), None)
    return requirement[:end].replace("-", "_").lower()


def check_ports(relative_path: str, nodes: list[ast.AST], imports: list[Import]) -> Iterator[Violation]:
    """Check that only SYSTEM modules use clocks, random numbers, files, sockets and threads directly."""
    for one in imports:
        if one.name.partition(".")[0] in BANNED_MODULES or is_banned(one.name):
            yield _port_violation(relative_path, one.line, one.name)
    knows_paths = any(one.name.partition(".")[0] == "pathlib" for one in imports)
    known = aliases(nodes)
    awaited = {id(node.value) for node in nodes if isinstance(node, ast.Await)}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and is_banned(name := qualified_name(node, known)):
            yield _port_violation(relative_path, node.lineno, name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            opens = knows_paths and node.func.attr == "open" and id(node) not in awaited
            if opens or node.func.attr in FILE_METHODS:
                what = f"'.{node.func.attr}()' touches a file; take files from a port"
                yield Violation(relative_path, node.lineno, "port", what)


def _port_violation(relative_path: str, line: int, name: str) -> Violation:
    return Violation(relative_path, line, "port", f"'{name}' is for system modules only; take it from a port")


def is_banned(name: str) -> bool:
    """Return True if a qualified name, or a name that contains it, is banned."""
    return bool(name) and any(name == one or name.startswith(one + ".") for one in BANNED_NAMES)


def aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the qualified name of each imported local name."""
    known = {"open": "builtins.open"}
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                top = one.name.partition(".")[0]
                known[one.asname or top] = one.name if one.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
    return known


def qualified_name(node: ast.expr, known: dict[str, str]) -> str:
    """Return the dotted name of an expression, resolved by the imports; empty if it is unknown."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        below = qualified_name(node.value, known)
        return f"{below}.{node.attr}" if below else ""
    return ""


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    """Yield every import of a file, also those inside functions, under TYPE_CHECKING, and by importlib."""
    yield from _imports(tree, module.split(".") if is_package else module.split(".")[:-1], False, False)


def _imports(node: ast.AST, package: list[str], is_typing_only: bool, is_lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for one in child.names:
                yield Import(one.name, child.lineno, is_typing_only, is_lazy)
        elif isinstance(child, ast.ImportFrom):
            above = package[: len(package) - child.level + 1] if child.level else []
            base = ".".join([*above, *([child.module] if child.module else [])])
            for one in child.names:
                yield Import(f"{base}.{one.name}", child.lineno, is_typing_only, is_lazy)
        elif isinstance(child, ast.Call) and _is_dynamic_import(child):
            yield Import(_constant(child.args), child.lineno, is_typing_only, is_lazy)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(ast.Module(child.body, []), package, True, is_lazy)
            yield from _imports(ast.Module(child.orelse, []), package, is_typing_only, is_lazy)
        else:
            inside = is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, is_typing_only, inside)


def _constant(arguments: list[ast.expr]) -> str:
    first = arguments[0] if arguments else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else COMPUTED


def _is_dynamic_import(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in {"import_module", "__import__"}


if __name__ == "__main__":
    wrong = violations(Path(__file__).resolve().parent.parent)
    print("".join(f"{violation}\n" for violation in wrong), end="", file=sys.stderr)
    sys.exit(1 if wrong else 0)
