"""Orphan collection in an artifact folder: the only way in which content and names leave it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Set as AbstractSet

from bsfg.artifacts import Collected
from bsfg.stores.artifacts.contents import INCOMING, Contents, Grace
from bsfg.stores.artifacts.files import Files, translating
from bsfg.stores.artifacts.names import Names


class Collector:
    """Removes what nobody needs; ``in_use`` are the paths of uploads under way."""

    def __init__(self, files: Files, contents: Contents, names: Names, in_use: AbstractSet[str]) -> None:
        self._files, self._contents, self._names, self._in_use = files, contents, names, in_use
        self._looked_for_empty_names = False

    def clear_incoming(self) -> None:
        """Remove what uploads that ended badly could not remove themselves."""
        for name in self._files.list(INCOMING):
            path = f"{INCOMING}/{name}"
            if path not in self._in_use:
                with contextlib.suppress(IsADirectoryError):  # is none of ours
                    self._files.remove(path)

    def collect(self, referenced: AbstractSet[str], grace: Grace) -> Collected:
        """Remove every content that is not referenced and not needed, its names first."""
        with translating("collecting artifacts"):
            self.clear_incoming()
            victims = self._contents.victims(referenced, grace)
            by_digest = self._names_of(victims, referenced)
            freed, removed, changed = 0, [], set()
            names_removed: list[str] = []
            for digits in sorted({*victims, *by_digest}):

                def remove_names(digits: str = digits) -> None:
                    found = by_digest.get(digits, ())
                    names_removed.extend(name for name in found if self._names.remove(name, f"sha256:{digits}"))

                size = self._contents.remove(digits, grace, remove_names)
                if size is not None:
                    freed += size
                    removed.append(f"sha256:{digits}")
                    changed.add(digits[:2])
            self._sync({name[:2] for name in names_removed}, changed)
            self._contents.forget_claims(grace)
        return Collected(tuple(removed), len(names_removed), freed)

    def _names_of(self, victims: list[str], referenced: AbstractSet[str]) -> dict[str, list[str]]:
        """Find the names of victims, and those whose content is gone although no fact names it.

        Reading every record takes its time, so it is done only when something is to go, and once after a start:
        names without content are what a power loss during a collection, or a careless hand, leaves.
        """
        by_digest: dict[str, list[str]] = defaultdict(list)
        if self._looked_for_empty_names and not victims:
            return by_digest
        chosen = set(victims)
        for name, artifact in self._names.all():
            digits = artifact.digest.removeprefix("sha256:")
            if digits in chosen or (artifact.digest not in referenced and not self._contents.exists(digits)):
                by_digest[digits].append(name)
        self._looked_for_empty_names = True
        return by_digest

    def _sync(self, name_shards: set[str], content_shards: set[str]) -> None:
        # Names first: a name without content is worse to find than content without a name.
        for shard in sorted(name_shards):
            self._names.shards.sync(shard)
        for shard in sorted(content_shards):
            self._contents.shards.sync(shard)
