"""A Java for Spark is found wherever it is, and comes with the package where there is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bsfg.errors import JavaMissing
from bsfg.spark import session as java_module
from bsfg.spark.session import (
    QUICK_FORKS,
    UNWANTED_OPTION,
    Java,
    bundled_java,
    find_java,
    java_in_use,
    launcher_home,
    settings,
    use_java,
    version_of,
    with_attempts,
)


def fake(home: Path, version: str, *, release: bool = True) -> Path:
    """Make something that says it is a Java, in its release file or only when it is asked."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026' >&2\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.mark.parametrize(
    ("said", "version"), [("17.0.9", 17), ("1.8.0_392", 8), ("25", 25), ("21-ea", 21), ("unknown", None)]
)
@pytest.mark.parametrize("release", [True, False])
def test_versions_are_read(tmp_path: Path, said: str, version: int | None, release: bool) -> None:
    """The version stands in a file or is told by the program, in the old way of counting or the new."""
    assert version_of(fake(tmp_path / "jdk", said, release=release)) == version


def test_the_first_that_is_new_enough_is_taken(tmp_path: Path) -> None:
    """JAVA_HOME comes before the PATH, what is too old is passed over."""
    old, new, newer = (fake(tmp_path / name, name) for name in ("11.0.2", "17.0.1", "21.0.1"))
    path = f"{newer / 'bin'}"
    assert find_java({"JAVA_HOME": str(new), "PATH": path}) == Java(new, 17)
    assert find_java({"JAVA_HOME": str(old), "PATH": path}) == Java(newer, 21)
    assert find_java({"PATH": path}) == Java(newer, 21)


def test_the_package_brings_one(tmp_path: Path) -> None:
    """Where the system has none, or one that is too old, the bundled one is taken."""
    old = fake(tmp_path / "old", "1.8.0")
    for environment in ({}, {"PATH": ""}, {"JAVA_HOME": str(old)}, {"JAVA_HOME": str(tmp_path / "nowhere")}):
        found = find_java(environment)
        assert found.bundled
        assert found.version >= 17


def test_no_java_at_all_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what was found and would not do, and what to do about it."""
    monkeypatch.setattr(java_module, "bundled_java", lambda: None)
    with pytest.raises(JavaMissing, match=r"no Java 17 or newer; found .*old \(version 8\)") as caught:
        find_java({"JAVA_HOME": str(fake(tmp_path / "old", "1.8.0"))})
    assert "bsfg[spark]" in caught.value.hint


def test_the_launcher_leaves_out_one_option_only(tmp_path: Path) -> None:
    """Everything else reaches Java as it was given, spaces and quotes included."""
    home = launcher_home(Java(fake(tmp_path / "it's a jdk", "17.0.1"), 17), {"XDG_CACHE_HOME": str(tmp_path)})
    given = ["-cp", "a b", "", "$HOME", "'", UNWANTED_OPTION, '"x"', "-Dy=*"]
    done = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == [each for each in given if each != UNWANTED_OPTION]


@pytest.mark.parametrize(("version", "kept"), [(17, [QUICK_FORKS]), (24, [QUICK_FORKS]), (25, []), (26, [])])
def test_quick_forks_are_for_a_java_that_does_not_warn_of_them(tmp_path: Path, version: int, kept: list[str]) -> None:
    """What makes a newer Java print a warning does not reach it."""
    home = launcher_home(Java(fake(tmp_path / "jdk", str(version)), version), {"XDG_CACHE_HOME": str(tmp_path)})
    done = subprocess.run([home / "bin" / "java", QUICK_FORKS, "-y"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*kept, "-y"]


def test_the_launcher_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    """A launcher that is there is used again, a changed one replaced, a folder that others can write passed over."""
    java = Java(fake(tmp_path / "jdk", "17.0.1"), 17)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    home = launcher_home(java, environment)
    program = home / "bin" / "java"
    made = program.stat().st_ino
    assert launcher_home(java, environment) == home
    assert program.stat().st_ino == made
    program.write_text("something else")
    assert launcher_home(java, environment) == home
    assert "exec" in program.read_text()
    home.chmod(0o777)
    elsewhere = launcher_home(java, environment)
    assert elsewhere != home
    assert os.stat(elsewhere).st_mode & 0o077 == 0


def test_the_bundled_java_starts_with_the_option_that_it_lacks(tmp_path: Path) -> None:
    """The bundled Java runs behind its launcher with what Spark gives to every Java."""
    bundled = bundled_java()
    assert bundled is not None
    home = launcher_home(bundled, {"XDG_CACHE_HOME": str(tmp_path)})
    done = subprocess.run([home / "bin" / "java", UNWANTED_OPTION, "-version"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_environment_is_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAVA_HOME names the launcher only while Spark starts."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere/java")
    with java_in_use():
        assert (Path(os.environ["JAVA_HOME"]) / "bin" / "java").exists()
    assert os.environ["JAVA_HOME"] == "/nowhere/java"
    monkeypatch.delenv("JAVA_HOME")
    with java_in_use():
        assert "JAVA_HOME" in os.environ
    assert "JAVA_HOME" not in os.environ
    environment: dict[str, str] = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")}
    use_java(environment)
    assert "JAVA_HOME" in environment


def test_settings_can_all_be_overridden() -> None:
    """What the caller says counts, and what is meant for one machine is left out on a cluster."""
    assert settings("local[2]", {"spark.ui.enabled": "true"})["spark.ui.enabled"] == "true"
    assert settings("local[2]")["spark.driver.host"] == "127.0.0.1"
    assert "spark.driver.host" not in settings("yarn")


@pytest.mark.parametrize(
    ("master", "used"),
    [
        ("local", "local[1,4]"),
        ("local[*]", "local[*,4]"),
        ("local[3]", "local[3,4]"),
        ("local[3,9]", "local[3,9]"),
        ("spark://master:7077", "spark://master:7077"),
    ],
)
def test_local_masters_try_tasks_again(master: str, used: str) -> None:
    """A failed task is tried again on one machine as it would be in a cluster, unless the caller said otherwise."""
    assert with_attempts(master) == used
