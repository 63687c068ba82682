"""What a log can show of its past: digests and chain values of what was removed, and where it had some chain value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bsfg.rangedigest import History, KeptRange, Restore
from bsfg.stores.log.files import Files
from bsfg.stores.log.identity import read_identity
from bsfg.stores.log.notes import Notes
from bsfg.stores.log.view import LogView


def history_of(view: LogView, notes: Notes, chain: bytes, heads: Sequence[bytes] = ()) -> History:
    """Describe the past of a log whose chain now ends with ``chain``; heads are searched from the end."""
    kept = tuple(kept_ranges(notes))
    found: dict[bytes, int | None] = dict.fromkeys(heads)
    missing = set(heads)
    for value, offset in _values(view, kept, chain) if missing else ():
        if value in missing:
            found[value] = offset
            missing.discard(value)
            if not missing:
                break
    return History(kept, found)


def restores_of(files: Files, folder: str) -> tuple[Restore, ...]:
    """Give the restores that a log has behind it."""
    identity = read_identity(files, folder)
    lineage = identity.lineage if identity is not None else ()
    return tuple(Restore(each.end, each.restored_unix_ms, each.log_id.hex()) for each in lineage)


def kept_ranges(notes: Notes) -> Iterator[KeptRange]:
    """Give what was kept of removed segments."""
    for anchor in notes.anchors:
        chain = bytes.fromhex(anchor.chain_before), bytes.fromhex(anchor.chain_after)
        yield KeptRange(anchor.first, anchor.last, anchor.range_digest, *chain)


def _values(view: LogView, kept: Sequence[KeptRange], chain: bytes) -> Iterator[tuple[bytes, int]]:
    """Give the chain values of a log from its end to its beginning, each with the offset that follows it."""
    yield chain, view.end
    for segment in reversed(view.segments):
        for ref in reversed(segment.frames):
            yield ref.header.chain_before, ref.base
        yield segment.header.chain_before, segment.base
    for each in reversed(kept):
        yield each.chain_after, each.last + 1
        yield each.chain_before, each.first
