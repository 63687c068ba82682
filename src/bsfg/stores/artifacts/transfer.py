"""Files on their way into and out of an artifact folder, counted and digested as they pass."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator

from bsfg.artifacts import Begun, StoredContent, check_digest
from bsfg.disk import give_place, is_damage
from bsfg.errors import ArtifactMissing, DigestMismatch
from bsfg.stores.artifacts.contents import ABSENT, CONTENT, INCOMING, Contents, Shards
from bsfg.stores.artifacts.files import ArtifactDiskFiles, ArtifactFiles, ReadFile, WriteFile, translating
from bsfg.stores.shared.artifacts import PIECE_BYTES, ContentIntake

SYNC_EVERY_BYTES = 64 << 20
"""How much may wait to be written at most: the disk starts early, and a full or broken one is noticed early."""


class ArtifactUpload:
    """An upload under way: a file that nobody sees until it is complete, synced and given its place.

    While it is under way its path is among ``in_use``, so that a collection leaves it alone.
    """

    def __init__(self, files: ArtifactFiles, in_use: set[str]) -> None:
        # The name is never used again, so a late `discard` cannot hit the file of somebody else.
        self.path = f"{INCOMING}/{secrets.token_hex(16)}"
        self._files, self._in_use = files, in_use
        in_use.add(self.path)
        self._file: WriteFile | None = None
        self._unsynced_bytes = 0
        self.placed = False

    def write(self, piece: bytes, intake: ContentIntake) -> None:
        """Digest a piece and write it."""
        intake.digest(piece)
        self._write(piece)
        if self._unsynced_bytes >= SYNC_EVERY_BYTES:
            self._sync()

    def place(self, contents: Contents, content: StoredContent) -> None:
        """Make the file durable and let it be the content with its digest."""
        with translating("storing an artifact"):
            if self._file is None:
                self._write(b"")
            self._files.touch(self.path, contents.clock.now_unix_ms())
            self._sync()
            self._close()
            contents.admit(self.path, content, check_digest(content.digest))
        self._done()

    def place_whole(self, path: str, data: bytes, sync_folder: Callable[[], None]) -> None:
        """Make a small file durable and give it its place."""
        with translating(f"writing {path}"):
            self._write(data)
            self._sync()
            self._close()
            give_place(self._files, self.path, path)
            sync_folder()
        self._done()

    def discard(self) -> None:
        """Remove the file if it has not got its place; what cannot be removed now goes at the next start."""
        if self.placed:
            return
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._files.remove(self.path)
        self._in_use.discard(self.path)

    def _done(self) -> None:
        self.placed = True
        self._in_use.discard(self.path)

    def _write(self, piece: bytes) -> None:
        with translating("writing an artifact"):
            if self._file is None:
                self._file = self._files.create(self.path)
            self._file.write([piece])
            self._unsynced_bytes += len(piece)

    def _sync(self) -> None:
        with translating("syncing an artifact"):
            if self._file is not None:
                self._file.sync()
            self._unsynced_bytes = 0

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def stored_pieces(folder: str | os.PathLike[str], digest: str, begun: Begun | None = None) -> Iterator[bytes]:
    """Read content out of an artifact folder, verified, in a program that has nothing else to do with the folder.

    Nothing is written and no lock is taken. Raises `ArtifactMissing`, and `DigestMismatch` in place of the last piece.
    Of what a copy was begun with nothing is given again, once it is known to be the beginning.
    """
    files = ArtifactDiskFiles(folder)
    outgoing = Outgoing(files, Shards(files, CONTENT).path(check_digest(digest)), digest)
    try:
        outgoing.open()
        left, before = begun.size_bytes if begun is not None else 0, Begun()
        while piece := outgoing.next():
            before.add(piece[:left])
            if begun is not None and left and len(piece) >= left and before.sha256.digest() != begun.sha256.digest():
                raise DigestMismatch(f"what was begun is not the beginning of {digest}", announced=digest)
            piece, left = piece[left:], max(0, left - len(piece))
            if piece:
                yield piece
        if left:
            raise DigestMismatch(f"what was begun is longer than {digest}", announced=digest)
    finally:
        outgoing.close()


class Outgoing:
    """A download under way: pieces of a file, the last of which is held back until the digest is known to be right."""

    def __init__(self, files: ArtifactFiles, path: str, digest: str) -> None:
        self._files, self._path, self._digest = files, path, digest
        self._file: ReadFile | None = None
        self._sha256 = hashlib.sha256()
        self._held = b""

    def open(self) -> None:
        """Open the file, or raise `ArtifactMissing`."""
        with translating("reading an artifact"):
            try:
                self._file = self._files.open_read(self._path)
            except ABSENT:
                raise ArtifactMissing(f"no artifact with digest {self._digest} is here", digest=self._digest) from None
        self._held = self._read()

    def next(self) -> bytes:
        """Give the next piece, none at the end; raises `DigestMismatch` in place of the last."""
        piece, self._held = self._held, self._read() if self._held else b""
        if not self._held and (found := f"sha256:{self._sha256.hexdigest()}") != self._digest:
            raise self._damaged(f"has the digest {found}", digest=found)
        return piece

    def _damaged(self, what: str, **details: str) -> DigestMismatch:
        return DigestMismatch(
            f"the content stored as {self._digest} {what}",
            hint="The copy in this zone is damaged: upload it again, or restore it from another zone.",
            announced=self._digest,
            **details,
        )

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()

    def _read(self) -> bytes:
        assert self._file is not None
        with translating("reading an artifact"):
            try:
                piece = self._file.read(PIECE_BYTES)
            except OSError as error:
                if not is_damage(error):
                    raise
                raise self._damaged(f"cannot be read: {error.strerror}") from None
        self._sha256.update(piece)
        return piece
