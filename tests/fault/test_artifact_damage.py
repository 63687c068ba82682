"""Whatever happens to the folder of artifacts, it opens, says what is wrong, and is healed by a second put."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bsfg.errors import ArtifactMissing, BsfgError, DigestMismatch
from bsfg.stores.artifacts.files import DiskReadFile
from bsfg.stores.artifacts.folder import ArtifactFolder

HELLO, OTHER = b"hello" * 1000, b"other" * 1000


async def stream(data: bytes) -> AsyncIterator[bytes]:
    """Give content as an upload does."""
    yield data


def as_folder(path: Path) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    (path / "something").mkdir(parents=True)


def as_file(path: Path) -> None:
    """Put a file in the place of a folder."""
    shutil.rmtree(path)
    path.write_bytes(b"no folder")


def as_pipe(path: Path) -> None:
    """Put something in the place of a file that keeps whoever opens it waiting."""
    HARMS["deleted"](path)
    os.mkfifo(path)


def as_loop(path: Path) -> None:
    """Put a link in the place of a file that leads nowhere."""
    HARMS["deleted"](path)
    path.symlink_to(path.name)


HARMS: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink() if path.is_file() else shutil.rmtree(path),
    "empty": lambda path: path.write_bytes(b"") if path.is_file() else as_file(path),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:3]) if path.is_file() else as_file(path),
    "garbage": lambda path: path.write_bytes(b"\x07garbage\xff") if path.is_file() else as_file(path),
    "replaced": lambda path: as_folder(path) if path.is_file() else as_file(path),
    "a pipe": as_pipe,
    "a loop": as_loop,
}
PLACES = {
    "mark": lambda folder, digits: folder / "artifacts.json",
    "lock": lambda folder, digits: folder / "lock",
    "incoming": lambda folder, digits: folder / "incoming",
    "all content": lambda folder, digits: folder / "content",
    "all names": lambda folder, digits: folder / "names",
    "references": lambda folder, digits: folder / "references",
    "content": lambda folder, digits: folder / "content" / digits[:2] / digits,
    "shard of content": lambda folder, digits: folder / "content" / digits[:2],
    "name": lambda folder, digits: next((folder / "names").rglob("*.json")),
    "shard of names": lambda folder, digits: next((folder / "names").rglob("*.json")).parent,
}


async def content(store: ArtifactFolder, digest: str) -> bytes:
    """Read all of a content."""
    return b"".join([piece async for piece in store.get(digest)])


@pytest.mark.parametrize("live", [False, True], ids=["at the start", "while open"])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("place", PLACES)
def test_any_harm_to_any_file_of_the_folder_is_survived(tmp_path: Path, place: str, harm: str, live: bool) -> None:
    """The folder opens; what is read is right or an error that names it; another put heals it, names included."""
    if live and place in ("mark", "lock", "incoming", "all content", "all names"):
        live = False  # what is only used at the start

    async def work() -> None:
        store = await ArtifactFolder.open(tmp_path)
        put = await store.put("bucket", "key", stream(HELLO))
        await store.references.remember(b"what is known")
        if not live:
            await store.close()
        HARMS[harm](PLACES[place](tmp_path, put.digest.removeprefix("sha256:")))
        if not live:
            store = await ArtifactFolder.open(tmp_path)
        said: BsfgError | None = None
        try:
            assert await content(store, put.digest) == HELLO
        except (DigestMismatch, ArtifactMissing) as error:
            said = error
            assert put.digest in error.message
            assert not await store.exists(put.digest), "what is damaged is not here"
            assert await store.claim([put.digest]) == [None]
        try:
            assert await store.stat("bucket", "key") in (put, None)
        except DigestMismatch as error:
            said = error
        if isinstance(said, DigestMismatch) or (place == "mark" and harm not in ("deleted", "a loop")):
            assert store.problems
        assert await store.references.recall() in (b"what is known", None)
        await store.references.remember(b"news")
        again = await store.put("bucket", "key", stream(HELLO), digest=put.digest)
        assert again.digest == put.digest
        assert await content(store, put.digest) == HELLO
        assert await store.stat("bucket", "key") == again
        assert await store.claim([put.digest]) == [len(HELLO)]
        await store.put("bucket", "another", stream(OTHER))
        await store.collect({put.digest}, now_unix_ms=1, grace_seconds=0)
        await store.close()
        store = await ArtifactFolder.open(tmp_path)
        assert await content(store, put.digest) == HELLO
        assert await store.references.recall() == b"news"
        await store.close()

    asyncio.run(work())


@pytest.mark.parametrize("live", [False, True], ids=["at the start", "while open"])
@pytest.mark.parametrize("place", ["mark", "references", "content", "name"])
def test_a_sector_that_cannot_be_read_is_damage(
    tmp_path: Path, place: str, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder opens; content behind a bad sector counts as missing, so that it is brought again, and is healed."""
    read, bad = DiskReadFile.read, set[int]()

    def sometimes(file: DiskReadFile, count: int) -> bytes:
        if os.fstat(file._fd).st_ino in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, count)

    monkeypatch.setattr(DiskReadFile, "read", sometimes)

    async def work() -> None:
        store = await ArtifactFolder.open(tmp_path)
        put = await store.put("bucket", "key", stream(HELLO))
        await store.references.remember(b"what is known")
        path = PLACES[place](tmp_path, put.digest.removeprefix("sha256:"))
        # Held, so that no new file gets its number.
        with path.open("rb") as file:
            bad.add(os.fstat(file.fileno()).st_ino)
            if not live:
                await store.close()
                store = await ArtifactFolder.open(tmp_path)
            if place == "content":
                with pytest.raises(DigestMismatch, match="cannot be read"):
                    await content(store, put.digest)
                assert await store.claim([put.digest]) == [None]
            if place == "name":
                with pytest.raises(DigestMismatch, match="is damaged"):
                    await store.stat("bucket", "key")
            assert await store.references.recall() == (None if place == "references" else b"what is known")
            if place in ("content", "name") or (place == "mark" and not live):
                assert store.problems
            again = await store.put("bucket", "key", stream(HELLO), digest=put.digest)
            await store.references.remember(b"news")
            assert await content(store, put.digest) == HELLO
            assert await store.stat("bucket", "key") == again
            await store.collect({put.digest}, now_unix_ms=1, grace_seconds=0)
            assert await store.references.recall() == b"news"
            await store.close()

    asyncio.run(work())
