"""`bsfg token` makes tokens that a node takes, and rows that its configuration reads."""

from __future__ import annotations

import json
import tomllib

import pytest
from tests.cli.conftest import Run

from bsfg.config import parse
from bsfg.node.dashboard.sessions import Tokens

ZONE = """
[zone]
name = "plant-a"
[tls]
ca = "ca.crt"
certificate = "a.crt"
key = "a.key"
[streams.operational]
"""


@pytest.mark.parametrize("name", ["control-room", "shift.lead_2", "7"])
@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_a_row_lets_its_token_in(bsfg: Run, name: str, role: str) -> None:
    """The row can be put into a zone's file as it is, and then the token is known by its name."""
    made = json.loads(bsfg("token", name, "--role", role, "--json").out)
    assert list(tomllib.loads(made["row"])["tokens"]) == [name]
    config = parse(ZONE + made["row"])
    assert config.tokens[name].role == role
    assert Tokens(config.tokens).name_of(made["token"]) == name
    assert made["token"] not in made["row"]


def test_a_token_is_shown_once_with_what_to_do(bsfg: Run) -> None:
    """For people there is the token, the row, and where the row belongs; each run makes another token."""
    shown = bsfg("token", "control-room")
    assert shown.code == 0
    assert "bsfg-" in shown.out and "[tokens.control-room]" in shown.out and "zone.toml" in shown.out
    assert shown.out != bsfg("token", "control-room").out


@pytest.mark.parametrize("name", ["", "Control Room", "a" * 65, "a/b", 'a"b', "ä"])
def test_a_name_that_the_file_would_refuse_is_refused(bsfg: Run, name: str) -> None:
    """What could not be a key of [tokens] is no name."""
    outcome = bsfg("token", name)
    assert (outcome.code, outcome.out) == (1, "")
    assert "error[invalid_argument]" in outcome.err
