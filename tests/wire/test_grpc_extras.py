"""What tools expect beside the services: health checks, reflection, and a clean end."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.wire.conftest import Sites
from tests.wire.entries import fetch_entries
from tests.wire.site import STREAM, until

from bsfg.batch import FactBatch
from bsfg.errors import PeerUnreachable, PortUnavailable
from bsfg.node.listeners import Listeners
from bsfg.node.service import NodeService
from bsfg.testing.facts import message, messages
from bsfg.wire.service import Caller


async def test_health_is_told(sites: Sites) -> None:
    """Health checks answer for the node and for each service."""
    site = await sites()
    async with grpc.aio.insecure_channel(site.grpc_address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        for name in ("", "bsfg.v1.Boundary", "bsfg.v1.Admin"):
            answer = await check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await site.listeners.grpc.serving(False)
        answer = await check(health_pb2.HealthCheckRequest(service="bsfg.v1.Boundary"))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_tools_can_ask_for_the_protocol(sites: Sites) -> None:
    """Reflection lists the services and gives their files."""
    site = await sites()
    async with grpc.aio.insecure_channel(site.grpc_address) as channel:
        ask = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="bsfg.v1.Boundary"),
        ]
        listed, file = [answer async for answer in ask(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert {"bsfg.v1.Boundary", "bsfg.v1.Admin", "grpc.health.v1.Health"} <= names
    assert b"AppendFacts" in b"".join(file.file_descriptor_response.file_descriptor_proto)


async def test_what_is_under_way_is_finished_at_the_end(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop waits for calls under way, answers what had come, and refuses what comes later."""
    site = await sites(storage="log")
    come: list[str] = []
    prepare = NodeService.prepare

    def counted(service: NodeService, caller: Caller, stream: str, facts: Any) -> Any:
        come.append(stream)
        return prepare(service, caller, stream, facts)

    monkeypatch.setattr(NodeService, "prepare", counted)
    stream = site.client().append_stream(STREAM)
    sent = [await stream.send(FactBatch.from_messages(messages(50, first=50 * number))) for number in range(8)]
    await until(lambda: len(come) == len(sent))
    closing = asyncio.create_task(stream.close())
    await site.listeners.stop(10)
    await closing
    assert sum(map(len, await asyncio.gather(*sent))) == 400
    with pytest.raises(PeerUnreachable):
        await site.client().append_fact(STREAM, message("late"))
    assert (await (await site.parts.store(STREAM)).stats()).end == 400


async def test_a_port_has_one_node(sites: Sites) -> None:
    """A second node on the same port is refused with a hint, and leaves nothing open."""
    site = await sites()
    limits = site.parts.settings.limits
    for grpc_port, http_port in ((site.listeners.grpc.port, 0), (0, site.listeners.http.port)):
        second = Listeners(site.boundary, site.admin, limits, zone="plant")
        with pytest.raises(PortUnavailable, match="another process uses the port"):
            await second.start(("127.0.0.1", grpc_port), ("127.0.0.1", http_port))
        await second.stop(0)


async def test_metrics_follow_the_requests(sites: Sites) -> None:
    """Requests are timed by operation, failures counted by code, and those under way shown."""
    site = await sites()
    client = site.client()
    await client.append_fact(STREAM, message("a"))
    await site.consumer()
    waiting = asyncio.create_task(fetch_entries(client, "historian", wait_seconds=60, limit=1))
    await waiting
    with pytest.raises(Exception, match="taken"):
        await client.append_fact(STREAM, message("a", 2))
    await until(lambda: site.listeners.admission.serving == 0)
    text = site.parts.metrics.text().decode()
    assert 'bsfg_request_seconds_count{operation="AppendFact"} 2.0' in text
    assert 'bsfg_request_failures_total{code="conflicting_duplicate"} 1.0' in text
    assert "bsfg_requests_in_flight 0.0" in text
