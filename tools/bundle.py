"""An archive that installs BSFG where there is no network: wheels, units, and a script (`make bundle`).

The wheels are made for the Python and the machine that this runs on; the archive carries their names.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import bsfg

ROOT = Path(__file__).parents[1]
EXTRAS = ("node", "spark", "delta", "postgres", "jetstream", "blake3")
SUMS = "SHA256SUMS"

INSTALL = """#!/bin/sh
# Installs BSFG {version} out of this folder, without any network: sh install.sh [FOLDER [EXTRAS]]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${{1:-/opt/bsfg}}
extras=${{2-{extras}}}
python=${{PYTHON:-python3}}

found=$("$python" -c 'import sys, sysconfig
print("cp%d%d-%s" % (*sys.version_info[:2], sysconfig.get_platform().replace("-", "_")))')
if [ "$found" != "{tag}" ]; then
  echo "These wheels are for {tag}, and $python is $found." >&2
  echo "Name another Python (PYTHON=/usr/bin/python3.11 sh install.sh), or make a bundle with this one." >&2
  exit 1
fi
(cd "$here" && sha256sum --quiet --check {sums}) || {{ echo "The bundle is damaged; copy it again." >&2; exit 1; }}
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-index -f "$here/wheels" \\
  "bsfg${{extras:+[$extras]}}=={version}"
"$folder/bin/bsfg" --version
"""


def tag() -> str:
    """Name the Python and the machine that wheels made here are for."""
    return f"cp{sys.version_info[0]}{sys.version_info[1]}-{sysconfig.get_platform().replace('-', '_')}"


def gather(wheels: Path, extras: tuple[str, ...]) -> None:
    """Build the wheel of BSFG, and get or build those of all that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        [own] = Path(folder).glob("*.whl")
        options = ["--quiet", "--wheel-dir", str(wheels), "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *options, f"{own}[{','.join(extras)}]"], check=True)


def pack(wheels: Path, target: Path, extras: tuple[str, ...]) -> Path:
    """Write the archive of a folder with wheels; what is in it says how to install it, and what it must be."""
    name = f"bsfg-{bsfg.__version__}-{tag()}-bundle"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        shutil.copytree(wheels, folder / "wheels")
        shutil.copytree(ROOT / "examples" / "systemd", folder / "systemd")
        shutil.copy(ROOT / "LICENSE", folder)
        script = INSTALL.format(version=bsfg.__version__, extras=",".join(extras), tag=tag(), sums=SUMS)
        (folder / "install.sh").write_text(script)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sums = [f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in files]
        (folder / SUMS).write_text("".join(sums))
        target.mkdir(parents=True, exist_ok=True)
        archive = target / f"{name}.tar"
        # Wheels are compressed already.
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, name)
    return archive


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Write the bundle into ``dist`` and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-spark", action="store_true", help="leave Spark and Java out")
    parser.add_argument("--target", type=Path, default=ROOT / "dist")
    asked = parser.parse_args()
    extras = tuple(extra for extra in EXTRAS if not (asked.without_spark and extra in ("spark", "delta")))
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder) / "wheels"
        gather(wheels, extras)
        archive = pack(wheels, asked.target, extras)
        count = len(list(wheels.iterdir()))
    print(f"Wrote {archive}: {count} wheels, {archive.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
