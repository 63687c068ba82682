"""What the system does not allow is said in a sentence with a fitting code, by every command, and never as a defect."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Run, environment
from tests.cli.test_verify import WITHOUT_THE_RIGHTS_OF_ROOT

from bsfg.cli import main
from bsfg.testing.ports import free_port


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zone with certificates and no node that runs."""
    folder = tmp_path_factory.mktemp("made")
    port, http_port = str(free_port()), str(free_port())
    peer = f"enterprise=localhost:{free_port()}"
    for arguments in (
        ["init", f"{folder}/plant", "--zone", "plant-a", "--port", port, "--http-port", http_port, "--peer", peer],
        ["certs", "init-ca", f"{folder}/authority"],
        ["certs", "bundle", f"{folder}/authority", "plant-a", f"{folder}/plant/certs", "--issue"],
    ):
        assert main(arguments) == 0
    return folder


@pytest.fixture
def here(made: Path, data: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder of one's own with that zone and data in it, and with a folder that cannot be written."""
    folder = tmp_path
    shutil.copytree(made, folder, dirs_exist_ok=True)
    shutil.copytree(data, folder / "plant" / "data")
    (folder / "facts.jsonl").write_text("{}\n")
    assert main(["backup", f"{folder}/good", "--data", f"{folder}/plant/data"]) == 0
    text = (folder / "plant" / "zone.toml").read_text().replace('# backend = "log"', 'backend = "postgres"')
    text = text.replace("\n[storage.postgres]\n", '\n[storage.postgres]\ndsn = "host=127.0.0.1"\n')
    for name, where in (("zone-new", "data-new"), ("zone-closed", "../closed/data")):
        path = folder / "plant" / f"{name}.toml"
        path.write_text(text.replace('# data_folder = "data"', f'data_folder = "{where}"'))
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0o555)
    yield folder
    for name in {"closed", *(closed for closed, _ in UNREADABLE)}:
        (folder / name).chmod(0o700)


CONFIG = ("--config", "plant/zone.toml")
UNREADABLE = [
    ("plant/data", ("verify", "plant/data")),
    ("plant/data", ("inspect", "plant/data")),
    ("plant/data", ("backup", "copy", "--data", "plant/data")),
    ("plant/data", ("backup", "copy", *CONFIG)),
    ("plant/data", ("node", *CONFIG)),
    ("plant/data", ("audit-trail", *CONFIG)),
    ("plant/data", ("salvage", "plant/data", "saved")),
    ("plant/data", ("migrate", "--to", "plant/zone-new.toml", *CONFIG)),
    ("plant/data", ("pipeline", "audit", "--sender", "plant/data", "--receiver", "plant/data")),
    ("plant/data/streams", ("verify", "plant/data")),
    ("plant/data/streams", ("backup", "copy", "--data", "plant/data")),
    ("plant/data/streams", ("salvage", "plant/data", "saved")),
    ("good", ("restore", "good", "new", "--accept-unsigned")),
    ("good/data", ("restore", "good", "new", "--accept-unsigned")),
    ("good/backup.json", ("restore", "good", "new", "--accept-unsigned")),
    ("good", ("backup", "copy", "--data", "plant/data", "--base", "good")),
    ("plant/zone-new.toml", ("migrate", "--to", "plant/zone-new.toml", *CONFIG)),
    ("plant/zone.toml", ("status", *CONFIG)),
    ("plant/zone.toml", ("node", *CONFIG)),
    ("plant/zone.toml", ("pipeline", "replicate", *CONFIG)),
    ("plant/certs", ("status", *CONFIG)),
    ("plant/certs", ("append", "facts.jsonl", "--stream", "operational", *CONFIG)),
    ("facts.jsonl", ("append", "facts.jsonl", "--stream", "operational", *CONFIG)),
    ("facts.jsonl", ("artifact", "put", "bucket", "key", "facts.jsonl", *CONFIG)),
]


@pytest.mark.parametrize(
    ("closed", "command"), UNREADABLE, ids=lambda part: part if isinstance(part, str) else " ".join(part[:2])
)
def test_what_cannot_be_read(bsfg: Run, here: Path, closed: str, command: tuple[str, ...]) -> None:
    """It is named, and nobody is advised to make it writable."""
    (here / closed).chmod(0)
    outcome = bsfg(*command, launcher=WITHOUT_THE_RIGHTS_OF_ROOT)
    assert outcome.code == 1, outcome
    last = outcome.err.splitlines()[-2:]
    assert last[0].startswith("error[storage_unreadable]: ") and closed in last[0], outcome.err
    assert "writable" not in last[1] and "defect" not in last[1]


UNWRITABLE = [
    ("init", "closed/zone", "--zone", "x"),
    ("certs", "init-ca", "closed"),
    ("certs", "bundle", "authority", "plant-a", "closed/bundle"),
    ("certs", "signing-key", "closed/line-7.key"),
    ("backup", "closed/copy", "--data", "plant/data"),
    ("salvage", "plant/data", "closed/saved"),
    ("migrate", "--to", "plant/zone-closed.toml", *CONFIG),
    ("append", "facts.jsonl", "--stream", "operational", "--outbox", "closed/out", *CONFIG),
    ("node", "--ready-file", "closed/ready", *CONFIG),
    ("restore", "good", "closed/new", "--accept-unsigned"),
    ("pipeline", "replicate", "--work", "closed", "--link", "from-enterprise", *CONFIG),
    ("pipeline", "replicate", "--work", "closed/work", "--link", "from-enterprise", *CONFIG),
    ("pipeline", "audit", "--sender", "plant/data", "--receiver", "plant/data", "--report", "closed/report.html"),
]


@pytest.mark.parametrize("command", UNWRITABLE, ids=lambda command: " ".join(command[:2]))
def test_what_cannot_be_written(bsfg: Run, here: Path, command: tuple[str, ...]) -> None:
    """It is named, with the code for it."""
    outcome = bsfg(*command, launcher=WITHOUT_THE_RIGHTS_OF_ROOT)
    assert outcome.code == 1, outcome
    last = outcome.err.splitlines()[-2:]
    assert last[0].startswith("error[storage_read_only]: ") and "closed" in last[0], outcome.err
    assert "defect" not in last[1]


def test_a_node_whose_authority_did_not_sign_it(bsfg: Run, here: Path) -> None:
    """It does not start: neither its own callers nor its pipeline would trust it."""
    for arguments in (
        ["certs", "init-ca", f"{here}/other"],
        ["certs", "bundle", f"{here}/other", "plant-a", f"{here}/certs", "--issue"],
    ):
        assert main(arguments) == 0
    shutil.copy(here / "plant" / "certs" / "ca.crt", here / "certs" / "ca.crt")
    shutil.rmtree(here / "plant" / "certs")
    (here / "certs").rename(here / "plant" / "certs")
    outcome = bsfg("node", *CONFIG)
    assert outcome.code == 1
    assert "error[certificate_invalid]: " in outcome.err and "no authority of the file signed" in outcome.err


def test_a_pipeline_whose_configuration_cannot_be_written(here: Path) -> None:
    """It works in a folder for passing things, which is this user's alone, and says so; a stranger's is not used."""
    code = "import pathlib, bsfg.cli.pipeline.replicate as job; print(job.work_folder(pathlib.Path('closed')))"

    def run() -> subprocess.CompletedProcess[str]:
        command = [*WITHOUT_THE_RIGHTS_OF_ROOT, sys.executable, "-c", code]
        env = environment(TMPDIR=str(here))
        return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=120, check=False)

    first, again = run(), run()
    folder = Path(first.stdout.strip())
    assert folder.parent == here and folder.stat().st_mode & 0o777 == 0o700
    assert again.stdout == first.stdout and "working in" in first.stderr
    folder.chmod(0o777)
    assert "is not this user's alone" in run().stderr
