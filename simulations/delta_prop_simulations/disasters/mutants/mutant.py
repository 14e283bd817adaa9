"""A mutant: a few words of our own code that are other ones for the duration of a run.

The code of a function is replaced, not the function: so whoever holds it, under whatever name, runs the wrong
one. What it takes away or puts in is said as text; where the code no longer says that, the mutant is refused.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STRIKE = "__strike_of_a_mutant__"


@dataclass(frozen=True, slots=True)
class Edit:
    """One function, and what of its text becomes what: pairs of text, each found there just once."""

    function: FunctionType
    changes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong version of our code. `what` says what is wrong, `promise` what it breaks."""

    name: str
    what: str
    promise: str
    edits: tuple[Edit, ...]


class Strikes:
    """How often the wrong code ran."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def edit(function: Callable[..., Any], *changes: tuple[str, str]) -> Edit:
    """The edit of a function, method or the getter of a property."""
    assert isinstance(function, FunctionType), f"{function!r} is not written in Python"
    return Edit(function, changes)


def getter(owner: type, name: str) -> Callable[..., Any]:
    """What a property of a class, or of one that it builds on, calls."""
    found = inspect.getattr_static(owner, name)
    assert isinstance(found, property)
    assert found.fget is not None
    return found.fget


@contextmanager
def applied(mutant: Mutant) -> Iterator[Strikes]:
    """Have the wrong code run, in this process, until the scope ends; one mutant at a time."""
    strikes = Strikes()
    with ExitStack() as undo:
        for one in mutant.edits:
            wrong = mutated(one, mutant.name)
            undo.callback(_restore, one.function, one.function.__code__)
            one.function.__globals__[_STRIKE] = strikes
            one.function.__code__ = wrong
        yield strikes


def mutated(one: Edit, name: str) -> CodeType:
    """The wrong code of a function, which counts a strike whenever it is called."""
    function = one.function
    text = textwrap.dedent(inspect.getsource(function))
    for was, becomes in one.changes:
        if text.count(was) != 1:
            raise LookupError(
                f"mutant {name}: {function.__qualname__} says {was!r} {text.count(was)} times, not once: "
                "its code has changed, so write the mutant anew"
            )
        text = text.replace(was, becomes)
    tree = ast.parse(text)
    made = tree.body[0]
    assert isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef)
    made.decorator_list = []
    made.body.insert(0, ast.parse(f"{_STRIKE}()").body[0])
    # Within a class, so that `super()` means what it did; the flag is what all our modules begin with.
    within: ast.stmt = ast.parse("class _Within: pass").body[0]
    assert isinstance(within, ast.ClassDef)
    within.body = [made]
    tree.body = [within]
    ast.fix_missing_locations(tree)
    module = compile(tree, f"<mutant {name}>", "exec", flags=annotations.compiler_flag, dont_inherit=True)
    code = _code_named(_code_named(module, "_Within"), function.__name__)
    assert code.co_freevars == function.__code__.co_freevars, f"mutant {name} changes what is closed over"
    return code


def _code_named(code: CodeType, name: str) -> CodeType:
    return next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)


def _restore(function: FunctionType, code: CodeType) -> None:
    function.__code__ = code
    function.__globals__.pop(_STRIKE, None)
