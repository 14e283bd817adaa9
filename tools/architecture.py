"""The rules of the architecture, as functions over a checkout: `violations(root)` lists what breaks them.

It reads source text and never imports it, so that it can judge any tree, a broken one too.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Each package, and the packages it may import besides itself.
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
# Importable only because a checkout is a folder; never there for an installed wheel.
CHECKOUT_ONLY = {"wire", "broker", "sinks", "simulations", "tests", "benchmarks", "tools", "examples", "docs"}

# Modules of calls and values alone: `now` is an argument. What they import at run time is pure as well.
PURE = (
    "wire/delta_prop_wire/*",
    "*/ports.py",
    "broker/delta_prop_broker/disk.py",
    "broker/delta_prop_broker/log/*",
    "delta_prop/advice.py",
    "delta_prop/backpressure/*",
    "delta_prop/checks.py",
    "delta_prop/client/addresses.py",
    "delta_prop/client/answers.py",
    "delta_prop/client/arguments.py",
    "delta_prop/client/calls.py",
    "delta_prop/client/backoff.py",
    "delta_prop/client/counts.py",
    "delta_prop/client/delivered.py",
    "delta_prop/client/errors.py",
    "delta_prop/client/flight.py",
    "delta_prop/client/heads.py",
    "delta_prop/client/held.py",
    "delta_prop/client/incoming.py",
    "delta_prop/client/known_service.py",
    "delta_prop/client/lane.py",
    "delta_prop/client/offer.py",
    "delta_prop/client/outgoing.py",
    "delta_prop/client/probing.py",
    "delta_prop/client/producing.py",
    "delta_prop/client/refusing.py",
    "delta_prop/client/session.py",
    "delta_prop/client/settings.py",
    "delta_prop/client/splitting.py",
    "delta_prop/client/spreading.py",
    "delta_prop/client/wanted_range.py",
    "delta_prop/commands/places.py",
    "delta_prop/dates.py",
    "delta_prop/misconfigured.py",
    "delta_prop/ingest/*",
    "delta_prop/order/*",
    "delta_prop/published.py",
    "delta_prop/recorded_traffic.py",
    "delta_prop/refusals.py",
    "delta_prop/repeats.py",
    "delta_prop/route/table.py",
    "delta_prop/server/wanted.py",
    "delta_prop/spark/option_values.py",
    "delta_prop/spark/options.py",
)
IMPURE = {"anyio", "trio", "sniffio"}  # and everything in BANNED_MODULES

# Public names that load on first use: the only imports whose name may be computed.
LAZY = (
    "delta_prop/__init__.py",
    "delta_prop/client/__init__.py",
    "delta_prop/spark/__init__.py",
    "sinks/delta_prop_sinks/__init__.py",
    "delta_prop/sinks.py",
)

# The edge: the only modules that may touch a clock, chance, files, sockets and threads. pyproject.toml says
# the same to ruff.
EDGE = (
    "broker/delta_prop_broker/local_disk.py",
    "delta_prop/auditing/stored.py",
    "delta_prop/client/blocking.py",
    "delta_prop/client/asking.py",
    "delta_prop/client/ranges.py",
    "delta_prop/commands/edge.py",
    "delta_prop/commands/logs.py",
    "delta_prop/demo/edge.py",
    "delta_prop/local_places.py",
    "delta_prop/loop_thread.py",
    "delta_prop/readiness.py",
    "delta_prop/sockets.py",
    "delta_prop/spark/edge.py",
    "delta_prop/streams.py",
    "delta_prop/synchronous.py",
    "delta_prop/tls.py",
    "delta_prop/tls_contexts.py",
    "delta_prop/unknown_hosts.py",
    "delta_prop/waking.py",
    "delta_prop/world.py",
    "delta_prop/testing/*",
    "simulations/delta_prop_simulations/calibration/edge.py",
    "simulations/delta_prop_simulations/chance.py",
    "simulations/delta_prop_simulations/disk*.py",
    "simulations/delta_prop_simulations/processes.py",
    "simulations/delta_prop_simulations/files.py",
    "sinks/delta_prop_sinks/conformance/loop_watch.py",
    "sinks/delta_prop_sinks/graph_file.py",
    "sinks/delta_prop_sinks/jsonlines.py",
    "sinks/delta_prop_sinks/storage_file.py",
    "sinks/delta_prop_sinks/storage_image.py",
)
BANNED_MODULES = {
    "asyncio",
    "concurrent",
    "fcntl",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
BANNED_NAMES = {
    "anyio.Path",
    "anyio.connect_tcp",
    "anyio.connect_unix",
    "anyio.create_tcp_listener",
    "anyio.create_udp_socket",
    "anyio.create_unix_listener",
    "anyio.from_thread",
    "anyio.open_file",
    "anyio.open_process",
    "anyio.run_process",
    "anyio.to_process",
    "anyio.to_thread",
    "builtins.open",
    "datetime.date.today",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "io.open",
    "numpy.fromfile",
    "numpy.load",
    "numpy.memmap",
    "numpy.random",
    "numpy.save",
}
# Calls on a path: told by their name, since a tree of syntax knows no types.
FILE_METHODS = {"read_bytes", "read_text", "touch", "unlink", "write_bytes", "write_text", "tofile"}

# Extras that one package is made for: at home there, nowhere else.
HOMES = {
    "pandas": "delta_prop/spark/*",
    "py4j": "delta_prop/spark/*",
    "pyarrow": "delta_prop/spark/*",
    "pyspark": "delta_prop/spark/*",
}

COMPUTED = "?"  # the name of an import that only runs can tell

FILE_LINES_MAX = 650
FUNCTION_LINES_MAX = 70


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One place that breaks one rule."""

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
    typing_only: bool  # under `if TYPE_CHECKING`
    lazy: bool  # inside a function


def violations(root: Path) -> list[Violation]:
    """Every rule over every Python file of the checkout."""
    found: list[Violation] = []
    declared = declared_imports(root)
    for path in source_files(root):
        text = path.read_text()
        tree = ast.parse(text, path)
        place = path.relative_to(root).as_posix()
        nodes = list(ast.walk(tree))
        found += shape(place, text, tree, nodes)
        package = package_of(place)
        if package is not None:
            imports = list(imports_of(tree, module_name(place), path.name == "__init__.py"))
            found += arrows(place, package, imports)
            found += purity(place, imports)
            found += third_parties(place, imports, *declared)
            if not matches(place, EDGE):
                found += ports(place, nodes, imports)
    return sorted(found)


def source_files(root: Path) -> Iterator[Path]:
    """The Python files of a checkout, its environments and caches left out."""
    for path in sorted(root.rglob("*.py")):
        if not any(part.startswith(".") for part in path.relative_to(root).parts):
            yield path


def package_of(place: str) -> str | None:
    """The package that a file belongs to; None for tests, benchmarks, tools and examples."""
    return next((name for name, folder in FOLDERS.items() if place.startswith(folder + "/")), None)


def module_name(place: str) -> str:
    """The dotted name under which a file of a package is imported."""
    package = package_of(place)
    assert package is not None
    inside = (
        place.removeprefix(FOLDERS[package] + "/").removesuffix(".py").removesuffix("__init__").strip("/")
    )
    return ".".join([package, *inside.split("/")]) if inside else package


def matches(place: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns names the file; `*` spans folders too."""
    return any(fnmatch(place, pattern) for pattern in patterns)


def shape(place: str, text: str, tree: ast.Module, nodes: list[ast.AST]) -> Iterator[Violation]:
    """Opening docstrings; the length of files and functions."""
    lines = len(text.splitlines())
    if lines > FILE_LINES_MAX:
        yield Violation(place, lines, "length", f"{lines} lines; a file has {FILE_LINES_MAX} at most")
    if not (ast.get_docstring(tree) or "").strip():
        yield Violation(place, 1, "docstring", "the file does not open by saying what it is")
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            long = (node.end_lineno or node.lineno) - node.lineno + 1
            if long > FUNCTION_LINES_MAX:
                what = f"{node.name} has {long} lines; a function has {FUNCTION_LINES_MAX} at most"
                yield Violation(place, node.lineno, "length", what)


def arrows(place: str, package: str, imports: Iterable[Import]) -> Iterator[Violation]:
    """wire <- broker, sinks <- delta_prop <- simulations, and nothing of the checkout around them."""
    for one in imports:
        top = one.name.partition(".")[0]
        if one.name == COMPUTED and not matches(place, LAZY):
            yield Violation(place, one.line, "arrow", "an import by a computed name hides where it points")
        elif top in CHECKOUT_ONLY:
            yield Violation(
                place, one.line, "arrow", f"'{one.name}' is not there once the wheel is installed"
            )
        elif top in ARROWS and top != package and top not in ARROWS[package]:
            yield Violation(place, one.line, "arrow", f"{package} must not know {top}")


def purity(place: str, imports: Iterable[Import]) -> Iterator[Violation]:
    """A pure module imports nothing that waits or does input and output, and no module of ours that may."""
    if not matches(place, PURE):
        return
    for one in imports:
        top = one.name.partition(".")[0]
        if top in IMPURE | BANNED_MODULES:
            yield Violation(place, one.line, "purity", f"a pure module imports '{one.name}'")
        elif top in ARROWS and not one.typing_only and not is_pure(one.name):
            yield Violation(
                place, one.line, "purity", f"a pure module imports '{one.name}', which is not pure"
            )


def is_pure(name: str) -> bool:
    """Whether an imported name of ours, a module or what it holds, lies in a pure module."""
    package, *inside = name.split(".")
    place = "/".join([FOLDERS[package], *inside])
    return any(matches(one, PURE) for one in (place + ".py", place + "/", place.rpartition("/")[0] + ".py"))


def third_parties(
    place: str, imports: Iterable[Import], core: set[str], extras: set[str]
) -> Iterator[Violation]:
    """What a package imports is declared; what only an extra installs is imported where it is used."""
    for one in imports:
        top = one.name.partition(".")[0]
        known = {COMPUTED, *ARROWS, *CHECKOUT_ONLY, *core, *sys.stdlib_module_names}
        if one.typing_only or top in known:
            continue
        home = HOMES.get(top)
        if home is not None:
            if not matches(place, [home]):
                yield Violation(place, one.line, "dependency", f"'{top}' is known to {home} alone")
        elif top not in extras:
            yield Violation(place, one.line, "dependency", f"pyproject.toml does not declare '{top}'")
        elif not one.lazy:
            yield Violation(
                place, one.line, "dependency", f"'{top}' is an extra; import it inside the function"
            )


def declared_imports(root: Path) -> tuple[set[str], set[str]]:
    """The import names of the core dependencies, and of the extras."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = [one for group in project.get("optional-dependencies", {}).values() for one in group]
    return {import_name(one) for one in project["dependencies"]}, {import_name(one) for one in extras}


def import_name(requirement: str) -> str:
    """`pybloom-live>=4.0` is imported as pybloom_live."""
    end = next((i for i, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")), None)
    return requirement[:end].replace("-", "_").lower()


def ports(place: str, nodes: list[ast.AST], imports: list[Import]) -> Iterator[Violation]:
    """Clock, chance, files, sockets and threads are handed in; only the edge reaches for them."""
    for one in imports:
        if one.name.partition(".")[0] in BANNED_MODULES or banned(one.name):
            yield Violation(
                place, one.line, "port", f"'{one.name}' is for the edge alone; take it from a port"
            )
    knows_paths = any(one.name.partition(".")[0] == "pathlib" for one in imports)
    known = aliases(nodes)
    awaited = {id(node.value) for node in nodes if isinstance(node, ast.Await)}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and banned(name := qualified(node, known)):
            yield Violation(
                place, node.lineno, "port", f"'{name}' is for the edge alone; take it from a port"
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            opens = knows_paths and node.func.attr == "open" and id(node) not in awaited
            if opens or node.func.attr in FILE_METHODS:
                what = f"'.{node.func.attr}()' touches a file; take files from a port"
                yield Violation(place, node.lineno, "port", what)


def banned(name: str) -> bool:
    """Whether a qualified name is banned, or lies below one that is."""
    return bool(name) and any(name == one or name.startswith(one + ".") for one in BANNED_NAMES)


def aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """What each imported local name stands for."""
    known = {"open": "builtins.open"}
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                known[one.asname or one.name.partition(".")[0]] = (
                    one.name if one.asname else one.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
    return known


def qualified(node: ast.expr, known: dict[str, str]) -> str:
    """The dotted name an expression stands for, as far as imports tell; empty where they do not."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        below = qualified(node.value, known)
        return f"{below}.{node.attr}" if below else ""
    return ""


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a file, whatever it hides in: functions, TYPE_CHECKING, importlib."""
    yield from _imports(tree, module.split(".") if is_package else module.split(".")[:-1], False, False)


def _imports(node: ast.AST, package: list[str], typing_only: bool, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for one in child.names:
                yield Import(one.name, child.lineno, typing_only, lazy)
        elif isinstance(child, ast.ImportFrom):
            above = package[: len(package) - child.level + 1] if child.level else []
            base = ".".join([*above, *([child.module] if child.module else [])])
            for one in child.names:
                yield Import(f"{base}.{one.name}", child.lineno, typing_only, lazy)
        elif isinstance(child, ast.Call) and _imports_by_name(child):
            yield Import(_constant(child.args), child.lineno, typing_only, lazy)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for inner in child.body:
                yield from _imports(ast.Module([inner], []), package, True, lazy)
            for inner in child.orelse:
                yield from _imports(ast.Module([inner], []), package, typing_only, lazy)
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, typing_only, inside)


def _constant(arguments: list[ast.expr]) -> str:
    first = arguments[0] if arguments else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else COMPUTED


def _imports_by_name(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in {"import_module", "__import__"}
