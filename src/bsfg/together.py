"""What many ask one by one and one call can do for all: whatever comes while a call is under way goes in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Together(Generic[Item, Answer]):
    """Gathers what is asked in one event loop and has it done in one go, one go after the other.

    ``work`` gets everything that was asked since it was begun last, in order and at most ``at_once``, and gives one
    outcome for each: an answer or an exception. Who gives up waiting takes back his question, and not what he asked.
    """

    def __init__(
        self, work: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | BaseException]]], at_once: int = 1024
    ) -> None:
        self._work, self._at_once = work, at_once
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._going: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Answer:
        """Have something done; give its answer or raise what kept it from being done."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._going is None or self._going.done():
            self._going = asyncio.create_task(self._go())
        return await future

    async def _go(self) -> None:
        try:
            while group := self._waiting[: self._at_once]:
                del self._waiting[: len(group)]
                await self._settle(group)
        finally:
            # Whoever ends the event loop, or this task, must not leave others waiting for it.
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()

    async def _settle(self, group: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        outcomes: Sequence[Answer | BaseException]
        try:
            outcomes = await self._work([item for item, _ in group])
        except asyncio.CancelledError:
            for _, future in group:
                future.cancel()
            raise
        except Exception as error:  # whatever it is belongs to those who wait
            outcomes = [error] * len(group)
        for (_, future), outcome in zip(group, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
