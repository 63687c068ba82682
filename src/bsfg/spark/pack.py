"""One archive with what tasks need beside Spark and a Python, for machines on which nothing is installed.

It holds the packages of this environment that tasks import, and ``bin/python``, a script that runs a Python of the
machine with them. Spark brings its own PySpark to its executors. Of this package it has what Spark's tasks may import.
Nothing in it is a setting, a certificate or a key: all of it comes from the lists of installed packages.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import sysconfig
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from bsfg.disk import translated
from bsfg.errors import DiskFull, InvalidArgument, StorageReadOnly, StorageUnreadable

PACK = "bsfg-pack"
"""What the archive is called where it is unpacked, in the folder of an executor."""

PACKED_PYTHON = f"./{PACK}/bin/python"
NO_PYTHON = "bsfg pack:"
"""How the script begins what it says when there is no Python for it."""

CHOSEN_PYTHON = "BSFG_PACK_PYTHON"
"""Names the Python of a machine where that is not the first one of its PATH."""

NEEDED = (
    *("crc32c", "cryptography", "grpcio", "grpcio-health-checking"),
    *("numpy", "orjson", "protobuf", "pyarrow"),
)
"""What tasks import beside the package itself; what these require comes with them."""

WELCOME = ("blake3",)
"""What tasks use where it is installed."""

OURS = ("bsfg", "pyspark_bsfg")
NOT_OURS = ("cli", "help", "node", "sdk", "sinks", "testing")
"""Parts of the package that nothing of `bsfg.spark` may import."""

OUR_KINDS = (".py", ".properties", ".css", ".sql", ".proto")
"""What files of the package end with; whatever else lies beside them is not ours."""

UNUSED = re.compile(
    r"(^|/)(__pycache__|tests|include)/|\.(pyc|pyi|pyx|pxd|pxi|h|hpp|a|pem|crt|cer|key|p12|pfx|jks|pth)$"
    r"|^pyarrow/src/"
    r"|\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json|uv_\w+\.json|sboms/.*)$"
)
"""What no task reads, and what depends on how the package was installed."""

TABLE = "pack.json"
LAST_CENTURY = 315532800
"""The time of all files in it, so that the same content gives the same archive; 1980 is the oldest that tools like."""

SCRIPT = """#!/bin/sh
# Runs a Python of this machine with the packages beside it.
here=$(cd "$(dirname "$0")/.." && pwd) || exit 1
seen=
for each in "${CHOSEN:-}" pythonVERSION python3 python; do
  [ -n "$each" ] && found=$(command -v "$each") || continue
  kind=$("$found" -I -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))' 2>/dev/null)
  if [ "$kind" = "KIND" ]; then
    PYTHONPATH=$here/lib${PYTHONPATH:+:$PYTHONPATH}
    PYTHONNOUSERSITE=1
    export PYTHONPATH PYTHONNOUSERSITE
    exec "$found" "$@"
  fi
  seen="$seen, $found is ${kind:-none that works}"
done
echo "WORDS $(uname -n) has no Python of the kind KIND on its PATH${seen}" >&2
exit 127
"""


@dataclass(frozen=True, slots=True)
class PackMember:
    """One file of the archive: its name in it, and where its content comes from."""

    name: str
    source: Path | bytes
    executable: bool = False

    @property
    def content(self) -> bytes:
        """What is in it."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()


@dataclass(frozen=True, slots=True)
class PackReport:
    """What was written."""

    path: Path
    size_bytes: int
    unpacked_bytes: int
    files: int
    sha256: str
    python: str
    packages: dict[str, str]


def python_kind() -> str:
    """Name the Pythons that can load what is compiled for this one: implementation, minor version, machine, library."""
    return str(sysconfig.get_config_var("SOABI"))


def pack(out: Path, watch: Callable[[int, int], None] = lambda done, total: None) -> PackReport:
    """Write the archive; ``watch`` is told how many bytes of how many are in it. What was there before is replaced."""
    if not out.name:
        raise InvalidArgument(f"{out} is no name of a file", hint="For example: bsfg pipeline pack bsfg-pack.tar.gz")
    found = [each for name in (*NEEDED, *WELCOME) for each in required(name, is_welcome=name in WELCOME)]
    packages = {each.name: each for each in sorted(found, key=lambda each: each.name.lower())}
    own = list(own_members())
    members = [*own, *(member for each in packages.values() for member in members_of(each))]
    versions = {name: each.version for name, each in packages.items()}
    table = {"python": python_kind(), "bsfg": build_of(own), "packages": versions}
    listed = json.dumps(table, indent=1, sort_keys=True).encode() + b"\n"
    members = sorted(
        {each.name: each for each in (*members, PackMember("bin/python", script(), True))}.values(), key=_name
    )
    members.insert(0, PackMember(TABLE, listed))
    total = sum(len(each.content) if isinstance(each.source, bytes) else each.source.stat().st_size for each in members)
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            _write(file, members, total, watch)
        fresh.replace(out)
    except OSError as error:
        told = translated(error, f"writing {out}")
        if isinstance(told, DiskFull):
            raise DiskFull(told.message, hint="Make room there, or write it elsewhere.") from None
        if isinstance(told, StorageUnreadable):
            raise told from None
        raise StorageReadOnly(f"{out} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            fresh.unlink()
    with out.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return PackReport(out, out.stat().st_size, total, len(members), digest, python_kind(), versions)


def _name(member: PackMember) -> str:
    return member.name


def _write(file: BinaryIO, members: Sequence[PackMember], total: int, watch: Callable[[int, int], None]) -> None:
    done = 0
    # Neither a name nor a time of its own in its head.
    with (
        gzip.GzipFile("", "wb", 6, file, 0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for member in members:
            content = member.content
            about = tarfile.TarInfo(member.name)
            about.size, about.mtime, about.mode = len(content), LAST_CENTURY, 0o755 if member.executable else 0o644
            archive.addfile(about, BytesIO(content))
            done += len(content)
            watch(done, total)


def script() -> bytes:
    """Write the script that stands for Python."""
    kind, version = python_kind(), sysconfig.get_python_version()
    words = {"CHOSEN": CHOSEN_PYTHON, "VERSION": version, "KIND": kind, "WORDS": NO_PYTHON}
    return re.sub("|".join(words), lambda found: words[found[0]], SCRIPT).encode()


def own_members() -> Iterator[PackMember]:
    """Give the files of this package that tasks may need."""
    for name in OURS:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*")):
            inside = PurePosixPath(path.relative_to(folder))
            if path.suffix in OUR_KINDS and inside.parts[0] not in NOT_OURS and UNUSED.search(str(inside)) is None:
                yield PackMember(f"lib/{name}/{inside}", path)
    yield from (each for each in members_of(distribution("bsfg")) if ".dist-info/" in each.name)


def build_of(own: Sequence[PackMember]) -> str:
    """Give a digest of what this package is, whatever its version says."""
    digest = hashlib.sha256()
    for each in sorted(own, key=_name):
        digest.update(f"{each.name}\n".encode() + hashlib.sha256(each.content).digest())
    return digest.hexdigest()


def required(name: str, *, is_welcome: bool = False) -> list[Distribution]:
    """Give a package and what it requires, as they are installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        if is_welcome:
            return []
        hint = "Install bsfg[spark] here first: the archive is made of what is installed."
        raise InvalidArgument(f"{name} is not installed", hint=hint) from None
    result = [found]
    for requirement in found.requires or ():
        wanted, _, marker = requirement.partition(";")
        if "extra" not in marker:
            # What a marker leaves out on this machine is not installed on it.
            result += required(re.split(r"[^\w.-]", wanted.strip(), maxsplit=1)[0], is_welcome=bool(marker))
    return result


def members_of(package: Distribution) -> Iterator[PackMember]:
    """Give the files of a package that tasks may need."""
    if package.files is None:
        hint = "Install it with pip, in an environment of its own."
        raise InvalidArgument(f"nobody knows which files {package.name} has", hint=hint)
    for path in sorted(package.files, key=str):
        if path.is_absolute() or ".." in path.parts or UNUSED.search(str(path)) is not None:
            continue
        source = Path(str(package.locate_file(path)))
        # Images are made small by deleting what nobody reads; Python 3.12 leaves it out of the list by itself.
        if source.exists():
            yield PackMember(f"lib/{path}", source)


def table_of(path: Path) -> dict[str, Any]:
    """Read what an archive says of itself, or raise `InvalidArgument` when it is none of ours."""
    hint = "Make one with: bsfg pipeline pack bsfg-pack.tar.gz"
    try:
        with tarfile.open(path, "r:gz") as archive:
            first = archive.next()
            is_ours = first is not None and first.name == TABLE and first.isfile()
            inside = archive.extractfile(first) if first is not None and is_ours else None
            table = None if inside is None else json.loads(inside.read())
    except OSError as error:
        why = error.strerror or "it is no archive"
        raise InvalidArgument(f"the pack {path} cannot be read: {why}", hint=hint) from None
    except (tarfile.TarError, EOFError, ValueError):
        table = None
    if not isinstance(table, dict):
        raise InvalidArgument(f"{path} is not what `bsfg pipeline pack` makes", hint=hint)
    return table


def packed_settings(path: Path) -> dict[str, str]:
    """Give the settings by which a cluster runs tasks out of an archive, which must be made of what runs here."""
    table, hint = table_of(path), f"Make it again with: bsfg pipeline pack {path}"
    if table.get("python") != python_kind():
        raise InvalidArgument(
            f"the pack {path} is for Python {table.get('python')}, here is {python_kind()}", hint=hint
        )
    if table.get("bsfg") != build_of(list(own_members())):
        raise InvalidArgument(f"the pack {path} was made of another build of bsfg than runs here", hint=hint)
    return {
        "spark.archives": f"{path.absolute().as_uri()}#{PACK}",
        "spark.pyspark.python": PACKED_PYTHON,
        "spark.executorEnv.BSFG_SPARK_NO_PANDAS": "1",
    }
