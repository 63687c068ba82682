"""A buffer as simple as it can be, to hold a storage against."""

from __future__ import annotations

from dataclasses import dataclass, field

from bsfg.fact import Key, Message
from bsfg.frontier import Frontier
from bsfg.ports import Result
from bsfg.testing.facts import key_of


@dataclass(slots=True)
class BufferModel:
    """One buffer with one required consumer: a list of messages and what is confirmed of it."""

    entries: list[Message] = field(default_factory=list)
    start: int = 0
    frontier: Frontier = field(default_factory=Frontier)
    refused: list[Message] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The offset that the next entry gets."""
        return len(self.entries)

    def write(self, facts: list[Message]) -> list[tuple[int, int]]:
        """Give the result and the offset of each fact, and keep the new ones."""
        return [self._write_one(fact) for fact in facts]

    def _write_one(self, fact: Message) -> tuple[int, int]:
        offset = self.offset_of(key_of(fact))
        if offset is None:
            self.entries.append(fact)
            return int(Result.INSERTED), self.end - 1
        if self.entries[offset].fact == fact.fact:
            return int(Result.ALREADY_EXISTS), offset
        if fact not in self.refused:
            self.refused.append(fact)
        return int(Result.CONFLICT), offset

    def offset_of(self, key: Key) -> int | None:
        """Find a key the slow way."""
        return next((offset for offset, fact in enumerate(self.entries) if key_of(fact) == key), None)

    def may_truncate(self, offset: int) -> bool:
        """Tell whether a truncation is allowed."""
        return offset <= max(self.start, self.frontier.committed + 1)

    def retained(self, key: Key) -> Message | None:
        """Give the message of a key if it was not truncated."""
        offset = self.offset_of(key)
        return None if offset is None or offset < self.start else self.entries[offset]
