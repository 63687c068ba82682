"""Errors as Spark's users meet them: inside a Python traceback, so the hint must be part of what is printed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from bsfg.errors import BsfgError

P = ParamSpec("P")
R = TypeVar("R")


def told(method: Callable[P, R]) -> Callable[P, R]:
    """Have a method, and the iterator that it gives, print code and hint with the errors that they raise."""

    @functools.wraps(method)
    def telling(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = method(*args, **kwargs)
        except BsfgError as error:
            tell(error)
            raise
        if isinstance(result, Iterator):
            return _telling_all(result)  # type: ignore[return-value]
        return result

    return telling


def _telling_all(items: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from items
    except BsfgError as error:
        tell(error)
        raise


def tell(error: BsfgError) -> None:
    """Add code and hint to what is printed of an error, once."""
    note = f"{error.code}: {error.hint}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
