"""The page on HTTP has an example of every operation, and its commands trust the node as anybody's would."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from tests.docs.pasting import ROOT, blocks

from bsfg.wire.operations import ROUTES, HttpRoute

PAGE = ROOT / "docs" / "guides" / "http.md"


@dataclass(frozen=True)
class Call:
    """One command of the page."""

    words: list[str]

    @property
    def method(self) -> str:
        """Give the method that curl would use."""
        if "--head" in self.words:
            return "HEAD"
        if "-T" in self.words:
            return "PUT"
        return "POST" if {"-d", "--data-binary"} & set(self.words) else "GET"

    @property
    def path(self) -> str:
        """Give the path that is asked for."""
        [address] = [word for word in self.words if word.startswith("https://")]
        return urlsplit(address).path

    def calls(self, operation: HttpRoute) -> bool:
        """Tell whether this is an example of an operation."""
        pattern = re.sub(r"\{\w+(:path)?\}", lambda found: ".+" if found[1] else "[^/]+", operation.path)
        return self.method == operation.method and re.fullmatch(pattern, self.path) is not None


def calls() -> Iterator[Call]:
    """Read the commands of the page that run."""
    for block in blocks(PAGE):
        if block.runs:
            text = block.text.replace("\\\n", " ")
            for found in re.finditer(r"^curl (?:'[^']*'|[^'\n|])*", text, re.MULTILINE):
                yield Call(shlex.split(found[0]))


@pytest.mark.parametrize("operation", ROUTES, ids=lambda operation: operation.name)
def test_every_operation_has_an_example(operation: HttpRoute) -> None:
    """There is a command for it that is run, as pasted, by the test of the pages."""
    assert any(call.calls(operation) for call in calls())


def test_every_kind_of_body_is_shown() -> None:
    """One fact and many, and every field that a confirmation can have but the log's own id."""
    text = PAGE.read_text()
    for operation in ROUTES:
        for kind, _ in operation.bodies if operation.name != "put_object" else ():
            assert f"Content-Type: {kind}" in text, operation.name
    assert all(f'"{name}": ' in text for name in ("through", "ranges", "refusals"))


def test_no_command_looks_away() -> None:
    """Each command checks the node's certificate, and fails when the node refuses."""
    found = list(calls())
    assert len(found) >= len(ROUTES)
    for call in found:
        assert call.words[1] == "-K", call
        assert not {"-k", "--insecure", "--no-fail"} & set(call.words), call
    [options] = [block.text for block in blocks(PAGE) if "cat > producer.curl" in block.text]
    assert {"cacert", "cert", "key", "fail-with-body"} <= {line.split(" ")[0] for line in options.splitlines()}
    assert "insecure" not in options


def test_there_is_a_curl() -> None:
    """Where there is none, the commands cannot be tried; `make test` installs it."""
    assert shutil.which("curl"), "the page on HTTP is run with curl: run `make programs`, or install it"
