"""What takes long by its bytes is done beside the event loop, what is small on it, on every way into a node and out."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.journey.zones import append
from tests.wire.conftest import Sites
from tests.wire.entries import fetch_entries
from tests.wire.site import STREAM

from bsfg.batch import FactBatch
from bsfg.digest import Sha256
from bsfg.fact import Envelope, Fact, Message
from bsfg.journey.link import FetchRequest
from bsfg.node import http, server
from bsfg.offload import STEP_FACTS, THREAD_BYTES, LoopTurns, by_size
from bsfg.testing.clock import FakeClock
from bsfg.testing.facts import messages

LARGE_BYTES = (1 << 20) - 2
JSON = {"content-type": "application/json"}
LINES = {"accept": "application/x-ndjson"}


def large(id: str) -> Message:
    """Make a fact of one mebibyte."""
    return Message(
        Envelope("plant", "enterprise", 1, message_id=id), Fact("thing:1", "said", b'"%b"' % (b"x" * LARGE_BYTES))
    )


class Work:
    """Notes of each piece of work that takes long by its bytes: what it was, how much, and whether on the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, int, bool]] = []
        self._loop_thread = threading.get_ident()
        self._watch(monkeypatch, Sha256, "digest_all", lambda hasher, items: sum(map(len, items)))
        self._watch(monkeypatch, FactBatch, "to_ipc_parts", lambda batch: batch.weight_bytes)
        self._watch(monkeypatch, server, "entry_message", lambda entry, *_: len(entry.message.fact.object))
        self._watch(monkeypatch, http, "entry_to_dict", lambda entry: len(entry.message.fact.object))
        self._watch(monkeypatch, http, "_facts", lambda body, *_: len(body))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if name == "digest_all":
                args = (args[0], list(args[1]))
            self.done.append((name, size(*args), threading.get_ident() == self._loop_thread))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    def check(self, *expected: str) -> None:
        """Check that each was done on the loop exactly if it was small, and that these were done."""
        wrong = [each for each in self.done if each[2] == (each[1] >= THREAD_BYTES)]
        assert wrong == []
        assert set(expected) <= {name for name, _, _ in self.done}


async def test_a_large_fact_leaves_the_loop_to_others(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fact of 1 MiB is sealed, written and read in a thread, whichever way it comes and goes."""
    site = await sites(storage="log", message_bytes=16 << 20)
    await site.consumer()
    client, work = site.client(), Work(monkeypatch)
    await client.append_fact(STREAM, large("single"))
    await client.append(STREAM, FactBatch.from_messages([large("batch")]))
    body = {
        "envelope": {"to_zone": "enterprise", "message_id": "http", "produced_at_unix_ms": 1},
        "fact": {"subject": "thing:1", "predicate": "said", "object": "x" * LARGE_BYTES},
    }
    answer = await site.http("POST", f"/v1/streams/{STREAM}/facts", json.dumps(body), headers=JSON)
    assert answer.status == 200
    work.check("digest_all", "_facts", "to_ipc_parts")
    wanted = FetchRequest(max_facts=10, max_bytes=8 << 20)
    fetched = await client.fetch("historian", wanted)
    assert sum(len(frame.entries) for frame in fetched.frames if frame.entries is not None) == 3
    found = await fetch_entries(client, "historian", limit=10, max_bytes=8 << 20)
    assert len(found.entries) == 3
    for headers in ({}, LINES):
        fetched_by = await site.http("GET", "/v1/consumers/historian/facts?max_bytes=8000000", headers=headers)
        assert len(fetched_by.body) > 3 * LARGE_BYTES
    work.check("entry_message", "entry_to_dict")
    assert {size >= THREAD_BYTES for _, size, _ in work.done} == {True}


async def test_a_few_large_facts_among_many_small_ones(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small facts are on average, a large one is written in a thread, and the small ones on the loop."""
    site = await sites(storage="log", message_bytes=16 << 20)
    await site.consumer()
    client = site.client()
    facts = [*messages(300), large("one"), large("two"), *messages(300, first=300)]
    await client.append(STREAM, FactBatch.from_messages(facts))
    work = Work(monkeypatch)
    found = await fetch_entries(client, "historian", limit=1_000, max_bytes=8 << 20)
    assert [entry.offset for entry in found.entries] == list(range(602))
    for headers in ({}, LINES):
        answer = await site.http("GET", "/v1/consumers/historian/facts?limit=1000&max_bytes=8000000", headers=headers)
        lines = answer.body.splitlines() if headers else [json.dumps(each) for each in answer.json()["entries"]]
        assert [json.loads(line)["offset"] for line in lines] == list(range(602))
    work.check("entry_message", "entry_to_dict")


async def test_small_batches_stay_on_the_loop(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of nine small facts costs no handing over: it is sealed where it came in."""
    site = await sites(storage="log")
    client, work = site.client(), Work(monkeypatch)
    await client.append(STREAM, FactBatch.from_messages(messages(9)))
    work.check("digest_all")
    assert {on_loop for _, _, on_loop in work.done} == {True}


async def test_many_small_facts_are_large_together(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the bytes that count: two hundred facts of 500 bytes leave the loop, too."""
    site = await sites(storage="memory")
    store = await site.parts.store(STREAM)
    work = Work(monkeypatch)
    await append(store, messages(200, object_bytes=500), clock=FakeClock())
    work.check("digest_all")
    assert {on_loop for name, _, on_loop in work.done if name == "digest_all"} == {False}


@pytest.mark.parametrize("size_bytes", [THREAD_BYTES - 1, THREAD_BYTES])
async def test_the_rule_itself(size_bytes: int) -> None:
    """Work below the limit is done at once; at the limit others go on meanwhile, and an error comes back the same."""
    here = threading.get_ident()
    assert (await by_size(size_bytes, threading.get_ident) == here) == (size_bytes < THREAD_BYTES)
    with pytest.raises(ZeroDivisionError):
        await by_size(size_bytes, divmod, 1, 0)


async def test_the_loop_goes_on_while_a_thread_works() -> None:
    """Somebody else's large work ends only after the loop has served another."""
    served = threading.Event()
    working = asyncio.create_task(by_size(THREAD_BYTES, served.wait, 60))
    await asyncio.sleep(0)
    served.set()
    assert await working


async def test_one_step_of_everybody_in_turn() -> None:
    """Between two steps all others have run, and those who take steps take them one after the other."""
    turns, seen = LoopTurns(), []

    def steps(name: str) -> Iterator[str]:
        for _ in range(5):
            seen.append(name)
            yield name

    async def others() -> None:
        for _ in range(20):
            seen.append("other")
            await asyncio.sleep(0)

    by_a, by_b, _ = await asyncio.gather(turns.of(steps("a")), turns.of(steps("b")), others())
    assert (by_a, by_b) == (["a"] * 5, ["b"] * 5)
    taken = [name for name in seen if name != "other"]
    assert taken == ["a", "b"] * 5
    for one, two in pairwise([at for at, name in enumerate(seen) if name != "other"]):
        assert "other" in seen[one:two]


async def test_the_loop_rests_after_a_millisecond_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other threads bring needs the interpreter, which a loop that only yields would never really leave."""
    turns, rests, sleep = LoopTurns(), [], asyncio.sleep

    async def resting(seconds: float) -> None:
        rests.append(seconds)
        await sleep(seconds)

    def steps(seconds: float) -> Iterator[None]:
        for _ in range(4):
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                pass
            yield

    monkeypatch.setattr("bsfg.offload.asyncio.sleep", resting)
    await turns.of(steps(0.0011))
    assert [seconds > 0 for seconds in rests[:4]] == [True] * 4
    rests.clear()
    monkeypatch.setattr("bsfg.offload.time.perf_counter", lambda: 0.0)
    await LoopTurns().of(iter(range(4)))
    assert rests == [0.0] * 5


async def test_a_step_that_fails_leaves_the_turn_to_others() -> None:
    """The error is its caller's alone."""
    turns = LoopTurns()
    with pytest.raises(ZeroDivisionError):
        await turns.of(1 // each for each in (1, 0))
    assert await turns.of([1, 2]) == [1, 2]


@pytest.mark.parametrize("headers", [None, {}, LINES])
async def test_many_small_facts_are_answered_in_steps(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str] | None
) -> None:
    """An answer with a thousand facts is whole and in order, and the event loop is left after every few of them."""
    site = await sites(storage="log")
    await site.consumer()
    client = site.client()
    await client.append(STREAM, FactBatch.from_messages(messages(1_000)))
    steps: list[int] = []
    of = LoopTurns.of

    async def counted(self: LoopTurns, taken: Any) -> Any:
        made = await of(self, taken)
        steps.append(len(made))
        return made

    monkeypatch.setattr(LoopTurns, "of", counted)
    if headers is None:
        offsets = [entry.offset for entry in (await fetch_entries(client, "historian", limit=1_000)).entries]
    else:
        path = "/v1/consumers/historian/facts?limit=1000"
        answer = await site.http("GET", path, headers=headers)
        lines = answer.body.splitlines() if headers else [json.dumps(each) for each in answer.json()["entries"]]
        offsets = [json.loads(line)["offset"] for line in lines]
    assert offsets == list(range(1_000))
    assert sum(steps) >= 1_000 / STEP_FACTS
