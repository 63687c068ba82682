"""A folder to be used as SPARK_HOME, in which Spark's Python workers start four times as fast.

Spark has its workers import PySpark from an archive beside its programs. An archive holds no compiled modules, so that
each new process compiles a hundred of them: 1.2 seconds of a processor against 0.3 for the installed package. A home
without the archive has them import the package, which is the same.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

PARTS = ("bin", "conf", "data", "jars", "sbin")
"""What Spark needs of its home; ``python``, where the archive is, is what it does not."""


@contextmanager
def home_in_use() -> Iterator[Path | None]:
    """Have SPARK_HOME name such a folder for a while, unless somebody has chosen a Spark or another Python."""
    chosen = "SPARK_HOME" in os.environ or os.environ.get("PYSPARK_PYTHON", sys.executable) != sys.executable
    home = None if chosen else light_home()
    if home is None:
        yield None
        return
    os.environ["SPARK_HOME"] = str(home)
    try:
        yield home
    finally:
        os.environ.pop("SPARK_HOME", None)


def light_home() -> Path | None:
    """Give the folder, in the user's cache or a temporary folder; None when there is no place for it."""
    package = _package()
    if package is None:
        return None
    name = f"spark-{hashlib.sha256(str(package).encode()).hexdigest()[:16]}"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME") or os.devnull, ".cache")
    for folder in (Path(caches) / "bsfg", Path(tempfile.gettempdir()) / f"bsfg-{os.getuid()}"):
        with suppress(OSError):
            return _made(folder / name, package)
    return None


def _package() -> Path | None:
    """Find where PySpark is installed, if it is one that brings its Spark along."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder if (folder / "jars").is_dir() and (folder / "bin" / "spark-submit").is_file() else None


def _made(home: Path, package: Path) -> Path:
    """Make the folder of links; what is there already must be ours and no one else's to change."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (home, home.parent):
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(f"{folder} can be changed by others")
    for part in PARTS:
        link = home / part
        if (package / part).is_dir() and not (link.is_symlink() and os.readlink(link) == str(package / part)):
            fresh = home / f".{part}.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(package / part)
            fresh.replace(link)
    return home
