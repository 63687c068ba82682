"""Errors on the wire: every code has its statuses, and whatever the other side writes becomes an error."""

import json

import grpc
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import BsfgError, BufferFull, InvalidFact, PeerUnreachable, RemoteError
from bsfg.wire.status import (
    ERROR_BYTES_MAX,
    STATUSES,
    decoded,
    encoded,
    error_message,
    error_of,
    from_rpc_error,
    grpc_status,
    http_status,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def test_every_error_has_its_statuses() -> None:
    """The table names exactly the codes that exist, and no error looks like a success."""
    assert set(STATUSES) == {BsfgError.code, *BsfgError.registry}
    assert all(status != grpc.StatusCode.OK and 400 <= number < 600 for status, number in STATUSES.values())


def test_retryable_errors_look_retryable() -> None:
    """Generic clients that go by HTTP status retry what can be retried, and nothing that a caller must correct."""
    for code, kind in BsfgError.registry.items():
        number = STATUSES[code][1]
        if number in (400, 401, 403, 404, 410, 413, 416, 422):
            assert not kind.retryable, code


@pytest.mark.parametrize("kind", [BsfgError, *BsfgError.registry.values()], ids=lambda kind: kind.code)
def test_errors_survive_the_way(kind: type[BsfgError]) -> None:
    """An error comes out as it went in: class, message, hint and details, in metadata and inside streams."""
    error = kind("what happened", hint="what to do", row=3, field="subject", remote_code="x")
    if kind is not BsfgError:
        for again in (decoded(encoded(error)), error_of(error_message(error))):
            assert type(again) is kind
            assert again.to_dict() == error.to_dict()
    assert (grpc_status(error), http_status(error)) == STATUSES[kind.code]


def test_large_errors_fit_into_metadata() -> None:
    """A message without end is cut and huge details are left out, so that the status is never lost for its size."""
    error = InvalidFact("x" * 100_000, rows=list(range(10_000)))
    data = encoded(error)
    assert len(data) <= ERROR_BYTES_MAX
    assert isinstance(decoded(data), InvalidFact)
    assert len(error_message(error).message) <= 1_000


@given(st.binary(max_size=100) | json_values.map(orjson.dumps))
def test_any_bytes_become_an_error(data: bytes) -> None:
    """Whatever a peer sends as an error is read as one, without another error."""
    assert isinstance(decoded(data), BsfgError)


@given(st.sampled_from(sorted(STATUSES)), json_values, json_values, st.dictionaries(st.text(), json_values, max_size=3))
def test_any_fields_become_an_error(code: str, message: object, hint: object, details: dict[str, object]) -> None:
    """Fields of the wrong type, and details that collide with an error's own arguments, do no harm."""
    details |= {"self": 1, "message": 2, "hint": 3}
    error = decoded(json.dumps({"code": code, "message": message, "hint": hint, "details": details}).encode())
    assert isinstance(error, BsfgError)
    assert isinstance(error.message, str)
    assert isinstance(error.hint, str)


def test_unknown_codes_are_kept() -> None:
    """An error of a newer version is a remote error that names its code."""
    error = decoded(b'{"code": "brand_new", "message": "hm"}')
    assert isinstance(error, RemoteError)
    assert error.details["remote_code"] == "brand_new"


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", "peer_unreachable"),
        (grpc.StatusCode.UNAVAILABLE, "Stream removed (Received RST_STREAM with error code 7)", "overloaded"),
        (grpc.StatusCode.UNAVAILABLE, "CERTIFICATE_VERIFY_FAILED: unable to get", "certificate_invalid"),
        (grpc.StatusCode.UNAVAILABLE, "Hostname Verification Check failed.", "server_identity_mismatch"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "timed_out"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)", "message_too_large"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", "overloaded"),
        (grpc.StatusCode.CANCELLED, "", "peer_unreachable"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "remote_error"),
    ],
)
def test_what_grpc_itself_reports_is_translated(status: grpc.StatusCode, text: str, code: str) -> None:
    """A status without BSFG's own error still becomes one of ours."""
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(status, metadata, metadata, details=text)
    assert from_rpc_error(error, where="there:1").code == code


GRPC_SAYS = {
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
    "Connection refused": "nobody listens there",
    "Stream removed (Transport closed (Socket closed (GOAWAY received; Error code: 0)))": "the connection was broken",
    "DNS resolution failed for nohost:1: Domain name not found": "nobody knows the host's name",
    "recvmsg:Connection reset by peer": "the connection was broken",
    "failed to connect to all addresses; last error: ipv4:10.0.0.9:1: No route to host": "no network leads there",
    "keepalive watchdog timeout": "it does not answer",
    "what no version of gRPC has said so far": "there:1 cannot be reached",
    "Ssl handshake failed: TSI_PROTOCOL_FAILURE: Invalid certificate verification context": "no TLS handshake",
}


@pytest.mark.parametrize("said", GRPC_SAYS)
def test_nobody_reads_the_words_of_grpc(said: str) -> None:
    """What gRPC says of a connection becomes a sentence of ours; its own words are a note for tracebacks."""
    error = from_rpc_error(
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=said),
        where="there:1",
    )
    assert error.message.startswith("there:1 cannot be reached") and GRPC_SAYS[said] in error.message
    assert said not in str(error.to_dict()) and said in error.__notes__[0]


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status != grpc.StatusCode.OK])
def test_no_status_shows_what_grpc_says(status: grpc.StatusCode) -> None:
    """Whatever the status, the text beside it is not told to people."""
    said = "RST_STREAM with error code 2, larger than max (5 vs. 4)"
    error = from_rpc_error(grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details=said))
    assert "RST_STREAM" not in str(error.to_dict())


def test_the_servers_own_error_comes_first() -> None:
    """The error in the metadata counts, whatever the status says."""
    metadata = grpc.aio.Metadata(("bsfg-error-bin", encoded(BufferFull("full"))))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), metadata, details="x")
    assert isinstance(from_rpc_error(error), BufferFull)
    assert isinstance(from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, None, None)), PeerUnreachable)
