"""Every error has a stable code, a hint and a form that crosses the wire."""

import ast
import inspect
import re
from pathlib import Path

import orjson
import pytest

import bsfg.errors
from bsfg.disk import translated
from bsfg.errors import BsfgError, FactTooLarge, InvalidFact, RemoteError

SOURCE = "\n".join(
    path.read_text(encoding="utf-8").replace("from __future__ import annotations", "")
    for path in sorted(Path(bsfg.errors.__file__).parent.glob("*.py"))
)
ERRORS = [
    value
    for _, value in inspect.getmembers(bsfg.errors, inspect.isclass)
    if issubclass(value, BsfgError) and value is not BsfgError
]


def test_the_registry_knows_every_error() -> None:
    """Each class of the module is found by its code, and nothing else is."""
    own = {code: cls for code, cls in BsfgError.registry.items() if cls.__module__.startswith("bsfg.errors.")}
    assert own == {cls.code: cls for cls in ERRORS}
    assert len(own) == len(ERRORS) >= 30


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_says_what_it_is_and_what_to_do(cls: type[BsfgError]) -> None:
    """A code in snake_case of its own, a sentence as docstring and a hint of its own."""
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)
    assert "code" in cls.__dict__
    assert "default_hint" in cls.__dict__
    assert cls.default_hint.endswith(".")
    assert (cls.__doc__ or "").strip().split("\n")[0].endswith((".", ":"))
    assert isinstance(cls.retryable, bool)


@pytest.mark.parametrize("cls", ERRORS)
def test_errors_cross_the_wire(cls: type[BsfgError]) -> None:
    """The dictionary form goes through JSON and gives the same error back, hint and details included."""
    error = cls("what happened", row=3, field="subject", rule="is required")
    sent = orjson.loads(orjson.dumps(error.to_dict()))
    assert set(sent) == {"code", "message", "retryable", "hint", "details"}
    back = BsfgError.from_dict(sent)
    assert type(back) is cls
    assert (str(back), back.hint, back.details) == ("what happened", cls.default_hint, back.details)
    assert back.details == {"row": 3, "field": "subject", "rule": "is required"} or cls is RemoteError
    assert back.retryable == cls.retryable


def test_a_hint_of_the_moment_replaces_the_usual_one() -> None:
    """A hint given with the error travels with it."""
    error = FactTooLarge("too many", hint="Split the batch.")
    assert BsfgError.from_dict(error.to_dict()).hint == "Split the batch."
    assert "details" not in error.to_dict()


def test_an_unknown_code_is_kept() -> None:
    """An error of a newer version keeps its code as a detail, and does not break the reader."""
    back = BsfgError.from_dict({"code": "from_the_future", "message": "m"})
    assert isinstance(back, RemoteError)
    assert back.details == {"remote_code": "from_the_future"}
    for broken in ({}, {"code": None}, {"code": 5, "details": None}, {"code": "invalid_fact", "hint": None}):
        assert BsfgError.from_dict(broken).hint


@pytest.mark.parametrize("details", [{"message": "x", "hint": "y", "self": 1}, "text", 5, ["a"], {"code": "z"}])
def test_a_strangers_details_do_no_harm(details: object) -> None:
    """Details that are none, or are called like arguments, are taken or left without an error of another kind."""
    back = BsfgError.from_dict({"code": "invalid_fact", "message": "m", "details": details})
    assert (type(back), str(back)) == (InvalidFact, "m")
    assert back.details == (details if isinstance(details, dict) else {})


def test_codes_cannot_be_taken_twice() -> None:
    """A second class with the same code is refused when it is defined."""
    with pytest.raises(TypeError, match="is taken by InvalidFact"):
        type("Copy", (BsfgError,), {"code": InvalidFact.code})


def test_codes_are_written_as_literals() -> None:
    """Each code stands in the source once, so that it can be found by searching for it."""
    codes = [
        str(node.value.value)
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "code"
        and isinstance(node.value, ast.Constant)
    ]
    assert sorted(codes) == sorted(cls.code for cls in ERRORS)


def test_a_path_that_leads_nowhere_is_no_broken_disk(tmp_path: Path) -> None:
    """Who gives a path below a file, or one with an endless name, is not sent to look at his disk."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(OSError) as caught:
            path.mkdir()
        error = translated(caught.value, f"making {path}")
        assert (error.code, "Check the path" in error.hint, "disk" in error.hint) == ("storage_failed", True, False)
