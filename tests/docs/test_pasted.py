"""What the pages tell a reader to type runs as it is pasted: every block, in order, on one machine with two zones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from tests.docs.pasting import ROOT, RUN, SHOWN, Terminal, blocks

pytestmark = pytest.mark.timeout(1_200)
"""A page is many commands, each a process of its own, some of them with a Spark; a busy machine takes its time."""

DOCS = ROOT / "docs"
QUICKSTART = DOCS / "quickstart.md"
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if path.parent.name not in ("adr", "reference")),
]
FROM_NOTHING = [ROOT / "README.md", QUICKSTART]
"""The pages that begin in an empty folder."""

ELSEWHERE = {"notebook.md": "tests/spark/test_notebook.py"}
"""Pages whose blocks run in tests of their own."""

SHOWN_SHORTER = {
    "auditing.md": "tests/cli/test_pipeline_audit.py",
    "ingesting.md": "tests/spark/test_ingest_kill.py",
    "landing.md": "tests/cli/test_pipeline_land.py",
    "pipelines.md": "tests/spark/test_run.py",
}
"""Pages that start one Spark after another for commands of which a campaign of their own runs each kind."""


def named(page: Path) -> str:
    """Give the name of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def guides() -> Iterator[ParameterSet]:
    """Give the pages that go on where the quickstart ended."""
    for page in PAGES:
        if page not in FROM_NOTHING and page.name not in ELSEWHERE and any(block.runs for block in blocks(page)):
            yield pytest.param(page, marks=[pytest.mark.long] if page.name in SHOWN_SHORTER else [], id=named(page))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_says_what_it_is(page: Path) -> None:
    """A block has a language, so that it is known whether it runs; one that does not run says why."""
    for block in blocks(page):
        where = f"{named(page)}:{block.line}"
        assert block.language in (*RUN, *SHOWN), f"{where} has no language that is known here"
        if block.not_run:
            assert block.language in RUN and len(block.not_run.split()) >= 3, f"{where} does not say why it is not run"


@pytest.mark.campaign
@pytest.mark.parametrize("page", FROM_NOTHING, ids=named)
def test_from_an_empty_folder(page: Path, tmp_path: Path) -> None:
    """README and quickstart lead from nothing to facts that cross."""
    folder = tmp_path / "empty"
    folder.mkdir()
    with Terminal(folder) as terminal:
        for block in blocks(page):
            if block.runs:
                terminal.run(block, named(page))
        assert '"step":3' in terminal.printed()
        assert "Traceback" not in terminal.printed()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of the quickstart after its zones are made and before they are started, and their ports."""
    folder = tmp_path_factory.mktemp("prepared") / "zones"
    folder.mkdir()
    [make] = [block for block in blocks(QUICKSTART) if "bsfg certs init-ca" in block.text]
    with Terminal(folder) as terminal:
        terminal.run(make, named(QUICKSTART))
    return folder, terminal.ports


@pytest.mark.campaign
@pytest.mark.parametrize("page", [*guides()])
def test_in_the_folder_of_the_quickstart(page: Path, prepared: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Every other page goes on in the folder that the quickstart made, with its nodes running and a first fact.

    For the pages that `make soak` alone runs, SHOWN_SHORTER names what runs their commands on Spark every time; that
    each command has the options of the page is shown by tests/docs/test_names.py.
    """
    made, ports = prepared
    folder = tmp_path / "zones"
    shutil.copytree(made, folder)
    begin, say = [block for block in blocks(QUICKSTART) if "bsfg status" in block.text or "step-3" in block.text]
    with Terminal(folder) as terminal:
        for config in folder.glob("*/zone.toml"):
            text = config.read_text()
            for name, port in ports.items():
                text = text.replace(port, terminal.ports[name])
            config.write_text(text)
        for block in (begin, say, *(block for block in blocks(page) if block.runs)):
            terminal.run(block, named(page))
        assert "Traceback" not in terminal.printed()
