"""How an error crosses the wire: one table from its code to the statuses of gRPC and HTTP, and back.

The status is for proxies and generic clients. What BSFG itself goes by is the code in the error's JSON form: in the
trailing metadata of gRPC, in the body of an HTTP answer, or inside an ack.
"""

from __future__ import annotations

from typing import Any

import grpc
import orjson

from bsfg.errors import (
    BsfgError,
    CertificateInvalid,
    MessageTooLarge,
    Overloaded,
    PeerUnreachable,
    RemoteError,
    ServerIdentityMismatch,
    TimedOut,
)
from bsfg.wire import boundary_pb2 as pb
from bsfg.wording import one_line

ERROR_METADATA = "bsfg-error-bin"
ERROR_BYTES_MAX = 4_096
"""gRPC refuses more than 8 KiB of metadata in all."""

MESSAGE_CHARACTERS_MAX = 1_000

Status = grpc.StatusCode

STATUSES: dict[str, tuple[grpc.StatusCode, int]] = {
    "internal": (Status.INTERNAL, 500),
    "remote_error": (Status.UNKNOWN, 502),
    # What a caller sent.
    "invalid_fact": (Status.INVALID_ARGUMENT, 422),
    "fact_too_large": (Status.INVALID_ARGUMENT, 413),
    "invalid_argument": (Status.INVALID_ARGUMENT, 400),
    "conflicting_duplicate": (Status.ALREADY_EXISTS, 409),
    "hash_collision": (Status.ALREADY_EXISTS, 409),
    "digest_mismatch": (Status.INVALID_ARGUMENT, 422),
    "hasher_unknown": (Status.FAILED_PRECONDITION, 422),
    "artifact_missing": (Status.NOT_FOUND, 404),
    "artifact_conflict": (Status.ALREADY_EXISTS, 409),
    "artifact_too_large": (Status.INVALID_ARGUMENT, 413),
    "signature_invalid": (Status.INVALID_ARGUMENT, 422),
    "signature_missing": (Status.INVALID_ARGUMENT, 422),
    "implausible_time": (Status.INVALID_ARGUMENT, 422),
    "frame_invalid": (Status.INVALID_ARGUMENT, 400),
    "message_too_large": (Status.RESOURCE_EXHAUSTED, 413),
    # What a buffer cannot do now.
    "buffer_full": (Status.RESOURCE_EXHAUSTED, 503),
    "gaps_full": (Status.RESOURCE_EXHAUSTED, 503),
    "quarantine_full": (Status.RESOURCE_EXHAUSTED, 503),
    "artifact_store_full": (Status.RESOURCE_EXHAUSTED, 503),
    "disk_full": (Status.RESOURCE_EXHAUSTED, 507),
    "outcome_unknown": (Status.UNAVAILABLE, 503),
    "storage_busy": (Status.UNAVAILABLE, 503),
    "storage_closed": (Status.UNAVAILABLE, 503),
    "storage_failed": (Status.INTERNAL, 500),
    "storage_foreign": (Status.FAILED_PRECONDITION, 500),
    "storage_moved": (Status.FAILED_PRECONDITION, 500),
    "storage_not_empty": (Status.FAILED_PRECONDITION, 500),
    "migration_unfinished": (Status.FAILED_PRECONDITION, 500),
    "storage_taken": (Status.UNAVAILABLE, 503),
    "storage_unable": (Status.FAILED_PRECONDITION, 400),
    "storage_unavailable": (Status.UNAVAILABLE, 503),
    "storage_unsafe": (Status.FAILED_PRECONDITION, 500),
    "stream_unavailable": (Status.UNAVAILABLE, 503),
    "storage_read_only": (Status.FAILED_PRECONDITION, 500),
    "storage_unreadable": (Status.FAILED_PRECONDITION, 500),
    "folder_locked": (Status.FAILED_PRECONDITION, 500),
    "not_a_data_folder": (Status.FAILED_PRECONDITION, 500),
    "format_unsupported": (Status.FAILED_PRECONDITION, 500),
    "log_damaged": (Status.DATA_LOSS, 500),
    "backup_untrusted": (Status.FAILED_PRECONDITION, 500),
    "hasher_mismatch": (Status.FAILED_PRECONDITION, 500),
    "policy_invalid": (Status.FAILED_PRECONDITION, 500),
    "file_exists": (Status.ALREADY_EXISTS, 409),
    # Positions.
    "foreign_log": (Status.FAILED_PRECONDITION, 409),
    "offset_out_of_range": (Status.OUT_OF_RANGE, 416),
    "truncate_refused": (Status.FAILED_PRECONDITION, 409),
    "unknown_consumer": (Status.NOT_FOUND, 404),
    "consumer_exists": (Status.ALREADY_EXISTS, 409),
    "consumer_retired": (Status.FAILED_PRECONDITION, 410),
    "too_many_ranges": (Status.RESOURCE_EXHAUSTED, 429),
    "fact_not_found": (Status.NOT_FOUND, 404),
    "unknown_stream": (Status.NOT_FOUND, 404),
    "unknown_service": (Status.NOT_FOUND, 404),
    # Gates and leases.
    "invalid_transition": (Status.FAILED_PRECONDITION, 409),
    "gate_held": (Status.FAILED_PRECONDITION, 409),
    "unknown_link": (Status.NOT_FOUND, 404),
    "lease_held": (Status.FAILED_PRECONDITION, 409),
    "lease_lost": (Status.FAILED_PRECONDITION, 409),
    # Who may do what.
    "zone_not_allowed": (Status.PERMISSION_DENIED, 403),
    "identity_unknown": (Status.UNAUTHENTICATED, 401),
    "identity_revoked": (Status.UNAUTHENTICATED, 401),
    "sign_in_required": (Status.UNAUTHENTICATED, 401),
    "host_unknown": (Status.FAILED_PRECONDITION, 421),
    "permission_denied": (Status.PERMISSION_DENIED, 403),
    "config_invalid": (Status.FAILED_PRECONDITION, 500),
    "certificate_invalid": (Status.UNAUTHENTICATED, 401),
    "server_identity_mismatch": (Status.UNAUTHENTICATED, 502),
    "tls_not_hardened": (Status.FAILED_PRECONDITION, 500),
    "extra_missing": (Status.FAILED_PRECONDITION, 500),
    # What happens in a pipeline and is only ever told to its own caller.
    "facts_missing": (Status.FAILED_PRECONDITION, 409),
    "java_missing": (Status.FAILED_PRECONDITION, 500),
    "link_stopped": (Status.FAILED_PRECONDITION, 409),
    "spool_not_shared": (Status.FAILED_PRECONDITION, 500),
    "landing_damaged": (Status.DATA_LOSS, 500),
    "landing_stale": (Status.FAILED_PRECONDITION, 409),
    "file_changed": (Status.FAILED_PRECONDITION, 409),
    "file_unreadable": (Status.INVALID_ARGUMENT, 422),
    "row_unreadable": (Status.INVALID_ARGUMENT, 422),
    "sink_away": (Status.UNAVAILABLE, 503),
    "sink_behind": (Status.FAILED_PRECONDITION, 409),
    "sink_changed": (Status.FAILED_PRECONDITION, 409),
    "sink_refused": (Status.FAILED_PRECONDITION, 409),
    "spark_failed": (Status.UNAVAILABLE, 503),
    "workers_unfit": (Status.FAILED_PRECONDITION, 500),
    "cluster_in_clear": (Status.FAILED_PRECONDITION, 500),
    # The node and the way to it.
    "overloaded": (Status.RESOURCE_EXHAUSTED, 429),
    "timed_out": (Status.DEADLINE_EXCEEDED, 504),
    "port_unavailable": (Status.FAILED_PRECONDITION, 500),
    "not_ready": (Status.UNAVAILABLE, 503),
    "standing_by": (Status.UNAVAILABLE, 503),
    "peer_unreachable": (Status.UNAVAILABLE, 502),
}


def grpc_status(error: BsfgError) -> grpc.StatusCode:
    """Give the gRPC status of an error; a code that is not in the table counts as internal."""
    return STATUSES.get(error.code, STATUSES["internal"])[0]


def http_status(error: BsfgError) -> int:
    """Give the HTTP status of an error."""
    return STATUSES.get(error.code, STATUSES["internal"])[1]


def encoded(error: BsfgError) -> bytes:
    """Write an error as JSON that fits into metadata: a message that is too long is cut, details may be left out."""
    whole = error.to_dict()
    whole["message"] = whole["message"][:MESSAGE_CHARACTERS_MAX]
    data = orjson.dumps(whole, default=str)
    if len(data) > ERROR_BYTES_MAX:
        whole.pop("details", None)
        data = orjson.dumps(whole, default=str)
    return data


def decoded(data: bytes) -> BsfgError:
    """Rebuild an error that somebody else wrote, whatever he wrote."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        return RemoteError("the other side reported an error that cannot be read")
    return _rebuilt(found, found.get("details"))


def error_message(error: BsfgError) -> pb.Error:
    """Give the form of an error inside a stream."""
    found = error.to_dict()
    details = orjson.dumps(found["details"], default=str).decode() if "details" in found else ""
    return pb.Error(
        code=error.code,
        message=error.message[:MESSAGE_CHARACTERS_MAX],
        retryable=error.retryable,
        hint=error.hint,
        details_json=details,
    )


def error_of(message: pb.Error) -> BsfgError:
    """Rebuild an error from its form inside a stream."""
    try:
        details = orjson.loads(message.details_json) if message.details_json else None
    except orjson.JSONDecodeError:
        details = None
    return _rebuilt({"code": message.code, "message": message.message, "hint": message.hint}, details)


def _rebuilt(found: dict[str, Any], details: Any) -> BsfgError:
    texts = {name: _words(found.get(name)) for name in ("code", "message", "hint")}
    known = details if isinstance(details, dict) else {}
    # These would collide with the arguments of the error's own constructor.
    safe = {name: value for name, value in known.items() if name not in ("self", "message", "hint")}
    return BsfgError.from_dict({**texts, "hint": texts["hint"] or None, "details": safe})


def _words(found: object) -> str:
    """Take words of the other side: they are shown here, so they stay within a line of reasonable length."""
    return one_line(str(found or "")[:MESSAGE_CHARACTERS_MAX])


def from_rpc_error(error: grpc.aio.AioRpcError, *, where: str = "the other side") -> BsfgError:
    """Give the error that a failed call stands for: the one the server wrote, or what gRPC says happened.

    What gRPC says is for those who know it: it is said in our own words, and kept as a note of the error, which
    tracebacks show (BSFG_DEBUG=1).
    """
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_METADATA:
            return decoded(bytes(value))
    text = one_line((error.details() or "")[:MESSAGE_CHARACTERS_MAX])
    found = _in_our_words(error.code(), text, where)
    found.add_note(f"gRPC said {error.code().name}: {text}")
    return found


def _in_our_words(status: grpc.StatusCode, text: str, where: str) -> BsfgError:
    if status == Status.DEADLINE_EXCEEDED:
        return TimedOut(f"{where} did not answer in time")
    if status == Status.RESOURCE_EXHAUSTED and "arger than max" in text:
        return MessageTooLarge(f"a message to or from {where} is larger than its receiver takes")
    if status == Status.RESOURCE_EXHAUSTED:
        return Overloaded(f"{where} serves as many calls as it may")
    if status == Status.UNAVAILABLE:
        return _unavailable(where, text)
    if status == Status.CANCELLED:
        return PeerUnreachable(f"{where} ended the call")
    code = status.name.lower()
    if status == Status.UNIMPLEMENTED:
        return RemoteError(f"{where} does not know this call", remote_code=code)
    return RemoteError(f"{where} answered with the status {code} and did not say why", remote_code=code)


_WHY = (
    (("Connection refused",), "nobody listens there"),
    (("DNS resolution failed", "ame or service not known", "Domain name not found"), "nobody knows the host's name"),
    (("unreachable", "No route to host"), "no network leads there"),
    (("imed out", "imeout", "ping", "keepalive"), "it does not answer"),
    (("WRONG_VERSION_NUMBER", "http2 header"), "it does not speak as a node does"),
    (("CERTIFICATE_REQUIRED", "ALERT", "alert"), "it refuses our certificate"),
    (("andshake", "SSL_", "TSI_"), "no TLS handshake comes about"),
    (("reset", "losed", "GOAWAY", "Broken pipe", "removed", "EOF", "recvmsg", "sendmsg"), "the connection was broken"),
)
"""What of gRPC's words means what; the first that is found counts."""


_NOT_BEGUN = ("error code 7)", "REFUSED_STREAM")
"""What gRPC says of a call that the other side has refused below HTTP/2, before anything of it was looked at."""


_NOT_SENT = "Stream removed (GOAWAY received; Error code: 0"
"""What gRPC says of a call that was made on a connection just as the other side ended it in peace.

The words stand at the beginning: behind others they are an aside about a connection that broke.
"""


def was_not_sent(error: grpc.aio.AioRpcError) -> bool:
    """Tell whether a call came too late for its connection, and goes over the next one without any wait."""
    return error.code() == Status.UNAVAILABLE and (error.details() or "").startswith(_NOT_SENT)


def was_not_begun(error: grpc.aio.AioRpcError) -> bool:
    """Tell whether nothing of a call was looked at, so that the same may be sent again, whatever it is."""
    refused = error.code() == Status.UNAVAILABLE and any(words in (error.details() or "") for words in _NOT_BEGUN)
    return refused or was_not_sent(error)


def _unavailable(where: str, text: str) -> BsfgError:
    """Tell an absent server, for which one waits, from a wrong one; gRPC only does so in its words."""
    if "Hostname Verification Check failed" in text:
        return ServerIdentityMismatch(f"the certificate of {where} carries another name than the one that is meant")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return CertificateInvalid(f"the certificate of {where} is of no authority that is trusted here, or out of date")
    if any(words in text for words in _NOT_BEGUN):
        return Overloaded(f"{where} takes no more calls over one connection at once", limit="concurrent_per_identity")
    why = next((f": {said}" for words, said in _WHY if any(word in text for word in words)), "")
    return PeerUnreachable(f"{where} cannot be reached{why}")


def reason_of(error: OSError) -> str:
    """Say why a connection failed, in the words that a failed call is told in."""
    text = error.strerror or str(error) or type(error).__name__
    return next((said for words, said in _WHY if any(word in text for word in words)), text)
