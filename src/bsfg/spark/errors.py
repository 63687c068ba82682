"""Errors as Spark's users meet them: found again in what Spark says, with the hint in what is printed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from bsfg.errors import BsfgError, RemoteError
from bsfg.spark.session import failed

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


_RAISED = re.compile(r"^bsfg\.errors\.(?:\w+\.)?(\w+): (.*?)^(\w+): ([^\n]*)$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"bsfg\.errors\.(?:\w+\.)?(\w+): ([^\n]+)")


def told_by_spark(error: BaseException, says: str = "a step of the ingest failed on Spark") -> BsfgError:
    """Find the error of ours in what Spark says, or give one that says that Spark itself failed.

    Spark passes on only the text of a Python traceback; `told` sees to it that code and hint are in it.
    """
    if isinstance(error, BsfgError):
        return error
    text = str(error)
    for found in reversed(_RAISED.findall(text)):
        _, message, code, hint = found
        kind = BsfgError.registry.get(code)
        if kind is not None and kind is not RemoteError:
            return kind(message.strip(), hint=hint)
    kinds = {kind.__name__: kind for kind in BsfgError.registry.values()}
    for name, message in reversed(_NAMED.findall(text)):
        if name in kinds:
            return kinds[name](message.strip()[:500])
    return failed(says, text or type(error).__name__)
