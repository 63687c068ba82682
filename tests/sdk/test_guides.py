"""The guides cannot drift from the classes and settings they describe."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from bsfg.batch import PIECE_BYTES
from bsfg.errors import BsfgError
from bsfg.sdk.consumer import AsyncConsumer, Consumer
from bsfg.sdk.consuming import ConsumerOptions, ConsumerSettings
from bsfg.sdk.core import DEADLINE_SECONDS, ProducerOptions, ProducerSettings
from bsfg.sdk.futures import FactFuture
from bsfg.sdk.local import LocalReader
from bsfg.sdk.producer import AsyncProducer, Producer

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PRODUCER, CONSUMER = ((GUIDES / name).read_text(encoding="utf-8") for name in ("producer.md", "consumer.md"))


@pytest.mark.parametrize("text", [PRODUCER, CONSUMER], ids=["producer", "consumer"])
def test_code_in_the_guides_is_real(text: str) -> None:
    """Every Python block parses, and what it imports exists."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block.replace(", …", ""))):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize(
    ("text", "owners"),
    [
        (PRODUCER, {"producer": Producer, "future": FactFuture}),
        (CONSUMER, {"consumer": Consumer, "reader": LocalReader}),
    ],
    ids=["producer", "consumer"],
)
def test_methods_in_the_guides_exist(text: str, owners: dict[str, type]) -> None:
    """Whatever is called on a producer, future, consumer or reader is there."""
    called = re.findall(r"\b(producer|future|consumer|reader)\.(?!md\b|crt\b|key\b)(\w+)", text)
    assert called
    for name, method in called:
        assert hasattr(owners[name], method), f"{name}.{method}"


def test_errors_in_the_guides_exist() -> None:
    """Errors are called by their names."""
    known = {cls.__name__ for cls in BsfgError.registry.values()}
    named = {"ConflictingDuplicate", "FactTooLarge", "FolderLocked", "InvalidFact", "SignatureInvalid", "StorageClosed"}
    assert named <= known
    assert all(name in PRODUCER + CONSUMER for name in named)


def test_defaults_in_the_guides_are_right() -> None:
    """The numbers that the guides state are those of the code."""
    producer, consumer = ProducerOptions(), ConsumerOptions()
    assert f"batches ({producer.max_in_flight})" in PRODUCER
    assert f"({DEADLINE_SECONDS:.0f}; for ever with an outbox)" in PRODUCER
    assert f"({producer.outbox_capacity_bytes >> 30} GiB)" in PRODUCER
    assert f"above {PIECE_BYTES >> 20} MiB" in PRODUCER
    assert f"`confirm_every_facts` ({consumer.confirm_every_facts:,})" in CONSUMER
    assert f"`confirm_interval_seconds` ({consumer.confirm_interval_seconds:.0f})" in CONSUMER
    assert f"`inbox_capacity_bytes` ({consumer.inbox_capacity_bytes >> 30} GiB)" in CONSUMER
    max_latest = inspect.signature(LocalReader).parameters["max_latest"].default
    assert f"`max_latest` ({max_latest:,})" in CONSUMER


@pytest.mark.parametrize("options", [ProducerOptions, ConsumerOptions])
def test_every_option_is_described(options: type) -> None:
    """The docstring of the options names each of them."""
    named = re.findall(r"``(\w+)``", options.__doc__ or "")
    assert {field.name for field in fields(options)} <= set(named)


@pytest.mark.parametrize(
    ("options", "settings"), [(ProducerOptions, ProducerSettings), (ConsumerOptions, ConsumerSettings)]
)
def test_type_checkers_know_every_option(options: type, settings: type) -> None:
    """The keyword arguments that type checkers see are the options, with their types."""
    declared = {field.name: field.type for field in fields(options)}
    known = {name: getattr(kind, "__forward_arg__", kind) for name, kind in settings.__annotations__.items()}
    assert known == declared


@pytest.mark.parametrize(("blocking", "other"), [(Producer, AsyncProducer), (Consumer, AsyncConsumer)])
def test_both_kinds_have_the_same_methods(blocking: type, other: type) -> None:
    """What the blocking class can do, the one for asyncio can do, with the same arguments."""
    for name, method in inspect.getmembers(blocking, inspect.isfunction):
        if name.startswith("_"):
            continue
        same = getattr(other, name)
        ours, theirs = (set(inspect.signature(each).parameters) for each in (method, same))
        assert ours - {"timeout_seconds"} == theirs - {"timeout_seconds"}, name
