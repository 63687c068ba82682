"""Bundles: what of an authority's folder belongs on the machine of one zone, and nothing else of it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

from bsfg.errors import CertificateInvalid, FileExists, StorageReadOnly
from bsfg.rules import ZONE, check_name
from bsfg.wire.certs import CA_NAME, NODE_SUFFIX, load_certificates, load_key

TOP = "certs"
"""The folder in an archive: beside zone.toml, as `bsfg init` writes it."""


def make_bundle(folder: Path, zone: str, target: Path, roles: Sequence[str] = ()) -> list[str]:
    """Write the files of one zone into a new folder, or a new archive that ends with ``.tar``; give their names."""
    content = _content(folder, check_name("zone", zone, ZONE), roles)
    check_target(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_archive(target, content) if target.suffix == ".tar" else _write_folder(target, content)
    except OSError as error:
        raise StorageReadOnly(f"{target} cannot be written: {error.strerror}", hint="Choose another place.") from None
    return list(content)


def check_target(target: Path) -> None:
    """Refuse to write over anything."""
    if os.path.lexists(target):
        raise FileExists(f"{target} is already there", hint="Choose a new name; a bundle never overwrites anything.")


def _content(folder: Path, zone: str, roles: Sequence[str]) -> dict[str, bytes]:
    """Read the files; the node's must be there, and every key must be that of its certificate."""
    authority = folder / f"{CA_NAME}.crt"
    load_certificates(authority)
    content = {authority.name: authority.read_bytes()}
    names = [f"{zone}{NODE_SUFFIX}", *(f"{zone}-{role}" for role in roles)]
    for name in names:
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        if name != names[0] and not certificate.exists() and not key.exists():
            continue
        if load_certificates(certificate)[0].public_key() != load_key(key).public_key():
            raise CertificateInvalid(f"{key} is not the key of {certificate}", hint="Issue the certificate again.")
        content |= {path.name: path.read_bytes() for path in (certificate, key)}
    return content


def _write_folder(target: Path, content: dict[str, bytes]) -> None:
    target.mkdir(mode=0o700)
    for name, data in content.items():
        _write(target / name, data)


def _write_archive(target: Path, content: dict[str, bytes]) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        top = tarfile.TarInfo(TOP)
        top.type, top.mode = tarfile.DIRTYPE, 0o700
        archive.addfile(top)
        for name, data in content.items():
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    _write(target, made.getvalue())


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
