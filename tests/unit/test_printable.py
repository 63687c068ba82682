"""Words of others cannot speak to a terminal, forge a line of a log, or become markup, wherever they are shown."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import orjson
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import RenderableType
from rich.text import Text

from bsfg.cli import gate, output, quarantine
from bsfg.cli import status as status_view
from bsfg.cli.append import LineTally
from bsfg.cli.inspect import view as inspect_view
from bsfg.cli.inspect.gather import LogInfo
from bsfg.cli.pipeline import audit
from bsfg.errors import FileExists
from bsfg.fact import Key
from bsfg.gaps import GapRecord
from bsfg.gate import Gate, Mode
from bsfg.node import logs
from bsfg.node.dashboard.pages import DashboardFiles
from bsfg.node.status import HealthFinding, HealthLevel
from bsfg.ports import Buffer, Quarantined
from bsfg.retention import GapReason
from bsfg.sdk.artifacts import PartFile
from bsfg.spark.audit.report import page
from bsfg.spark.audit.verdict import AuditFinding, Check, CheckState, EndState, FindingKind, StreamVerdict, Verdict
from bsfg.testing.facts import batch
from bsfg.wire.service import GateView, QuarantinedView
from bsfg.wire.status import decoded
from bsfg.wording import counted, markup, one_line, printable, printable_json

C0 = [chr(code) for code in range(0x20)] + ["\x7f"]
C1 = [chr(code) for code in range(0x80, 0xA0)]
BIDI = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
ENDS = ["\r\n", "\u2028", "\u2029"]
SEQUENCES = ["\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\x1b]8;;http://evil.example\x1b\\", "[red]", "[/]", "<b>"]
FORBIDDEN = set("".join(C0 + C1 + BIDI + ENDS)) - {"\n"}

hostile = st.lists(
    st.sampled_from(C0 + C1 + BIDI + ENDS + SEQUENCES) | st.text(st.characters(codec="utf-8"), max_size=4), max_size=12
).map(lambda parts: "".join(parts) + "\nFORGED line\rFORGED too\u2028FORGED three")

FILES = DashboardFiles()


def shown(call: Callable[[], object]) -> str:
    """Give what a call prints, on stdout and stderr."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(out), redirect_stderr(out):
        call()
    return out.buffer.getvalue().decode()


def printed(thing: object) -> str:
    """Give what the console of the commands makes of something."""
    return shown(lambda: output.console().print(thing))


def logged(form: str, text: str) -> str:
    """Give the line that the node logs about a text, by itself and by way of a library."""
    out, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logs.configure(form=form, stream=out)
    try:
        structlog.get_logger("x").warning("link_held", why=text, more={"deep": [text]})
        logging.getLogger("library").warning("%s", text)
        try:
            raise ValueError(one_line(text))
        except ValueError:
            structlog.get_logger("x").exception("request_failed", about=text)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()
    return out.getvalue()


def gate_view(text: str) -> GateView:
    """Give a gate that was held with a reason."""
    return GateView("from-a", "receiver", Gate(Mode.HELD, 1, text, text))


def quarantined(text: str) -> QuarantinedView:
    """Give a fact that a link refused."""
    found = Quarantined(1, 1, text, Key("plant-a", text), 3, batch(1), text)
    return QuarantinedView("operational", Buffer.FORWARD, found)


def verdict(text: str) -> StreamVerdict:
    """Give a verdict of an audit that found something."""
    end = EndState("plant-a", "00", 0, 1, "00")
    found = AuditFinding(FindingKind.MISSING, "sender", 1, from_zone=text, message_id=text, fields=(text,), detail=text)
    checks = [Check("chains", CheckState.FAILED, text)]
    counts: dict[str, int] = {FindingKind.MISSING: 1}
    return StreamVerdict("operational", end, end, 0, 1, 1, True, findings=[found], finding_counts=counts, checks=checks)


def log_info(text: str) -> LogInfo:
    """Give what `bsfg inspect` knows of a log."""
    return LogInfo("operational", "forward", gaps=[GapRecord(1, 2, GapReason.QUARANTINED, 3, text, text)])


def failure(text: str) -> str:
    """Give how a command tells of an error that another zone wrote."""
    error = decoded(orjson.dumps({"code": text, "message": text, "hint": text}))
    return shown(lambda: output.print_failure(error.to_dict(), as_json=True))


def audited(found: StreamVerdict) -> None:
    """Print what `bsfg pipeline audit` says of a stream."""
    audit._checks(found)
    audit._findings(found)


SURFACES: dict[str, Callable[[str], str]] = {
    "cell": lambda text: printed(_row("first", text)),
    "styled cell": lambda text: printed(_row("first", Text(text, "red"))),
    "pairs": lambda text: printed(output.pairs("x", {"name": text})),
    "lines of a cell": lambda text: printed(_row("first", output.CellLines("a", text))),
    "waiting": lambda text: shown(lambda: output.say(f"waiting: {text}")),
    "json": lambda text: shown(lambda: output.print_json({"a": text})),
    "json line": lambda text: output.json_line({"a": text}).decode(),
    "error of a peer": failure,
    "gates": lambda text: printed(gate._table([gate_view(text)], True)),
    "gate": lambda text: shown(lambda: gate._show(gate_view(text), "is held", False)),
    "quarantine": lambda text: printed(quarantine._table([quarantined(text)], True)),
    "quarantined": lambda text: shown(lambda: quarantine._show(quarantined(text))),
    "status": lambda text: printed(status_view._findings([HealthFinding(HealthLevel.ALERT, "gate_held", "x", text)])),
    "inspect": lambda text: shown(lambda: inspect_view._details(log_info(text))),
    "audit": lambda text: shown(lambda: audited(verdict(text))),
    "audit report": lambda text: page(Verdict("from-a", text, "e", 0, 1.0, (verdict(text),))),
    "log": lambda text: logged("json", text),
    "log for people": lambda text: logged("text", text),
    "page": lambda text: bytes(FILES.page("sign-in.html", says=text).body).decode(),
}


def _row(*cells: RenderableType) -> object:
    made = output.table("one", "two")
    made.add_row(*cells)
    return made


@pytest.mark.parametrize("name", SURFACES)
@settings(max_examples=40)
@given(text=hostile)
def test_no_surface_obeys_the_words_of_others(name: str, text: str) -> None:
    """Whatever another zone says: no control character is shown, no line begins with its words, no markup is read."""
    found = SURFACES[name](text)
    assert not FORBIDDEN & set(found), name
    assert not [line for line in found.splitlines() if line.startswith("FORGED")]
    assert "FORGED line" in found.replace("\n", " ") or name == "error of a peer" or "FORGED" in found


@given(text=hostile)
def test_documents_keep_their_meaning(text: str) -> None:
    """Escaped is not changed: a program reads the text as it was said."""
    assert json.loads(printable_json(orjson.dumps({text: [text]}))) == {text: [text]}


@given(text=st.text())
def test_what_is_harmless_stays(text: str) -> None:
    """Printable text is left as it is, and what was cleaned once is clean."""
    for clean in (printable, one_line):
        assert clean(clean(text)) == clean(text)
    if text.isprintable():
        assert printable(text) == one_line(text) == text
    assert not set("<>\"'") & set(markup(text))


def test_brackets_are_no_markup() -> None:
    """A name in brackets is printed as it is."""
    assert "[red]x[/]" in printed("[red]x[/]") and "[/nothing]" in printed(_row("[/nothing]", ""))


def test_a_download_does_not_follow_links(tmp_path: Path) -> None:
    """A link that somebody laid where the part of a download goes is replaced; what it leads to stays."""
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    (tmp_path / "a.pdf.part").symlink_to(other)
    with PartFile(tmp_path / "a.pdf") as sink:
        sink.write(b"content")
    assert (other.read_bytes(), (tmp_path / "a.pdf").read_bytes()) == (b"precious", b"content")
    with pytest.raises(FileExists):
        PartFile(tmp_path / "a.pdf")


def test_one_is_one() -> None:
    """What is counted has its singular, also in what a command says at its end."""
    said = [
        counted(number, thing)
        for number, thing in ((0, "fact"), (1, "fact"), (2_000, "fact"), (1, "entry"), (2, "entry"))
    ]
    assert said == ["0 facts", "1 fact", "2,000 facts", "1 entry", "2 entries"]
    assert LineTally(facts=1, inserted=1).sentence() == "1 fact: 1 stored."
    assert LineTally(facts=2, inserted=1, already_exists=1).sentence() == "2 facts: 1 stored, 1 was there already."
