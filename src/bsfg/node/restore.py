"""Restoring a zone from a backup, as a new history that its peers recognise as such.

A backup is somebody's word until the zone's signature says otherwise, and even then it is read as if it were a
stranger's: what it holds is compared with what was signed, file by file, before anything is made of it. It is made
beside its place and gets its name when it is complete; what is there already is never overwritten, and what fails
leaves nothing behind. A zone that was only moved, with nothing written since the backup, may keep its history.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bsfg.config import ZoneConfig, load
from bsfg.disk import clear_away
from bsfg.errors import BackupUntrusted, FileExists, InvalidArgument, LogDamaged
from bsfg.journey.link import PeerPosition
from bsfg.node.backup import (
    ARTIFACTS,
    AUTHORITY_KEY,
    DATA,
    MANIFEST,
    PARTS,
    SIGNATURE,
    ZONE,
    Manifest,
    Meter,
    Progress,
    ZonePlace,
    is_signed,
    parsed,
    read_document,
    verified,
)
from bsfg.node.manifest import HINT, UNSIGNED_HINT, check_plain, differences, open_plain
from bsfg.node.state import NodeState
from bsfg.stores.artifacts.files import ArtifactDiskFiles as ArtifactFiles
from bsfg.stores.artifacts.folder import copy_artifacts
from bsfg.stores.artifacts.folder import size_of as size_of_artifacts
from bsfg.stores.log.backup import RestoredLog, begin_new_histories, copy_folder, size_of
from bsfg.stores.log.files import DiskFiles, translated
from bsfg.wording import one_line

STAGING = ".restoring"
_PRIVATE = b"PRIVATE KEY-----"


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """How a backup is restored.

    ``moved`` keeps the history, ``accept_damage`` takes what is left of a damaged one, ``take_config`` also takes the
    zone's file and certificates, ``authorities`` are those that vouch for the zone, where the zone's own file does not
    say, and ``accept_unsigned`` asks nobody.
    """

    moved: bool = False
    accept_damage: bool = False
    take_config: bool = False
    authorities: Path | None = None
    accept_unsigned: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored and where; ``files`` are those of the zone that were missing and are there again.

    ``signed_by`` is the certificate of the zone that vouches for it, None when nobody was asked. ``warnings`` are what
    the file that was taken makes this machine do. ``damage`` is what was wrong with the backup, and was accepted.
    """

    manifest: Manifest
    data: Path
    artifacts: Path
    config: Path | None
    logs: tuple[RestoredLog, ...]
    files: tuple[str, ...]
    lacking: tuple[str, ...]
    signed_by: str | None = None
    warnings: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()


def restore(
    backup: Path, folder: Path, options: RestoreOptions, now_unix_ms: Callable[[], int], progress: Progress
) -> Restored:
    """Restore a backup into the folder of its zone; without a configuration the folder becomes the data folder."""
    document = read_document(backup, MANIFEST)
    manifest = parsed(backup, document)
    own = _own_config(folder, manifest)
    signed_by = None if options.accept_unsigned else _check_signed(backup, document, manifest, own, options)
    damage = _check_contents(backup, manifest, options, progress)
    config = own if own is not None else _taken_config(backup, folder, manifest, options)
    place = ZonePlace.of(config) if config is not None else ZonePlace.of_folder(folder)
    for path in (place.data, place.artifacts):
        _check_free(folder, path)
    damage += _check_sound(backup, manifest, options, progress)
    try:
        logs, files = _Restore(backup, place, options, now_unix_ms, progress).run(folder, manifest, config)
    except OSError as error:
        raise translated(error, f"restoring into {folder}") from None
    needed = (*place.certificates, *((place.key,) if place.key else ()))
    lacking = tuple(str(path) for path in needed if not path.is_file())
    source = config.source if config is not None else None
    warnings = _warnings(config) if config is not None and own is None else ()
    return Restored(
        manifest,
        place.data,
        place.artifacts,
        source,
        tuple(logs),
        files,
        lacking,
        signed_by,
        tuple(warnings),
        tuple(dict.fromkeys(damage)),
    )


# Whose it is.


def _own_config(folder: Path, manifest: Manifest) -> ZoneConfig | None:
    """Give the configuration that is in the folder."""
    if manifest.config is None or not (folder / manifest.config).exists():
        return None
    config = load(folder / manifest.config)
    if config.zone.name != manifest.zone:
        says = f"the backup is of the zone {manifest.zone}, {config.source} is of {config.zone.name}"
        raise InvalidArgument(one_line(says))
    return config


def _check_signed(
    backup: Path, document: bytes, manifest: Manifest, own: ZoneConfig | None, options: RestoreOptions
) -> str:
    """Give the name of the zone's certificate that signed a backup, or raise `BackupUntrusted`."""
    from bsfg.node.signed import check_signature
    from bsfg.wire.certcheck import names_in_file

    if not is_signed(backup):
        raise BackupUntrusted(f"nobody has signed the backup {backup}", hint=UNSIGNED_HINT)
    authorities, names = options.authorities, tuple[str, ...]()
    if own is not None and own.tls.ca is not None and authorities is None:
        authorities = own.path(own.tls.ca)
    if own is not None and own.tls.certificate is not None and own.path(own.tls.certificate).is_file():
        found = names_in_file(own.path(own.tls.certificate))
        names = (*found.common_names, *found.telling_names)
    if authorities is None:
        says = "nobody says whose signature counts: there is no zone.toml with an authority in the folder"
        raise BackupUntrusted(says, hint="Give the authority of the zone's certificate, such as --ca ca.crt.")
    signature, made = read_document(backup, SIGNATURE), manifest.made_unix_ms
    return check_signature(
        document, signature, zone=manifest.zone, made_unix_ms=made, authorities=authorities, names=names
    )


def _check_contents(backup: Path, manifest: Manifest, options: RestoreOptions, progress: Progress) -> list[str]:
    """Hold every file against the manifest; one of an earlier version lists none, and only its kinds are looked at.

    Gives what differs, where that is accepted.
    """
    found = check_plain(backup, PARTS)
    if not manifest.contents:
        if not options.accept_unsigned:
            raise BackupUntrusted(f"the backup {backup} does not list its files", hint=UNSIGNED_HINT)
        return []
    planted = sorted(found - set(manifest.contents))
    if planted:
        raise BackupUntrusted(f"{one_line(planted[0])[:200]!r} is not part of the backup {backup}", hint=HINT)
    meter = Meter(progress, "comparing", sum(int(str(size)) for size, _ in manifest.contents.values()))
    wrong = list(differences(backup, manifest.contents, meter))
    damage = [one_line(f"{name}: {what}") for name, what in wrong]
    if any(name.startswith(f"{ZONE}/") for name, _ in wrong) or (wrong and not options.accept_damage):
        raise _damaged(damage)
    return damage


def _damaged(found: list[str]) -> LogDamaged:
    hint = "Use another backup; or take what is left of this one with --accept-damage, and the rest is lost."
    return LogDamaged(one_line(f"the backup is damaged: {'; '.join(found[:5])}"), hint=hint, problems=len(found))


def _check_sound(backup: Path, manifest: Manifest, options: RestoreOptions, progress: Progress) -> list[str]:
    """Read every byte of a backup before anything relies on it; what was not sound when it was made is not now.

    Gives what is damaged, where that is accepted.
    """
    heads, problems = verified(backup, lambda _, done, total: progress("verifying", done, total))
    damage = [*manifest.damage, *replace(manifest, problems=problems).damage]
    found = list(dict.fromkeys(one_line(f"{each['where']}: {each['detail']}") for each in damage))
    found += [
        f"{log.stream}/{log.buffer}: it is not the log that was backed up"
        for log in manifest.logs
        if log.chain_head and heads.get((log.stream, log.buffer)) != log.chain_head
    ]
    if found and not options.accept_damage:
        raise _damaged(found)
    return found


# Where it goes.


def _taken_config(backup: Path, folder: Path, manifest: Manifest, options: RestoreOptions) -> ZoneConfig | None:
    """Give the configuration in the backup, for a folder that has none, when its owner wants it."""
    if manifest.config is None:
        return None
    if not options.take_config:
        hint = "Put the zone's own file there, or take the one in the backup with --take-config; read it first."
        raise InvalidArgument(f"there is no {manifest.config} in {folder}", hint=hint)
    config = replace(load(backup / ZONE / manifest.config), source=folder / manifest.config)
    if config.zone.name != manifest.zone:
        raise BackupUntrusted(one_line(f"the backup is of the zone {manifest.zone}, its file of {config.zone.name}"))
    for path in (config.data_folder, config.artifacts_folder):
        if not _inside(path, folder):
            hint = f"Read {backup / ZONE / manifest.config}, and put it into {folder} yourself if that is right."
            raise InvalidArgument(f"the file in the backup has its data in {path}, outside of {folder}", hint=hint)
    return config


def _inside(path: Path, folder: Path) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder))


def _warnings(config: ZoneConfig) -> list[str]:
    """Name what a file that came with a backup makes this machine do."""
    found = []
    if config.alerts.command is not None:
        found.append(f"[alerts] command runs {' '.join(config.alerts.command)!r}")
    if config.alerts.webhook is not None:
        found.append(f"[alerts] webhook sends to {config.alerts.webhook}")
    for name, link in config.links.items():
        found.append(f"[links.{name}] pulls from {link.address}")
    operators = [name for name, row in config.identities.items() if "operator" in row.roles and not row.revoked]
    operators += [f"token {name}" for name, row in config.tokens.items() if row.role == "operator"]
    if operators:
        found.append(f"operators are {', '.join(operators)}")
    return [one_line(each)[:300] for each in found]


def _check_free(folder: Path, path: Path) -> None:
    """Refuse a place that is taken, or that a link leads away from."""
    for each in (path, *(parent for parent in path.parents if _inside(parent, folder) and parent != folder)):
        if each.is_symlink():
            raise FileExists(f"{each} is a link", hint="Name the folder it leads to in zone.toml, or remove the link.")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        hint = f"Move it aside first (mv {path} {path}.lost) and keep it: it may hold what the backup lacks."
        raise FileExists(f"{path} is already there", hint=hint)
    staging = path.with_name(path.name + STAGING)
    if os.path.lexists(staging):
        hint = "Another restore is under way, or one was interrupted; then remove it."
        raise FileExists(f"{staging} is already there", hint=hint)


class _Restore:
    """One restore being made: all of it is undone unless all of it succeeds."""

    def __init__(
        self,
        backup: Path,
        place: ZonePlace,
        options: RestoreOptions,
        now_unix_ms: Callable[[], int],
        progress: Progress,
    ) -> None:
        self._backup, self._place, self._options, self._now = backup, place, options, now_unix_ms
        self._data, self._artifacts = DiskFiles(backup / DATA), ArtifactFiles(backup / ARTIFACTS)
        self._meter = Meter(progress, "restoring", size_of(self._data) + size_of_artifacts(self._artifacts))

    def run(
        self, folder: Path, manifest: Manifest, config: ZoneConfig | None
    ) -> tuple[list[RestoredLog], tuple[str, ...]]:
        """Copy everything beside its place, make it a new history, and give it its name; give logs and zone's files."""
        place = self._place
        inside = place.artifacts.is_relative_to(place.data)
        data = place.data.with_name(place.data.name + STAGING)
        artifacts = place.artifacts.with_name(place.artifacts.name + STAGING)
        if inside:
            artifacts = data / place.artifacts.relative_to(place.data)
        with ExitStack() as undo:
            _make_folder(data.parent, undo)
            undo.callback(clear_away, data)
            data.mkdir(mode=0o700)
            files = DiskFiles(data)
            copy_folder(self._data, files, copied=self._meter)
            if not inside:
                _make_folder(artifacts.parent, undo)
                undo.callback(clear_away, artifacts)
            copy_artifacts(self._artifacts, ArtifactFiles(artifacts), copied=self._meter)
            logs = [] if self._options.moved else begin_new_histories(files, self._now())
            if config is not None and not self._options.moved:
                distrust(data, config)
            files.sync_folder("")
            written = self._zone_files(folder, manifest, undo) if self._options.take_config else ()
            if not inside and artifacts.exists():
                _name_it(artifacts, place.artifacts, undo)
            _name_it(data, place.data, undo)
            undo.pop_all()
        return logs, written

    def _zone_files(self, folder: Path, manifest: Manifest, undo: ExitStack) -> tuple[str, ...]:
        """Put back what is missing of the zone's own files; what is there stays as it is."""
        written = []
        own_key = self._place.key
        for name in manifest.files:
            target = folder / name
            _check_parents(folder, target)
            if os.path.lexists(target):
                continue
            with open_plain(self._backup / ZONE / name) as file:
                content = file.read()
            private = _PRIVATE in content
            if target.name.casefold() == AUTHORITY_KEY or (private and target != own_key):
                continue
            _make_folder(target.parent, undo)
            mode = 0o600 if private else 0o644
            number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            undo.callback(target.unlink, missing_ok=True)
            with os.fdopen(number, "wb") as made:
                made.write(content)
                made.flush()
                os.fsync(made.fileno())
            written.append(name)
        return tuple(written)


def _check_parents(folder: Path, target: Path) -> None:
    for parent in target.parents:
        if parent == folder:
            return
        if parent.is_symlink():
            raise FileExists(f"{parent} is a link", hint="Remove it, or put the zone's files there yourself.")


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


def _make_folder(folder: Path, undo: ExitStack) -> None:
    """Make a folder with those above it; what was not there before goes again with all else that is undone."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for each in reversed(made):
        undo.callback(_remove_empty, each)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _name_it(staging: Path, path: Path, undo: ExitStack) -> None:
    staging.rename(path)
    undo.callback(clear_away, path)
    DiskFiles(path.parent).sync_folder("")
