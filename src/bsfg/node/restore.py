"""Restoring a zone from a backup, as a new history that its peers recognise as such.

It is made beside its place and gets its name when it is complete; what is there already is never overwritten. A zone
that was only moved, with nothing written since the backup, may keep its history.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bsfg.disk import clear_away
from bsfg.errors import FileExists, InvalidArgument, LogDamaged
from bsfg.journey.link import PeerPosition
from bsfg.node.backup import (
    ARTIFACTS,
    DATA,
    ZONE,
    Manifest,
    Meter,
    Place,
    Progress,
    read_manifest,
    verified,
)
from bsfg.node.config import ZoneConfig, load
from bsfg.node.state import NodeState
from bsfg.stores.artifacts import copying
from bsfg.stores.artifacts.files import DiskFiles as ArtifactFiles
from bsfg.stores.log.backup import copy_folder, size_of
from bsfg.stores.log.files import DiskFiles, translated
from bsfg.stores.log.restoring import RestoredLog, begin_new_histories

STAGING = ".restoring"


@dataclass(frozen=True, slots=True)
class Options:
    """How a backup is restored; ``moved`` keeps the history, ``accept_damage`` takes what is left of a damaged one."""

    moved: bool = False
    accept_damage: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored and where; ``files`` are those of the zone that were missing and are there again."""

    manifest: Manifest
    data: Path
    artifacts: Path
    config: Path | None
    logs: tuple[RestoredLog, ...]
    files: tuple[str, ...]
    lacking: tuple[str, ...]


def restore(
    backup: Path, folder: Path, options: Options, now_unix_ms: Callable[[], int], progress: Progress
) -> Restored:
    """Restore a backup into the folder of its zone; without a configuration the folder becomes the data folder."""
    manifest = read_manifest(backup)
    config = _config(backup, folder, manifest)
    place = Place.of(config) if config is not None else Place.of_folder(folder)
    for path in (place.data, place.artifacts):
        _check_free(path)
    _check_sound(backup, manifest, options, progress)
    try:
        logs = _Restore(backup, place, options, now_unix_ms, progress).run(config)
        files = _zone_files(backup, folder, manifest)
    except OSError as error:
        raise translated(error, f"restoring into {folder}") from None
    lacking = tuple(str(path) for path in (*place.certificates, *place.keys) if not path.is_file())
    source = config.source if config is not None else None
    return Restored(manifest, place.data, place.artifacts, source, tuple(logs), files, lacking)


def _config(backup: Path, folder: Path, manifest: Manifest) -> ZoneConfig | None:
    """Give the configuration that decides where things lie: the one in the folder, or else the one in the backup."""
    if manifest.config is None:
        return None
    own = folder / manifest.config
    config = load(own) if own.exists() else replace(load(backup / ZONE / manifest.config), source=own)
    if config.zone.name != manifest.zone:
        raise InvalidArgument(f"the backup is of the zone {manifest.zone}, {own} is of {config.zone.name}")
    return config


def _check_free(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        hint = f"Move it aside first (mv {path} {path}.lost) and keep it: it may hold what the backup lacks."
        raise FileExists(f"{path} is already there", hint=hint)
    staging = path.with_name(path.name + STAGING)
    if staging.exists():
        hint = "Another restore is under way, or one was interrupted; then remove it."
        raise FileExists(f"{staging} is already there", hint=hint)


def _check_sound(backup: Path, manifest: Manifest, options: Options, progress: Progress) -> None:
    """Read every byte of a backup before anything relies on it."""
    heads, problems = verified(backup, lambda _, done, total: progress("verifying", done, total))
    found = [f"{each['where']}: {each['detail']}" for each in replace(manifest, problems=problems).damage]
    found += [
        f"{log.stream}/{log.buffer}: it is not the log that was backed up"
        for log in manifest.logs
        if log.chain_head and heads.get((log.stream, log.buffer)) != log.chain_head
    ]
    if found and not options.accept_damage:
        hint = "Use another backup; or take what is left of this one with --accept-damage, and the rest is lost."
        raise LogDamaged(f"the backup is damaged: {'; '.join(found[:5])}", hint=hint, problems=len(found))


class _Restore:
    """One restore being made."""

    def __init__(
        self, backup: Path, place: Place, options: Options, now_unix_ms: Callable[[], int], progress: Progress
    ) -> None:
        self._backup, self._place, self._options, self._now = backup, place, options, now_unix_ms
        self._data, self._artifacts = DiskFiles(backup / DATA), ArtifactFiles(backup / ARTIFACTS)
        self._meter = Meter(progress, "restoring", size_of(self._data) + copying.size_of(self._artifacts))

    def run(self, config: ZoneConfig | None) -> list[RestoredLog]:
        """Copy everything beside its place, make it a new history, and give it its name."""
        place = self._place
        inside = place.artifacts.is_relative_to(place.data)
        data = place.data.with_name(place.data.name + STAGING)
        artifacts = place.artifacts.with_name(place.artifacts.name + STAGING)
        if inside:
            artifacts = data / place.artifacts.relative_to(place.data)
        try:
            data.mkdir(parents=True, mode=0o750)
            files = DiskFiles(data)
            copy_folder(self._data, files, copied=self._meter)
            copying.copy_artifacts(self._artifacts, ArtifactFiles(artifacts), copied=self._meter)
            logs = [] if self._options.moved else begin_new_histories(files, self._now())
            if config is not None and not self._options.moved:
                distrust(data, config)
            files.sync_folder("")
            if not inside and artifacts.exists():
                _name_it(artifacts, place.artifacts)
            _name_it(data, place.data)
        except BaseException:
            clear_away(data)
            if not inside:
                clear_away(artifacts)
            raise
        return logs


def distrust(data: Path, config: ZoneConfig) -> None:
    """Let links that the backup knows nothing of begin at the beginning.

    A link may have been made, and have confirmed facts, after the backup. Its sender then goes on behind them. As an
    unknown sender it would be believed; as one that skips something it is held, and read again from there.
    """
    state = NodeState(data)
    try:
        for link in config.links.values():
            for stream in config.streams_of(link):
                state.begin_at_least(link.name, stream, PeerPosition(latest_start=0))
    finally:
        state.close()


def _name_it(staging: Path, path: Path) -> None:
    staging.rename(path)
    DiskFiles(path.parent).sync_folder("")


def _zone_files(backup: Path, folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Put back what is missing of the zone's own files; what is there stays as it is."""
    written = []
    for name in manifest.files:
        target = folder / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(backup / ZONE / name, target)
            written.append(name)
    return tuple(written)
