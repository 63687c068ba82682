"""A sender that lies, is damaged or was restored: what the receiver believes, fetches again, or holds the link for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest.mock import ANY

import numpy as np
import pyarrow as pa
import pytest
from tests.journey.zones import DirectLink, Inbound, Zone, connect

from bsfg import digest
from bsfg.batch import EntryBatch
from bsfg.errors import ForeignLog
from bsfg.gaps import RangeSet
from bsfg.journey.link import DETAIL_CHARACTERS_MAX, Fetched, FetchRequest, PeerPosition, Refusal
from bsfg.journey.receive import LinkHeld, LinkRules, Put, judge
from bsfg.ports import Confirmation, Frame, GapRecord, GapSet
from bsfg.retention import GapReason
from bsfg.testing.facts import WeakHasher, messages, sealed

MakeZone = Callable[[str], Zone]
Alteration = Callable[[Fetched], Fetched]


@dataclass
class LyingLink(DirectLink):
    """A link whose answers are altered on the way."""

    alter: Alteration | None = None
    advanced_to: int | None = None

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Serve, then lie."""
        fetched = await super().fetch(request)
        return self.alter(fetched) if self.alter else fetched

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Take the confirmation, then lie about it."""
        advanced_to = await super().confirm(confirmation, refusals)
        return advanced_to if self.advanced_to is None else self.advanced_to


async def lied_to(make_zone: MakeZone, alter: Alteration | None = None) -> tuple[Zone, Zone, Inbound, LyingLink]:
    """Make a plant with ten facts behind a lying link, the first four pulled honestly."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    link = LyingLink(plant, inbound.link.consumer)
    inbound.link = link
    await plant.append(messages(4))
    await inbound.pull()
    await plant.append(messages(6, first=4))
    link.alter = alter
    return plant, enterprise, inbound, link


def entries_of(fetched: Fetched) -> EntryBatch:
    """Give the entries of an answer of one frame."""
    (frame,) = fetched.frames
    assert frame.entries is not None
    return frame.entries


def with_entries(fetched: Fetched, entries: EntryBatch) -> Fetched:
    """Put other entries in the place of an answer's only frame."""
    (frame,) = fetched.frames
    return replace(fetched, frames=[replace(frame, entries=entries)])


def with_column(name: str, *, row: int, value: object) -> Alteration:
    """Change one value of one column."""

    def alter(fetched: Fetched) -> Fetched:
        entries = entries_of(fetched)
        values = entries.column(name).to_pylist()
        values[row] = value
        column = pa.array(values, type=entries.column(name).type)
        return with_entries(fetched, entries.with_columns(**{name: column}))

    return alter


def split_at(fetched: Fetched, row: int) -> tuple[Frame, Frame]:
    """Split an answer's only frame in two."""
    entries = entries_of(fetched)
    first = int(entries.offsets[0])
    head, tail = entries.slice(0, row), entries.slice(row)
    return Frame(first, first + row - 1, head), Frame(first + row, first + len(entries) - 1, tail)


def shifted(entries: EntryBatch, by: int) -> EntryBatch:
    """Give entries with other offsets."""
    return entries.with_columns(offset=pa.array(entries.offsets + by))


def reordered(fetched: Fetched) -> Fetched:
    """Exchange two rows, offsets included."""
    return with_entries(fetched, entries_of(fetched).take([1, 0, *range(2, 6)]))


def hole(fetched: Fetched) -> Fetched:
    """Leave out one offset in the middle."""
    first, second = split_at(fetched, 2)
    assert second.entries is not None
    return replace(fetched, frames=[first, Frame(second.first + 1, second.last, second.entries.slice(1))])


def overlap(fetched: Fetched) -> Fetched:
    """Give an offset in two frames."""
    first, second = split_at(fetched, 3)
    entries = entries_of(fetched).slice(2)
    return replace(fetched, frames=[first, Frame(second.first - 1, second.last, entries)])


def jump(fetched: Fetched) -> Fetched:
    """Start beyond what is expected."""
    _, second = split_at(fetched, 2)
    return replace(fetched, start=second.first, frames=[second])


def beyond_end(fetched: Fetched) -> Fetched:
    """Give more than the log has."""
    return replace(fetched, end=fetched.end - 1, chain_head=b"")


def both(fetched: Fetched) -> Fetched:
    """Give a frame with entries and a gap record."""
    (frame,) = fetched.frames
    gap = GapRecord(frame.first, frame.last, GapReason.SKIPPED, 0)
    return replace(fetched, frames=[replace(frame, gap=gap)])


def neither(fetched: Fetched) -> Fetched:
    """Give a frame with nothing in it."""
    (frame,) = fetched.frames
    return replace(fetched, frames=[Frame(frame.first, frame.last)])


def backwards(fetched: Fetched) -> Fetched:
    """Give a gap whose last offset is below its first."""
    gap = GapRecord(fetched.start, fetched.start - 1, GapReason.SKIPPED, 0)
    return replace(fetched, frames=[Frame(fetched.start, fetched.start - 1, gap=gap)])


def short_count(fetched: Fetched) -> Fetched:
    """Claim more offsets than there are entries."""
    return with_entries(fetched, entries_of(fetched).slice(0, 5))


def wrong_offsets(fetched: Fetched) -> Fetched:
    """Give entries whose offsets are not those of the frame."""
    return with_entries(fetched, shifted(entries_of(fetched), 1))


def malformed(fetched: Fetched) -> Fetched:
    """Give a column whose layout points outside of its own bytes."""
    entries = entries_of(fetched)
    bad_offsets = pa.py_buffer(np.array([0, 4, 2, 8, 1 << 30, 3, 9], dtype=np.int32).tobytes())
    column = pa.StringArray.from_buffers(len(entries), bad_offsets, pa.py_buffer(b"abcdefghi"))
    return with_entries(fetched, entries.with_columns(subject=column))


def negative_start(fetched: Fetched) -> Fetched:
    """Start before the first offset there can be."""
    return replace(fetched, start=-3, frames=[])


LIES: dict[str, tuple[Alteration, str]] = {
    "a zone it may not speak for": (with_column("from_zone", row=3, value="moon"), "zone_not_allowed"),
    "a rule of the message model broken": (with_column("predicate", row=2, value="Not Snake"), "invalid_fact"),
    "no message id": (with_column("message_id", row=0, value=None), "invalid_fact"),
    "no offset": (with_column("offset", row=1, value=None), "frame_invalid"),
    "no time": (with_column("appended_at_unix_ms", row=1, value=None), "frame_invalid"),
    "rows in another order": (reordered, "frame_invalid"),
    "a hole": (hole, "frame_invalid"),
    "an overlap": (overlap, "frame_invalid"),
    "a jump": (jump, "frame_invalid"),
    "frames beyond the end": (beyond_end, "frame_invalid"),
    "entries and a gap at once": (both, "frame_invalid"),
    "an empty frame": (neither, "frame_invalid"),
    "a range that runs backwards": (backwards, "frame_invalid"),
    "fewer entries than offsets": (short_count, "frame_invalid"),
    "offsets of other entries": (wrong_offsets, "frame_invalid"),
    "a negative start": (negative_start, "foreign_log"),
    "another log": (lambda fetched: replace(fetched, log_id="another"), "foreign_log"),
    "an older end": (lambda fetched: replace(fetched, end=2, start=2, frames=[]), "foreign_log"),
    "a cursor that went back": (lambda fetched: replace(fetched, start=2, frames=[]), "foreign_log"),
    "a gap record of a strange zone": (
        lambda fetched: replace(fetched, gaps=[GapRecord(0, 0, GapReason.LOST, 0, origin_zone="moon")]),
        "zone_not_allowed",
    ),
    "a gap beyond all offsets": (
        lambda fetched: replace(
            fetched,
            end=(1 << 62) + 2,
            frames=[Frame(4, 1 << 62, gap=GapRecord(4, 1 << 62, GapReason.LOST, 0))],
        ),
        "frame_invalid",
    ),
    "a relayed gap beyond all offsets": (
        lambda fetched: replace(fetched, gaps=[GapRecord(0, 1 << 62, GapReason.LOST, 0, origin_zone="plant")]),
        "frame_invalid",
    ),
    "a gap record of nobody": (
        lambda fetched: replace(fetched, gaps=[GapRecord(0, 0, GapReason.LOST, 0)]),
        "frame_invalid",
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_holds_the_link_and_stores_nothing(make_memory_zone: MakeZone, lie: str) -> None:
    """Faults of history, framing and identity hold the link at once: nothing is put, recorded or confirmed."""
    alter, code = LIES[lie]
    plant, enterprise, inbound, link = await lied_to(make_memory_zone, alter)
    before = await inbound.memory.recall()
    progress = await inbound.pull()
    assert progress.held is not None
    assert progress.held.code == code
    assert progress.held.detail
    assert len(await enterprise.received()) == 4
    assert await enterprise.forward_gaps() == []
    assert await plant.committed(link.consumer) == 3
    assert await inbound.memory.recall() == before


@pytest.mark.parametrize("lie", LIES)
async def test_an_honest_answer_after_a_lie_is_taken(make_memory_zone: MakeZone, lie: str) -> None:
    """Once the sender is in order again and the link is released, everything arrives, once and in order."""
    plant, enterprise, inbound, link = await lied_to(make_memory_zone, LIES[lie][0])
    await inbound.pull()
    link.alter = None
    await inbound.pull_all()
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(10)]
    assert await plant.committed(link.consumer) == 9


async def test_malformed_columns_are_noticed_before_they_are_read(make_zone: MakeZone) -> None:
    """A column whose layout points outside of its bytes holds the link and harms nobody."""
    _, enterprise, inbound, _ = await lied_to(make_zone, malformed)
    progress = await inbound.pull()
    assert progress.held is not None
    assert progress.held.code in ("frame_invalid", "invalid_fact")
    assert len(await enterprise.received()) == 4


async def test_damage_on_the_way_is_fetched_again(make_zone: MakeZone) -> None:
    """What stands before an altered fact is taken; the altered one is fetched again and, being right then, taken."""
    plant, enterprise, inbound, link = await lied_to(make_zone, with_column("object", row=2, value=b'"forged"'))
    progress = await inbound.pull()
    assert (progress.held, progress.refetch_at) == (None, 6)
    assert (progress.inserted, progress.acknowledged) == (2, 5)
    assert len(await enterprise.received()) == 6
    link.alter = None
    again = await inbound.pull()
    assert (again.refetch_at, again.inserted) == (None, 4)
    assert await plant.committed(link.consumer) == 9
    assert (await inbound.memory.recall()).suspect is None


async def test_damage_that_stays_holds_the_link(make_zone: MakeZone) -> None:
    """A fact that does not match its digest twice holds the link, and the sender keeps it: nothing passes it."""
    plant, enterprise, inbound, link = await lied_to(make_zone)

    def forge_seventh(fetched: Fetched) -> Fetched:
        return with_column("object", row=7 - fetched.start, value=b'"forged"')(fetched)

    link.alter = forge_seventh
    assert (await inbound.pull()).refetch_at == 7
    progress = await inbound.pull()
    assert progress.held is not None
    assert progress.held.code == "digest_mismatch"
    assert "7" in progress.held.detail
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(7)]
    assert await plant.committed(link.consumer) == 6


async def test_damage_in_the_first_fact(make_zone: MakeZone) -> None:
    """When the very first fact is altered there is nothing to confirm, and it is fetched again all the same."""
    plant, enterprise, inbound, link = await lied_to(make_zone, with_column("digest", row=0, value=bytes(32)))
    progress = await inbound.pull()
    assert (progress.refetch_at, progress.moved, progress.inserted) == (4, False, 0)
    assert len(await enterprise.received()) == 4
    assert (await inbound.pull()).held is not None
    assert await plant.committed(link.consumer) == 3


async def test_cursor_that_runs_ahead_is_noticed(make_zone: MakeZone) -> None:
    """A sender that counts more as confirmed than was confirmed is held at the jump that follows."""
    plant, enterprise, inbound, link = await lied_to(make_zone)
    inbound.request = FetchRequest(max_facts=2)
    link.advanced_to = 1_000
    assert (await inbound.pull()).acknowledged == 5
    cursors = (await plant.storage()).cursors
    await cursors.commit(link.consumer, Confirmation(through=7))
    inbound.begin_anew()
    progress = await inbound.pull()
    assert progress.held is not None
    assert progress.held.code == "frame_invalid"
    assert len(await enterprise.received()) == 6


async def test_gap_records_are_cut_to_their_frame(make_zone: MakeZone) -> None:
    """A gap record that claims more than its frame, or speaks at length, is stored for its frame and in short.

    A character that a storage or a terminal does not bear is left out: it would stop every link that it is told over.
    """

    def boast(fetched: Fetched) -> Fetched:
        gap = GapRecord(0, 1 << 60, GapReason.EVICTED, 7, "\x00\x1b" + "x" * 100_000, origin_zone="moon")
        return replace(fetched, frames=[Frame(4, 9, gap=gap)])

    plant, enterprise, inbound, link = await lied_to(make_zone, boast)
    progress = await inbound.pull()
    assert (progress.held, progress.gaps, progress.acknowledged) == (None, 1, 9)
    (gap,) = await enterprise.forward_gaps()
    assert gap == GapRecord(4, 9, GapReason.EVICTED, 7, "x" * (DETAIL_CHARACTERS_MAX - 2), "plant")
    assert await plant.committed(link.consumer) == 9


async def test_sender_that_refuses_the_position_holds_the_link(make_zone: MakeZone) -> None:
    """A sender that says the position belongs to another history holds the link from its side."""
    _, _, inbound, link = await lied_to(make_zone)

    async def refuse(*_: object, **__: object) -> Fetched:
        raise ForeignLog("restored")

    link.fetch = refuse  # type: ignore[method-assign]
    progress = await inbound.pull()
    assert progress.held is not None
    assert (progress.held.code, progress.held.detail) == ("foreign_log", "restored")


async def test_confirmation_of_another_history_holds_the_link(make_zone: MakeZone) -> None:
    """When the sender's log was replaced between fetch and confirm, the facts stay here and the link is held."""
    _, enterprise, inbound, link = await lied_to(make_zone)

    async def refuse(*_: object, **__: object) -> int:
        raise ForeignLog("replaced")

    link.confirm = refuse  # type: ignore[method-assign]
    forward = await enterprise.forward()
    assert (await inbound.flow().turn(forward)).inserted == 6
    progress = await inbound.flow().turn(forward)
    assert progress.held is not None
    assert (progress.inserted, progress.moved) == (0, False)
    assert len(await enterprise.received()) == 10


async def test_restored_sender_is_noticed(make_zone: MakeZone) -> None:
    """A sender whose folder was put back to an older copy is held, because it forgot what it had acknowledged."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    await plant.append(messages(5))
    await inbound.pull()
    older = make_zone("older-plant")
    restored = await connect(older, enterprise)
    await older.append(messages(9))
    log_id = (await plant.store()).log_id

    async def fetch(request: FetchRequest) -> Fetched:
        return replace(await restored.link.fetch(request), log_id=log_id)

    inbound.link.fetch = fetch  # type: ignore[method-assign]
    inbound.begin_anew()
    progress = await inbound.pull()
    assert progress.held is not None
    assert progress.held.code == "foreign_log"
    assert "went back" in progress.held.detail


def test_log_that_became_shorter_is_noticed() -> None:
    """A sender whose log ends earlier than it did is held, also when nothing was confirmed yet."""
    position = PeerPosition(log_id="a", latest_start=9, end=9)
    fetched = Fetched("a", 0, 8, b"")
    rules = LinkRules("enterprise", frozenset({"plant"}))
    held = judge(fetched, position, rules, "plant")
    assert isinstance(held, LinkHeld)
    assert held.code == "foreign_log"
    assert isinstance(judge(replace(fetched, end=9), position, rules, "plant"), Put)


def skips(*ranges: tuple[int, int], detail: str = "not carried") -> GapSet:
    """Make a set of what a link left out."""
    return GapSet(GapReason.SKIPPED, RangeSet.of(ranges, 1), detail, None, 1)


LEFT_OUT: dict[str, tuple[list[int] | None, list[GapSet]]] = {
    "a hole": ([4, 6, 8, 9], [skips((5, 5))]),
    "an entry that was left out": ([4, 5, 6, 7, 8, 9], [skips((5, 5))]),
    "a set beyond the frame": ([4, 6, 7, 8, 9], [skips((5, 5), (10, 10))]),
    "a set before the frame": ([4, 5, 6, 7, 8], [skips((3, 3))]),
    "two sets of one offset": ([4, 7, 8, 9], [skips((5, 5)), skips((5, 5), detail="again")]),
    "nothing but a part": (None, [skips((4, 8))]),
    "everything and more": (None, [skips((4, 1 << 61))]),
}


@pytest.mark.parametrize("case", LEFT_OUT)
async def test_what_was_left_out_must_fit_the_entries(make_memory_zone: MakeZone, case: str) -> None:
    """A frame whose entries and skipped ranges are not together its whole range holds the link, and stores nothing."""
    rows, left_out = LEFT_OUT[case]

    def alter(fetched: Fetched) -> Fetched:
        (frame,) = fetched.frames
        assert frame.entries is not None
        entries = None if rows is None else frame.entries.take(np.array(rows) - 4)
        return replace(fetched, frames=[replace(frame, entries=entries, skips=left_out)])

    _, enterprise, inbound, _ = await lied_to(make_memory_zone, alter)
    progress = await inbound.pull()
    assert progress.held is not None
    assert progress.held.code == "frame_invalid"
    assert len(await enterprise.received()) == 4
    assert await enterprise.forward_gaps() == []


async def test_a_damaged_entry_between_skips_is_fetched_again(make_memory_zone: MakeZone) -> None:
    """What was left out before a damaged entry is recorded, what stands behind it is not, until it comes whole."""

    def alter(fetched: Fetched) -> Fetched:
        (frame,) = fetched.frames
        assert frame.entries is not None
        batch = frame.entries.take(np.array([0, 2, 4, 5])).record_batch
        place = batch.schema.get_field_index("object")
        objects = batch.column(place).to_pylist()
        objects[1] = b'{"value":"altered"}'
        batch = batch.set_column(place, batch.schema.field(place), pa.array(objects, type=pa.binary()))
        return replace(fetched, frames=[replace(frame, entries=EntryBatch(batch), skips=[skips((5, 5), (7, 7))])])

    _, enterprise, inbound, link = await lied_to(make_memory_zone, alter)
    progress = await inbound.pull()
    assert (progress.held, progress.refetch_at, progress.acknowledged) == (None, 6, 5)
    assert [(gap.first, gap.last) for gap in await enterprise.forward_gaps()] == [(5, 5)]
    link.alter = None
    assert (await inbound.pull()).acknowledged == 9


async def test_digests_that_nobody_here_can_check_hold_the_link(
    make_zone: MakeZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts by an unknown function are not altered ones: the link is held at once, and goes on when it is known."""
    plant, enterprise, inbound, _ = await lied_to(make_zone)
    await (await plant.store()).append(sealed(messages(3, first=10), hasher=WeakHasher()))
    assert (await inbound.pull()).held == LinkHeld(
        "hasher_unknown", "the digest function 'weak' is not known here", ANY
    )
    assert len(await enterprise.received()) == 4
    monkeypatch.setitem(digest._known, "weak", WeakHasher())
    assert (await inbound.pull()).inserted == 9
    assert [entry.hasher for entry in await enterprise.received()] == ["sha256"] * 10 + ["weak"] * 3
