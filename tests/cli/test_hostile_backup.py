"""Backups of strangers: nothing that they hold is put into place, followed or run, whatever they say of themselves."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cli.test_backup import entries_of, files_of, fill
from tests.e2e.zones import Zone, pair

from bsfg.config import load
from bsfg.errors import BackupUntrusted, BsfgError, FileExists, InvalidArgument, LogDamaged, NotAFolder
from bsfg.node import restore as restoring
from bsfg.node.backup import BackupOptions, Manifest, ZonePlace, back_up, parsed
from bsfg.node.manifest import check_name
from bsfg.node.restore import Restored, RestoreOptions
from bsfg.node.signed import signature_of
from bsfg.node.state import NodeState
from bsfg.wire.certs import create_authority, issue, load_certificates

NOW = 1_800_000_000_000
STRANGER = RestoreOptions(accept_unsigned=True, take_config=True)


def quiet(doing: str, done: int, total: int) -> None:
    """Show no progress."""


def made(zone: Zone, target: Path, **options: Any) -> Manifest:
    """Back up a zone."""
    now = int(datetime.now(UTC).timestamp() * 1000)
    return back_up(ZonePlace.of(load(zone.folder / "zone.toml")), target, BackupOptions(**options), lambda: now, quiet)


def restore(backup: Path, folder: Path, options: RestoreOptions) -> Restored:
    """Restore a backup."""
    return restoring.restore(backup, folder, options, lambda: NOW, quiet)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a zone, its backup, and the authority of both."""
    folder = tmp_path_factory.mktemp("site")
    plant = pair(folder)[0]
    shutil.copytree(plant.certs, plant.folder / "certs")
    shutil.copy(plant.certs / "ca.crt", folder / "known.crt")
    shutil.copytree(plant.certs, folder / "authority")
    plant.certs = Path("certs")
    plant.write()
    asyncio.run(fill(plant))
    made(plant, folder / "backup", with_keys=True)
    shutil.copytree(plant.folder, folder / "zone")
    yield folder


@pytest.fixture
def backup(site: Path, tmp_path: Path) -> Path:
    """A copy of the backup, to be spoilt."""
    return Path(shutil.copytree(site / "backup", tmp_path / "backup", symlinks=True))


def rewritten(backup: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a backup says of itself."""
    found = orjson.loads((backup / "backup.json").read_bytes())
    change(found)
    (backup / "backup.json").write_bytes(orjson.dumps(found))


def signed_again(backup: Path, certificate: Path) -> None:
    """Sign a backup with the key of another certificate."""
    manifest = (backup / "backup.json").read_bytes()
    (backup / "backup.sig").write_bytes(signature_of(manifest, certificate, certificate.with_suffix(".key")))


def trusting(site: Path, **more: Any) -> RestoreOptions:
    """Restore what the authority of the site vouches for."""
    return RestoreOptions(authorities=site / "known.crt", take_config=True, **more)


def test_a_good_one_is_restored(site: Path, backup: Path, tmp_path: Path) -> None:
    """The zone's own backup passes, says who signed it, and brings the zone's own key pair and no other."""
    restored = restore(backup, tmp_path / "new", trusting(site))
    assert restored.signed_by == "plant-a-bsfg"
    assert len(entries_of(tmp_path / "new" / "data")) == 30
    keys = [name for name, content in files_of(tmp_path / "new").items() if b"PRIVATE KEY" in content]
    assert keys == ["certs/plant-a-bsfg.key"]
    assert any("[links." in warning for warning in restored.warnings)


def test_the_folder_says_whose_signature_counts(site: Path, backup: Path, tmp_path: Path) -> None:
    """With a zone.toml in the folder its authority counts, and its file and certificates stay as they are."""
    folder = Path(shutil.copytree(site / "zone", tmp_path / "zone"))
    shutil.rmtree(folder / "data")
    before = files_of(folder)
    restored = restore(backup, folder, RestoreOptions())
    assert (restored.signed_by, restored.files, restored.warnings) == ("plant-a-bsfg", (), ())
    assert {name: data for name, data in files_of(folder).items() if not name.startswith("data/")} == before


# Everything that a stranger with the medium in his hands could do.


def _altered(backup: Path, where: str) -> None:
    file = next(path for path in sorted((backup / where).rglob("*")) if path.is_file() and path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def _swap(backup: Path, where: str, make: Callable[[Path], None]) -> None:
    file = next(path for path in sorted((backup / where).rglob("*")) if path.is_file())
    file.unlink()
    make(file)


def _outside(backup: Path) -> Path:
    file = backup.parent / "outside"
    file.write_bytes(b"of somebody else")
    return file


def _longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def _linked_folder(backup: Path) -> None:
    (backup / "data").rename(backup.parent / "moved")
    (backup / "data").symlink_to(backup.parent / "moved")


HARMS: dict[str, Callable[[Path], object]] = {
    "altered data": lambda backup: _altered(backup, "data"),
    "altered artifact": lambda backup: _altered(backup, "artifacts"),
    "altered zone.toml": lambda backup: _altered(backup, "zone"),
    "missing file": lambda backup: _swap(backup, "data", lambda file: None),
    "longer file": lambda backup: _longer(next((backup / "data").rglob("*.seg"))),
    "link to a file": lambda backup: _swap(backup, "data", lambda file: file.symlink_to("/etc/passwd")),
    "link in zone": lambda backup: _swap(backup, "zone", lambda file: file.symlink_to("/etc/passwd")),
    "hard link of another": lambda backup: _swap(backup, "data", lambda file: os.link(_outside(backup), file)),
    "pipe": lambda backup: _swap(backup, "data", os.mkfifo),
    "linked folder": _linked_folder,
    "linked manifest": lambda backup: _swap(backup, ".", lambda file: file.symlink_to("/etc/passwd")),
    "planted log": lambda backup: shutil.copytree(
        backup / "data" / "streams" / "operational", backup / "data" / "streams" / "planted"
    ),
    "planted artifact": lambda backup: (backup / "artifacts" / "content" / "planted").write_bytes(b"x"),
    "planted file of the zone": lambda backup: (backup / "zone" / "planted.crt").write_bytes(b"x"),
    "planted link": lambda backup: (backup / "data" / "planted").symlink_to("/etc"),
    "other manifest": lambda backup: rewritten(backup, lambda found: found.update(size_bytes=1)),
    "other zone": lambda backup: rewritten(backup, lambda found: found.update(zone="enterprise")),
    "no contents": lambda backup: rewritten(backup, lambda found: found.pop("contents")),
    "no signature": lambda backup: (backup / "backup.sig").unlink(),
    "empty signature": lambda backup: (backup / "backup.sig").write_bytes(b""),
    "no certificate": lambda backup: (backup / "backup.sig").write_bytes(b'{"certificate": "", "signature": ""}'),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_was_changed_is_refused(site: Path, backup: Path, tmp_path: Path, harm: str) -> None:
    """Whatever is changed, planted, taken away or turned into a link: the restore says so and leaves nothing behind."""
    HARMS[harm](backup)
    with pytest.raises((BackupUntrusted, LogDamaged)) as caught:
        restore(backup, tmp_path / "new", trusting(site))
    assert caught.value.hint
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("harm", ["planted log", "link to a file", "pipe", "linked folder", "altered zone.toml"])
def test_what_is_planted_is_refused_also_by_those_who_accept_much(backup: Path, tmp_path: Path, harm: str) -> None:
    """Neither --accept-unsigned nor --accept-damage takes links, strange files, or files that nobody listed."""
    HARMS[harm](backup)
    options = RestoreOptions(accept_unsigned=True, accept_damage=True, take_config=True)
    with pytest.raises((BackupUntrusted, LogDamaged)):
        restore(backup, tmp_path / "new", options)
    assert not (tmp_path / "new").exists()


def test_another_log_is_known_by_its_chain(backup: Path, tmp_path: Path) -> None:
    """A backup that lists no files still says which log it was made of: a sound one in its place is refused."""
    shutil.rmtree(backup / "data")
    other = Zone("other", tmp_path, tmp_path)
    asyncio.run(fill(other))
    shutil.copytree(other.data, backup / "data", ignore=shutil.ignore_patterns("artifacts"))
    rewritten(backup, lambda found: found.pop("contents"))
    with pytest.raises(LogDamaged, match="not the log that was backed up"):
        restore(backup, tmp_path / "new", STRANGER)
    assert not (tmp_path / "new").exists()


def test_links_that_a_backup_knows_nothing_of_begin_at_the_beginning(site: Path, backup: Path, tmp_path: Path) -> None:
    """Their senders may go on behind what is lost here: that has to look like something left out, not like a start."""
    restore(backup, tmp_path / "new", trusting(site))
    config = load(tmp_path / "new" / "zone.toml")
    state = NodeState(tmp_path / "new" / "data")
    known = [
        asyncio.run(state.peer(link.name, stream).recall()).latest_start
        for link in config.links.values()
        for stream in config.streams_of(link)
    ]
    state.close()
    assert known and set(known) == {0}


def test_others_cannot_sign_for_a_zone(site: Path, backup: Path, tmp_path: Path) -> None:
    """Not another zone of the same authority, not an application, and nobody whom another authority calls so."""
    now = datetime.now(UTC)
    foreign = tmp_path / "foreign"
    create_authority(foreign, name="BSFG development authority", days=10, now=now)
    issue(foreign, "plant-a-bsfg", days=5, now=now)
    issue(site / "authority", "plant-a-mallory", days=5, now=now, force=True)
    old = tmp_path / "old"
    shutil.copytree(site / "authority", old)
    issue(old, "plant-a-bsfg", days=1, now=now - timedelta(days=30), force=True)
    signers = (
        site / "authority" / "enterprise-bsfg.crt",
        site / "authority" / "plant-a-mallory.crt",
        foreign / "plant-a-bsfg.crt",
        old / "plant-a-bsfg.crt",
    )
    for signer in signers:
        signed_again(backup, signer)
        with pytest.raises(BackupUntrusted):
            restore(backup, tmp_path / "new", trusting(site))
    # The authority that comes along is nobody's word.
    shutil.copy(foreign / "ca.crt", backup / "zone" / "certs" / "ca.crt")
    with pytest.raises(BackupUntrusted):
        restore(backup, tmp_path / "new", trusting(site))
    assert not (tmp_path / "new").exists()


def test_a_name_that_every_machine_has_signs_for_nobody(site: Path, backup: Path, tmp_path: Path) -> None:
    """The certificates of two nodes both say localhost; that does not make one the other's."""
    folder = Path(shutil.copytree(site / "zone", tmp_path / "zone"))
    shutil.rmtree(folder / "data")
    authority = Path(shutil.copytree(site / "authority", tmp_path / "authority"))
    for name in ("plant-a-bsfg", "enterprise-bsfg"):
        issue(authority, name, days=5, now=datetime.now(UTC), hosts=["localhost"], force=True)
    for end in ("crt", "key"):
        shutil.copy(authority / f"plant-a-bsfg.{end}", folder / "certs")
    signed_again(backup, authority / "enterprise-bsfg.crt")
    with pytest.raises(BackupUntrusted):
        restore(backup, folder, RestoreOptions())
    signed_again(backup, authority / "plant-a-bsfg.crt")
    assert restore(backup, folder, RestoreOptions()).signed_by == "plant-a-bsfg"


def test_a_certificate_that_ended_since_is_good(site: Path, backup: Path, tmp_path: Path) -> None:
    """A backup outlives the certificate of its zone: it counts whether it was valid when the backup was made."""
    then = datetime.now(UTC) - timedelta(days=2)
    old = Path(shutil.copytree(site / "authority", tmp_path / "old"))
    create_authority(old, name="old authority", days=100, now=then - timedelta(days=10), force=True)
    issue(old, "plant-a-bsfg", days=1, now=then, force=True)
    begun = int((then + timedelta(hours=2)).timestamp() * 1000)
    rewritten(backup, lambda found: found.update(made_unix_ms=begun))
    signed_again(backup, old / "plant-a-bsfg.crt")
    assert load_certificates(old / "plant-a-bsfg.crt")[0].not_valid_after_utc < datetime.now(UTC)
    options = RestoreOptions(authorities=old / "ca.crt", take_config=True)
    assert restore(backup, tmp_path / "new", options).signed_by == "plant-a-bsfg"


def test_nobody_says_whose_signature_counts(backup: Path, tmp_path: Path) -> None:
    """Into an empty folder, without --ca, nothing is restored: the authority in the backup is not asked."""
    with pytest.raises(BackupUntrusted, match="whose signature counts"):
        restore(backup, tmp_path / "new", RestoreOptions(take_config=True))


def test_a_file_of_strangers_is_not_taken_by_itself(site: Path, backup: Path, tmp_path: Path) -> None:
    """The zone.toml of a backup comes with --take-config only, inside its folder, and what it would run is named."""
    with pytest.raises(InvalidArgument, match=r"zone\.toml") as caught:
        restore(backup, tmp_path / "new", RestoreOptions(authorities=site / "known.crt"))
    assert "--take-config" in caught.value.hint
    text = (backup / "zone" / "zone.toml").read_text() + '\n[alerts]\ncommand = ["/bin/sh", "-c", "id"]\n'
    outside = text.replace('name = "plant-a"', f'name = "plant-a"\ndata_folder = "{tmp_path}/elsewhere"')
    for content in (outside, text):
        (backup / "zone" / "zone.toml").write_text(content)
        rewritten(backup, lambda found: found.update(contents={}))
        if content is outside:
            with pytest.raises(InvalidArgument, match="outside"):
                restore(backup, tmp_path / "new", STRANGER)
            assert not (tmp_path / "elsewhere").exists()
    restored = restore(backup, tmp_path / "new", STRANGER)
    assert [each for each in restored.warnings if "[alerts] command runs '/bin/sh -c id'" in each]


def test_no_other_key_comes_along(site: Path, backup: Path, tmp_path: Path) -> None:
    """A backup of an earlier version may hold the authority's key and everybody's: none of them is put into place."""
    for name in ("ca.key", "enterprise-bsfg.key"):
        shutil.copy(site / "authority" / name, backup / "zone" / "certs" / name)
    shutil.copy(site / "authority" / "ca.key", backup / "zone" / "certs" / "innocent.pem")
    more = ["certs/ca.key", "certs/enterprise-bsfg.key", "certs/innocent.pem"]
    rewritten(backup, lambda found: found.update(contents={}, files=[*found["files"], *more]))
    restore(backup, tmp_path / "new", STRANGER)
    keys = [name for name, content in files_of(tmp_path / "new").items() if b"PRIVATE KEY" in content]
    assert keys == ["certs/plant-a-bsfg.key"]


@pytest.mark.parametrize("name", ["data", "certs", "data.restoring"])
def test_links_in_the_target_are_not_followed(site: Path, backup: Path, tmp_path: Path, name: str) -> None:
    """A link where something is to be put is in the way, whether it leads somewhere or not."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(FileExists):
        restore(backup, tmp_path / "new", trusting(site))
    assert os.listdir(tmp_path / "precious") == [] and os.listdir(tmp_path / "new") == [name]


def test_what_fails_at_the_end_leaves_nothing(
    site: Path, backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last step fails, what the steps before it have put into place is taken away again."""
    real = restoring._name_it

    def failing(staging: Path, path: Path, undo: Any) -> None:
        real(staging, path, undo)
        raise OSError(5, "no more")

    monkeypatch.setattr(restoring, "_name_it", failing)
    with pytest.raises(BsfgError):
        restore(backup, tmp_path / "new" / "zone", trusting(site))
    assert not (tmp_path / "new").exists()


# Names.

ODD = ["..", ".", "", "~", "\\", "\x00", "\n", "x" * 300]
pieces = st.sampled_from([*ODD, "a", "zone.toml", "ZONE.TOML", "data", "etc", "certs"])
names = st.lists(pieces, min_size=1, max_size=5).map("/".join) | st.text(max_size=20)
hostile = st.one_of(names, names.map(lambda name: f"zone/{name}"), names.map(lambda name: f"data/../../{name}"))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(hostile, min_size=1, max_size=4), config=st.none() | hostile, listed=st.booleans())
def test_no_name_leads_out_of_the_target(site: Path, wanted: list[str], config: str | None, listed: bool) -> None:
    """Whatever names a manifest has, a restore that accepts everything writes below its folder, or nothing."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        backup = Path(shutil.copytree(site / "backup", top / "backup"))
        (top / "escaped").write_text("precious")

        def change(found: dict[str, Any]) -> None:
            found.update(files=[*found["files"], *wanted], config=config or found["config"])
            found["contents"] = {**found["contents"], **{name: [1, "x"] for name in wanted}} if listed else {}

        rewritten(backup, change)
        before = files_of(top)
        try:
            restore(backup, top / "new", RestoreOptions(accept_unsigned=True, accept_damage=True, take_config=True))
        except BsfgError:
            assert files_of(top) == before
        after = {name: data for name, data in files_of(top).items() if not name.startswith("new/")}
        assert after == before


@given(name=hostile)
def test_names_that_pass_stay_below(name: str) -> None:
    """A name that is let through means a place below its part, by every reading."""
    try:
        check_name(name, ("zone",))
    except BackupUntrusted:
        return
    assert os.path.normpath(name) == name and name.startswith("zone/") and "\\" not in name and name.isprintable()


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(Manifest.__dataclass_fields__)), value=json_values)
def test_a_manifest_of_anything_is_read_or_refused(site: Path, key: str, value: Any) -> None:
    """Values of any other kind are a damaged manifest, and never a defect."""
    found = orjson.loads((site / "backup" / "backup.json").read_bytes())
    found[key] = value
    try:
        document = orjson.dumps(found)
    except (TypeError, orjson.JSONEncodeError):
        return
    try:
        assert all(problem["code"] and problem["where"] for problem in parsed(site / "backup", document).damage)
    except BsfgError as error:
        assert error.hint


@pytest.mark.parametrize(
    "value", [1, "x", [1], [{}], [{"code": "log_damaged"}], [{"code": 1, "where": "", "detail": ""}]]
)
def test_problems_that_are_none_are_a_damaged_manifest(backup: Path, tmp_path: Path, value: Any) -> None:
    """What a backup says was wrong with it is read as carefully as the rest, and is a sentence when it is nonsense."""
    rewritten(backup, lambda found: found.update(problems=value))
    with pytest.raises(NotAFolder, match="is damaged"):
        restore(backup, tmp_path / "new", STRANGER)
    assert not (tmp_path / "new").exists()


def test_files_of_a_zone_without_its_configuration_are_not_restored(backup: Path, tmp_path: Path) -> None:
    """They would go into the data folder, whose name is taken then."""
    rewritten(backup, lambda found: found.update(config=None))
    with pytest.raises(BackupUntrusted, match=r"zone\.toml"):
        restore(backup, tmp_path / "new", STRANGER)
    assert not (tmp_path / "new").exists()
