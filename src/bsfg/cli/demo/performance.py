"""One performance of the demo, from the empty folder to the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from bsfg.cli.demo.crew import Crew
from bsfg.cli.demo.director import Director, steps_of
from bsfg.cli.demo.show import Lines, Show, Silent, show_on
from bsfg.cli.demo.site import Site
from bsfg.cli.demo.stage import Stage
from bsfg.cli.demo.telling import introduce, show_keeping, show_verdict
from bsfg.cli.demo.verdict import Verdict
from bsfg.cli.ending import orderly_end, run
from bsfg.cli.output import console, print_json


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asked for."""

    three_zones: bool
    spark: bool
    seconds: float
    keep: bool
    json: bool


def perform(wanted: Wanted) -> bool:
    """Play, show and judge; tell whether every promise was kept."""
    # gRPC reads this when it is loaded; what it says of connections that the demo itself breaks is of no use.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if wanted.spark and find_spec("pyspark") is None:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")
    screen = console(stderr=wanted.json)
    show = show_on(screen, as_json=wanted.json)
    with orderly_end():
        folder = Path(tempfile.mkdtemp(prefix="bsfg-demo-"))
        try:
            site = Site(folder, wanted.three_zones, wanted.spark)
            if not isinstance(show, Silent):
                introduce(screen, site)
            return run(_Performance(wanted, site, screen, show).play()).ok
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _Performance:
    """What happens on and around the stage."""

    def __init__(self, wanted: Wanted, site: Site, screen: Console, show: Show) -> None:
        self._wanted, self._site, self._screen, self._show = wanted, site, screen, show

    async def play(self) -> Verdict:
        stage = Stage(self._site, steps_of(self._site), lambda step: self._show.on_step(stage, step))
        async with Crew(self._site.root) as crew:
            director = Director(self._site, stage, crew, self._wanted.seconds)
            try:
                self._show.begin(stage)
                try:
                    verdict = await director.play()
                finally:
                    self._show.end()
                self._tell(verdict)
                if self._wanted.keep:
                    await self._keep(director, stage)
            finally:
                self._show.end()
                await director.end()
        return verdict

    def _tell(self, verdict: Verdict) -> None:
        if self._wanted.json:
            print_json(verdict.to_dict())
        else:
            show_verdict(self._screen, verdict)

    async def _keep(self, director: Director, stage: Stage) -> None:
        """Go on until Ctrl-C, which is how this is meant to end."""
        show_keeping(self._screen, self._site)
        if not isinstance(self._show, Lines):
            self._show.begin(stage, told=False)
        with contextlib.suppress(asyncio.CancelledError):
            await director.linger()
