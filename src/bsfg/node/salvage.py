"""Salvaging a zone's data folder into a new one: logs, cursors, what the node knows of its peers, and artifacts.

It is made beside its place and gets its name when it is complete. The source is only read, and no node may write to it
meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from bsfg.disk import clear_away, without_writer
from bsfg.errors import DigestMismatch, FileExists, InvalidArgument, NotAFolder
from bsfg.node.backup import ARTIFACTS, Meter, Progress
from bsfg.stores.artifacts import folder
from bsfg.stores.artifacts.contents import CONTENT, NAMES, SUFFIX, Shards, decoded
from bsfg.stores.artifacts.files import ArtifactDiskFiles as ArtifactFiles
from bsfg.stores.artifacts.folder import FORMAT, MARK
from bsfg.stores.log.backup import size_of
from bsfg.stores.log.damage import is_damage
from bsfg.stores.log.files import DiskFiles, translated, write_whole
from bsfg.stores.log.salvage import Missing, SalvagedData, salvage_data
from bsfg.stores.shared.frame import Damaged

STAGING = ".salvaging"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What is in the new folder and what could not be saved."""

    target: Path
    data: SalvagedData
    artifacts: int

    @property
    def missing(self) -> list[Missing]:
        """Everything that was lost, by where it was."""
        return self.data.missing


def salvage(source: Path, target: Path, artifacts: Path | None, now_unix_ms: int, progress: Progress) -> Salvaged:
    """Write everything readable of a data folder into a new one; whatever fails leaves nothing behind."""
    if not source.is_dir():
        raise NotAFolder(f"there is no folder {source}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExists(f"{target} is already there", hint="Choose a new folder; nothing is ever overwritten.")
    if target.resolve().is_relative_to(source.resolve()):
        raise InvalidArgument(f"{target} lies inside {source}, which is only read", hint="Choose another disk.")
    staging = target.with_name(target.name + STAGING)
    if staging.exists():
        raise FileExists(f"{staging} is already there", hint="Another one is under way, or was interrupted: remove it.")
    try:
        with without_writer(source):
            try:
                staging.mkdir(parents=True, mode=0o700)
                old = ArtifactFiles(artifacts or source / ARTIFACTS)
                meter = Meter(progress, "salvaging", _size(source, old))
                data = salvage_data(DiskFiles(source), DiskFiles(staging), now_unix_ms, meter)
                kept = _Artifacts(old, ArtifactFiles(staging / ARTIFACTS), data, meter).run()
                result = data, kept
                if target.exists():
                    target.rmdir()
                staging.rename(target)
                DiskFiles(target.parent).sync_folder("")
            except BaseException:
                clear_away(staging)
                raise
    except OSError as error:
        raise translated(error, f"salvaging {source}") from None
    return Salvaged(target, *result)


def _size(source: Path, artifacts: ArtifactFiles) -> int:
    """Give about how much there is to read; nobody knows it of what cannot be read."""
    total = 0
    with suppress(OSError):
        total += size_of(DiskFiles(source))
    with suppress(OSError):
        total += folder.size_of(artifacts)
    return total


class _Artifacts:
    """The artifacts being saved: contents that are what their names say, and the names that stand for them."""

    def __init__(self, source: ArtifactFiles, target: ArtifactFiles, found: SalvagedData, copied: Meter) -> None:
        self._source, self._target, self._found, self._copied = source, target, found, copied

    def run(self) -> int:
        """Copy them; give how many contents there are."""
        if not self._listed("", (MARK, CONTENT, NAMES)):
            return 0
        self._target.prepare()
        kept = {digits for digits in self._digits(CONTENT) if self._content(digits)}
        for digits in self._digits(NAMES, SUFFIX):
            self._name(digits, kept)
        for top in (NAMES, CONTENT):
            self._target.make_folder(top)
            for shard in self._target.list(top):
                self._target.sync_folder(f"{top}/{shard}")
            self._target.sync_folder(top)
        write_whole(DiskFiles(self._target.root), MARK, orjson.dumps({"format": FORMAT}))
        return len(kept)

    def _listed(self, path: str, wanted: tuple[str, ...]) -> bool:
        try:
            return any(name in wanted for name in self._source.list(path))
        except OSError as error:
            self._lost(path, error)
            return False

    def _digits(self, top: str, suffix: str = "") -> list[str]:
        found: list[str] = []
        try:
            found.extend(Shards(self._source, top).files(suffix))
        except OSError as error:
            self._lost(top, error)
        return found

    def _content(self, digits: str) -> bool:
        path, digest = Shards(self._source, CONTENT).path(digits), hashlib.sha256()
        self._target.make_folder(path.rpartition("/")[0])
        file = self._target.create(path)
        try:
            for chunk in self._chunks(path):
                digest.update(chunk)
                file.write([chunk])
                self._copied(len(chunk))
            file.sync()
            sound = digest.hexdigest() == digits
            if not sound:
                self._found.miss(f"{ARTIFACTS}/{path}", "the content has another digest than its name says")
        except Damaged as error:
            self._found.miss(f"{ARTIFACTS}/{path}", str(error))
            sound = False
        finally:
            file.close()
        if not sound:
            self._target.remove(path)
        return sound

    def _chunks(self, path: str) -> Iterator[bytes]:
        """Read a file of the source; what its medium cannot give is told apart from what the target cannot take."""
        try:
            file = self._source.open_read(path)
            try:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
            finally:
                file.close()
        except OSError as error:
            if not is_damage(error):
                raise
            raise Damaged(f"cannot be read: {error.strerror}") from None

    def _name(self, digits: str, kept: set[str]) -> None:
        path = Shards(self._source, NAMES).path(digits, SUFFIX)
        try:
            data = b"".join(self._chunks(path))
            artifact = decoded(data, digits)
        except Damaged as damage:
            self._found.miss(f"{ARTIFACTS}/{path}", str(damage))
            return
        except (DigestMismatch, ValueError, TypeError) as error:
            self._found.miss(f"{ARTIFACTS}/{path}", getattr(error, "message", "the record cannot be read"))
            return
        if artifact.digest.rpartition(":")[2] not in kept:
            self._found.miss(f"{ARTIFACTS}/{path}", f"{artifact.bucket}/{artifact.key} stands for content that is lost")
            return
        self._target.make_folder(path.rpartition("/")[0])
        write_whole(DiskFiles(self._target.root), path, data)

    def _lost(self, path: str, error: OSError) -> None:
        if not is_damage(error):
            raise error
        self._found.miss(f"{ARTIFACTS}/{path}".rstrip("/"), f"cannot be read: {error.strerror}")
