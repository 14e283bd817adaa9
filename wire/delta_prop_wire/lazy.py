"""A property that is computed on first access and stored in the instance.

Like `functools.cached_property` without the lock that it takes before Python 3.12, which costs more than
most of the computations here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """Decorator that turns a method without arguments into a property that is computed once."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        value = self._compute(instance)
        setattr(instance, self._name, value)  # `instance.__dict__` would create that dictionary first
        return value
