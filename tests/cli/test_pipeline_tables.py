"""[pipelines.*] of a zone's file: what they mean is what the command of the same name means by the same options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from bsfg.cli.app import app
from bsfg.cli.connection import Target
from bsfg.cli.pipeline import app_of, ingest, kept, land
from bsfg.cli.pipeline.run import ZonePipelines
from bsfg.cli.pipeline.running import FollowedFiles
from bsfg.config import ZoneConfig, parse
from bsfg.errors import ConfigInvalid, InvalidArgument, StorageUnreadable
from bsfg.spark.calls import NodeAccess
from bsfg.spark.land.state import Landed
from bsfg.spark.replicate.driver import Layout
from bsfg.spark.supervise import Diary, Schedule, Supervisor

ZONE = """
[zone]
name = "hub"
[listen]
grpc = "127.0.0.1:9"
http = "127.0.0.1:10"
plaintext = true
plaintext_identity = "hub-pipeline"
[identities.hub-pipeline]
zone = "hub"
roles = ["pipeline", "producer", "consumer"]
streams = ["*"]
[streams.operational]
"""
NODE = Target("127.0.0.1:9", zone="hub")
SPARK: Any = None
"""A landing that finds no node asks nothing of Spark."""


def zone(tmp_path: Path, tables: str) -> ZoneConfig:
    """Read a zone's file with some tables."""
    return parse(ZONE + tables, tmp_path / "zone.toml")


def options(tmp_path: Path, table: str, name: str = "p") -> dict[str, Any]:
    """Give the options of a table."""
    config = zone(tmp_path, f"[pipelines.{name}]\n{table}\n")
    return kept.options_of(config, config.pipelines[name])


def on_the_line(job: str, words: Sequence[str]) -> dict[str, Any]:
    """Give the options of a command's line."""
    with get_command(app_of(job)).make_context("x", list(words)) as context:
        return dict(context.params)


def test_a_landing_is_the_same_on_both_ways(tmp_path: Path) -> None:
    """Names, switches, sizes and what is left out."""
    table = 'land = { stream = "operational", buffer = "forward", out = "lake", from = "latest", compact = false, '
    given = options(tmp_path, table + 'file_size = "1MB", every = 2 }')
    words = ["--stream", "operational", "--buffer", "forward", "--out", str(tmp_path / "lake"), "--from", "latest"]
    line = on_the_line("land", [*words, "--no-compact", "--file-size", "1MB", "--every", "2"])
    assert land.landing_settings(**given, node=NODE) == land.landing_settings(**line, node=NODE)
    assert land.landing_settings(**given, node=NODE).file_size_bytes == 1_000_000


def test_an_ingest_is_the_same_on_both_ways(tmp_path: Path) -> None:
    """Tables stand for NAME=VALUE, lists for what is repeated, and folders come last."""
    table = 'ingest = { files = ["in", "-x"], stream = "operational", map = { subject = "m:{a}", "label.b" = "c" }, '
    table += 'to_zone = "z", set = ["predicate=p", "produced_at=2026-03-01T06:00:00Z"], '
    given = options(tmp_path, table + 'type = { v = "number" }, tasks = 2 }')
    words = ["--stream", "operational", "--map", "subject=m:{a}", "--map", "label.b=c", "--set", "predicate=p"]
    words += [
        "--set",
        "produced_at=2026-03-01T06:00:00Z",
        "--to-zone",
        "z",
        "--type",
        "v=number",
        "--tasks",
        "2",
        "--work",
        str(tmp_path / "bsfg-ingest"),
        "--",
        "in",
        "-x",
    ]
    line = on_the_line("ingest", words)
    assert ingest.ingest_wish(**given, node=NODE) == ingest.ingest_wish(**line, node=NODE)


def test_sinks_are_the_same_on_both_ways(tmp_path: Path) -> None:
    """Their options, and files that begin at the folder of the zone's file."""
    given = options(tmp_path, 'sql = { consumer = "app", dsn_file = "dsn", latest = true, max_facts_per_batch = 7 }')
    words = ["--consumer", "app", "--dsn-file", str(tmp_path / "dsn"), "--latest", "--max-facts-per-batch", "7"]
    assert given == on_the_line("sql", words)
    given = options(tmp_path, 'webhook = { consumer = "app", url = "https://x.example/", secret = "s", timeout = 2 }')
    words = ["--consumer", "app", "--url", "https://x.example/", "--secret", str(tmp_path / "s"), "--timeout", "2"]
    assert given == on_the_line("webhook", words)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('sql = { consumer = "app" }', "is not said, or twice"),
        ('sql = { consumer = "app", dsn = "host=x", dsn_file = "dsn" }', "is not said, or twice"),
        ('sql = { consumer = "app", dsn = "host=x password=y" }', "--dsn holds a password"),
        ('sql = { consumer = "app", dsn = "host=x sslpassword=y" }', "--dsn holds a password"),
        ('sql = { consumer = "app", dsn = "host=x", schema = "A B" }', "--schema 'A B' is not a schema name"),
        ('sql = { consumer = "app", dsn = "nothing" }', "is no connection string"),
        ('webhook = { consumer = "app", url = "http://plant.example/" }', "--url must start with https://"),
    ],
)
def test_what_is_wrong_with_a_sink_is_said_before_it_runs(tmp_path: Path, table: str, says: str) -> None:
    """By `--check`, with the name of its table and without its password."""
    file = tmp_path / "zone.toml"
    file.write_text(f"{ZONE}[pipelines.p]\n{table}\n")
    wrong = CliRunner().invoke(app, ["pipeline", "run", "-c", str(file), "--check"])
    assert isinstance(wrong.exception, InvalidArgument), wrong.output
    assert wrong.exception.message.startswith("[pipelines.p]: ")
    assert says in wrong.exception.message


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            'sql = { consumer = "app", dsn_file = "away" }',
            "--dsn-file {}/away cannot be read: No such file or directory",
        ),
        ('sql = { consumer = "app", dsn_file = "." }', "--dsn-file {} cannot be read: Is a directory"),
        ('sql = { consumer = "app", dsn_file = "bytes" }', "--dsn-file {}/bytes cannot be read: it is no text"),
    ],
)
def test_a_file_that_is_not_there_is_no_question_of_rights(tmp_path: Path, table: str, says: str) -> None:
    """The path is to be checked; another user could not read it either. No words of Python's are in it."""
    file = tmp_path / "zone.toml"
    file.write_text(f"{ZONE}[pipelines.p]\n{table}\n")
    (tmp_path / "bytes").write_bytes(b"host=\xff")
    wrong = CliRunner().invoke(app, ["pipeline", "run", "-c", str(file), "--check"])
    assert isinstance(wrong.exception, StorageUnreadable), wrong.output
    assert wrong.exception.message == f"[pipelines.p]: {says.format(tmp_path)}"
    assert wrong.exception.hint == "Check the path."


def test_a_string_in_a_file_is_blamed_by_the_name_of_its_option(tmp_path: Path) -> None:
    """Nobody gave --dsn."""
    file = tmp_path / "zone.toml"
    file.write_text(f'{ZONE}[pipelines.p]\nsql = {{ consumer = "app", dsn_file = "dsn" }}\n')
    (tmp_path / "dsn").write_text("nothing")
    wrong = CliRunner().invoke(app, ["pipeline", "run", "-c", str(file), "--check"])
    assert isinstance(wrong.exception, InvalidArgument), wrong.output
    assert wrong.exception.message == "[pipelines.p]: --dsn-file is no connection string of PostgreSQL"


def test_an_audit_and_links_are_the_same_on_both_ways(tmp_path: Path) -> None:
    """Whatever their commands take."""
    given = options(tmp_path, 'audit = { link = "from-a", from = 5, to = 9, deep = false, stream = ["operational"] }')
    words = ["--link", "from-a", "--from", "5", "--to", "9", "--shallow", "--stream", "operational"]
    assert given == on_the_line("audit", words)
    given = options(tmp_path, 'replicate = { link = ["a", "b"], bundles = 3, replay_backlog = 7 }')
    line = on_the_line("replicate", ["--link", "a", "--link", "b", "--bundles", "3", "--replay-backlog", "7"])
    assert {name: given[name] for name in ("link", "bundles", "replay_backlog")} == {
        name: line[name] for name in ("link", "bundles", "replay_backlog")
    }


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('land = { strem = "operational", out = "x" }', "strem is no option of its command; did you mean 'stream'"),
        ('land = { stream = "operational" }', "Missing option '--out'"),
        ('land = { out = "x", every = "soon" }', "Invalid value for '--every'"),
        ('land = { out = "x", once = true }', "once is not for a pipeline that is kept alive"),
        ('land = { out = "x", compact = "yes" }', "compact must be true or false"),
        ('land = { out = ["x"] }', "out must be a text or a number"),
        ('audit = { master = "local" }', "master is not for a pipeline"),
        ('ingest = { files = [], stream = "operational" }', "Missing argument"),
        ('replicate = { work = "elsewhere" }', "work is not for a pipeline"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, table: str, says: str) -> None:
    """With its name, and what was probably meant."""
    with pytest.raises(InvalidArgument) as caught:
        options(tmp_path, table)
    assert says.replace("'stream'", "") in caught.value.message.replace("'stream'", "").replace('"stream"', "")
    assert caught.value.message.startswith("[pipelines.p] ")


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ("[pipelines.p]\n", "says nothing of what it does"),
        ("[pipelines.p]\nreplicate = {}\naudit = {}\n", "has replicate and audit"),
        ('[pipelines.p]\nreplicate = {}\nevery = "1h"\n', "has an effect only with ingest and audit"),
        ('[pipelines.p]\nsql = {}\nevery = "1h"\n', "has an effect only with ingest and audit"),
        ('[pipelines.p]\naudit = {}\nidentity = "nobody"\n', "has no row in [identities]"),
        ('[pipelines.p]\naudit = {}\nrestart_after = "1h"\n', "must not be longer than restart_max"),
        ("[pipelines.p]\nreplicate = {}\n[pipelines.q]\nreplicate = {}\n", "[pipelines.p] moves links already"),
        (
            '[pipelines.p]\nland = { out = "lake" }\n[pipelines.q]\nland = { out = "x/../lake" }\n',
            "[pipelines.p] lands in x/../lake already",
        ),
        ('[pipelines.p]\nland = "lake"\n', "must be a table"),
        ("[pipelines.P]\nreplicate = {}\n", "is not a pipeline name"),
    ],
)
def test_what_no_node_starts_with(tmp_path: Path, tables: str, says: str) -> None:
    """A table that contradicts itself is a mistake of the file."""
    with pytest.raises(ConfigInvalid) as caught:
        zone(tmp_path, tables)
    assert says in caught.value.message


def test_there_are_no_more_tables_than_a_node_is_told_of(tmp_path: Path) -> None:
    """Else it would be told of none, and call all of them dead."""
    tables = [f"[pipelines.p{number}]\naudit = {{}}\n" for number in range(201)]
    zone(tmp_path, "".join(tables[:200]))
    with pytest.raises(ConfigInvalid, match="201 tables, the limit is 200"):
        zone(tmp_path, "".join(tables))


def test_columns_of_a_landing_come_from_a_file_beside_that_of_the_zone(tmp_path: Path) -> None:
    """As every path of a table, wherever the command is started."""
    file = tmp_path / "zone.toml"
    file.write_text(
        ZONE + '[pipelines.lake]\nland = { stream = "operational", out = "lake", columns = "@typed.txt" }\n'
    )
    (tmp_path / "typed.txt").write_text("# of all presses\nvalue double\n")
    done = CliRunner().invoke(app, ["pipeline", "run", "-c", str(file), "--check"])
    assert done.exit_code == 0, done.exception


def test_a_landing_works_when_it_lands(tmp_path: Path) -> None:
    """To find the node is not enough while facts wait; and the time of a batch is that of the last one."""
    given = options(tmp_path, 'land = { stream = "operational", out = "lake" }')
    landing, diary, done = kept.KeptLanding({**given, "node": NODE}), Diary(), Landed(backlog=7)
    lander: Any = SimpleNamespace(has_joined=True, done=done, problem=None, turns=0)
    landing._lander = lander
    landing.look(diary)
    assert diary.last_good_unix_ms == 0
    done.batches, done.seconds, done.backlog, lander.turns = 1, 4.0, 2, 1
    landing.look(diary)
    assert diary.last_good_unix_ms > 0
    assert diary.batch_seconds == 4.0
    done.batches, done.seconds = 2, 4.5
    landing.look(diary)
    assert diary.batch_seconds == 0.5
    landing.look(diary)
    assert diary.batch_seconds == 0.5


@pytest.mark.parametrize("only", [(), ("lake",)])
def test_the_last_table_that_is_taken_out_ends(tmp_path: Path, only: tuple[str, ...]) -> None:
    """Whether it is gone or only not enabled; when it is back it begins again."""
    file = tmp_path / "zone.toml"
    table = '[pipelines.lake]\nland = { stream = "operational", out = "lake" }\n'
    place = kept.RunPlace(file, None, None, "local[1]", tmp_path, Layout())
    supervisor = Supervisor(SPARK, NodeAccess("127.0.0.1:9"), "here", Schedule(tmp_path / "schedule.json"))
    tables = ZonePipelines(file, only, FollowedFiles(file))
    said = []
    for text in (table, table + "enabled = false\n", table, ""):
        file.write_text(ZONE + text)
        said += tables.keep(supervisor, place)
    assert said == ["lake: new", "lake: ended", "lake: new", "lake: ended"]
    assert not supervisor.keepers
    with pytest.raises(InvalidArgument):
        tables.rows()


def test_check_says_what_would_run_and_starts_nothing(tmp_path: Path) -> None:
    """With its exit code: a mistake in a table is found before Spark is started."""
    file = tmp_path / "zone.toml"
    file.write_text(ZONE + '[pipelines.lake]\nland = { stream = "operational", out = "lake" }\n')
    done = CliRunner().invoke(app, ["pipeline", "run", "-c", str(file), "--check"])
    assert done.exit_code == 0, done.output
    assert "lake" in done.output
    assert "all the time" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["zone.toml"]
    none = CliRunner().invoke(app, ["pipeline", "run", "-c", str(file), "--check", "--only", "lak"])
    assert isinstance(none.exception, InvalidArgument)
    assert "has no [pipelines.lak]" in none.exception.message
    file.write_text(ZONE + '[pipelines.lake]\nland = { stream = "operational", out = "lake", by = "noon" }\n')
    wrong = CliRunner().invoke(app, ["pipeline", "run", "-c", str(file), "--check"])
    assert isinstance(wrong.exception, InvalidArgument)
    assert "[pipelines.lake]: --by 'noon'" in wrong.exception.message
    file.write_text(ZONE)
    empty = CliRunner().invoke(app, ["pipeline", "run", "-c", str(file)])
    assert isinstance(empty.exception, InvalidArgument)
    assert "no [pipelines.…] table" in empty.exception.message
