"""Every error a user of BSFG can meet, each with a stable code, a retry verdict and a hint.

The codes are part of the product: the same string appears in Python, gRPC details, JSON bodies, log records and
``--json`` output. A duplicate is a result, never an error.
"""

from __future__ import annotations

from typing import Any, ClassVar


class BsfgError(Exception):
    """The base of all errors: a message, a stable ``code``, whether a retry can help, and what to do next."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = "This is a defect in BSFG; please report it with the log around it."
    registry: ClassVar[dict[str, type[BsfgError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.code in BsfgError.registry:
            raise TypeError(f"error code {cls.code!r} is taken by {BsfgError.registry[cls.code].__name__}")
        BsfgError.registry[cls.code] = cls

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.details = details

    def to_dict(self) -> dict[str, Any]:
        """Give the form used in JSON bodies, logs and ``--json``."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "hint": self.hint,
            **({"details": self.details} if self.details else {}),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> BsfgError:
        """Rebuild an error that crossed the wire; an unknown code keeps its code as a detail."""
        cls = BsfgError.registry.get(str(data.get("code")), RemoteError)
        error = cls(str(data.get("message", "")), hint=str(data.get("hint") or "") or None)
        details = data.get("details")
        # Set, not passed: a stranger's detail may be called like an argument.
        error.details = dict(details) if isinstance(details, dict) else {}
        if cls is RemoteError:
            error.details.setdefault("remote_code", data.get("code"))
        return error


class RemoteError(BsfgError):
    """The other side reported an error that this version does not know."""

    code = "remote_error"
    default_hint = "The other side runs another version of BSFG; look at its log for the full record."


# What a caller sent.


class InvalidFact(BsfgError):
    """A fact breaks a rule of the message model; ``details`` name the row, the field and the rule."""

    code = "invalid_fact"
    default_hint = "Correct the named field and send the fact again; nothing of the batch was stored."


class FactTooLarge(BsfgError):
    """An object exceeds the configured limit."""

    code = "fact_too_large"
    default_hint = "Upload the content as an artifact and append a fact that refers to it by digest."


class InvalidArgument(BsfgError):
    """A request names something that cannot be: a negative offset, an empty range, a bad name."""

    code = "invalid_argument"
    default_hint = "Correct the argument named in the message."


class ConflictingDuplicate(BsfgError):
    """The message id is taken by a fact with another body."""

    code = "conflicting_duplicate"
    default_hint = "A fact is immutable: send a correction as a new fact with its own message_id."


class HashCollision(BsfgError):
    """Two different bodies have the same digest; the later one is quarantined."""

    code = "hash_collision"
    default_hint = "Inspect the quarantined entry and the stored one; this should never happen with SHA-256."


class DigestMismatch(BsfgError):
    """Content does not have the digest that was claimed for it."""

    code = "digest_mismatch"
    default_hint = "The content was altered or damaged on its way; fetch or send it again from its origin."


# What a buffer cannot do now.


class BufferFull(BsfgError):
    """The buffer has reached its capacity and its policy is to reject new facts."""

    code = "buffer_full"
    retryable = True
    default_hint = "Keep the fact and retry; see why the frontier does not move, or raise capacity_bytes."


class OutcomeUnknown(BsfgError):
    """The medium failed while the batch was being made durable: it may or may not be stored."""

    code = "outcome_unknown"
    retryable = True
    default_hint = "Send the same facts with the same message ids again: what was stored is answered as a repeat."


class StorageClosed(BsfgError):
    """The storage is closed, or closed itself after a failed fsync."""

    code = "storage_closed"
    retryable = True
    default_hint = "Reopen the storage; if it closed itself, check the disk first (dmesg, smartctl)."


class DiskFull(BsfgError):
    """The file system has no space left; nothing of the batch was stored."""

    code = "disk_full"
    retryable = True
    default_hint = "Free space on the volume or lower capacity_bytes; facts stored so far are intact."


class StorageFailed(BsfgError):
    """The medium reported an input/output error."""

    code = "storage_failed"
    default_hint = "Check the disk (dmesg, smartctl), then reopen and run `bsfg verify` on the folder."


class StorageReadOnly(BsfgError):
    """The folder cannot be written."""

    code = "storage_read_only"
    default_hint = "Make the folder writable for this user, or open it with LocalReader for reading only."


class FolderLocked(BsfgError):
    """Another process is the writer of this folder."""

    code = "folder_locked"
    default_hint = "Stop the other process, or read the folder with LocalReader; one folder has one writer."


class NotAFolder(BsfgError):
    """The path holds no BSFG data folder."""

    code = "not_a_data_folder"
    default_hint = "Give the data folder of a zone: the one that contains bsfg.json."


class FormatUnsupported(BsfgError):
    """The folder was written in a format that this version does not read."""

    code = "format_unsupported"
    default_hint = "Use a version of BSFG at least as new as the one that wrote the folder."


class LogDamaged(BsfgError):
    """Stored bytes fail their checks; what they covered is reported as a gap, never skipped."""

    code = "log_damaged"
    default_hint = "Run `bsfg verify` for the full list; restore the folder from a backup or fetch the range again."


class ForeignLog(BsfgError):
    """The history on the other side is not the one this position belongs to."""

    code = "foreign_log"
    default_hint = "The folder was restored or replaced: reconcile the link before you release its gate."


class HasherMismatch(BsfgError):
    """The folder was written with another digest function."""

    code = "hasher_mismatch"
    default_hint = "Open the folder with the hasher named in its bsfg.json."


class PolicyInvalid(BsfgError):
    """A stream's settings contradict each other."""

    code = "policy_invalid"
    default_hint = 'Keep retention <= max age <= key horizon, and reject_new for streams with safety = "sil".'


# Positions.


class OffsetOutOfRange(BsfgError):
    """The offset lies beyond the end of the buffer."""

    code = "offset_out_of_range"
    default_hint = "Ask for the buffer's stats and use an offset below its end."


class TruncateRefused(BsfgError):
    """The entries to be removed are not all confirmed by the required consumers."""

    code = "truncate_refused"
    default_hint = "Truncate at most to committed + 1, or retire the consumer that holds the frontier back."


class UnknownConsumer(BsfgError):
    """No durable consumer has this name."""

    code = "unknown_consumer"
    default_hint = "Create it first with a start position (earliest, latest, an offset or a time)."


class ConsumerExists(BsfgError):
    """A consumer of this name exists with other settings."""

    code = "consumer_exists"
    default_hint = "Use another name, or retire the existing consumer with a reason."


class ConsumerRetired(BsfgError):
    """The consumer was retired by an operator."""

    code = "consumer_retired"
    default_hint = "Create a consumer with a new name; what the retired one missed is listed as gap records."


class TooManyRanges(BsfgError):
    """The consumer holds more open confirmation ranges than the limit allows."""

    code = "too_many_ranges"
    retryable = True
    default_hint = "Confirm the missing offsets below the open ranges first."


class InvalidTransition(BsfgError):
    """A gate cannot make this move from its present mode."""

    code = "invalid_transition"
    default_hint = "Look at the gate's mode; a held gate must be released first."


# What does not pass between zones.


class ZoneNotAllowed(BsfgError):
    """The caller or the link may not speak for this from_zone, or not send to this to_zone."""

    code = "zone_not_allowed"
    default_hint = "Use the zone of your certificate, or add the zone to the table of zones this link may carry."


class ImplausibleTime(BsfgError):
    """A fact's produced_at lies outside the plausibility window of the stream."""

    code = "implausible_time"
    default_hint = "Set the producer's clock, or widen or switch off the plausibility window of the stream."


class FrameInvalid(BsfgError):
    """What the other side sent is not a sequence of frames: holes, overlaps, or offsets that are not its own."""

    code = "frame_invalid"
    default_hint = "The other side is defective or not what it claims to be; inspect it before the link is released."


# Who may do what, and the settings that say so.


class ConfigInvalid(BsfgError):
    """The configuration file cannot be used; ``details`` list every problem with its key and line."""

    code = "config_invalid"
    default_hint = "Correct the lines named above; docs/reference/configuration.md describes every key."


class IdentityUnknown(BsfgError):
    """The caller's certificate names nobody in the table of identities."""

    code = "identity_unknown"
    default_hint = "Add the certificate's name to [identities] with its zone and roles, or use another certificate."


class IdentityRevoked(BsfgError):
    """The caller's identity was revoked or has expired in the table of identities."""

    code = "identity_revoked"
    default_hint = "Issue a certificate with a new name and add it to [identities]; a revoked name stays revoked."


class PermissionRefused(BsfgError):
    """The caller is known but may not do this; ``details`` name the rule that refused."""

    code = "permission_denied"
    default_hint = "Give the identity the role, stream or zone named in the message, if it is meant to have it."


class CertificateInvalid(BsfgError):
    """A certificate, key or authority file cannot be used as configured."""

    code = "certificate_invalid"
    default_hint = "Run `bsfg certs check --config zone.toml` to see what is wrong with which file."


class ServerIdentityMismatch(BsfgError):
    """The server that answered is not the one that was meant."""

    code = "server_identity_mismatch"
    default_hint = "Check the address first; change server_identity only if the certificate shown is the right one."


class PeerUnreachable(BsfgError):
    """No connection to the other side could be made."""

    code = "peer_unreachable"
    retryable = True
    default_hint = "Check that the node runs, the address and port, and the firewall between the zones."


class TlsNotHardened(BsfgError):
    """The gRPC library was loaded before TLS 1.2 could be switched off in it."""

    code = "tls_not_hardened"
    default_hint = "Import bsfg before grpc."


class FileExists(BsfgError):
    """A file that would be written is already there."""

    code = "file_exists"
    default_hint = "Choose another folder or name, or overwrite it with --force."


# What a node cannot answer, or not now.


class Overloaded(BsfgError):
    """The node serves as many requests as it may, for this caller or for all."""

    code = "overloaded"
    retryable = True
    default_hint = "Wait a moment and try again; send larger batches over fewer connections."


class TimedOut(BsfgError):
    """The answer did not come in time; what was asked may or may not have happened."""

    code = "timed_out"
    retryable = True
    default_hint = "Repeat the request with the same ids; allow more time if it happens often."


class MessageTooLarge(BsfgError):
    """A message on the wire exceeds the limit of its receiver."""

    code = "message_too_large"
    default_hint = "Split the batch, or raise message_bytes in [limits] of the node."


class NotReady(BsfgError):
    """The node is starting, stopping, or has lost its storage."""

    code = "not_ready"
    retryable = True
    default_hint = "Wait until /readyz answers 200; the node's log says what it waits for."


class FactNotFound(BsfgError):
    """No fact with this key is retained here."""

    code = "fact_not_found"
    default_hint = "Check stream, from_zone and message_id; what left the buffer is listed as gap records."


class UnknownStream(BsfgError):
    """The node has no stream of this name."""

    code = "unknown_stream"
    default_hint = "Use one of the configured streams, or add a table [streams.NAME] to the configuration."


class UnknownLink(BsfgError):
    """The node has no link of this name, or not on this side."""

    code = "unknown_link"
    default_hint = "List the links with `bsfg gate`; inbound ones are named in [links], outbound ones in [serve]."


class GateHeld(BsfgError):
    """An operator holds the gate of this link; ``details`` name it."""

    code = "gate_held"
    retryable = True
    default_hint = "Wait until the gate is released; `bsfg gate` shows who holds it and why."


class LeaseHeld(BsfgError):
    """Somebody else holds the lease of the link; ``details`` say who, and for how long at most."""

    code = "lease_held"
    retryable = True
    default_hint = "Let the other pipeline work, or stop it; its lease ends by itself when it is gone."


class LeaseLost(BsfgError):
    """The lease of the link is not, or no longer, held with this token."""

    code = "lease_lost"
    default_hint = "Stop what is under way and take the lease again."


# Artifacts.


class ArtifactMissing(BsfgError):
    """The content that a fact or a request names is not here."""

    code = "artifact_missing"
    default_hint = "Upload the artifact first, under the bucket and key that the fact names, then append the fact."


class ArtifactConflict(BsfgError):
    """The bucket and key stand for other content."""

    code = "artifact_conflict"
    default_hint = "An artifact is immutable: upload the new content under another key and append a new fact."


class ArtifactTooLarge(BsfgError):
    """The content exceeds the largest size that this store accepts."""

    code = "artifact_too_large"
    default_hint = "Split the content, or raise max_artifact in [artifacts] of every zone that it passes."


class ArtifactStoreFull(BsfgError):
    """The store of artifacts has reached its capacity."""

    code = "artifact_store_full"
    retryable = True
    default_hint = "Retry after the next orphan collection, or raise capacity in [artifacts]."
