"""What is in the wheel, and what it says of itself."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.packaging.environments import ROOT, wheel_metadata
from tests.unit.test_tidy import tracked

import bsfg
from bsfg.errors.operation import EXTRAS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_file_is_missing(wheel: Path) -> None:
    """Every file of the package under version control is in the wheel, data files and type marks included."""
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in tracked() if path.is_relative_to(ROOT / "src")}
    assert sources - names == set()
    assert {"bsfg/py.typed", "bsfg/spark/log4j2.properties", "bsfg/wire/boundary.proto"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"bsfg", "pyspark_bsfg", f"bsfg-{bsfg.__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_metadata(wheel: Path) -> None:
    """Version, licence, command and extras are what the project says."""
    with ZipFile(wheel) as archive:
        top = f"bsfg-{bsfg.__version__}.dist-info"
        scripts = archive.read(f"{top}/entry_points.txt").decode()
        assert f"{top}/licenses/LICENSE" in archive.namelist()
    metadata = wheel_metadata(wheel)
    assert (metadata["Name"], metadata["Version"]) == ("bsfg", bsfg.__version__)
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "bsfg = bsfg.cli:main" in scripts


def test_the_table_of_extras_is_complete() -> None:
    """Whatever module of an extra is missing, its name leads to that extra."""
    modules: dict[str, set[str]] = {}
    for module, names in packages_distributions().items():
        for name in names:
            modules.setdefault(canonicalize_name(name), set()).add(module)
    core = {Requirement(text).name for text in PROJECT["dependencies"]}
    for extra, needs in PROJECT["optional-dependencies"].items():
        for name in {Requirement(text).name for text in needs} - core - {"bsfg"} if extra != "dev" else ():
            found = {module for module in modules.get(name, {name}) if module.isidentifier()}
            assert {EXTRAS.get(module) for module in found if not module.startswith("_")} == {extra}, name


CHOSEN = ("pandas",)
"""What PySpark uses and does not bring along; the extra says in which version."""


def test_every_extra_is_for_code_that_exists() -> None:
    """Each package of an extra that users install is imported somewhere in the source."""
    text = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    modules: dict[str, set[str]] = {}
    for module, names in packages_distributions().items():
        for name in names:
            modules.setdefault(canonicalize_name(name), set()).add(module)
    for extra, needs in PROJECT["optional-dependencies"].items():
        for name in {Requirement(text).name for text in needs} - {"bsfg", *CHOSEN} if extra != "dev" else ():
            assert modules.get(name, {name}) & imported, f"nothing imports {name} of bsfg[{extra}]"
