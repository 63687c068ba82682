"""The signature of a backup: the zone's own key vouches for its manifest, so that a restore takes nothing else.

The manifest lists every file with its size and digest, and the node's private key signs the manifest. The certificate
travels beside the signature; that it is the zone's is for an authority to say which the restore is given, never for one
that came with the backup. A certificate that has expired since is good if it was valid when the backup was made.

A room of its own, because backups of zones without TLS are made and read without the library that signs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from bsfg.errors import BackupUntrusted, CertificateInvalid
from bsfg.node.manifest import UNSIGNED_HINT
from bsfg.wire.certs import NODE_SUFFIX, load_certificates, load_key
from bsfg.wire.peer import names_of

DOMAIN = b"bsfg backup 1\n"
"""Stands before what is signed, so that no signature of the same key for another purpose can be taken for one."""

CHAIN_MAX = 6


def signature_of(manifest: bytes, certificate: Path, key: Path) -> bytes:
    """Sign a manifest with the node's key; give the document that lies beside it."""
    secret, signed = load_key(key), DOMAIN + manifest
    if isinstance(secret, ec.EllipticCurvePrivateKey):
        made = secret.sign(signed, ec.ECDSA(hashes.SHA256()))
    elif isinstance(secret, rsa.RSAPrivateKey):
        made = secret.sign(signed, _pss(), hashes.SHA256())
    elif isinstance(secret, ed25519.Ed25519PrivateKey):
        made = secret.sign(signed)
    else:
        raise CertificateInvalid(f"{key} is of a kind that signs nothing", hint="Use an ECDSA, RSA or Ed25519 key.")
    chain = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in load_certificates(certificate))
    return orjson.dumps(
        {"certificate": chain.decode(), "signature": base64.b64encode(made).decode()}, option=orjson.OPT_INDENT_2
    )


def check_signature(
    manifest: bytes, signature: bytes, *, zone: str, made_unix_ms: int, authorities: Path, names: Sequence[str] = ()
) -> str:
    """Check that a zone has signed a manifest and give the name of its certificate, or raise `BackupUntrusted`.

    The certificate must be called as the zone's node usually is, or by one of ``names``.
    """
    chain, made = _read(signature)
    leaf = chain[0]
    if not _fits(leaf, DOMAIN + manifest, made):
        raise BackupUntrusted("the manifest of the backup is not what was signed", hint="Use another backup.")
    when = datetime.fromtimestamp(min(made_unix_ms, 253_402_300_799_000) / 1000, UTC)
    if not _leads_to(leaf, chain[1:], load_certificates(authorities), when):
        says = f"the backup is signed by {names_of(leaf)}, for whom {authorities} does not vouch"
        raise BackupUntrusted(says, hint=UNSIGNED_HINT)
    found = names_of(leaf)
    wanted = {f"{zone}{NODE_SUFFIX}".lower(), *(name.lower() for name in names)}
    for name in (*found.common_names, *found.telling_names):
        if name.lower() in wanted:
            return name
    raise BackupUntrusted(f"the backup is of the zone {zone}, but {found} has signed it", hint=UNSIGNED_HINT)


def _read(signature: bytes) -> tuple[list[x509.Certificate], bytes]:
    try:
        found: Any = orjson.loads(signature)
        chain = x509.load_pem_x509_certificates(found["certificate"].encode())
        return chain[:CHAIN_MAX], base64.b64decode(found["signature"], validate=True)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError, binascii.Error):
        raise BackupUntrusted("the signature of the backup cannot be read", hint=UNSIGNED_HINT) from None


def _fits(leaf: x509.Certificate, signed: bytes, signature: bytes) -> bool:
    key = leaf.public_key()
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, signed, _pss(), hashes.SHA256())
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, signed)
        else:
            return False
    except InvalidSignature:
        return False
    return True


def _pss() -> padding.PSS:
    return padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


def _leads_to(
    certificate: x509.Certificate,
    others: Sequence[x509.Certificate],
    authorities: Sequence[x509.Certificate],
    when: datetime,
    left: int = CHAIN_MAX,
) -> bool:
    """Tell whether a certificate was issued, over others or at once, by an authority, and all were valid then."""
    if not certificate.not_valid_before_utc <= when <= certificate.not_valid_after_utc:
        return False
    issuers = [each for each in (*authorities, *others) if left and _issued(certificate, each)]
    return any(
        (each in authorities and each.not_valid_before_utc <= when <= each.not_valid_after_utc)
        or (each in others and _leads_to(each, others, authorities, when, left - 1))
        for each in issuers
    )


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        constraints = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(issuer)
    except (x509.ExtensionNotFound, InvalidSignature, ValueError, TypeError):
        return False
    return constraints.ca
