"""Signatures: a producer vouches for a fact, and whoever has its public key can check that to the end of the journey.

What is signed is the digest of the fact's body together with the whole envelope, so neither can be exchanged on the
way. The signature travels in ``envelope.signature`` as ``ed25519:<key id>:<base64>``. It is checked where a key is
configured: in a `Consumer` or a `LocalReader` that was given `TrustedKeys`.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from bsfg.batch import FactBatch
from bsfg.errors import CertificateInvalid, FileExists, InvalidArgument, SignatureInvalid
from bsfg.fact import Entry, Envelope, Fact, Message
from bsfg.jsonform import message_to_dict
from bsfg.keys import EXPLICIT, MessageIds
from bsfg.rows import message_of
from bsfg.rules import ZONE, check_name
from bsfg.sealing import seal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ALGORITHM = "ed25519"
_DOMAIN = b"bsfg.v1.fact\0"
_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def signed_bytes(envelope: Envelope, digest: bytes) -> bytes:
    """Give the bytes that a signature covers: the digest of the body, and the envelope without the signature."""
    bare = Message(replace(envelope, signature=None), Fact("a:b", "c"))
    head = message_to_dict(bare)["envelope"]
    return _DOMAIN + digest + orjson.dumps(head, option=orjson.OPT_SORT_KEYS)


class Signer:
    """Signs facts with a private key; ``key_id`` tells those who check which public key to use."""

    def __init__(self, key: Ed25519PrivateKey, key_id: str) -> None:
        self._key, self._prefix = key, f"{ALGORITHM}:{_checked_id(key_id)}:"

    @staticmethod
    def load(path: str | os.PathLike[str], key_id: str | None = None) -> Signer:
        """Read a private key in PEM form; the key id is the name of the file unless another is given."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        from bsfg.wire.certs import load_key

        key = load_key(Path(path))
        if not isinstance(key, Ed25519PrivateKey):
            raise CertificateInvalid(f"{path} is not an Ed25519 key", hint="Make one with bsfg.sdk.signing.create_key.")
        return Signer(key, key_id or Path(path).stem)

    def sign(self, batch: FactBatch) -> FactBatch:
        """Give a sealed batch with every fact signed."""
        rows = batch.record_batch.to_pylist()
        signatures = [self._signature(message_of(row).envelope, row["digest"]) for row in rows]
        signed = batch.with_columns(signature=pa.array(signatures, type=pa.string()))
        return signed.as_sealed()

    def sign_message(self, message: Message, ids: MessageIds = EXPLICIT) -> Message:
        """Give one message as it will be sent: canonical, with its id, and signed."""
        signed = self.sign(seal(FactBatch.from_messages([message]), ids=ids))
        return signed.to_messages()[0]

    def _signature(self, envelope: Envelope, digest: bytes) -> str:
        return self._prefix + base64.b64encode(self._key.sign(signed_bytes(envelope, digest))).decode()


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The public keys by which facts of some zones are checked: zone → key id → key.

    Every fact of a zone that has keys must carry a good signature by one of them. Zones without keys are not checked.
    """

    zones: Mapping[str, Mapping[str, Ed25519PublicKey]]

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> TrustedKeys:
        """Read a folder with a sub-folder per zone that holds its public keys as ``<key id>.pem``."""
        root = Path(folder)
        if not root.is_dir():
            raise CertificateInvalid(f"there is no folder {root}", hint="Give a folder with a sub-folder per zone.")
        zones = {
            check_name("zone", zone.name, ZONE): {
                _checked_id(file.stem): _public_key(file) for file in zone.glob("*.pem")
            }
            for zone in sorted(root.iterdir())
            if zone.is_dir()
        }
        return TrustedKeys(zones)

    def verify(self, entry: Entry) -> None:
        """Raise `SignatureInvalid` unless the entry is signed as its zone's keys demand."""
        envelope = entry.message.envelope
        keys = self.zones.get(envelope.from_zone)
        if keys is None:
            return
        reason = _refused(keys, envelope, entry.digest)
        if reason:
            raise SignatureInvalid(
                f"offset {entry.offset}: the fact {envelope.message_id!r} of {envelope.from_zone} {reason}",
                offset=entry.offset,
                from_zone=envelope.from_zone,
                message_id=envelope.message_id,
            )


def _refused(keys: Mapping[str, Ed25519PublicKey], envelope: Envelope, digest: bytes) -> str:
    """Say why a signature is not good, or nothing."""
    from cryptography.exceptions import InvalidSignature

    if envelope.signature is None:
        return "is not signed"
    algorithm, _, rest = envelope.signature.partition(":")
    key_id, _, encoded = rest.partition(":")
    if algorithm != ALGORITHM:
        return f"is signed by {algorithm[:20]!r}, not by {ALGORITHM}"
    key = keys.get(key_id)
    if key is None:
        return f"is signed with the key {key_id[:64]!r}, which is not known"
    try:
        key.verify(base64.b64decode(encoded, validate=True), signed_bytes(envelope, digest))
    except (InvalidSignature, ValueError):
        return "has a signature that does not fit it"
    return ""


def create_key(path: str | os.PathLike[str]) -> Path:
    """Make a key pair: the private key at ``path`` (owner only), the public one beside it as ``.pub.pem``."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    private, key = Path(path), Ed25519PrivateKey.generate()
    public = private.with_suffix(".pub.pem")
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
    except FileExistsError:
        raise FileExists(f"{private} is already there", hint="Choose another name; a key is never replaced.") from None
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return public


def _public_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CertificateInvalid(f"{path} holds no readable public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise CertificateInvalid(f"{path} is not an Ed25519 key")
    return key


def _checked_id(key_id: str) -> str:
    if not _KEY_ID.fullmatch(key_id):
        raise InvalidArgument(f"{key_id!r} is not a key id: letters, digits, '.', '_', '-', at most 64")
    return key_id
