"""Step 6, truncate: what everybody has confirmed may leave, when age allows, and while the peers are there to ask.

A store buffer gives up nothing that a required consumer still needs, and nothing at all while a link stands still:
after an outage the receiver may have lost what it confirmed last. A consumer that never comes back would hold the
frontier for ever; an operator retires it, and what it missed stays listed as gap records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bsfg.errors import InvalidArgument, TruncateRefused
from bsfg.frontier import NOTHING
from bsfg.gate import Gate, Mode
from bsfg.ports import Buffer, ConsumerState, CursorTracker, ForwardBuffer, GapRecord, StoreBuffer


@dataclass(frozen=True, slots=True)
class Truncation:
    """What may leave a store buffer, and what keeps the rest.

    ``frontier`` is the lowest offset that all required consumers have confirmed (-1 when nothing is, or when there is
    no required consumer). ``held_by`` names the consumers whose links do not allow truncation now, ``slowest`` those
    that stand at the frontier.
    """

    frontier: int
    held_by: tuple[str, ...] = ()
    slowest: tuple[str, ...] = ()

    @property
    def link_open(self) -> bool:
        """Whether every link of a required consumer allows truncation."""
        return not self.held_by

    @property
    def before(self) -> int:
        """The offset below which entries may leave, as far as consumers and links are concerned."""
        return self.frontier + 1 if self.link_open else 0


def decide(consumers: Iterable[ConsumerState], stream: str, modes: Mapping[str, Mode]) -> Truncation:
    """Decide from the required consumers of a store buffer and the modes of their links.

    ``modes`` maps consumer names to the mode of their link's gate on this side; a consumer that is not in it is local
    and needs no link.
    """
    required = [
        state
        for state in consumers
        if (state.spec.stream, state.spec.buffer) == (stream, Buffer.STORE)
        and state.spec.required
        and state.retired_reason is None
    ]
    frontier = min((state.checkpoint.committed for state in required), default=NOTHING)
    return Truncation(
        frontier,
        held_by=tuple(state.spec.name for state in required if not _allows(modes.get(state.spec.name))),
        slowest=tuple(state.spec.name for state in required if state.checkpoint.committed == frontier),
    )


async def truncate(store: StoreBuffer, cursors: CursorTracker, modes: Mapping[str, Mode]) -> Truncation:
    """Let go what is confirmed and old enough, and record what outlived its max age unconfirmed.

    This is what a node does from time to time; the buffer's policy says how long confirmed facts stay.
    """
    truncation = decide(await cursors.consumers(), store.stream, modes)
    await store.enforce_retention(link_open=truncation.link_open)
    return truncation


async def truncate_before(store: StoreBuffer, cursors: CursorTracker, modes: Mapping[str, Mode], offset: int) -> None:
    """Remove everything below an offset (exclusive) at once, whatever its age, by an operator's decision.

    Raises `TruncateRefused` when a required consumer still needs some of it or its link is not open.
    """
    truncation = decide(await cursors.consumers(), store.stream, modes)
    if not truncation.link_open:
        raise TruncateRefused(
            f"the links of {', '.join(truncation.held_by)} are not open; nothing leaves meanwhile",
            hint="Wait until the link is in mode normal or reconciliation, or retire the consumer.",
            held_by=list(truncation.held_by),
        )
    if offset > truncation.before:
        raise TruncateRefused(
            f"cannot truncate before {offset}: confirmed is only {truncation.frontier}, by {truncation.slowest}",
            committed=truncation.frontier,
        )
    await store.truncate_before(offset)


async def keep_forward(forward: ForwardBuffer) -> None:
    """Let go what a forward buffer has kept long enough; it is read locally, so no link has a say."""
    await forward.enforce_retention(link_open=True)


async def retire(cursors: CursorTracker, consumer: str, reason: str) -> list[GapRecord]:
    """End a consumer for good by an operator's decision; give the gap records of what it had not confirmed.

    They are durable in the consumer's buffer, and it no longer holds the frontier back.
    """
    if not reason.strip():
        raise InvalidArgument("retiring a consumer needs a reason")
    return await cursors.retire(consumer, reason)


def _allows(mode: Mode | None) -> bool:
    return mode is None or Gate(mode).allows_truncation
