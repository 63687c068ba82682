"""Errors of a request: who asked, what was sent, which position it named, and what may not pass."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class ConfigInvalid(BsfgError):
    """The configuration file cannot be used; ``details`` list every problem with its key and line."""

    code = "config_invalid"
    default_hint = "Correct the lines named above; `bsfg help configuration` describes every key."


class IdentityUnknown(BsfgError):
    """The caller's certificate names nobody in the table of identities."""

    code = "identity_unknown"
    default_hint = "Add the certificate's name to [identities] with its zone and roles, or use another certificate."


class IdentityRevoked(BsfgError):
    """The caller's identity was revoked or has expired in the table of identities, or its authority withdrew it."""

    code = "identity_revoked"
    default_hint = "Issue a certificate with a new name and add it to [identities]; a revoked name stays revoked."


class PermissionRefused(BsfgError):
    """The caller is known but may not do this; ``details`` name the rule that refused."""

    code = "permission_denied"
    default_hint = "Give the identity the role, stream or zone named in the message, if it is meant to have it."


class SignInRequired(BsfgError):
    """The caller has shown neither a certificate nor a token that counts, or his session has ended."""

    code = "sign_in_required"
    default_hint = "Use a client certificate, sign in to the dashboard with a token, or send the token as a bearer."


class HostUnknown(BsfgError):
    """A request over HTTP names a host that this node is not called by."""

    code = "host_unknown"
    default_hint = "Use the node's address or a name in its certificate, or add the name to [listen] http_names."


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


class HasherUnknown(BsfgError):
    """A fact has a digest by a function that is not known here, so nobody here can check it; nothing of it was used."""

    code = "hasher_unknown"
    default_hint = (
        "Install what brings the function (for blake3: pip install 'bsfg[blake3]'), with a version of BSFG that knows "
        "it, restart, and release the gate of a link that is held for this."
    )

    @classmethod
    def of(cls, name: str, *, installable: bool = False) -> HasherUnknown:
        """Say of one function that it is not known here."""
        why = ": the extra that brings it is not installed" if installable else ""
        return cls(f"the digest function {name[:40]!r} is not known here{why}", hasher=name[:40])


class SignatureInvalid(BsfgError):
    """A fact is not signed as the keys that are trusted for its zone demand."""

    code = "signature_invalid"
    default_hint = "Find out who wrote the fact; add the public key of its signer if it is one that you trust."


class SignatureMissing(SignatureInvalid):
    """A fact carries no signature, and its zone's keys demand one."""

    code = "signature_missing"
    default_hint = "Give the producer a signing key, or let unsigned facts of the zone pass with require = false."


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
