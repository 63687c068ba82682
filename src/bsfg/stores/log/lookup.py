"""Finding an entry by its key."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bsfg.fact import Entry, Key
from bsfg.stores.log.writer import LogWriter


def find_key(writer: LogWriter, key: Key) -> Entry | None:
    """Give the entry of a key while its bytes are retained."""
    hashes = writer.hash_of(pa.array([key.from_zone], pa.string()), pa.array([key.message_id], pa.string()))
    _, offsets = writer.index.keys.candidates(hashes)
    view = writer.view()
    for offset in np.unique(offsets).tolist():
        rows = view.rows_at(offset)
        if rows is not None:
            entry = rows.to_entries()[0]
            if entry.key == key:
                return entry
    return None
