"""Step 7, truncate: what everybody has confirmed may leave, when age allows, and while the peers are there to ask.

What may leave, and with which record, is one rule, `bsfg.retention.departure`: the buffers ask it when room is short,
and here it is asked from time to time and by operators. A buffer gives up nothing that a required consumer still needs.
By age nothing confirmed leaves while a link stands still, because after an outage its receiver may have lost what it
confirmed last; when a full buffer needs the room, what is safe elsewhere leaves all the same. A consumer that never
comes back would hold the frontier for ever; an operator retires it, and what it missed stays listed as gap records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bsfg.errors import TruncateRefused
from bsfg.frontier import NOTHING
from bsfg.gate import Gate, Mode
from bsfg.journey.link import PeerPosition
from bsfg.ports import Buffer, ConsumerState, CursorTracker, Replayable


@dataclass(frozen=True, slots=True)
class Truncation:
    """What may leave a buffer, and what keeps the rest.

    ``frontier`` is the lowest offset that all required consumers have confirmed (-1 when nothing is, or when there is
    no required consumer). ``held_by`` names the consumers whose links stand still, ``slowest`` those that stand at the
    frontier.
    """

    frontier: int
    held_by: tuple[str, ...] = ()
    slowest: tuple[str, ...] = ()

    @property
    def link_open(self) -> bool:
        """Whether every link of a required consumer is open."""
        return not self.held_by


def decide(consumers: Iterable[ConsumerState], stream: str, buffer: Buffer, modes: Mapping[str, Mode]) -> Truncation:
    """Decide from the required consumers of a buffer and the modes of their links.

    ``modes`` maps consumer names to the mode of their link's gate on this side; a consumer that is not in it is local
    and needs no link.
    """
    required = [
        state
        for state in consumers
        if (state.spec.stream, state.spec.buffer) == (stream, buffer)
        and state.spec.required
        and state.retired_reason is None
    ]
    frontier = min((state.checkpoint.committed for state in required), default=NOTHING)
    return Truncation(
        frontier,
        held_by=tuple(state.spec.name for state in required if not _allows(modes.get(state.spec.name))),
        slowest=tuple(state.spec.name for state in required if state.checkpoint.committed == frontier),
    )


async def truncate(
    buffer: Replayable, cursors: CursorTracker, modes: Mapping[str, Mode], keys_as_of_unix_ms: int | None = None
) -> Truncation:
    """Let go what is confirmed and old enough, and record what outlived its max age unconfirmed.

    This is what a node does from time to time with each of its buffers, whose policy says how long facts stay. The key
    horizon counts back from ``keys_as_of_unix_ms``, see `InStep`, or from now.
    """
    truncation = decide(await cursors.consumers(), buffer.stream, buffer.buffer, modes)
    # The buffer asks for the frontier itself, in its writer's turn: consumers come and go meanwhile.
    await buffer.enforce_retention(link_open=truncation.link_open, keys_as_of_unix_ms=keys_as_of_unix_ms)
    return truncation


class InStep:
    """When each link was last in step: its sender had acknowledged everything that had been put here until then.

    On a `sil` stream a sender never lets go what it has not seen confirmed. A confirmation that an outage swallowed
    leads to the same facts being offered again, however long the outage was, and only their keys tell that they are
    here. So the key horizon of such a stream counts back from the last moment when all its links were in step: while
    one of them is not, it stands still. Nothing of this is kept: after a restart no key is forgotten before the links
    are in step again.
    """

    def __init__(self) -> None:
        self._marks: dict[tuple[str, str], tuple[int, int]] = {}
        self._seen: dict[tuple[str, str], int] = {}

    def observe(self, link: str, stream: str, mode: Mode, position: PeerPosition, now_unix_ms: int) -> None:
        """Take note of the receiver's gate of a link, and of what is remembered of its sender.

        A busy link is never seen without a fact on its way. It was in step at a moment once the sender has
        acknowledged all that it had then.
        """
        lane = (link, stream)
        acknowledged = -1 if position.acknowledged is None else position.acknowledged
        if mode != Mode.NORMAL:
            # What the position says may be old by now: a put that was not remembered is not in it.
            self._marks.pop(lane, None)
            return
        end, at_unix_ms = self._marks.get(lane, (position.end, now_unix_ms))
        if acknowledged >= end - 1:
            self._seen[lane] = at_unix_ms
            self._marks[lane] = (position.end, now_unix_ms)
        else:
            self._marks[lane] = (end, at_unix_ms)

    def since(self, links: Iterable[str], stream: str) -> int | None:
        """Give the last moment when all these links were in step, 0 when it is not known, None without a link."""
        return min((self._seen.get((link, stream), 0) for link in links), default=None)


async def truncate_before(
    buffer: Replayable, cursors: CursorTracker, modes: Mapping[str, Mode], offset: int
) -> Truncation:
    """Remove everything below an offset (exclusive) at once, whatever its age, by an operator's decision.

    Raises `TruncateRefused` when a required consumer still needs some of it or its link stands still.
    """
    truncation = decide(await cursors.consumers(), buffer.stream, buffer.buffer, modes)
    if not truncation.link_open:
        raise TruncateRefused(
            f"the links of {', '.join(truncation.held_by)} are not open; nothing leaves meanwhile",
            hint="Wait until the link is in mode normal or reconciliation, or retire the consumer.",
            held_by=list(truncation.held_by),
        )
    if truncation.slowest and offset > truncation.frontier + 1:
        raise TruncateRefused(
            f"cannot truncate before {offset}: {', '.join(truncation.slowest)} confirmed only up to "
            f"{truncation.frontier}",
            committed=truncation.frontier,
        )
    await buffer.truncate_before(offset)
    return truncation


def _allows(mode: Mode | None) -> bool:
    return mode is None or Gate(mode).allows_truncation
