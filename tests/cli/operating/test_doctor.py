"""`bsfg doctor` on machines, folders, certificates and peers as they should be, and as they should not."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cli.operating.conftest import Cli, Outcome
from tests.e2e.zones import Zone, link_to, pair, peer

from bsfg.cli.doctor.machine import Subject, clock, disk, file_system, kernel_synchronised, limits, measure_syncs
from bsfg.cli.doctor.zone import command_of, folder, listener_of
from bsfg.config import load
from bsfg.ports import Buffer
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import batch, messages, sealed
from bsfg.testing.ports import free_port
from bsfg.wire.certs import issue
from bsfg.wording import CheckFinding, CheckLevel

SMALL = """
[artifacts]
capacity = "2MiB"
max_artifact = "1MiB"
[limits]
connections = 10
"""
STREAMS = """
[streams.operational]
store_capacity = "2MiB"
forward_capacity = "2MiB"
max_batch = "1MiB"
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Zone, Zone]]:
    """Two zones that run, small enough for any disk."""
    zones = pair(tmp_path_factory.mktemp("doctor"), streams=STREAMS)
    try:
        for zone in zones:
            zone.more = SMALL
            zone.write()
            zone.start()
        yield zones
    finally:
        for zone in zones:
            zone.kill()


@pytest.fixture
def plant(tmp_path: Path) -> Zone:
    """A zone that does not run, and whose peer does not either."""
    zone, _ = pair(tmp_path, streams=STREAMS)
    zone.more = SMALL
    zone.write()
    return zone


def examined(cli: Cli, zone: Zone) -> Outcome:
    """Run the command for a zone."""
    return cli("doctor", "--json", "-c", zone.folder / "zone.toml")


def says(done: Outcome, check: str, level: str | None = None) -> str:
    """Give what was found by one check, with what to do."""
    rows: list[dict[str, Any]] = done.json["findings"]
    return "\n".join(
        f"{row['level']} {row['says']} {row.get('do', '')}"
        for row in rows
        if row["check"] == check and level in (None, row["level"])
    )


def problems(done: Outcome) -> set[str]:
    """Give the checks that found a problem."""
    return {row["check"] for row in done.json["findings"] if row["level"] == "problem"}


def test_a_running_node_is_well(cli: Cli, running: tuple[Zone, Zone]) -> None:
    """Beside the node its ports and folder are its own, and its peer is who it should be and knows it."""
    plant, enterprise = running
    done = examined(cli, plant)
    assert (done.code, problems(done)) == (0, set()), done.out
    assert done.json["ok"] is True
    assert f"used by the zone's own node (process {plant.pid})" in says(done, "ports")
    assert f"written by process {plant.pid}" in says(done, "data")
    assert f"enterprise-bsfg at 127.0.0.1:{enterprise.port} answers" in says(done, "peers", "ok")
    assert "the running node may open" in says(done, "limits", "ok")
    assert "every byte verified" in says(done, "data", "ok")
    checks = [row["check"] for row in done.json["findings"]]
    assert list(dict.fromkeys(checks)) == [
        *("software", "configuration", "certificates", "clock", "disk", "ports", "peers", "data", "limits"),
    ]
    assert all(row.get("do") for row in done.json["findings"] if row["level"] != "ok")


def test_doctor_changes_nothing(cli: Cli, running: tuple[Zone, Zone]) -> None:
    """Asking a peer moves no cursor there, and the folder is as it was."""
    plant, enterprise = running

    async def consumers() -> list[Any]:
        async with enterprise.admin() as admin:
            return [(view.state.spec.name, view.state.checkpoint) for view in await admin.consumers()]

    names = sorted(path.name for path in plant.data.rglob("*"))
    before = asyncio.run(consumers())
    assert examined(cli, plant).code == 0
    assert asyncio.run(consumers()) == before
    assert sorted(path.name for path in plant.data.rglob("*")) == names


def test_a_zone_before_its_first_start(cli: Cli, plant: Zone) -> None:
    """Nothing is there yet, nobody answers, and neither is a problem."""
    done = examined(cli, plant)
    assert done.code == 0, done.out
    assert "the node makes it when it first starts" in says(done, "data", "ok")
    assert "is free" in says(done, "ports", "ok")
    assert "nobody listens there" in says(done, "peers", "warning")
    assert "nothing is lost" in says(done, "peers", "warning")


def test_lines_fit_into_sixty_columns(cli: Cli, plant: Zone) -> None:
    """On a narrow terminal every line is within it, has its level in a word, and the end counts them."""
    done = cli("doctor", "-c", plant.folder / "zone.toml", columns=60)
    assert done.code == 0
    assert max(len(line.rstrip()) for line in done.out.splitlines()) <= 60
    assert "ok      configuration" in done.out
    assert "do: " in done.out
    assert done.out.splitlines()[-1].startswith("no problem, ")


# Configuration and certificates.


def test_every_wrong_line_of_the_configuration_is_a_problem(cli: Cli, plant: Zone) -> None:
    """Each has its line and key, and what needs a configuration is not tried."""
    path = plant.folder / "zone.toml"
    text = path.read_text().replace("127.0.0.1:", "nowhere", 1).replace('max_batch = "1MiB"', "max_batch = 7s")
    path.write_text(text.replace("7s", '"7s"'))
    done = examined(cli, plant)
    assert done.code == 1
    assert problems(done) == {"configuration"}
    assert "listen.grpc" in says(done, "configuration") and "streams.operational.max_batch" in says(
        done, "configuration"
    )
    path.unlink()
    done = examined(cli, plant)
    assert (done.code, "there is no file" in says(done, "configuration", "problem")) == (1, True)


def test_a_zone_without_an_operator_is_warned(cli: Cli, plant: Zone) -> None:
    """A correct file in which nobody could hold a gate says how to add somebody."""
    path = plant.folder / "zone.toml"
    path.write_text(path.read_text().replace('["operator"]', '["viewer"]'))
    assert "[identities.plant-a-operator]" in says(examined(cli, plant), "configuration", "warning")


def test_certificates_that_do_not_fit_are_problems(cli: Cli, plant: Zone) -> None:
    """A key of another certificate, an expired one and one of another zone are each named."""
    files, path = plant.files(), plant.folder / "zone.toml"
    own = path.read_text()
    path.write_text(own.replace("plant-a-bsfg.key", "plant-a-viewer.key"))
    assert "is not the key of" in says(examined(cli, plant), "certificates", "problem")
    path.write_text(
        own.replace("plant-a-bsfg.crt", "enterprise-bsfg.crt").replace("plant-a-bsfg.key", "enterprise-bsfg.key")
    )
    done = examined(cli, plant)
    assert "is the zone 'enterprise', but this is 'plant-a'" in says(done, "certificates", "problem")
    path.write_text(own)
    issue(files.ca.parent, "plant-a-bsfg", days=1, now=datetime.now(UTC) - timedelta(days=3), force=True)
    issue(files.ca.parent, "plant-a-viewer", days=1, now=datetime.now(UTC) - timedelta(days=3), force=True)
    done = examined(cli, plant)
    assert (done.code, "certificates" in problems(done)) == (1, True)
    assert "the certificate expired on" in says(done, "certificates", "problem")
    assert "the certificate of plant-a-viewer has expired" in says(done, "certificates", "warning")
    files.ca.unlink()
    done = examined(cli, plant)
    assert "there is no file" in says(done, "certificates", "problem")
    assert "no peer can be asked without a certificate" in says(done, "peers", "warning")


# Peers.


def test_a_peer_that_is_somebody_else_is_a_problem(cli: Cli, running: tuple[Zone, Zone], plant: Zone) -> None:
    """An address at which another node of the same authority answers is found out before the link is."""
    other = running[0]
    stray = Zone("plant-a", plant.root / "stray", other.certs, streams=STREAMS, identities=peer("enterprise"))
    stray.links = link_to(running[1], port=other.port)
    stray.write()
    done = examined(cli, stray)
    assert done.code == 1
    assert "is plant-a-bsfg, not enterprise-bsfg" in says(done, "peers", "problem")


def test_a_peer_that_does_not_know_this_zone_is_a_problem(cli: Cli, running: tuple[Zone, Zone], tmp_path: Path) -> None:
    """The refusal is told in the peer's own words, with whose file must be changed."""
    plant, enterprise = running
    issue(plant.certs, "lab-bsfg", days=60, now=datetime.now(UTC), force=True)
    lab = Zone("lab", tmp_path, plant.certs, streams=STREAMS, identities=peer("enterprise"), more=SMALL)
    lab.links = link_to(enterprise)
    lab.write()
    done = examined(cli, lab)
    assert done.code == 1
    assert "'lab-bsfg' is not in [identities]" in says(done, "peers", "problem")
    assert "The operators of enterprise must change it" in says(done, "peers", "problem")


def test_a_peer_of_another_authority_is_a_problem(cli: Cli, running: tuple[Zone, Zone], plant: Zone) -> None:
    """A certificate that cannot be trusted is not the same as nobody at home."""
    plant.links = link_to(running[1])
    plant.write()
    done = examined(cli, plant)
    assert done.code == 1
    assert "is refused" in says(done, "peers", "problem")


# Ports.


def test_a_port_that_another_program_uses_is_a_problem(cli: Cli, plant: Zone) -> None:
    """The program is named with its process and command."""
    with socket.create_server(("127.0.0.1", plant.port)):
        done = examined(cli, plant)
    assert done.code == 1
    assert f"used by process {os.getpid()} (" in says(done, "ports", "problem")


def test_a_node_that_runs_elsewhere_than_its_file_says_is_noticed(cli: Cli, running: tuple[Zone, Zone]) -> None:
    """A file that was changed after the start is a warning."""
    plant = running[0]
    path = plant.folder / "zone.toml"
    own = path.read_text()
    try:
        path.write_text(own.replace(f":{plant.http_port}", f":{free_port()}"))
        assert "but HTTP is not on" in says(examined(cli, plant), "ports", "warning")
    finally:
        path.write_text(own)


@pytest.mark.parametrize(("address", "words"), [("192.0.2.1:9443", "address"), ("no-such-host.invalid:9443", "nobody")])
def test_an_address_of_another_machine_is_a_problem(cli: Cli, plant: Zone, address: str, words: str) -> None:
    """A node cannot listen where this machine is not."""
    path = plant.folder / "zone.toml"
    path.write_text(path.read_text().replace(f"127.0.0.1:{plant.port}", address, 1))
    done = examined(cli, plant)
    assert done.code == 1
    assert words in says(done, "ports", "problem")


def test_who_listens_is_found() -> None:
    """A listening port is traced to its process, and a closed one to nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener_of(port) == os.getpid()
        assert "python" in command_of(os.getpid())
    assert listener_of(port) is None


# Data folder.


async def fill(folder: Path) -> None:
    """Write a data folder with a stream that is configured and one that is not."""
    storage = await LogStorage.open(folder)
    for stream in ("operational", "old"):
        await (await storage.store(stream)).append(batch(50))
    await storage.close()


def test_a_damaged_folder_is_a_problem(cli: Cli, plant: Zone) -> None:
    """A flipped bit is found with its place and what to do; a stream without configuration is only a warning."""
    asyncio.run(fill(plant.data))
    done = examined(cli, plant)
    assert done.code == 0, done.out
    assert "'old' is on disk but not configured" in says(done, "data", "warning")
    [segment] = (plant.data / "streams" / "operational" / Buffer.STORE).glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    done = examined(cli, plant)
    assert (done.code, problems(done)) == (1, {"data"})
    assert "log_damaged in streams/operational/store" in says(done, "data", "problem")


def test_a_folder_of_something_else_is_a_problem(cli: Cli, plant: Zone) -> None:
    """A data folder that holds other things is not taken for an empty one."""
    plant.data.mkdir()
    assert "is empty" in says(examined(cli, plant), "data", "ok")
    (plant.data / "notes.txt").write_text("hello")
    done = examined(cli, plant)
    assert (done.code, problems(done)) == (1, {"data"})


# Disk, clock and limits, with machines that are not at hand.


def subject(zone: Zone, now: datetime | None = None) -> Subject:
    """Give what the checks look at."""
    return Subject(load(zone.folder / "zone.toml"), now or datetime.now(UTC))


def test_a_folder_is_gathered_once_and_verified_with_progress(cli: Cli, plant: Zone) -> None:
    """Clock and data are judged by one look at the folder; who watches is told how far its verification is."""
    asyncio.run(_stored(plant.data))
    told: list[tuple[int, int]] = []
    looked = Subject(load(plant.folder / "zone.toml"), datetime.now(UTC), progress=lambda *bytes_: told.append(bytes_))
    assert worst(clock(looked))[0] != CheckLevel.PROBLEM
    known = looked.data
    assert "every byte verified" in worst(folder(looked))[1]
    assert looked.data is known
    assert told[-1][0] == told[-1][1] > 0


async def _stored(data: Path) -> None:
    storage = await LogStorage.open(data)
    await (await storage.store("operational")).append(sealed(messages(3)))
    await storage.close()


def worst(found: Iterator[CheckFinding]) -> tuple[CheckLevel, str]:
    """Give the worst level of some findings, and all their words."""
    rows = list(found)
    order = [CheckLevel.PROBLEM, CheckLevel.WARNING, CheckLevel.OK]
    return min((row.level for row in rows), key=order.index), " ".join(f"{row.says} {row.do}" for row in rows)


MOUNTS = """\
22 1 0:21 / / rw,relatime - ext4 /dev/vda rw
23 22 0:22 / /var/lib/bsfg rw,relatime shared:1 - nfs4 server:/export rw
24 22 0:23 / /mnt/with\\040space rw - tmpfs tmpfs rw
25 22 0:24 / /mnt/twice rw - ext4 /dev/vdb rw
26 25 0:25 / /mnt/twice rw - cifs //server/share rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/data", "ext4"),
        ("/var/lib/bsfg", "nfs4"),
        ("/var/lib/bsfg/deep/data", "nfs4"),
        ("/var/lib/bsfg-other", "ext4"),
        ("/mnt/with space/data", "tmpfs"),
        ("/mnt/twice/data", "cifs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path, path: str, kind: str) -> None:
    """Mounts are matched by whole names, spaces included, and the last one on a point counts."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system(Path(path), mounts) == kind
    assert file_system(Path(path), tmp_path / "missing") == ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tmpfs", "lives in memory"),
        ("nfs4", "not a local file system"),
        ("fuse.sshfs", "not a local file system"),
        ("overlay", "container"),
    ],
)
def test_file_systems_that_do_not_keep_data_are_warned_about(
    plant: Zone, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    """Memory, networks and container layers are named, with what to use instead."""
    monkeypatch.setattr("bsfg.cli.doctor.machine.file_system", lambda path: kind)
    level, text = worst(disk(subject(plant)))
    assert level == CheckLevel.WARNING
    assert words in text


@pytest.mark.parametrize(
    ("free_percent", "level", "words"),
    [
        (50.0, CheckLevel.OK, "may grow by"),
        (4.0, CheckLevel.WARNING, "before the disk is full"),
        (0.0001, CheckLevel.PROBLEM, "disk_full"),
    ],
)
def test_free_space_is_compared_with_capacities(
    plant: Zone, monkeypatch: pytest.MonkeyPatch, free_percent: float, level: CheckLevel, words: str
) -> None:
    """A disk that is nearly full is a warning, one that is full a problem."""
    blocks = 1 << 20
    free = int(blocks * free_percent / 100)
    stats = os.statvfs_result((4096, 4096, blocks, free, free, 0, 0, 0, 0, 255))
    monkeypatch.setattr("bsfg.cli.doctor.machine.file_system", lambda path: "ext4")
    monkeypatch.setattr("bsfg.cli.doctor.machine.os.statvfs", lambda path: stats)
    monkeypatch.setattr("bsfg.cli.doctor.machine.measure_syncs", lambda path: measured(1.0, 2.0))
    found, text = worst(disk(subject(plant)))
    assert found == level
    assert words in text


def test_capacities_beyond_the_disk_are_a_warning(plant: Zone, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the buffers may grow to is compared with what is free, before the disk is full."""
    plant.streams = STREAMS.replace('store_capacity = "2MiB"', 'store_capacity = "4PiB"')
    plant.write()
    monkeypatch.setattr("bsfg.cli.doctor.machine.measure_syncs", lambda path: measured(1.0, 2.0))
    _, text = worst(disk(subject(plant)))
    assert "data and artifacts may grow by" in text and "Lower store_capacity" in text


def measured(p50_ms: float, p99_ms: float) -> Any:
    """Give a measurement."""
    from bsfg.cli.doctor.machine import Syncs

    return Syncs(p50_ms, p99_ms)


@pytest.mark.parametrize(
    ("p50_ms", "p99_ms", "level", "words"),
    [
        (1.0, 5.0, CheckLevel.OK, "at most 1,000 times a second"),
        (25.0, 30.0, CheckLevel.WARNING, "faster disk"),
        (1.0, 600.0, CheckLevel.WARNING, "faster disk"),
        (0.001, 0.002, CheckLevel.WARNING, "write cache"),
    ],
)
def test_what_a_sync_takes_is_explained(
    plant: Zone, monkeypatch: pytest.MonkeyPatch, p50_ms: float, p99_ms: float, level: CheckLevel, words: str
) -> None:
    """Slow disks and disks that are too fast to be true are named, with what the median means for a producer."""
    monkeypatch.setattr("bsfg.cli.doctor.machine.file_system", lambda path: "ext4")
    monkeypatch.setattr("bsfg.cli.doctor.machine.measure_syncs", lambda path: measured(p50_ms, p99_ms))
    found, text = worst(disk(subject(plant)))
    assert found == level
    assert words in text


def test_syncs_are_measured_and_leave_nothing(tmp_path: Path) -> None:
    """A measurement has a median that is not above its tail, and the file is gone."""
    found = measure_syncs(tmp_path)
    assert 0 < found.p50_ms <= found.p99_ms
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        measure_syncs(tmp_path / "missing")


def test_a_clock_of_another_age_is_a_problem(plant: Zone) -> None:
    """A machine that came up in 1970 is told so before certificates fail in strange ways."""
    level, text = worst(clock(subject(plant, datetime(1970, 1, 2, tzinfo=UTC))))
    assert level == CheckLevel.PROBLEM
    assert "1970-01-02" in text


def test_a_clock_behind_the_newest_fact_is_a_warning(plant: Zone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts from the future show that the clock was wrong, now or then."""
    asyncio.run(fill(plant.data))
    monkeypatch.setattr("bsfg.cli.doctor.machine.kernel_synchronised", lambda: True)
    assert worst(clock(subject(plant)))[0] == CheckLevel.OK
    level, text = worst(clock(subject(plant, datetime.now(UTC) - timedelta(minutes=5))))
    assert level == CheckLevel.WARNING
    assert "the newest stored fact is of" in text


@pytest.mark.parametrize(
    ("state", "level"), [(True, CheckLevel.OK), (None, CheckLevel.OK), (False, CheckLevel.WARNING)]
)
def test_a_clock_that_nobody_keeps_is_a_warning(
    plant: Zone, monkeypatch: pytest.MonkeyPatch, state: bool | None, level: CheckLevel
) -> None:
    """The kernel knows whether a time service is at work; where it does not say, nobody is alarmed."""
    monkeypatch.setattr("bsfg.cli.doctor.machine.kernel_synchronised", lambda: state)
    assert worst(clock(subject(plant)))[0] == level
    assert kernel_synchronised() in (True, False, None)


@pytest.mark.parametrize(("allowed", "level"), [(276, CheckLevel.OK), (275, CheckLevel.WARNING), (-1, CheckLevel.OK)])
def test_too_few_open_files_are_a_warning(
    plant: Zone, monkeypatch: pytest.MonkeyPatch, allowed: int, level: CheckLevel
) -> None:
    """What the configuration may need is compared with what the system allows."""
    monkeypatch.setattr("bsfg.cli.doctor.machine.resource.getrlimit", lambda kind: (allowed, allowed))
    assert worst(limits(subject(plant)))[0] == level
