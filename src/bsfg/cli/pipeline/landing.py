"""Runs a landing under the eyes of a user: its progress, and its end when a signal asks for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from bsfg.cli.output import console, count_text, say
from bsfg.errors import BsfgError, SparkFailed
from bsfg.printable import counted

if TYPE_CHECKING:
    from bsfg.spark.land.lander import Lander
    from bsfg.spark.land.needed import SparkWhenNeeded

LOOK_SECONDS = 0.25
LINE_SECONDS = 10.0
"""How often a line is written where there is no terminal to keep one up to date."""

RATE_SECONDS = 20.0
GONE_SECONDS = 2.0
"""How long a JVM that does not answer any more may take until it is known to have ended."""

END_SECONDS = 9.0
"""After this time a landing that was asked to end is left as it is, which harms nothing."""


class Progress:
    """How far a landing is: facts, rate over the last seconds, what is left, and how long that will take."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: deque[tuple[float, int]] = deque()

    def text(self, landed: int, backlog: int) -> str:
        """Describe the moment in one line; the calls of the last seconds give the rate."""
        now = self._now()
        self._seen.append((now, landed))
        while now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = (landed - before) / (now - since) if now > since else 0.0
        parts = [f"{counted(landed, 'fact')} landed"]
        if rate >= 1:
            parts.append(f"{count_text(round(rate))}/s")
        parts.append(f"{count_text(backlog)} waiting" if backlog else "nothing waiting")
        if backlog and rate >= 1:
            parts.append(f"{_duration(backlog / rate)} left")
        return " · ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def watched(lander: Lander, spark: SparkWhenNeeded, work: Callable[[], None], *, shown: bool) -> bool:
    """Do the work of a landing in a thread of its own; tell whether a signal ended it."""
    from bsfg.spark.land.lander import Interrupted

    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except Interrupted:
            return
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="bsfg-landing", daemon=True)
    progress = Progress()
    with _asked_to_end() as asked, _line(shown) as show:
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            if asked.is_set() or spark.has_ended():
                lander.end()
            elif shown:
                show(_text(lander, spark, progress))
    if asked.is_set():
        return True
    if spark.has_ended(GONE_SECONDS if failures and isinstance(failures[0], SparkFailed) else 0.0):
        from bsfg.spark.session import failed

        raise failed("the Java of Spark has ended")
    if failures:
        raise failures[0]
    return False


def told(error: BsfgError) -> None:
    """Tell on stderr what is waited for."""
    say(f"waiting: {error.message}")


def _text(lander: Lander, spark: SparkWhenNeeded, progress: Progress) -> str:
    if spark.is_starting:
        return "Starting Spark …"
    if not lander.has_joined:
        return "Merging small files …" if spark.is_started else "Looking at the node …"
    under_way = lander.under_way()
    return progress.text(lander.done.facts + under_way, max(0, lander.done.backlog - under_way))


@contextmanager
def _line(shown: bool) -> Iterator[Callable[[str], None]]:
    """Give what keeps a text on stderr: as a line that stays in place, or as a line of its own every few seconds."""
    if shown and sys.stderr.isatty():
        with console(stderr=True).status("Looking at the node …") as status:
            yield status.update
        return
    due, last = time.monotonic() + LINE_SECONDS, ""

    def show(text: str) -> None:
        nonlocal due, last
        if time.monotonic() >= due and text != last:
            due, last = time.monotonic() + LINE_SECONDS, text
            say(text)

    yield show


@contextmanager
def _asked_to_end() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C and SIGTERM set; whatever hangs then, the process ends some seconds later."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if not asked.is_set():
            asked.set()
            timer = threading.Timer(END_SECONDS, os._exit, [128 + number])
            timer.daemon = True
            timer.start()

    before = [(number, signal.signal(number, ask)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield asked
    finally:
        for number, handler in before:
            signal.signal(number, handler)
