"""The contents of an artifact folder: one file per digest, plain bytes, so that `sha256sum` can check them.

Everything here blocks and runs in the threads of `bsfg.stores.artifacts.folder`. A file's time of modification says
when its content was last needed; a collection goes by that.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from bsfg.artifacts import StoredContent
from bsfg.errors import OutcomeUnknown
from bsfg.ports import Clock
from bsfg.stores.artifacts.files import Files, give_place, move_away

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

    def __init__(self, files: Files, top: str) -> None:
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

    files: Files
    clock: Clock
    durable: bool = True
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
        """Count what is there; under a writer's hands it may be gone the next moment."""
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
        if self.durable:
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
