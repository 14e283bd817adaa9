"""Mutants: small edits of the production code that hold for the duration of a run.

A mutant replaces a function's code object, not the function itself, so every reference to the function runs
the mutated code. An edit replaces text; if the code no longer contains the old text, applying the mutant
fails.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

_COUNTER = "__calls_of_a_mutant__"


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit of one function. `changes`: pairs of an old text, which occurs exactly once, and a new one."""

    function: FunctionType
    changes: tuple[tuple[str, str], ...]


class Mutant:
    """A faulty version of the production code. `what`: the fault; `promise`: the promise that it breaks."""

    def __init__(self, name: str, what: str, promise: str, *edits: Edit) -> None:
        self.name, self.what, self.promise, self.edits = name, what, promise, edits


class CallCounter:
    """Counts the calls of the mutated code."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def edit(function: Callable[..., Any], *texts: str) -> Edit:
    """Return the edit of a function, a method or a property's getter. `texts`: old and new ones in turn."""
    assert isinstance(function, FunctionType), f"{function!r} is not a Python function"
    return Edit(function, tuple(zip(texts[::2], texts[1::2], strict=True)))


def getter(owner: type, name: str) -> Callable[..., Any]:
    """Return the getter of a property of a class, which may inherit it."""
    attribute = inspect.getattr_static(owner, name)
    assert isinstance(attribute, property)
    assert attribute.fget is not None
    return attribute.fget


@contextmanager
def apply_mutant(mutant: Mutant) -> Iterator[CallCounter]:
    """Let this process run the mutated code until the scope ends; only one mutant at a time."""
    calls = CallCounter()
    with ExitStack() as undo:
        for one in mutant.edits:
            mutated = mutate(one, mutant.name)
            undo.callback(_restore, one.function, one.function.__code__)
            one.function.__globals__[_COUNTER] = calls
            one.function.__code__ = mutated
        yield calls


def mutate(one: Edit, name: str) -> CodeType:
    """Return the mutated code of a function, which counts its calls."""
    function = one.function
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in one.changes:
        if text.count(old) != 1:
            raise LookupError(
                f"mutant {name}: {function.__qualname__} contains {old!r} {text.count(old)} times, not once: "
                "update the mutant to the changed code"
            )
        text = text.replace(old, new)
    tree = ast.parse(text)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    definition.decorator_list = []
    definition.body.insert(0, ast.parse(f"{_COUNTER}()").body[0])
    # Compiled in a class body, so that `super()` works; with the flag of `from __future__ import
    # annotations`, which all modules of the project have.
    within: ast.stmt = ast.parse("class _Within: pass").body[0]
    assert isinstance(within, ast.ClassDef)
    within.body = [definition]
    tree.body = [within]
    ast.fix_missing_locations(tree)
    module = compile(tree, f"<mutant {name}>", "exec", flags=annotations.compiler_flag, dont_inherit=True)
    code = _find_code(_find_code(module, "_Within"), function.__name__)
    assert code.co_freevars == function.__code__.co_freevars, f"mutant {name} changes the closure"
    return code


def _find_code(code: CodeType, name: str) -> CodeType:
    return next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)


def _restore(function: FunctionType, code: CodeType) -> None:
    function.__code__ = code
    function.__globals__.pop(_COUNTER, None)
