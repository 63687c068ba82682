"""The names of an artifact folder: one small record per bucket and key, in a file called by their hash.

The hash keeps every name, whatever its length, case or alphabet, apart from the names of files. Everything here
blocks and runs in the threads of `bsfg.stores.artifacts.folder`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict

import orjson

from bsfg.artifacts import StoredArtifact
from bsfg.disk import is_damage
from bsfg.errors import ArtifactConflict, DigestMismatch
from bsfg.stores.artifacts.contents import Shards, Stripes
from bsfg.stores.artifacts.files import Files

NAMES = "names"
SUFFIX = ".json"
RECORD_BYTES_MAX = 64 << 10

WriteWhole = Callable[[str, bytes, Callable[[], None]], None]
"""Makes a file with this content durable and gives it its place; the folder is synced by the function given."""


def hashed(bucket: str, key: str) -> str:
    """Give the digits that a name's file is called by; a bucket has no NUL, so joining by it is unambiguous."""
    return hashlib.sha256(f"{bucket}\0{key}".encode()).hexdigest()


class Names:
    """All names of a folder."""

    def __init__(self, files: Files, write_whole: WriteWhole, *, durable: bool = True) -> None:
        self.shards = Shards(files, NAMES)
        self._files, self._write_whole, self._durable = files, write_whole, durable
        self._stripes = Stripes()

    def read(self, bucket: str, key: str) -> StoredArtifact | None:
        """Give what a name stands for, None when nothing; raises `DigestMismatch` for a damaged record."""
        digits = hashed(bucket, key)
        with self._stripes.of(digits):
            return self._read(digits)

    def check_free(self, bucket: str, key: str, digest: str) -> None:
        """Raise `ArtifactConflict` when a name stands for another digest."""
        existing = self._standing(hashed(bucket, key))
        if existing is not None and existing.digest != digest:
            raise _conflict(existing, digest)

    def bind(self, artifact: StoredArtifact) -> StoredArtifact:
        """Let a name stand for a digest, and give what it stands for; the first one wins."""
        digits = hashed(artifact.bucket, artifact.key)
        with self._stripes.of(digits):
            existing = self._standing(digits)
            if existing is None:
                self.shards.make(digits)
                path = self.shards.path(digits, SUFFIX)
                self._write_whole(path, encoded(artifact), lambda: self.shards.sync(digits))
                return artifact
        if existing.digest != artifact.digest:
            raise _conflict(existing, artifact.digest)
        return existing

    def all(self) -> Iterator[tuple[str, StoredArtifact]]:
        """Give every undamaged record with the digits of its file."""
        for digits in self.shards.files(SUFFIX):
            artifact = self._standing(digits)
            if artifact is not None:
                yield digits, artifact

    def remove(self, digits: str, digest: str) -> bool:
        """Remove a record that still stands for a digest; the caller syncs the folder."""
        with self._stripes.of(digits):
            existing = self._standing(digits)
            if existing is None or existing.digest != digest:
                return False
            self._files.remove(self.shards.path(digits, SUFFIX))
            return True

    def _standing(self, digits: str) -> StoredArtifact | None:
        """Give a record; a damaged one stands for nothing, and whoever has the content may write it anew."""
        try:
            return self._read(digits)
        except DigestMismatch:
            return None

    def _read(self, digits: str) -> StoredArtifact | None:
        if self._durable:
            self.shards.settle(digits)
        try:
            file = self._files.open_read(self.shards.path(digits, SUFFIX))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            return decoded(b"", digits)  # which says that it is damaged
        try:
            data = b"".join(iter(lambda: file.read(RECORD_BYTES_MAX), b""))
        except OSError as error:
            if not is_damage(error):
                raise
            data = b""
        finally:
            file.close()
        return decoded(data, digits)


def encoded(artifact: StoredArtifact) -> bytes:
    """Give the content of a record's file: the record, and a line with its digest."""
    record = orjson.dumps(asdict(artifact), option=orjson.OPT_SORT_KEYS)
    return record + b"\n" + hashlib.sha256(record).hexdigest().encode() + b"\n"


def decoded(data: bytes, digits: str) -> StoredArtifact:
    """Read a record, or raise `DigestMismatch` when it is not as it was written or not in its place."""
    record, _, check = data.partition(b"\n")
    if check.strip() == hashlib.sha256(record).hexdigest().encode():
        artifact = StoredArtifact(**orjson.loads(record))
        if hashed(artifact.bucket, artifact.key) == digits:
            return artifact
    raise DigestMismatch(
        f"the record {NAMES}/{digits[:2]}/{digits}{SUFFIX} is damaged",
        hint="Upload the artifact again under its name, or restore the file from a backup.",
    )


def _conflict(existing: StoredArtifact, digest: str) -> ArtifactConflict:
    return ArtifactConflict(
        f"{existing.bucket}/{existing.key} stands for {existing.digest}, not for {digest}",
        bucket=existing.bucket,
        key=existing.key,
        digest=existing.digest,
    )
