"""The frame around all commands: help, versions, wrong usage, errors, pipes and narrow terminals."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Run, environment
from tools.pages.commands import commands

import bsfg as package
from bsfg.cli import COMMANDS, SUMMARIES
from bsfg.cli import main as run_in_process
from bsfg.errors import BufferFull


def test_version(bsfg: Run) -> None:
    """`bsfg --version` prints the version and nothing else."""
    outcome = bsfg("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"bsfg {package.__version__}\n", "")


def test_help_lists_every_command_and_teaches(bsfg: Run) -> None:
    """`bsfg --help` names every command and shows what to type first."""
    outcome = bsfg("--help")
    assert outcome.code == 0
    assert all(f" {name} " in outcome.out for name in COMMANDS)
    assert "Examples" in outcome.out
    assert bsfg("-h").out == outcome.out


def test_a_flag_shows_no_value(bsfg: Run) -> None:
    """Nobody is led to write `--json true`; what takes a value says of which kind."""
    for args in (["--help"], ["status", "--help"], ["token", "-h"]):
        assert "<bool>" not in bsfg(*args).out
    assert "<viewer|operator>" in bsfg("token", "--help").out


@pytest.mark.parametrize("command", [["init"], ["consumers", "add"], ["pipeline", "land"], ["pipeline", "webhook"]])
def test_a_narrow_window_cuts_no_word(command: list[str]) -> None:
    """In 60 columns long names go on in the next line, those of options and those in what is said of them."""
    narrow = {**environment(), "COLUMNS": "60", "TERMINAL_WIDTH": "60"}
    line = [sys.executable, "-m", "bsfg", *command, "--help"]
    shown = subprocess.run(line, env=narrow, capture_output=True, text=True, check=True).stdout
    assert "Options" in shown and not re.search(r"\w…", shown), shown


def test_no_arguments_show_the_help(bsfg: Run) -> None:
    """`bsfg` alone shows its help, with the exit code of wrong usage."""
    outcome = bsfg()
    assert outcome.code == 2
    assert "Usage: bsfg" in outcome.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    """Every command says what it does, explains each of its options, and gives examples."""
    listed = list(commands(name))
    for path, command in listed:
        assert command.help, path
        assert [param.name for param in command.params if not getattr(param, "help", None)] == [], path
    assert any("Examples" in (command.epilog or "") for _, command in listed)
    assert (listed[0][1].help or "").split("\n\n")[0] == SUMMARIES[name], "the list of commands says something else"


def test_a_misspelt_command_gets_a_suggestion(bsfg: Run) -> None:
    """A command that is nearly right is answered with the right one."""
    outcome = bsfg("verfy", "data")
    assert outcome.code == 2
    assert outcome.err.splitlines()[0] == "error[usage]: No such command 'verfy'. Did you mean 'verify'?"
    assert outcome.err.splitlines()[1].startswith("hint: ")
    assert outcome.out == ""


def test_an_unknown_command_gets_the_list(quick: Run) -> None:
    """A command that is like none is answered with all there are."""
    outcome = quick("fly")
    assert outcome.code == 2
    assert all(name in outcome.err for name in COMMANDS)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("verify",), "DIR"),
        (("verify", "data", "--jason"), "--json"),
        (("inspect", "data", "--from", "many"), "--from"),
        (("inspect", "data", "--buffer", "middle"), "store"),
        (("bench", "store", "--facts", "0"), "--facts"),
        (("demo", "storage", "--producers", "0"), "--producers"),
    ],
)
def test_wrong_usage_is_exit_code_2(quick: Run, args: tuple[str, ...], says: str) -> None:
    """What is wrong with the command line is named, with where to find its help."""
    outcome = quick(*args)
    assert outcome.code == 2
    assert outcome.err.startswith("error[usage]: ")
    assert says in outcome.err.splitlines()[0]
    assert f"bsfg {args[0]}" in outcome.err.splitlines()[1]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("status", "--wait", "abc"), "'--wait': it must be a number"),
        (("bench", "store", "--facts", "many"), "'--facts': it must be a whole number"),
        (("bench", "store", "--facts", "0"), "'--facts': it must be at least 1"),
        (("init", "x", "--zone", "b", "--port", "99999"), "'--port': it must be at most 65535"),
        (("init", "x", "--zone", "b", "--engine", "rust"), "'--engine': 'rust' is not one of 'spark', 'native'."),
        (("completion", "tcsh"), "'shell': 'tcsh' is not one of 'bash', 'zsh', 'fish', 'powershell'."),
    ],
)
def test_a_wrong_value_is_told_in_our_words(quick: Run, args: tuple[str, ...], says: str) -> None:
    """Nothing of what the libraries say about values reaches a person."""
    outcome = quick(*args)
    assert outcome.code == 2
    assert outcome.err.splitlines()[0] == f"error[usage]: Invalid value for {says}"


def test_wrong_usage_as_json(bsfg: Run) -> None:
    """With --json wrong usage is JSON too."""
    outcome = bsfg("inspect", "--json", "--from", "x")
    assert outcome.code == 2
    assert outcome.json()["code"] == "usage"


def test_an_error_has_the_same_form_as_everywhere(bsfg: Run, tmp_path: Path) -> None:
    """With --json an error is the object that Python and the wire give, on stdout, and two lines on stderr."""
    outcome = bsfg("verify", tmp_path / "nothing", "--json")
    assert outcome.code == 1
    error = outcome.json()
    assert set(error) == {"code", "message", "retryable", "hint"}
    assert outcome.out.count("\n") == 1, "commands that go on write lines of JSON before it"
    assert (error["code"], error["retryable"]) == ("not_a_data_folder", False)
    assert outcome.err.splitlines() == [f"error[not_a_data_folder]: {error['message']}", f"hint: {error['hint']}"]


def test_brackets_in_messages_are_not_markup(bsfg: Run, tmp_path: Path) -> None:
    """A path with square brackets is printed as it is."""
    outcome = bsfg("verify", tmp_path / "[red]x[/red]")
    assert "[red]x[/red]" in outcome.err


def test_a_defect_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Something unforeseen is an internal error without a traceback, which BSFG_DEBUG=1 adds."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("bsfg.stores.log.verify.verify", broken)
    monkeypatch.setattr("bsfg.cli.verify.checked_folder", lambda path: path)
    monkeypatch.delenv("BSFG_DEBUG", raising=False)
    assert run_in_process(["verify", "data"]) == 1
    words = capsys.readouterr().err
    assert words.startswith("error[internal]: ZeroDivisionError: surprise")
    assert "Traceback" not in words
    monkeypatch.setenv("BSFG_DEBUG", "1")
    assert run_in_process(["verify", "data"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_every_error_ends_with_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Any error of BSFG that a command raises is exit code 1, details included in its JSON."""

    def full(*_: object, **__: object) -> None:
        raise BufferFull("no room", used_bytes=7)

    monkeypatch.setattr("bsfg.stores.log.verify.verify", full)
    monkeypatch.setattr("bsfg.cli.verify.checked_folder", lambda path: path)
    assert run_in_process(["verify", "data", "--json"]) == 1
    assert '"used_bytes":7' in capsys.readouterr().out


def test_interrupting_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a command quietly."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bsfg.stores.log.verify.verify", interrupted)
    monkeypatch.setattr("bsfg.cli.verify.checked_folder", lambda path: path)
    assert run_in_process(["verify", "data"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_has_seen_enough_is_no_error(data: Path) -> None:
    """`bsfg inspect … --export | head -1` ends quietly."""
    command = [sys.executable, "-m", "bsfg", "inspect", str(data), "--stream", "operational", "--export"]
    reading, writing = os.pipe()
    process = subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=environment())
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    _, words = process.communicate(timeout=60)
    assert (process.returncode, words) == (141, b"")


def test_a_closed_pipe_is_noticed_by_small_output_too(data: Path) -> None:
    """Output that fits into a buffer meets the closed pipe only at the end, which is as quiet."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "bsfg", "verify", str(data)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment(), check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("args", [("--help",), ("inspect", "--help"), ("verify", "DATA"), ("inspect", "DATA")])
def test_sixty_columns_are_enough(quick: Run, data: Path, args: tuple[str, ...]) -> None:
    """On a terminal of 60 columns no table is wider than that."""
    given = [str(data) if arg == "DATA" else arg for arg in args]
    outcome = quick(*given, env={"COLUMNS": "60"})
    assert outcome.code == 0
    wide = [line for line in outcome.out.splitlines() if len(line.rstrip()) > 60 and str(data) not in line]
    assert wide == []


def test_sixty_columns_cut_no_name(quick: Run) -> None:
    """A long option goes on in the next line of its column, so that it can be read and typed."""
    outcome = quick("pipeline", "replicate", "--help", env={"COLUMNS": "60"})
    names = [line[2:19].rstrip() for line in outcome.out.splitlines() if line.startswith("│ ")]
    assert "--until-caught-up" in "".join(names)
    assert [name for name in names if "…" in name] == []


def test_no_colours_in_pipes(quick: Run, data: Path) -> None:
    """Output into a pipe has no escape sequences, and neither has any output with NO_COLOR."""
    for outcome in (quick("verify", data), quick("inspect", data), quick("verify", data / "nothing"), quick("--help")):
        assert "\x1b" not in outcome.out + outcome.err


def test_commands_import_only_what_they_need() -> None:
    """Asking for the version or for help loads no storage, and verify loads neither gRPC nor a web server."""
    probe = "import sys; from bsfg.cli import main; main({args}); print([n for n in {names} if n in sys.modules])"
    heavy = ["pyarrow", "grpc", "numpy", "pandas"]
    cases = [(["--version"], heavy), (["--help"], heavy), (["verify", "nothing"], ["grpc", "uvicorn", "pyspark"])]
    for args, names in cases:
        code = probe.format(args=args, names=names)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


def test_no_command_has_threads_for_linear_algebra() -> None:
    """What a command and all that it starts load of numpy begins no thread, on a machine of several cores either."""
    code = "import os; from bsfg.cli import main; main(['--help']); import numpy; print(os.listdir('/proc/self/task'))"
    plain = {name: value for name, value in environment().items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True)
    assert len(ast.literal_eval(done.stdout.splitlines()[-1])) == 1
