"""The HTTP operations against their own OpenAPI document: what fits it, and what does not, is answered by it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.wire.site import Site

from bsfg.wire import limits
from bsfg.wire.operations import openapi

pytestmark = pytest.mark.campaign

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    """Run the listeners of a node in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    site = asyncio.run_coroutine_threadsafe(Site.open(folder, fetch_wait_max_seconds=0.05), loop).result(60)
    asyncio.run_coroutine_threadsafe(site.consumer("historian"), loop).result(60)
    try:
        yield site
    finally:
        asyncio.run_coroutine_threadsafe(site.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.mark.soak
def test_every_operation_answers_as_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak_size: Callable[[int, int], int]
) -> None:
    """No request gives a server's error, an answer of another form than described, or one that is not described."""
    monkeypatch.setattr(limits, "DELAY_SECONDS_MAX", 0.0)
    schema = schemathesis.openapi.from_dict(openapi())
    answers: Counter[int] = Counter()
    with serving(tmp_path / "site") as site:
        address = f"http://127.0.0.1:{site.listeners.http.port}"
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()
            for mode in GenerationMode:
                if mode is GenerationMode.NEGATIVE and not operation.body and not operation.query:
                    continue  # nothing of it could be wrong

                @settings(
                    max_examples=soak_size(15, 400),
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                    database=None,
                )
                @given(case=operation.as_strategy(mode))
                def check(case: Case[Any]) -> None:
                    response = case.call(base_url=address, timeout=60)
                    answers[response.status_code] += 1
                    case.validate_response(response, checks=CHECKS)

                check()
    print(dict(answers))
    assert answers[200] and answers[400]
