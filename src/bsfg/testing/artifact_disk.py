"""The simulated disk as `bsfg.stores.artifacts.files.Files` needs it: files that are read in pieces and have times."""

from __future__ import annotations

from random import Random

from bsfg.testing.disk import SimulatedDisk


class SimulatedReadFile:
    """A file of a simulated disk as it was when it was opened."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, count: int) -> bytes:
        """Give the next bytes."""
        piece = self._data[self._at : self._at + count]
        self._at += len(piece)
        return piece

    def close(self) -> None:
        """Release the file."""


class SimulatedArtifactDisk(SimulatedDisk):
    """A disk that forgets what was not synced, for artifact folders."""

    def __init__(self, seed: int | str = 0, disk: SimulatedDisk | None = None) -> None:
        super().__init__(seed, None if disk is None else disk._root)
        self._times: dict[str, int] = dict(disk._times) if isinstance(disk, SimulatedArtifactDisk) else {}

    def after_power_loss(self, random: Random) -> SimulatedArtifactDisk:
        """Give the disk as it may be found after losing power at this moment."""
        return self._with_times(SimulatedArtifactDisk(self._seed, self.crash(random)))

    def after_kill(self) -> SimulatedArtifactDisk:
        """Give the disk as the next process finds it when this one is killed."""
        return self._with_times(SimulatedArtifactDisk(self._seed, self.killed()))

    def prepare(self) -> None:
        """Do nothing: the folder itself is always there."""

    def open_read(self, path: str) -> SimulatedReadFile:
        """Open a file for reading."""
        return SimulatedReadFile(bytes(self.read(path)))

    def touched_unix_ms(self, path: str) -> int:
        """Give the time that was set last."""
        self.size(path)
        return self._times.get(path, 0)

    def touch(self, path: str, unix_ms: int) -> None:
        """Set the time of a file."""
        if self.exists(path):
            self._times[path] = unix_ms

    def rename(self, old: str, new: str) -> None:
        """Rename a file, which keeps its time."""
        super().rename(old, new)
        self._times[new] = self._times.pop(old, 0)

    def _with_times(self, other: SimulatedArtifactDisk) -> SimulatedArtifactDisk:
        other._times = dict(self._times)
        return other
