"""The backup of a zone: its data folder, its artifacts and its configuration, copied while the node runs.

::

    backup.json     what is in it, file by file; written last, so that a backup without it is known to be incomplete
    backup.sig      the zone's signature of backup.json, by its node's key
    data/           a data folder as any other: `bsfg verify` and `bsfg inspect` read it
    artifacts/      the artifacts
    zone/           zone.toml and the certificates beside it; the node's own key only when asked for

It is made beside its place and gets its name when it is complete. Nothing here needs the node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

import bsfg
from bsfg.config import ZoneConfig
from bsfg.disk import clear_away
from bsfg.errors import (
    BackupUntrusted,
    CertificateInvalid,
    ExtraMissing,
    FileExists,
    FormatUnsupported,
    InvalidArgument,
    NotAFolder,
    StorageUnable,
)
from bsfg.node.manifest import Contents, check_names, listed, open_plain
from bsfg.stores.artifacts.files import ArtifactDiskFiles as ArtifactFiles
from bsfg.stores.artifacts.folder import copy_artifacts, problems_of
from bsfg.stores.artifacts.folder import size_of as size_of_artifacts
from bsfg.stores.log.backup import copy_folder, size_of
from bsfg.stores.log.damage import DamageFinding
from bsfg.stores.log.files import DiskFiles, translated, write_whole
from bsfg.stores.log.verify import verify
from bsfg.wording import one_line

FORMAT = 1
MANIFEST = "backup.json"
SIGNATURE = "backup.sig"
DATA, ARTIFACTS, ZONE = "data", "artifacts", "zone"
PARTS = (DATA, ARTIFACTS, ZONE)
MANIFEST_BYTES_MAX = 1 << 30
PARTIAL = ".partial"
_COMPARED_BYTES = 64 << 10
AUTHORITY_KEY = "ca.key"
_CERTIFICATES = (".crt", ".pem", ".key", ".cer")

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many bytes of how many are."""


@dataclass(frozen=True, slots=True)
class ZonePlace:
    """Where a zone keeps what it has; only the data folder must be there.

    ``keys`` are all private keys that lie beside the node's certificate. Only ``key`` is the zone's own: the others are
    those of other zones, of applications, or of the authority, and none of them ever leaves in a backup.
    """

    data: Path
    artifacts: Path
    config: Path | None = None
    zone: str = ""
    certificates: tuple[Path, ...] = ()
    keys: tuple[Path, ...] = ()
    certificate: Path | None = None
    key: Path | None = None

    @staticmethod
    def of(config: ZoneConfig) -> ZonePlace:
        """Give the place of a configured zone; certificates are all that lie beside the node's own in its folder."""
        if config.storage.backend != "log":
            raise StorageUnable(f"the facts of {config.zone.name} are not in its folder: see [storage] backend")
        tls, top = config.tls, config.source.parent.resolve()
        files = {config.path(path) for path in (tls.ca, tls.certificate, tls.key) if path is not None}
        folders = {file.parent for file in files if file.resolve().is_relative_to(top)}
        files |= {path for folder in folders for path in folder.glob("*") if path.suffix in _CERTIFICATES}
        keys = {path for path in files if _holds_key(path)} | ({config.path(tls.key)} if tls.key else set())
        certificates = sorted(files - keys)
        return ZonePlace(
            config.data_folder,
            config.artifacts_folder,
            config.source,
            config.zone.name,
            tuple(certificates),
            tuple(sorted(keys)),
            config.path(tls.certificate) if tls.certificate else None,
            config.path(tls.key) if tls.key else None,
        )

    @staticmethod
    def of_folder(data: Path) -> ZonePlace:
        """Give the place of a data folder without a configuration."""
        return ZonePlace(data, data / ARTIFACTS)


@dataclass(frozen=True, slots=True)
class BackupLog:
    """One log in a backup: entries from ``start`` up to ``end`` (exclusive), and what they are known by."""

    stream: str
    buffer: str
    log_id: str
    start: int
    end: int
    chain_head: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup says of itself; ``problems`` is None when it was not verified."""

    zone: str
    begun_unix_ms: int
    made_unix_ms: int
    logs: tuple[BackupLog, ...]
    artifacts: int = 0
    size_bytes: int = 0
    config: str | None = None
    files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    with_keys: bool = False
    problems: tuple[dict[str, Any], ...] | None = None
    contents: Contents = field(default_factory=dict)
    version: str = bsfg.__version__
    format: int = field(default=FORMAT)

    @property
    def damage(self) -> list[dict[str, Any]]:
        """The problems that are damage; what was lost before, and is on record as lost, is not."""
        return [each for each in self.problems or () if each["code"] != "entries_lost"]


@dataclass(frozen=True, slots=True)
class BackupOptions:
    """How a backup is made; what never changes is taken from ``base``, an earlier one, by links."""

    base: Path | None = None
    with_keys: bool = False
    verify: bool = True


def back_up(
    place: ZonePlace, target: Path, options: BackupOptions, now_unix_ms: Callable[[], int], progress: Progress
) -> Manifest:
    """Copy a zone into a new folder and check the copy; whatever fails leaves nothing behind."""
    _check(place, target, options)
    partial = target.with_name(target.name + PARTIAL)
    try:
        # Made in here: a signal may end this process as soon as the folder is there.
        _make(partial)
        manifest = _Backup(place, partial, options, now_unix_ms, progress).run()
        partial.rename(target)
        DiskFiles(target.parent).sync_folder("")
    except FileExists:
        raise
    except OSError as error:
        clear_away(partial)
        raise translated(error, f"writing {target}") from None
    except BaseException:
        clear_away(partial)
        raise
    return manifest


def _make(partial: Path) -> None:
    """Make the folder that becomes the backup; one that is there already is somebody else's."""
    try:
        partial.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        hint = "Another backup is being made, or one was interrupted; then remove it."
        raise FileExists(f"{partial} is already there", hint=hint) from None


def _check(place: ZonePlace, target: Path, options: BackupOptions) -> None:
    if not (place.data / "bsfg.json").is_file():
        raise NotAFolder(f"there is no bsfg.json in {place.data}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExists(f"{target} is already there", hint="Choose a new folder; a backup never overwrites anything.")
    for folder in (place.data, place.artifacts):
        if target.resolve().is_relative_to(folder.resolve()):
            raise InvalidArgument(f"{target} lies inside {folder}, which is to be copied", hint="Choose another disk.")
    if options.base is not None:
        read_manifest(options.base)


class _Backup:
    """One backup being made."""

    def __init__(
        self, place: ZonePlace, target: Path, options: BackupOptions, now_unix_ms: Callable[[], int], progress: Progress
    ) -> None:
        self._place, self._target, self._options, self._now = place, target, options, now_unix_ms
        self._data, self._artifacts = DiskFiles(place.data), ArtifactFiles(place.artifacts)
        self._meter = Meter(progress, "copying", size_of(self._data) + size_of_artifacts(self._artifacts))

    def run(self) -> Manifest:
        """Copy everything, artifacts after the facts that name them, then check, then say what it is."""
        begun = self._now()
        target = DiskFiles(self._target / DATA)
        lacking: list[dict[str, Any]] = []

        def lacks(where: str, what: str) -> None:
            lacking.append(asdict(DamageFinding("log_damaged", where, f"not in the backup: {what}")))

        logs = copy_folder(self._data, target, reuse=self._reuse(DATA), copied=self._meter, lacks=lacks)
        artifacts = copy_artifacts(
            self._artifacts,
            ArtifactFiles(self._target / ARTIFACTS),
            reuse=self._reuse(ARTIFACTS),
            copied=self._meter,
        )
        files, left_out = self._zone_files()
        heads, problems = self._verified()
        if lacking:
            problems = (*lacking, *(problems or ()))
        manifest = Manifest(
            zone=self._place.zone,
            begun_unix_ms=begun,
            made_unix_ms=self._now(),
            logs=tuple(BackupLog(**asdict(log), chain_head=heads.get((log.stream, log.buffer), "")) for log in logs),
            artifacts=artifacts.contents if artifacts is not None else 0,
            size_bytes=self._meter.done,
            config=self._place.config.name if self._place.config is not None else None,
            files=files,
            left_out=left_out,
            with_keys=self._options.with_keys,
            problems=problems,
            contents=listed(self._target, PARTS),
        )
        document = orjson.dumps(asdict(manifest), option=orjson.OPT_INDENT_2)
        self._sign(document)
        write_whole(DiskFiles(self._target), MANIFEST, document)
        return manifest

    def _sign(self, manifest: bytes) -> None:
        """Sign with the node's key; without one, or without cryptography, there is a backup that only says less."""
        certificate, key = self._place.certificate, self._place.key
        if certificate is None or key is None:
            return
        try:
            # Here, because the core alone makes backups too.
            from bsfg.node.signed import signature_of
        except ModuleNotFoundError as error:
            if ExtraMissing.behind(error) is None:
                raise
            return
        with suppress(CertificateInvalid):
            write_whole(DiskFiles(self._target), SIGNATURE, signature_of(manifest, certificate, key))

    def _reuse(self, part: str) -> Callable[[str, int], bool]:
        """Give what links a file of the earlier backup into this one when it is the same."""
        if self._options.base is None:
            return lambda path, size: False
        old, new = self._options.base / part, self._target / part
        source = self._place.data if part == DATA else self._place.artifacts

        def reuse(path: str, size_bytes: int) -> bool:
            if not _alike(old / path, source / path, size_bytes):
                return False
            try:
                os.link(old / path, new / path)
            except OSError:
                return False  # another disk, or a file system without links
            return True

        return reuse

    def _zone_files(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Copy the configuration and certificates; give what was copied, and what was not and why one may miss it."""
        place, copied, left_out = self._place, [], []
        if place.config is None:
            return (), ()
        top = place.config.parent.resolve()
        for path in (place.config, *place.certificates, *place.keys):
            inside = path.resolve().is_relative_to(top)
            if not path.is_file() or not inside or (path in place.keys and not self._takes(path)):
                left_out.append(str(path))
                continue
            name = path.resolve().relative_to(top)
            target = self._target / ZONE / name
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copy2(path.resolve(), target)
            copied.append(name.as_posix())
        return tuple(copied), tuple(left_out)

    def _takes(self, key: Path) -> bool:
        """Tell whether a private key goes along: the node's own, when it is asked for, and no other ever."""
        return self._options.with_keys and key == self._place.key and key.name != AUTHORITY_KEY

    def _verified(self) -> tuple[dict[tuple[str, str], str], tuple[dict[str, Any], ...] | None]:
        if not self._options.verify:
            return {}, None
        return verified(self._target, self._meter.of("verifying"))


class Meter:
    """Counts bytes and tells how far something is."""

    def __init__(self, progress: Progress, doing: str, total: int) -> None:
        self._progress, self._doing, self._total, self.done = progress, doing, total, 0

    def __call__(self, size_bytes: int) -> None:
        """Count bytes that are done."""
        self.done += size_bytes
        self._progress(self._doing, self.done, max(self._total, self.done))

    def of(self, doing: str) -> Progress:
        """Give what tells of another step."""
        return lambda _, done, total: self._progress(doing, done, total)


def verified(backup: Path, progress: Progress) -> tuple[dict[tuple[str, str], str], tuple[dict[str, Any], ...]]:
    """Check everything in a backup; give the chain heads of its logs, and what is wrong."""
    report = verify(backup / DATA, progress=lambda done, total: progress("", done, total))
    problems = [asdict(problem) for problem in report.problems]
    files = ArtifactFiles(backup / ARTIFACTS)
    meter = Meter(progress, "", size_of_artifacts(files))
    for path, words in problems_of(files, meter):
        problems.append({"code": "digest_mismatch", "where": f"{ARTIFACTS}/{path}", "detail": words})
    return {(log.stream, log.buffer): log.chain_head for log in report.logs}, tuple(problems)


def is_signed(backup: Path) -> bool:
    """Tell whether a signature lies in a backup; whose it is is for a restore to find out."""
    return (backup / SIGNATURE).is_file()


def read_manifest(backup: Path) -> Manifest:
    """Read what a backup says of itself, or raise `NotAFolder` when it is none or not complete."""
    return parsed(backup, read_document(backup, MANIFEST))


def read_document(backup: Path, name: str) -> bytes:
    """Read the manifest or its signature, which are plain files."""
    try:
        with open_plain(backup / name) as file:
            return file.read(MANIFEST_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        hint = f"Give a folder that `bsfg backup` made; one without {MANIFEST} is not complete."
        raise NotAFolder(f"there is no {name} in {backup}", hint=hint) from None
    except OSError as error:
        raise translated(error, f"reading {backup}") from None


def parsed(backup: Path, document: bytes) -> Manifest:
    """Read a manifest, whoever wrote it: every value is of its kind, and no name leads out of the backup."""
    try:
        data = orjson.loads(document)
        if data["format"] > FORMAT:
            raise FormatUnsupported(f"{backup} has format {data['format']}, this version reads up to {FORMAT}")
        known = {name: value for name, value in data.items() if name in Manifest.__dataclass_fields__}
        manifest = Manifest(**{**known, "logs": tuple(BackupLog(**log) for log in data["logs"])})
        _check_kinds(manifest)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
        raise NotAFolder(f"{backup / MANIFEST} is damaged", hint="Use another backup.") from None
    check_names(list(manifest.files), ())
    check_names(list(manifest.contents), PARTS)
    if manifest.config is None and manifest.files:
        raise BackupUntrusted("the backup has a zone's files and does not say which of them is its zone.toml")
    if manifest.config is not None and (manifest.config not in manifest.files or "/" in manifest.config):
        raise BackupUntrusted(f"{one_line(manifest.config)[:200]!r} is no zone's file of this backup")
    return manifest


def _check_kinds(manifest: Manifest) -> None:
    lists = (manifest.files, manifest.left_out)
    if not all(isinstance(each, list | tuple) for each in lists) or not isinstance(manifest.contents, dict):
        raise TypeError
    texts = (
        manifest.zone,
        manifest.version,
        *manifest.files,
        *manifest.left_out,
        "" if manifest.config is None else manifest.config,
    )
    numbers = (manifest.begun_unix_ms, manifest.made_unix_ms, manifest.artifacts, manifest.size_bytes)
    rows = [(log.stream, log.buffer, log.log_id, log.chain_head) for log in manifest.logs]
    if not all(isinstance(each, str) for each in (*texts, *(text for row in rows for text in row))):
        raise TypeError
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in numbers):
        raise TypeError
    for size, digest in manifest.contents.values():
        if type(size) is not int or not isinstance(digest, str):
            raise TypeError
    for problem in manifest.problems or ():
        if not all(isinstance(problem[name], str) for name in ("code", "where", "detail")):
            raise TypeError


def _holds_key(path: Path) -> bool:
    """Tell whether a file is a private key, whatever it is called."""
    try:
        return path.suffix == ".key" or b"PRIVATE KEY-----" in path.read_bytes()
    except OSError:
        return False


def _alike(old: Path, new: Path, size_bytes: int) -> bool:
    """Tell whether two files that never change are the same one: their sizes, beginnings and ends are.

    That is enough: the end of a segment depends on all before it, and artifacts are called by their digest.
    """
    try:
        return old.stat().st_size == size_bytes and list(_ends(old, size_bytes)) == list(_ends(new, size_bytes))
    except OSError:
        return False


def _ends(path: Path, size_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(_COMPARED_BYTES)
        file.seek(max(0, size_bytes - _COMPARED_BYTES))
        yield file.read(_COMPARED_BYTES)
