"""Empty environments with the built wheel in them, made without a network.

What the wheel depends on is linked from the environment that runs the tests. The installer then has to find every
requirement satisfied, as it would with an index at hand, and anything that is not required is really absent.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Where its packages are."""
        return next((self.folder / "lib").glob("python*")) / "site-packages"

    def run(self, *args: object, cwd: Path, env: Mapping[str, str] | None = None) -> Outcome:
        """Run one of its programs in a folder."""
        done = subprocess.run(
            [self.folder / "bin" / str(args[0]), *map(str, args[1:])],
            cwd=cwd,
            env=clean_environment(self.folder) | {"PYTHONWARNINGS": "error"} | dict(env or {}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)


def clean_environment(folder: Path) -> dict[str, str]:
    """Give an environment in which nothing of the tests' own installation is found."""
    ours = ("BSFG_", "PYTHON", "PIP_", "VIRTUAL_ENV", "COLUMNS", "SPARK_", "JAVA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"PATH": f"{folder / 'bin'}{os.pathsep}{kept['PATH']}", "BSFG_JAVA_ARCHIVE": "no"}


def required(wheel: Path, extras: Iterable[str]) -> dict[str, Distribution]:
    """Find everything that a wheel needs with some extras among what is installed here."""
    own = wheel_metadata(wheel).get_all("Requires-Dist", [])
    found: dict[str, Distribution] = {}
    waiting = [(text, tuple(extras)) for text in own]
    done = set()
    while waiting:
        text, wanted = waiting.pop()
        if (text, wanted) in done:
            continue
        done.add((text, wanted))
        need = Requirement(text)
        if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
            continue
        if need.name == "bsfg":
            waiting += [(each, tuple(need.extras)) for each in own]
            continue
        there = found[need.name] = distribution(need.name)
        waiting += [(each, tuple(need.extras)) for each in there.requires or ()]
    return found


def wheel_metadata(wheel: Path) -> Message:
    """Read what a wheel says of itself."""
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def make(folder: Path, wheel: Path, extras: str = "") -> Environment:
    """Make an environment and install the wheel into it."""
    venv.create(folder, with_pip=False, symlinks=True)
    made = Environment(folder)
    wanted = tuple(filter(None, extras.split(",")))
    for there in required(wheel, wanted).values():
        link(there, made.packages)
    asked = f"{wheel}[{extras}]" if extras else str(wheel)
    options = ("--quiet", "--no-index", "--constraint", str(ROOT / "constraints.txt"))
    command = [sys.executable, "-m", "pip", "--python", str(made.python), "install", *options, asked]
    subprocess.run(command, check=True, env=clean_environment(folder), timeout=TIMEOUT_SECONDS)
    return made


def link(there: Distribution, packages: Path) -> None:
    """Put a distribution into another environment by links."""
    tops = {Path(str(file)).parts[0] for file in there.files or ()}
    for name in sorted(tops - {"..", "__pycache__"}):
        target = packages / name
        if not target.exists():
            target.symlink_to(Path(str(there.locate_file(name))))


def repacked(there: Distribution, wheels: Path) -> Path:
    """Make a wheel of a distribution that is installed here, as it would come from an index."""
    said = Parser().parsestr(there.read_text("WHEEL") or "")
    name = there.metadata["Name"].replace("-", "_").replace(".", "_")
    tags = zip(*(each.split("-") for each in said.get_all("Tag", [])), strict=True)
    tag = "-".join(".".join(dict.fromkeys(part)) for part in tags)
    target = wheels / f"{name}-{there.version}-{tag}.whl"
    left_out = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")
    with ZipFile(target, "w") as archive:
        names = []
        for file in there.files or ():
            path = Path(str(there.locate_file(file)))
            is_made = file.parts[0] == ".." or "__pycache__" in file.parts or file.name in left_out
            if path.is_file() and not is_made:
                archive.write(path, str(file))
                names.append(str(file))
        [top] = {Path(each).parts[0] for each in names if each.split("/")[0].endswith(".dist-info")}
        archive.writestr(f"{top}/RECORD", "".join(f'"{each}",,\n' for each in [*names, f"{top}/RECORD"]))
    return target


def installed_bytes(there: Distribution) -> int:
    """Tell how much room a distribution takes, what is compiled of it included."""
    paths = (Path(str(there.locate_file(file))) for file in there.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder once for all processes of a test run."""
    with open(f"{folder}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            (folder / "made").touch()
    return folder
