"""How the demo is shown while it runs: a live picture on a terminal, lines anywhere else."""

from __future__ import annotations

import os
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bsfg.cli.demo.picture import ASCII, SIGNS, Picture, story
from bsfg.cli.demo.stage import Progress, Stage, Step

REFRESHES_PER_SECOND = 5


class Show(Protocol):
    """What shows a stage."""

    def begin(self, stage: Stage, *, told: bool = True) -> None:
        """Begin to show a stage."""
        ...

    def on_step(self, stage: Stage, step: Step) -> None:
        """Show that a step has begun, or is over."""
        ...

    def end(self) -> None:
        """Stop showing it; repeats are harmless."""
        ...


class Silent:
    """Shows nothing."""

    def begin(self, stage: Stage, *, told: bool = True) -> None:
        """Nothing."""

    def on_step(self, stage: Stage, step: Step) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class Lines:
    """Tells the story line by line: a step when it begins, and how it went."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen

    def begin(self, stage: Stage, *, told: bool = True) -> None:
        """Nothing: lines come with the steps."""

    def on_step(self, stage: Stage, step: Step) -> None:
        """Write a line."""
        text = step.title if step.progress == Progress.NOW else f"  {step.detail}"
        self._screen.print(Text(f"{stage.seconds:6.1f} s  {text}"), soft_wrap=True)

    def end(self) -> None:
        """Nothing."""


class Screen:
    """Draws the picture several times a second; the story stays when it ends."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._live: Live | None = None
        self._stage: Stage | None = None

    def begin(self, stage: Stage, *, told: bool = True) -> None:
        """Begin to draw."""
        self._stage = stage if told else None
        picture = Picture(stage, told=told)
        self._live = Live(
            picture,
            console=self._screen,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def on_step(self, stage: Stage, step: Step) -> None:
        """Nothing: the picture shows it by itself."""

    def end(self) -> None:
        """Take the picture away and leave the story."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        if self._stage is not None:
            glyphs = ASCII if self._screen.options.ascii_only else SIGNS
            for line in story(self._stage.steps, glyphs, self._screen.width):
                self._screen.print(line)


def show_on(screen: Console, *, as_json: bool) -> Show:
    """Choose what fits: a picture needs a terminal that can move its cursor, and colours to be worth it."""
    if screen.is_terminal and not screen.is_dumb_terminal and not os.environ.get("NO_COLOR"):
        return Screen(screen)
    return Silent() if as_json else Lines(screen)
