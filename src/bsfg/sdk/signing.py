"""Signing: a producer vouches for a fact, and whoever has its public key can check that to the end of the journey.

What is signed is the digest of the fact's body together with the whole envelope and the stream, so none of them can be
exchanged on the way (see `bsfg.signatures`). It is checked where a key is configured: in nodes, and in a `Consumer` or
a `LocalReader` that was given `TrustedKeys`.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from bsfg.batch import FactBatch
from bsfg.digest import hasher_named
from bsfg.errors import CertificateInvalid, FileExists, InvalidArgument
from bsfg.fact import SHA256_NAME, Envelope, Message, function_in
from bsfg.rows import message_of
from bsfg.rules import STREAM, check_name
from bsfg.sealing import EXPLICIT, MessageIds, seal
from bsfg.signatures import V1, V2, TrustedKeys, checked_key_id, key_text, public_key, signed_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["Signer", "TrustedKeys", "create_key", "public_key_text"]


class Signer:
    """Signs facts with a private key; ``key_id`` tells those who check which public key to use.

    Signatures are of version 2, which covers the stream. ``version=1`` is for as long as somebody who checks them is
    older than that.
    """

    def __init__(self, key: Ed25519PrivateKey, key_id: str, *, version: int = 2) -> None:
        if version not in (1, 2):
            raise InvalidArgument(f"there are signatures of version 1 and 2, not of {version}")
        self._key, self._bound = key, version == 2
        self._prefix = f"{V2 if self._bound else V1}:{checked_key_id(key_id)}:"

    @staticmethod
    def load(path: str | os.PathLike[str], key_id: str | None = None, *, version: int = 2) -> Signer:
        """Read a private key in PEM form; the key id is the name of the file unless another is given."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        from bsfg.wire.certs import load_key

        key = load_key(Path(path))
        if not isinstance(key, Ed25519PrivateKey):
            raise CertificateInvalid(f"{path} is not an Ed25519 key", hint="Make one with `bsfg certs signing-key`.")
        return Signer(key, key_id or Path(path).stem, version=version)

    def sign(self, batch: FactBatch, stream: str) -> FactBatch:
        """Give a sealed batch with every fact signed for a stream."""
        check_name("stream", stream, STREAM)
        rows = batch.record_batch.to_pylist()
        signatures = [
            self._signature(message_of(row).envelope, row["digest"], stream, function_in(row["labels"])) for row in rows
        ]
        signed = batch.with_columns(signature=pa.array(signatures, type=pa.string()))
        return signed.as_sealed()

    def sign_message(
        self, message: Message, stream: str, *, ids: MessageIds = EXPLICIT, hasher: str = SHA256_NAME
    ) -> Message:
        """Give one message as it will be sent to a stream: canonical, with its id, and signed.

        ``ids`` and ``hasher`` are those of the zone that it is sent to.
        """
        sealed = seal(FactBatch.from_messages([message]), ids=ids, hasher=hasher_named(hasher))
        signed = self.sign(sealed, stream)
        return signed.to_messages()[0]

    def _signature(self, envelope: Envelope, digest: bytes, stream: str, hasher: str) -> str:
        covered = signed_bytes(envelope, digest, stream if self._bound else None, hasher=hasher)
        return self._prefix + base64.b64encode(self._key.sign(covered)).decode()


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


def public_key_text(path: str | os.PathLike[str], key_id: str | None = None) -> str:
    """Write a public key file as ``[signing]`` of a configuration names it; the key id is its name unless given."""
    name = Path(path).name.removesuffix(".pem").removesuffix(".pub")
    return key_text(key_id or name, public_key(Path(path)))
