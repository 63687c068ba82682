"""The archive of Java's classes: it is used where it fits, and nobody notices where it does not."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bsfg.spark import archive
from bsfg.spark.archive import AGAIN_SECONDS, ARCHIVE, FAILED, LOCK, OF, SWITCH
from bsfg.spark.session import Java, find_java, light_home

PROGRAM = """
import sys
from pathlib import Path
from bsfg.spark.session import started, end
log, classes = sys.argv[1:]
said = {"spark.driver.extraJavaOptions": f"-Xlog:class+load:file={classes}"}
spark = started("test", "local[1]", said, Path(log))
print(spark.range(7).count())
end(spark)
"""
MAKE = "from bsfg.spark.archive import main; main()"


def environment(cache: Path, **more: str) -> dict[str, str]:
    """Give an environment with a cache of its own, in which archives may be made."""
    kept = {name: value for name, value in os.environ.items() if name not in (SWITCH, "SPARK_HOME")}
    return kept | {"XDG_CACHE_HOME": str(cache)} | more


def run(code: str, *arguments: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run some Python as a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a cache in which two processes have made an archive at the same time."""
    cache = tmp_path_factory.mktemp("cache")
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE],
            env=environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    ended = [(maker.communicate()[0], maker.returncode) for maker in makers]
    assert [code for _, code in ended] == [0, 0], ended
    [folder] = (cache / "bsfg").glob("classes-*")
    assert sorted(each.name for each in folder.iterdir()) == sorted([ARCHIVE, LOCK, OF])
    return cache


def from_archive(cache: Path, folder: Path) -> bool:
    """Start Spark, which must work and say nothing; tell whether its classes came from the archive."""
    folder.mkdir()
    log, classes = folder / "spark.log", folder / "classes"
    done = run(PROGRAM, log, classes, env=environment(cache, **{SWITCH: "no"}))
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", ""), done.stderr
    assert log.read_text() == ""
    [loaded] = [line for line in classes.read_text().splitlines() if " org.apache.spark.SparkContext " in line]
    return "shared objects file" in loaded


def flipped(file: Path) -> None:
    """Change bytes all over a file; its size and its beginning stay."""
    with file.open("r+b") as found:
        for place in range(1 << 16, file.stat().st_size, 1 << 16):
            found.seek(place)
            found.write(b"\xff\x00\xff\x00")


def cut(file: Path) -> None:
    """Cut a file in the middle."""
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    """Leave nothing of a file."""
    os.truncate(file, 0)


@pytest.mark.long
@pytest.mark.xdist_group("archive")
def test_classes_come_from_the_archive(made: Path, tmp_path: Path) -> None:
    """Two made it at once, one of them for nothing; whoever starts then finds it."""
    assert from_archive(made, tmp_path / "run")


@pytest.mark.long
@pytest.mark.xdist_group("archive")
@pytest.mark.parametrize("damage", [flipped, cut, emptied])
def test_a_damaged_archive_is_as_none(made: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Spark starts all the same, and nothing is said."""
    whole = next((made / "bsfg").glob(f"classes-*/{ARCHIVE}"))
    kept = tmp_path / "kept"
    shutil.copy(whole, kept)
    try:
        damage(whole)
        assert not from_archive(made, tmp_path / "run")
    finally:
        shutil.copy(kept, whole)


@pytest.mark.long
@pytest.mark.xdist_group("archive")
def test_an_archive_that_came_from_elsewhere_does_no_harm(made: Path, tmp_path: Path) -> None:
    """One of libraries in another folder is taken by Java or refused; Spark works either way, and nothing is said."""
    cache = tmp_path / "cache"
    from_archive(cache, tmp_path / "first")
    [folder] = (cache / "bsfg").glob("classes-*")
    shutil.copy(next((made / "bsfg").glob(f"classes-*/{ARCHIVE}")), folder)
    from_archive(cache, tmp_path / "second")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give where the archive of this Java and this Spark belongs, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (SWITCH, "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = light_home()
    assert home is not None
    found = archive.place(find_java(), home)
    assert found is not None
    yield found


def test_another_java_and_other_libraries_have_another_place(folder: Path, tmp_path: Path) -> None:
    """What belongs to one version is never found by another."""
    java = find_java()
    for name in ("a.jar", "b.jar"):
        (tmp_path / "home" / "jars").mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / "jars" / name).write_bytes(b"x")
    homes = [folder, archive.place(java, tmp_path / "home")]
    (tmp_path / "home" / "jars" / "b.jar").write_bytes(b"xy")
    homes.append(archive.place(java, tmp_path / "home"))
    other = tmp_path / "jdk"
    other.mkdir()
    (other / "release").write_text('JAVA_VERSION="21"')
    homes.append(archive.place(Java(other, 21), tmp_path / "home"))
    assert None not in homes and len(set(homes)) == len(homes)
    assert archive.place(Java(tmp_path / "nowhere", 21), tmp_path / "home") is None


def test_without_an_archive_java_is_told_nothing(folder: Path) -> None:
    """There is no option for what is not there, and those for what is there keep Java quiet."""
    assert archive.options(Java(Path("/jdk"), 17), None) == archive.options(Java(Path("/jdk"), 17), folder) == ""
    (folder / ARCHIVE).touch()
    given = {version: archive.options(Java(Path("/jdk"), version), folder).split() for version in (17, 25)}
    assert f"-XX:SharedArchiveFile={folder / ARCHIVE}" in given[17] and "-Xlog:cds*=off" in given[17]
    assert given[25] == [*given[17], "-Xlog:aot*=off"], (
        "an older Java would not start with a name that it does not know"
    )


def test_where_nothing_can_be_written_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be written is no reason to fail."""
    home = light_home()
    assert home is not None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/fdinfo/cache")
    monkeypatch.setattr("tempfile.tempdir", "/proc/self/fdinfo")
    assert archive.place(find_java(), home) is None


def test_it_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where there is one, where nobody wants one, or where it failed a short while ago."""
    assert archive.is_wanted(folder)
    monkeypatch.setenv(SWITCH, "no")
    assert not archive.is_wanted(folder)
    monkeypatch.delenv(SWITCH)
    (folder / FAILED).touch()
    assert not archive.is_wanted(folder)
    long_ago = time.time() - AGAIN_SECONDS - 60
    os.utime(folder / FAILED, (long_ago, long_ago))
    assert archive.is_wanted(folder)
    (folder / ARCHIVE).touch()
    assert not archive.is_wanted(folder)


def test_one_at_a_time_makes_it(folder: Path, tmp_path: Path) -> None:
    """Who finds another one at work leaves it to that."""
    with (folder / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(MAKE, env=environment(tmp_path / "cache", TMPDIR=str(tmp_path)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(each.name for each in folder.iterdir()) == sorted([LOCK, OF])


@pytest.mark.campaign
def test_nothing_is_taken_from_the_folder_where_a_command_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there may be anybody's: neither who makes the archive nor a worker of Spark imports it."""
    here, seen = tmp_path / "here of others", tmp_path / "seen"
    here.mkdir()
    (here / "shutil.py").write_text(f"open({str(seen)!r}, 'a').write('imported')\nraise SystemExit(1)\n")
    monkeypatch.chdir(here)
    begun: list[Any] = []

    class Noted(subprocess.Popen[Any]):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            begun.append(self)

    monkeypatch.setattr("bsfg.spark.archive.subprocess.Popen", Noted)
    with (folder / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archive.make_beside()
        assert [each.wait(60) for each in begun] == [0]
    # The package, too, may lie in a folder whose name has a space.
    package = Path(archive.__file__).parents[2]
    (here / "packages").symlink_to(package)
    env = environment(tmp_path / "cache", PYTHONPATH=str(here / "packages"), PYTHONSAFEPATH="1", **{SWITCH: "no"})
    program = PROGRAM.replace("import sys", "import os, sys; os.environ.pop('PYTHONSAFEPATH')").replace(
        "spark.range(7)", "spark.range(7).mapInArrow(lambda them: them, 'id long')"
    )
    monkeypatch.undo()
    monkeypatch.chdir(here)
    done = run(program, tmp_path / "log", tmp_path / "classes", env=env)
    assert (done.returncode, done.stdout, seen.exists()) == (0, "7\n", False), done.stderr


def test_who_was_killed_is_not_followed_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the system ends for lack of memory has no time to say so; the next command does not try it again."""
    looks: list[bool] = []
    monkeypatch.setattr("bsfg.spark.archive.make", lambda java, folder: looks.append(archive.is_wanted(folder)))
    archive.main()
    assert looks == [False]
    assert sorted(each.name for each in folder.iterdir()) == sorted([LOCK, OF]), "one that succeeds leaves no note"


def test_a_java_that_cannot_is_noted(folder: Path, tmp_path: Path) -> None:
    """The reason is in a file, nothing half done is left, and what an earlier one left behind is gone."""
    jdk = tmp_path / "jdk"
    (jdk / "bin").mkdir(parents=True)
    (jdk / "release").write_text('JAVA_VERSION="17.0.1"')
    (jdk / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    (jdk / "bin" / "java").chmod(0o755)
    home = light_home()
    assert home is not None
    place = archive.place(Java(jdk, 17), home)
    assert place is not None
    (place / "making-before").mkdir()
    done = run(MAKE, env=environment(tmp_path / "cache", TMPDIR=str(tmp_path), JAVA_HOME=str(jdk)))
    assert done.returncode == 1
    assert sorted(each.name for each in place.iterdir()) == sorted([FAILED, LOCK, OF])
    assert (place / FAILED).read_text()


def test_older_ones_are_removed(folder: Path) -> None:
    """Those of the same Spark and of one that is gone make room; those of others stay."""
    same, gone, other = (folder.with_name(f"classes-{name}") for name in ("same", "gone", "other"))
    ours = (folder / OF).read_text()
    for each, of in ((same, ours), (gone, "/nowhere\n/jdk"), (other, ours + "/another/jdk")):
        each.mkdir()
        (each / OF).write_text(of)
    archive._remove_older(folder)
    assert [each.exists() for each in (folder, same, gone, other)] == [True, False, False, True]
