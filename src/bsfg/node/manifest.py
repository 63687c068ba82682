"""What is in a backup, file by file, and the signature by which the zone's own key vouches for it."""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import orjson
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from bsfg.errors import BackupUntrusted, CertificateInvalid
from bsfg.wire.certs import NODE_SUFFIX, load_certificates, load_key
from bsfg.wire.peer import names_of
from bsfg.wording import one_line

PIECE_BYTES = 4 << 20
NAME_CHARACTERS_MAX = 1_000
HINT = "This is no backup as `bsfg backup` makes it: use another one, and find out who changed it."

UNSIGNED_HINT = (
    "Use a backup of your own, and give the authority of the zone with --ca. --accept-unsigned takes it unchecked."
)

Contents = Mapping[str, Sequence[object]]
"""Every file by its path in the backup, with its size and its SHA-256."""


def listed(folder: Path, parts: Sequence[str]) -> dict[str, list[object]]:
    """List all files of some parts of a folder with size and digest."""
    return {name: [*digest_of(folder / name)] for part in parts for name in sorted(_walk(folder, part))}


def check_name(name: object, parts: Sequence[str]) -> str:
    """Give a name that cannot lead out of its part, or raise `BackupUntrusted`."""
    if isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS_MAX:
        pieces = name.split("/")
        plain = all(piece not in ("", ".", "..") and _is_plain(piece) for piece in pieces)
        if plain and (not parts or (pieces[0] in parts and len(pieces) > 1)):
            return name
    raise BackupUntrusted(f"{one_line(str(name))[:200]!r} cannot be a file of a backup", hint=HINT)


def check_names(names: Sequence[object], parts: Sequence[str]) -> list[str]:
    """Give names of which none leaves its part, and no two of which are one file on some other file system."""
    found = [check_name(name, parts) for name in names]
    folded: dict[str, str] = {}
    for name in found:
        for path in (PurePosixPath(name), *PurePosixPath(name).parents):
            text = str(path)
            if folded.setdefault(text.casefold(), text) != text:
                raise BackupUntrusted(f"{name!r} and {folded[text.casefold()]!r} differ in case only", hint=HINT)
    if len(set(found)) < len(found):
        raise BackupUntrusted("a name is listed twice", hint=HINT)
    return found


def check_plain(folder: Path, parts: Sequence[str]) -> set[str]:
    """Give all files of a backup; raise `BackupUntrusted` when anything in it is neither a file nor a folder."""
    mode = folder.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise BackupUntrusted(f"{folder} is not a folder", hint=HINT)
    return {name for part in parts for name in _walk(folder, part)}


def differences(folder: Path, contents: Contents, done: Callable[[int], None]) -> Iterator[tuple[str, str]]:
    """Hold every listed file against what is there; give the name of each that is another, and what is wrong."""
    for name, (size, digest) in contents.items():
        try:
            found = digest_of(folder / name, done)
        except FileNotFoundError:
            yield name, "it is missing"
            continue
        if found != (size, digest):
            yield name, "it is not what was backed up"


def digest_of(path: Path, done: Callable[[int], None] = lambda size: None) -> tuple[int, str]:
    """Give size and SHA-256 of a plain file, which is opened as such: no link is followed."""
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            done(len(piece))
    return size, digest.hexdigest()


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading, or raise `BackupUntrusted` when it is a link or something else."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BackupUntrusted(f"{path} is a link or a device", hint=HINT) from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise BackupUntrusted(f"{path} is not a plain file", hint=HINT)
    return os.fdopen(number, "rb")


def _is_plain(piece: str) -> bool:
    """Tell whether a piece of a name is one: no other separator, nothing that is not seen."""
    return piece.isprintable() and "\\" not in piece and piece == piece.strip()


def _walk(folder: Path, part: str) -> Iterator[str]:
    """Give the files below a part, which must be plain; a part that is not there has none."""
    if not os.path.lexists(folder / part):
        return
    waiting = [part]
    if not stat.S_ISDIR((folder / part).lstat().st_mode):
        raise BackupUntrusted(f"{part} in {folder} is not a folder", hint=HINT)
    while waiting:
        here = waiting.pop()
        with os.scandir(folder / here) as entries:
            for entry in entries:
                name = f"{here}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name)
                elif entry.is_file(follow_symlinks=False):
                    yield name
                else:
                    what = "a link" if entry.is_symlink() else "neither a file nor a folder"
                    raise BackupUntrusted(f"{one_line(name)[:200]!r} in {folder} is {what}", hint=HINT)


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
