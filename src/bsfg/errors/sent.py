"""Errors of what a caller sent."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


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
