"""The contents of an artifact folder and the names that point to them: how they are kept, and how orphans leave."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field

import orjson

from bsfg.artifacts import Collected, StoredArtifact, StoredContent
from bsfg.disk import give_place, is_damage, move_away
from bsfg.errors import ArtifactConflict, DigestMismatch, OutcomeUnknown
from bsfg.ports import Clock
from bsfg.stores.artifacts.files import ArtifactFiles, translating

CONTENT = "content"
INCOMING = "incoming"
STRIPES = 64
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What the system says when there is no such file, or something else in its place."""

_is_hex = re.compile(r"[0-9a-f]{64}").fullmatch


@dataclass(frozen=True, slots=True)
class Grace:
    """How long ago content must have been needed last to go."""

    now_unix_ms: int
    seconds: float

    @property
    def milliseconds(self) -> float:
        """The same in the unit of the clocks."""
        return self.seconds * 1000


class Stripes:
    """Locks by digest or name: equal texts share one, others rarely do."""

    def __init__(self) -> None:
        self._locks = tuple(threading.Lock() for _ in range(STRIPES))

    def of(self, hex_digits: str) -> threading.Lock:
        """Give the lock of a text of hexadecimal digits."""
        return self._locks[int(hex_digits[:4], 16) % STRIPES]


class Shards:
    """The folders that files are spread over; each is made, and its names made durable, before it is relied on.

    A process that was killed between renaming and syncing leaves a name that everybody sees and a power loss may
    still take back. So a folder is synced once before the first answer out of it.
    """

    def __init__(self, files: ArtifactFiles, top: str) -> None:
        self._files, self.top = files, top
        self._settled: set[str] = set()

    def path(self, hex_digits: str, suffix: str = "") -> str:
        """Give the path of a file."""
        return f"{self.top}/{hex_digits[:2]}/{hex_digits}{suffix}"

    def make(self, hex_digits: str) -> None:
        """Make the folder of a file durably."""
        folder = f"{self.top}/{hex_digits[:2]}"
        if not self._files.exists(folder):
            self._settled.discard(folder)
        try:
            self._files.make_folder(folder)
        except FileExistsError:
            move_away(self._files, folder)
            self._files.make_folder(folder)
            self._settled.discard(folder)
        if folder not in self._settled:
            self._files.sync_folder(self.top)
            self._settle(folder)

    def settle(self, hex_digits: str) -> None:
        """Make durable what can be seen in the folder of a file."""
        folder = f"{self.top}/{hex_digits[:2]}"
        if folder not in self._settled and self._files.exists(folder):
            self._files.sync_folder(self.top)
            with contextlib.suppress(NotADirectoryError):  # whoever has content for it puts a folder there
                self._settle(folder)

    def sync(self, hex_digits: str) -> None:
        """Make a change of names in the folder of a file durable; raises `OutcomeUnknown` when that fails."""
        folder = f"{self.top}/{hex_digits[:2]}"
        try:
            self._files.sync_folder(folder)
        except OSError as error:
            raise OutcomeUnknown(
                f"syncing {folder}: {error.strerror or error}",
                hint="Open the folder of artifacts again, after a look at the disk, and repeat the call.",
            ) from error

    def files(self, suffix: str = "") -> Iterator[str]:
        """Give the hexadecimal digits of every file, in order; what does not look like one of ours is left out."""
        for shard in self._files.list(self.top):
            try:
                names = self._files.list(f"{self.top}/{shard}")
            except NotADirectoryError:
                continue
            for name in names:
                digits = name.removesuffix(suffix)
                if digits + suffix == name and _is_hex(digits):
                    yield digits

    def _settle(self, folder: str) -> None:
        self._files.sync_folder(folder)
        self._settled.add(folder)


@dataclass(slots=True)
class Contents:
    """All contents of a folder, how much room they take, and who needs them now."""

    files: ArtifactFiles
    clock: Clock
    artifacts: int = 0
    used_bytes: int = 0
    damaged: set[str] = field(default_factory=set)
    """What was found to be other than its digest says: it counts as missing, until somebody brings it again."""
    shards: Shards = field(init=False)
    _stripes: Stripes = field(default_factory=Stripes)
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _claimed_ms: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shards = Shards(self.files, CONTENT)

    def load(self) -> None:
        """Count what is there; somebody may remove it the next moment."""
        for digits in self.shards.files():
            with contextlib.suppress(*ABSENT):
                self.used_bytes += self.files.size(self.shards.path(digits))
                self.artifacts += 1

    def exists(self, digits: str) -> bool:
        """Tell whether a content is here; one that is just getting its place is waited for."""
        with self._stripes.of(digits):
            return digits not in self.damaged and self.size(digits) is not None

    def size(self, digits: str) -> int | None:
        """Give the size of a content, None when it is not here."""
        self.shards.settle(digits)
        try:
            return self.files.size(self.shards.path(digits))
        except ABSENT:
            return None

    def claim(self, digits: str) -> int | None:
        """Give the size of a content and note that it is needed now."""
        with self._stripes.of(digits):
            size = None if digits in self.damaged else self.size(digits)
            if size is not None:
                self._need(digits)
            return size

    def admit(self, incoming: str, content: StoredContent, digits: str) -> None:
        """Give a complete and synced file its place; content that was there already is replaced by its equal."""
        with self._stripes.of(digits):
            self.shards.make(digits)
            before = self.size(digits)
            give_place(self.files, incoming, self.shards.path(digits))
            self.damaged.discard(digits)
            self._need(digits)
            self._count(0 if before is not None else 1, content.size_bytes - (before or 0))
            self.shards.sync(digits)

    def victims(self, referenced: AbstractSet[str], grace: Grace) -> list[str]:
        """Find what may go, and note of what is referenced that it is needed now."""
        found = []
        for digits in self.shards.files():
            if f"sha256:{digits}" in referenced:
                self.files.touch(self.shards.path(digits), grace.now_unix_ms)
            elif self._is_old(digits, grace):
                found.append(digits)
        return found

    def remove(self, digits: str, grace: Grace, remove_names: Callable[[], None]) -> int | None:
        """Remove a content and its names unless it is needed again; give the bytes that went, None when none did.

        Names that stand for content which is not here go too: nothing can be got by them.
        """
        with self._stripes.of(digits):
            size = self.size(digits)
            if size is not None and not self._is_old(digits, grace):
                return None
            remove_names()
            if size is not None:
                self.files.remove(self.shards.path(digits))
                self._count(-1, -size)
            return size

    def forget_claims(self, grace: Grace) -> None:
        """Drop claims that no longer protect anything."""
        oldest_ms = self.clock.monotonic_ms() - grace.milliseconds
        for digits in [digits for digits, at_ms in list(self._claimed_ms.items()) if at_ms < oldest_ms]:
            with self._stripes.of(digits):
                if self._claimed_ms.get(digits, 0) < oldest_ms:
                    self._claimed_ms.pop(digits, None)

    def _need(self, digits: str) -> None:
        self.files.touch(self.shards.path(digits), self.clock.now_unix_ms())
        self._claimed_ms[digits] = self.clock.monotonic_ms()

    def _is_old(self, digits: str, grace: Grace) -> bool:
        """Tell whether a content was not needed for the grace period, by both clocks as far as they know."""
        claimed_ms = self._claimed_ms.get(digits)
        if claimed_ms is not None and self.clock.monotonic_ms() - claimed_ms < grace.milliseconds:
            return False
        try:
            touched_unix_ms = self.files.touched_unix_ms(self.shards.path(digits))
        except FileNotFoundError:
            return False
        return grace.now_unix_ms - touched_unix_ms >= grace.milliseconds

    def _count(self, artifacts: int, size_bytes: int) -> None:
        with self._counting:
            self.artifacts += artifacts
            self.used_bytes += size_bytes


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

    def __init__(self, files: ArtifactFiles, write_whole: WriteWhole) -> None:
        self.shards = Shards(files, NAMES)
        self._files, self._write_whole = files, write_whole
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


class Collector:
    """Removes what nobody needs; ``in_use`` are the paths of uploads under way."""

    def __init__(self, files: ArtifactFiles, contents: Contents, names: Names, in_use: AbstractSet[str]) -> None:
        self._files, self._contents, self._names, self._in_use = files, contents, names, in_use
        self._looked_for_empty_names = False

    def clear_incoming(self) -> None:
        """Remove what uploads that ended badly could not remove themselves."""
        for name in self._files.list(INCOMING):
            path = f"{INCOMING}/{name}"
            if path not in self._in_use:
                with contextlib.suppress(IsADirectoryError):  # is none of ours
                    self._files.remove(path)

    def collect(self, referenced: AbstractSet[str], grace: Grace) -> Collected:
        """Remove every content that is not referenced and not needed, its names first."""
        with translating("collecting artifacts"):
            self.clear_incoming()
            victims = self._contents.victims(referenced, grace)
            by_digest = self._names_of(victims, referenced)
            freed, removed, changed = 0, [], set()
            names_removed: list[str] = []
            for digits in sorted({*victims, *by_digest}):

                def remove_names(digits: str = digits) -> None:
                    found = by_digest.get(digits, ())
                    names_removed.extend(name for name in found if self._names.remove(name, f"sha256:{digits}"))

                size = self._contents.remove(digits, grace, remove_names)
                if size is not None:
                    freed += size
                    removed.append(f"sha256:{digits}")
                    changed.add(digits[:2])
            name_shards = {name[:2] for name in names_removed}
            for shard in sorted(name_shards):
                self._names.shards.sync(shard)
            for shard in sorted(changed):
                self._contents.shards.sync(shard)
            self._contents.forget_claims(grace)
        return Collected(tuple(removed), len(names_removed), freed)

    def _names_of(self, victims: list[str], referenced: AbstractSet[str]) -> dict[str, list[str]]:
        """Find the names of victims, and those whose content is gone although no fact names it.

        Reading every record takes its time, so it is done only when something is to go, and once after a start:
        names without content are what a power loss during a collection, or a careless hand, leaves.
        """
        by_digest: dict[str, list[str]] = defaultdict(list)
        if self._looked_for_empty_names and not victims:
            return by_digest
        chosen = set(victims)
        for name, artifact in self._names.all():
            digits = artifact.digest.removeprefix("sha256:")
            if digits in chosen or (artifact.digest not in referenced and not self._contents.exists(digits)):
                by_digest[digits].append(name)
        self._looked_for_empty_names = True
        return by_digest
