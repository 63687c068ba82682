"""What is known in memory of the messages of one buffer: its keys by hash, and where its frames are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from bsfg.digest import KeptRange
from bsfg.gaps import GapSet, RangeSet
from bsfg.retention import GapReason
from bsfg.stores.jetstream.messages import ASIDE, FRAME_SUBJECT, GAPS, NOTE, MessageBody, unpack
from bsfg.stores.shared.keeper import AsideRow

FRAME = np.dtype(
    [
        ("base", "<i8"),
        ("count", "<i4"),
        ("parts", "<i4"),
        ("size_bytes", "<i8"),
        ("unix_ms", "<i8"),
        ("seq", "<i8"),
        ("chain", "V32"),
    ]
)
"""Where a frame is: how many messages hold it, the first of them, and what else is asked without its content."""


class KeyRuns:
    """Hash and offset of every key, in runs that are sorted by hash; each is at least twice as long as the next."""

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        self._first = 0
        self._forgotten = 0

    def add(self, hashes: np.ndarray, offsets: np.ndarray) -> None:
        """Take in keys."""
        if not len(hashes):
            return
        self._runs.append(_sorted(hashes, offsets))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            (one, at_one), (other, at_other) = self._runs[-2:]
            self._runs[-2:] = [_sorted(np.concatenate([one, other]), np.concatenate([at_one, at_other]))]

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Give the keys that have one of some different hashes, as rows of hash and offset."""
        found: list[np.ndarray] = []
        for known, offsets in self._runs:
            firsts = known.searchsorted(hashes)
            # Mostly none is known, which is seen without looking where it ends.
            if not (known.take(firsts, mode="clip") == hashes).any():
                continue
            counts = known.searchsorted(hashes, side="right") - firsts
            rows = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            found.append(np.column_stack([known[rows], offsets[rows]]))
        rows = np.concatenate(found) if found else np.empty((0, 2), dtype=np.int64)
        return rows[rows[:, 1] >= self._first] if self._first else rows

    def forget_before(self, offset: int) -> None:
        """Know the keys below an offset no more."""
        self._forgotten += max(0, offset - self._first)
        self._first = max(self._first, offset)
        # Taken out of the runs when it is worth it.
        if self._forgotten > sum(len(hashes) for hashes, _ in self._runs) // 2:
            kept = [(hashes[offsets >= offset], offsets[offsets >= offset]) for hashes, offsets in self._runs]
            self._runs = [run for run in kept if len(run[0])]
            self._forgotten = 0


def _sorted(hashes: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(hashes) == 1:
        return hashes, offsets
    order = np.argsort(hashes, kind="stable")
    return hashes[order], offsets[order]


class FrameTable:
    """Where the frames of a buffer are, by their offsets; readers hold a view while the writer goes on."""

    def __init__(self) -> None:
        self._rows = np.empty(64, dtype=FRAME)
        self._from = self._to = 0

    @property
    def rows(self) -> np.ndarray:
        """All frames, the oldest first."""
        return self._rows[self._from : self._to]

    def add(self, rows: np.ndarray) -> None:
        """Take in frames that follow those that are there."""
        if self._to + len(rows) > len(self._rows):
            live = self.rows
            grown = np.empty(2 * (len(live) + len(rows)), dtype=FRAME)
            grown[: len(live)] = live
            self._rows, self._from, self._to = grown, 0, len(live)
        self._rows[self._to : self._to + len(rows)] = rows
        self._to += len(rows)

    def drop_through(self, offset: int) -> None:
        """Let the frames go that begin at an offset or before."""
        self._from += int(np.searchsorted(self.rows["base"], offset, side="right"))

    def drop(self, gone: np.ndarray) -> None:
        """Let some frames go, told by where they begin."""
        kept = self.rows[~np.isin(self.rows["base"], gone)]
        self._rows, self._from, self._to = kept, 0, len(kept)

    def since(self, at: int, until: int | None, most: int) -> np.ndarray:
        """Give the frames that end after an offset and begin before another."""
        rows = self.rows
        first = int(np.searchsorted(rows["base"], at, side="right"))
        if first and rows["base"][first - 1] + rows["count"][first - 1] > at:
            first -= 1
        last = len(rows) if until is None else int(np.searchsorted(rows["base"], until))
        return rows[first : min(last, first + most)]

    def holding(self, offsets: np.ndarray) -> np.ndarray:
        """Give the frames that hold one of some ascending offsets."""
        rows = self.rows
        at = np.searchsorted(rows["base"], offsets, side="right") - 1
        inside = at >= 0
        inside[inside] = offsets[inside] < rows["base"][at[inside]] + rows["count"][at[inside]]
        return rows[np.unique(at[inside])]

    def places(self, heads: Collection[bytes]) -> dict[bytes, int]:
        """Tell which frames have one of some digests before them."""
        wanted, found = set(heads), {}
        if wanted:
            for base, chain in zip(self.rows["base"].tolist(), self.rows["chain"].tolist(), strict=True):
                if chain in wanted:
                    found[chain] = base
        return found


def page_of(rows: np.ndarray, page_bytes: int) -> np.ndarray:
    """Give the first of some frames, as many as make up a page, one at least."""
    sizes = rows["size_bytes"]
    return rows[: max(1, int(np.searchsorted(np.cumsum(sizes) - sizes, page_bytes)))]


class LeftRange(NamedTuple):
    """A range that left, and where its keys are; their message is 0 when they are forgotten."""

    kept: KeptRange
    newest_unix_ms: int
    size_bytes: int
    seq: int
    parts: int


class RefusedPlace(NamedTuple):
    """Where a refused fact is: in which messages, and where in what they hold."""

    same: int
    seq: int
    parts: int
    at: int
    head_bytes: int
    fact_bytes: int

    def row(self, id_: int, content: bytes) -> AsideRow:
        """Read the fact."""
        middle = self.at + self.head_bytes
        return AsideRow(id_, self.same, content[self.at : middle].decode(), content[middle : middle + self.fact_bytes])


class SummaryPlace(NamedTuple):
    """Where frames were summed up: in which message, up to which offset."""

    seq: int
    end: int


class KnownBuffer:
    """What is known of one buffer: all but the content of its messages."""

    def __init__(self) -> None:
        self.frames, self.keys = FrameTable(), KeyRuns()
        self.gaps: list[GapSet] = []
        self.gaps_seq = 0
        """The message in which they were last written anew, 0 when they never were."""
        self.left: list[LeftRange] = []
        self.aside: dict[int, RefusedPlace] = {}
        self._same: dict[int, list[int]] = {}
        self.last_aside_id = 0
        self.latest: tuple[int, int] | None = None
        self.unsummed: list[tuple[np.ndarray, np.ndarray]] = []
        self.unsummed_bytes = 0
        self.summaries: list[SummaryPlace] = []
        self.summed_seq = 0
        self.summed_end = 0

    # Taking in.

    def take(self, body: MessageBody) -> None:
        """Know what a part of a change says."""
        if body.kind == FRAME_SUBJECT:
            self._take_frame(body)
        elif body.kind == ASIDE:
            at = 0
            for id_, same, head_bytes, fact_bytes in unpack(body.data)[0]["rows"]:
                self.aside[id_] = RefusedPlace(same, body.seq, body.parts, at, head_bytes, fact_bytes)
                self._same.setdefault(same, []).append(id_)
                self.last_aside_id = max(self.last_aside_id, id_)
                at += head_bytes + fact_bytes
        elif body.kind == NOTE:
            self._take_note(body)
        elif body.kind == GAPS:
            self._take_gaps(body)

    def _take_frame(self, body: MessageBody) -> None:
        meta, (content, hashes) = unpack(body.data)
        base, count, unix_ms, chain = meta["frame"]
        row = np.array([(base, count, body.parts, len(content), unix_ms, body.seq, bytes.fromhex(chain))], dtype=FRAME)
        keys = np.frombuffer(hashes, dtype="<i8")
        self.frames.add(row)
        self.keys.add(keys, np.arange(base, base + count))
        self.unsummed.append((row, keys))
        self.unsummed_bytes += len(content)

    def _take_note(self, body: MessageBody) -> None:
        note, _ = unpack(body.data)
        if "latest" in note:
            back, parts = note["latest"]
            self.latest = body.seq - back, parts
        if "departed" in note:
            first, last, digest, before, after = note["departed"]
            newest, size, back, parts = note["gone"]
            kept = KeptRange(first, last, digest, bytes.fromhex(before), bytes.fromhex(after))
            self.left.append(LeftRange(kept, newest, size, body.seq - back, parts))
            self.frames.drop_through(last)
        if "forgotten" in note:
            at = next(at for at, left in enumerate(self.left) if left.kept.first == note["forgotten"])
            self.left[at] = self.left[at]._replace(seq=0)
            self.keys.forget_before(self.first_key)
        if "released" in note:
            id_ = note["released"][0]
            self.last_aside_id = max(self.last_aside_id, id_)
            if (gone := self.aside.pop(id_, None)) is not None:
                self._same[gone.same].remove(id_)

    def _take_gaps(self, body: MessageBody) -> None:
        told, blobs = unpack(body.data)
        gaps = [
            GapSet(GapReason(reason), RangeSet.decode(blob), *more)
            for (reason, *more), blob in zip(told["gaps"], blobs, strict=True)
        ]
        if told["anew"]:
            self.gaps, self.gaps_seq = gaps, body.seq
        else:
            self.gaps += gaps

    # Sums: what is known of many frames, in one message.

    def summary(self) -> tuple[dict[str, int], list[bytes]]:
        """Write the places and keys of the frames since the last time."""
        rows = np.concatenate([row for row, _ in self.unsummed])
        keys = np.concatenate([keys for _, keys in self.unsummed])
        end = int(rows["base"][-1] + rows["count"][-1])
        meta = {"since": self.summed_seq, "begin": self.summed_end, "end": end}
        return meta, [rows.tobytes(), keys.astype("<i8").tobytes()]

    def summed(self, first_seq: int, through_seq: int, end: int) -> None:
        """Know that a summary is stored."""
        self.summaries.append(SummaryPlace(first_seq, end))
        self.unsummed, self.unsummed_bytes = [], 0
        self.summed_seq, self.summed_end = through_seq, end

    def take_summary(self, body: MessageBody) -> tuple[int, int]:
        """Take in a summary; tell behind which message, and from which offset on, it sums up."""
        meta, (rows, hashes) = unpack(body.data)
        frames = np.frombuffer(rows, dtype=FRAME)
        counts = frames["count"].astype(np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self.frames.add(frames)
        self.keys.add(np.frombuffer(hashes, dtype="<i8"), np.repeat(frames["base"], counts) + within)
        self.summed(body.seq, meta["through"], meta["end"])
        return meta["since"], meta["begin"]

    def settle(self, start: int) -> None:
        """Let go what messages said is gone, however early they were read, and what nobody asks for any more."""
        rows = self.frames.rows
        rows = rows[np.unique(rows["base"], return_index=True)[1]]
        self.frames = FrameTable()
        self.frames.add(rows[rows["base"] + rows["count"] > start])
        if self.left:
            self.frames.drop_through(self.left[-1].kept.last)
        self.keys.forget_before(self.first_key)

    # What is known.

    @property
    def first_key(self) -> int:
        """The offset before which no key is known."""
        known = next((left.kept.first for left in self.left if left.seq), None)
        if known is None:
            return self.left[-1].kept.last + 1 if self.left else 0
        return known

    def refused(
        self, after: int | None, limit: int, newest_first: bool, same: Sequence[int] | None
    ) -> dict[int, RefusedPlace]:
        """Find refused facts by their ids."""
        ids = list(self.aside) if same is None else [id_ for each in set(same) for id_ in self._same.get(each, ())]
        if after is not None:
            ids = [id_ for id_ in ids if (id_ < after if newest_first else id_ > after)]
        return {id_: self.aside[id_] for id_ in sorted(ids, reverse=newest_first)[:limit]}
