"""A running `replicate` and its configuration: changes are taken up, mistakes are said, nothing is taken half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bsfg.config
from bsfg.cli.pipeline import replicate, running
from bsfg.cli.pipeline.replicate import ConfiguredLinks
from bsfg.errors import InvalidArgument
from bsfg.spark.calls import NodeAccess

ZONE = """
[zone]
name = "hub"
[listen]
grpc = "127.0.0.1:9"
[tls]
ca = "ca.crt"
certificate = "hub.crt"
key = "hub.key"
[streams.operational]
"""
LINK = """
[identities.{zone}-bsfg]
zone = "{zone}"
roles = ["peer"]
streams = ["*"]
[links.from-{zone}]
zone = "{zone}"
address = "127.0.0.1:9"
{more}
"""


class Run:
    """A zone whose file changes, and a run that notes what it is to go on with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, names: list[str] | None = None) -> None:
        self.file, self.said, self.plans = folder / "zone.toml", list[str](), list[list[Any]]()
        monkeypatch.setattr(running, "FOLLOW_SECONDS", 0.0)
        monkeypatch.setattr(replicate, "say", self.said.append)
        self.links = ConfiguredLinks(self.file, names, NodeAccess("127.0.0.1:9"))

    def write(self, **links: str) -> None:
        """Write the file with some links, each with lines of its own."""
        text = ZONE + "".join(LINK.format(zone=zone, more=more) for zone, more in links.items())
        self.file.write_text(text, encoding="utf-8")

    def replan(self, plans: list[Any]) -> list[str]:
        """Take other plans."""
        self.plans.append(plans)
        return [f"{plan.name}: taken" for plan in plans]

    def look(self, times: int = 2) -> list[str]:
        """Let the run look; give the links that it goes on with, if they are others."""
        for _ in range(times):
            self.links.follow(self)  # type: ignore[arg-type]
        return [plan.name for plan in self.plans.pop()] if self.plans else []


def test_changes_are_taken_up_when_the_file_is_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the first look that finds it changed: it may be half written. The same again is no change."""
    run = Run(tmp_path, monkeypatch)
    run.write(a="", b="")
    assert [plan.name for plan in run.links.read()] == ["from-a", "from-b"]
    assert run.links.zone == "hub"
    assert run.look() == []
    run.write(a="", b="rate_limit = 7", c="")
    assert run.look(1) == []
    assert run.look(1) == ["from-a", "from-b", "from-c"]
    assert run.said == ["from-a: taken", "from-b: taken", "from-c: taken"]
    assert run.look(3) == []
    run.write(a='engine = "native"', c="")
    assert run.look() == ["from-c"], "another engine moves it now"
    run.write()
    run.look()
    assert run.links._files._taken == run.links._files._seen


def test_a_file_with_a_mistake_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, in words, and what was taken before stays until the file is right; one that is away is too."""
    run = Run(tmp_path, monkeypatch)
    run.write(a="")
    run.links.read()
    run.write(a="", b="rate_limit = -1")
    assert run.look(4) == []
    [said] = run.said
    assert "is not taken up: config_invalid" in said
    assert "rate_limit" in said
    run.file.unlink()
    assert run.look(3) == []
    run.write(a="", b="")
    assert run.look() == ["from-a", "from-b"]


def test_named_links_are_those_that_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are left alone; one that is no longer there is no longer moved, and one that never was is an error."""
    run = Run(tmp_path, monkeypatch, ["from-a", "from-b"])
    run.write(a="")
    with pytest.raises(InvalidArgument, match="from-b"):
        run.links.read()
    run.write(a="", b='engine = "native"', c="")
    assert [plan.name for plan in run.links.read()] == ["from-a", "from-b"]
    run.write(b="", c="")
    assert run.look() == ["from-b"]
    nothing = Run(tmp_path, monkeypatch)
    nothing.write(a='engine = "native"')
    with pytest.raises(InvalidArgument, match="no link with engine"):
        nothing.links.read()


def test_renewed_certificates_travel_to_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks elsewhere have copies of them; on this machine they read the files themselves."""
    run = Run(tmp_path, monkeypatch)
    for name in ("ca.crt", "hub.crt", "hub.key"):
        (tmp_path / name).write_text("-----BEGIN ONE-----")
    run.write(a="")
    run.links.read()
    (tmp_path / "hub.crt").write_text("-----BEGIN TWO-----")
    assert run.look() == []
    run.links.ship_to("spark://host:7077")
    [plan] = run.links.read()
    assert plan.peer.certificate == "-----BEGIN TWO-----"
    (tmp_path / "hub.crt").write_text("-----BEGIN THREE-----")
    run.look(1)
    run.links.follow(run)  # type: ignore[arg-type]
    [[plan]] = run.plans
    assert plan.peer.certificate == "-----BEGIN THREE-----"


def test_what_changes_while_it_is_read_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second save right behind the first, for tasks elsewhere, too: what was read last is what the files are."""
    run, load = Run(tmp_path, monkeypatch), bsfg.config.load
    for name in ("ca.crt", "hub.crt", "hub.key"):
        (tmp_path / name).write_text("-----BEGIN ONE-----")
    run.write(a="")
    run.links.ship_to("spark://host:7077")
    run.links.read()
    saves = [{"a": "", "b": "", "c": ""}]

    def read_before_it_changes(path: Path) -> Any:
        found = load(path)
        if saves:
            run.write(**saves.pop())
        return found

    monkeypatch.setattr(bsfg.config, "load", read_before_it_changes)
    run.write(a="", b="")
    assert run.look(2) == ["from-a", "from-b"]
    assert run.look(2) == ["from-a", "from-b", "from-c"]
