"""Damaged messages at every method: each gets an answer with a stable code, never ``internal``, and harms nobody."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from tests.attack.mutating import damaged, made
from tests.wire.site import STREAM, Site

from bsfg.testing.facts import batch, message
from bsfg.wire import limits
from bsfg.wire.connection import _StatusKept
from bsfg.wire.messages import ADMIN, BOUNDARY, Method
from bsfg.wire.status import from_rpc_error

pytestmark = pytest.mark.campaign

BOUNDARY_ROLES = {"PutFacts": "pipeline", "PutLanes": "pipeline", "GetEvidence": "pipeline", "SumFacts": "pipeline"}
ADMIN_ROLES = {"Lease": "pipeline", "Peer": "pipeline", "Report": "pipeline"}
AT_ONCE = 16
BROKEN = frozenset({"internal", "remote_error", "timed_out"})


def role_of(method: Method) -> str:
    """Name an identity that may call a method, so that its messages are looked into."""
    if method.name in BOUNDARY:
        return BOUNDARY_ROLES.get(method.name, "app")
    return next((role for word, role in ADMIN_ROLES.items() if word in method.name), "operator")


def blobs() -> list[bytes]:
    """Give bytes that some field means: batches, digests, sets of ranges."""
    few = batch(3, from_zone="plant")
    return [b"", bytes(few.to_ipc()), bytes(batch(200, from_zone="plant").to_ipc()), bytes(32), b"\x01\x02\x03", b"{}"]


@pytest.mark.soak
async def test_no_message_breaks_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak_size: Callable[[int, int], int]
) -> None:
    """Messages are made from the protocol, damaged and sent to every method by somebody who may call it."""
    monkeypatch.setattr(limits, "DELAY_SECONDS_MAX", 0.0)
    seed = 20_260 if soak_size(0, 1) == 0 else Random().randrange(1 << 32)
    each = soak_size(60, 3_500)
    chance, found, inputs = Random(seed), Counter[str](), 0
    site = await Site.open(tmp_path / "site", storage="log", fetch_wait_max_seconds=0.05)
    try:
        await site.consumer("historian")
        values = blobs()
        for method in (*BOUNDARY.values(), *ADMIN.values()):
            site.act_as(role_of(method))
            async with grpc.aio.insecure_channel(site.grpc_address) as channel:
                codes = await _bombarded(channel, method, chance, values, each)
            inputs += each
            broken = {code: count for code, count in codes.items() if code in BROKEN or code.startswith("grpc:")}
            assert not broken, f"{method.name}: {broken} with seed {seed}"
            found += codes
        site.act_as("app")
        answer = await site.client().append_fact(STREAM, message("afterwards", from_zone="plant"))
        assert answer.offset >= 0
    finally:
        await site.close()
    print(f"{inputs} messages, seed {seed}: {dict(found.most_common())}")


async def _bombarded(
    channel: grpc.aio.Channel, method: Method, chance: Random, values: list[bytes], count: int
) -> Counter[str]:
    codes: Counter[str] = Counter()
    work = iter(range(count))

    async def one() -> None:
        for _ in work:
            codes[await _answered(channel, method, _messages(method, chance, values))] += 1

    async with asyncio.timeout(900):
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    return codes


def _messages(method: Method, chance: Random, values: list[bytes]) -> list[bytes]:
    count = chance.randrange(1, 4) if method.request_streams else 1
    return [_message(method, chance, values) for _ in range(count)]


def _message(method: Method, chance: Random, values: list[bytes]) -> bytes:
    data: bytes = made(method.request_type, chance, values).SerializeToString()
    return damaged(data, chance) if chance.random() < 0.6 else data


async def _answered(channel: grpc.aio.Channel, method: Method, parts: list[bytes]) -> str:
    """Send raw bytes and give the code of the answer, ``ok`` where it is none; codes inside streams count too."""

    async def sent() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    call = channel.stream_stream(method.path)(sent(), timeout=60)
    # A node that refuses answers while the caller is still sending; gRPC would then hide its status behind its own.
    call._cython_call = _StatusKept(call._cython_call)
    worst = "ok"
    try:
        async for data in call:
            inside = _error_inside(method, data)
            if inside in BROKEN:
                worst = inside
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).code
    return worst


def _error_inside(method: Method, data: bytes) -> str:
    answer: Any = method.response_type.FromString(data)
    if "error" in answer.DESCRIPTOR.fields_by_name and answer.HasField("error"):
        return str(answer.error.code)
    return ""
