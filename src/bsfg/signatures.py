"""Signatures of facts: what they cover, how they are written, and the keys by which they are checked.

A signature travels in ``envelope.signature`` as ``<version>:<key id>:<base64>``. Version ``ed25519.v2`` covers the
digest of the body with the name of its function, the whole envelope, and the stream that the fact was said in: a fact
that is replayed in another stream does not fit its signature. Version ``ed25519``, the first one, knows no stream.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from bsfg.batch import FactBatch
from bsfg.errors import CertificateInvalid, InvalidArgument, SignatureInvalid, SignatureMissing
from bsfg.fact import SHA256_NAME, Entry, Envelope, Fact, Message, digest_text, function_in
from bsfg.jsonform import message_to_dict
from bsfg.model import ZONE, check_name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

V1, V2 = "ed25519", "ed25519.v2"
ALGORITHM = "ed25519"
KEY_BYTES = 32

SIGNATURE_WEIGHT_BYTES = 8 << 10
"""A signature takes as long to check as so many bytes to seal, a good tenth of a millisecond; see `bsfg.offload`."""

_DOMAINS = {V1: b"bsfg.v1.fact\0", V2: b"bsfg.v2.fact\0"}
_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ANY = Fact("a:b", "c")


def signed_bytes(envelope: Envelope, digest: bytes, stream: str | None, *, hasher: str = SHA256_NAME) -> bytes:
    """Give the bytes that a signature covers; without a stream those of version 1.

    They are the digest of the body and the envelope without its signature, and since version 2 the stream.
    """
    head = message_to_dict(Message(envelope, _ANY))["envelope"]
    head.pop("signature", None)
    if stream is None:
        return _DOMAINS[V1] + digest + orjson.dumps(head, option=orjson.OPT_SORT_KEYS)
    said = {"digest": digest_text(hasher, digest), "envelope": head, "stream": stream}
    return _DOMAINS[V2] + orjson.dumps(said, option=orjson.OPT_SORT_KEYS)


def checked_key_id(key_id: str) -> str:
    """Give a key id back, or raise `InvalidArgument`."""
    if not _KEY_ID.fullmatch(key_id):
        raise InvalidArgument(f"{key_id!r} is not a key id: letters, digits, '.', '_', '-', at most 64")
    return key_id


def key_text(key_id: str, key: Ed25519PublicKey) -> str:
    """Write a public key as a configuration names it: ``ed25519:<key id>:<base64>``."""
    return f"{ALGORITHM}:{checked_key_id(key_id)}:{base64.b64encode(key.public_bytes_raw()).decode()}"


def read_key(text: str) -> tuple[str, Ed25519PublicKey]:
    """Read what `key_text` wrote: the key id and the key; raises `InvalidArgument`."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    algorithm, _, rest = text.partition(":")
    key_id, _, encoded = rest.partition(":")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raw = b""
    if algorithm != ALGORITHM or len(raw) != KEY_BYTES:
        raise InvalidArgument(f'{text[:100]!r} is not a public key such as "{ALGORITHM}:line-7:<44 characters>"')
    return checked_key_id(key_id), Ed25519PublicKey.from_public_bytes(raw)


def public_key(path: Path) -> Ed25519PublicKey:
    """Read a public key in PEM form; raises `CertificateInvalid`."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CertificateInvalid(f"{path} holds no readable public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise CertificateInvalid(f"{path} is not an Ed25519 key")
    return key


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The public keys by which facts of some zones are checked: zone → key id → key.

    A fact of a zone that has keys must carry a good signature by one of them; facts of the zones in ``unsigned`` may
    also carry none. Signatures of version 1, which can be replayed in another stream, pass for the zones in ``v1``, for
    all if that is None. Zones without keys are not checked.
    """

    zones: Mapping[str, Mapping[str, Ed25519PublicKey]]
    unsigned: frozenset[str] = frozenset()
    v1: frozenset[str] | None = None

    @staticmethod
    def load(folder: str | os.PathLike[str], *, allow_v1: bool = True) -> TrustedKeys:
        """Read a folder with a sub-folder per zone that holds its public keys as ``<key id>.pem``."""
        root = Path(folder)
        if not root.is_dir():
            raise CertificateInvalid(f"there is no folder {root}", hint="Give a folder with a sub-folder per zone.")
        zones = {
            check_name("zone", zone.name, ZONE): {
                checked_key_id(file.stem): public_key(file) for file in zone.glob("*.pem")
            }
            for zone in sorted(root.iterdir())
            if zone.is_dir()
        }
        return TrustedKeys(zones, v1=None if allow_v1 else frozenset())

    def concern(self, zones: Iterable[str]) -> bool:
        """Tell whether facts of any of these zones are checked."""
        return bool(self.zones) and not self.zones.keys().isdisjoint(zones)

    def verify(self, entry: Entry, stream: str | None = None) -> None:
        """Raise `SignatureInvalid` unless an entry of a stream is signed as its zone's keys demand."""
        error = self.problem(entry.message.envelope, entry.digest, stream, entry.hasher, offset=entry.offset)
        if error is not None:
            raise error

    def check(self, batch: FactBatch, stream: str) -> None:
        """Raise `SignatureInvalid` for the first fact of a sealed batch that is not signed as it must be."""
        for error in self._found(batch, stream):
            raise error

    def problems(self, batch: FactBatch, stream: str) -> dict[int, SignatureInvalid]:
        """Give what is wrong with the signatures of a sealed batch, by row."""
        return {int(error.details["row"]): error for error in self._found(batch, stream)}

    def _found(self, batch: FactBatch, stream: str) -> Iterator[SignatureInvalid]:
        rows = [row for row, zone in enumerate(batch.values("from_zone")) if zone in self.zones]
        checked = batch if len(rows) == len(batch) else batch.take(np.array(rows, dtype=np.int64))
        hashers = map(function_in, checked.values("labels"))
        for row, message, digest, hasher in zip(rows, checked.to_messages(), checked.digests(), hashers, strict=True):
            error = self.problem(message.envelope, digest, stream, hasher, row=row)
            if error is not None:
                yield error

    def problem(
        self, envelope: Envelope, digest: bytes, stream: str | None, hasher: str = SHA256_NAME, **place: int
    ) -> SignatureInvalid | None:
        """Give what is wrong with one signature, None when nothing is; ``place`` says where the fact stands."""
        zone = envelope.from_zone
        if zone not in self.zones or (envelope.signature is None and zone in self.unsigned):
            return None
        why, more = self._fault(envelope, digest, stream, hasher)
        if not why:
            return None
        where = "".join(f"{name} {number}: " for name, number in place.items())
        text = f"{where}the fact {envelope.message_id!r} of {zone} {why}{more}"
        kind = SignatureMissing if envelope.signature is None else SignatureInvalid
        details: dict[str, Any] = {**place, "from_zone": zone, "message_id": envelope.message_id, "why": why}
        return kind(text, **details)

    def _fault(self, envelope: Envelope, digest: bytes, stream: str | None, hasher: str) -> tuple[str, str]:
        """Say why a signature is not good, or nothing; what its writer chose stands apart in the second text."""
        from cryptography.exceptions import InvalidSignature

        if envelope.signature is None:
            return "is not signed", ""
        version, _, rest = envelope.signature.partition(":")
        key_id, _, encoded = rest.partition(":")
        if version not in _DOMAINS:
            return "is signed in a way that is not known", f": {version[:20]!r}"
        if version == V1 and self.v1 is not None and envelope.from_zone not in self.v1:
            return "has a signature of version 1, which names no stream", ""
        if version == V2 and stream is None:
            return "is signed for a stream, and which one this is is not known", ""
        key = self.zones[envelope.from_zone].get(key_id)
        if key is None:
            return "is signed with a key that is not known", f": {key_id[:64]!r}"
        try:
            covered = signed_bytes(envelope, digest, stream if version == V2 else None, hasher=hasher)
            key.verify(base64.b64decode(encoded, validate=True), covered)
        except (InvalidSignature, ValueError):
            return "has a signature that does not fit it", ""
        return "", ""


NO_KEYS = TrustedKeys({})
