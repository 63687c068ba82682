"""`bsfg pipeline pack`: one archive for clusters on whose machines nothing is installed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bsfg.cli.common import Json, argument, orderly_end
from bsfg.cli.output import console, examples, print_json, progress_bar, size_text
from bsfg.wording import counted

app = typer.Typer()

DEFAULT = Path("bsfg-pack.tar.gz")
EPILOG = examples(
    ("bsfg pipeline pack", "write bsfg-pack.tar.gz"),
    (
        "bsfg pipeline replicate -c zone.toml --master spark://host:7077 --secret-file spark.secret "
        "--pack bsfg-pack.tar.gz",
        "run the tasks out of it",
    ),
    ("bsfg pipeline pack /srv/bsfg-pack.tar.gz --json", "its digest and packages, for programs"),
)


@app.command(epilog=EPILOG)
def pack(
    out: Annotated[Path, argument("OUT", "The archive to write; one that is there is replaced.")] = DEFAULT,
    *,
    json: Json = False,
) -> None:
    """Make one archive from which a cluster runs tasks, so that nothing need be installed on its machines.

    It holds what tasks import: bsfg itself and the packages of this environment that it needs. Give it to the other
    pipeline commands with --pack; Spark takes it to every executor. Each machine needs Spark with its Java, and a bare
    Python of the same minor version and platform as here: the first such python3 of its PATH, or the one that
    spark.executorEnv.BSFG_PACK_PYTHON names with --conf. A machine without one ends the command with `workers_unfit`.

    No certificate, key or configuration is in it. The same packages give the same archive, byte by byte. Make it again
    after an upgrade: an archive of another build is refused.
    """
    from bsfg.spark.pack import pack as write

    with orderly_end(), progress_bar("packing", shown=not json) as bar:
        packed = write(out, lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total))
    if json:
        print_json({**asdict(packed), "path": str(packed.path)})
        return
    console().print(
        f"Wrote {packed.path}: {size_text(packed.size_bytes)}, {counted(packed.files, 'file')} of bsfg and "
        f"{counted(len(packed.packages), 'package')}, for Python {packed.python}.\nSHA-256 {packed.sha256}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
