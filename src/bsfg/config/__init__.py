"""A zone's configuration: one TOML file, read and checked as a whole before anything starts.

Every problem is reported at once, each with its key and line::

    config = load(Path("zone.toml"))
    config.streams["operational"].store_policy
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
from pathlib import Path

from bsfg.config.access import Authority as Authority
from bsfg.config.access import Identity as Identity
from bsfg.config.access import Link as Link
from bsfg.config.access import Serve as Serve
from bsfg.config.access import Stream as Stream
from bsfg.config.access import Token as Token
from bsfg.config.access import consumer_name as consumer_name
from bsfg.config.checks import doubts_of as doubts_of
from bsfg.config.checks import problems_of
from bsfg.config.declare import ConfigReader, Problem
from bsfg.config.kinds import Address as Address
from bsfg.config.kinds import Engine as Engine
from bsfg.config.kinds import IdentityFrom as IdentityFrom
from bsfg.config.kinds import PipelineKind as PipelineKind
from bsfg.config.kinds import Role as Role
from bsfg.config.kinds import TokenRole as TokenRole
from bsfg.config.positions import lines_of
from bsfg.config.settings import Alerts as Alerts
from bsfg.config.settings import PipelineTable as PipelineTable
from bsfg.config.settings import ZoneConfig as ZoneConfig
from bsfg.errors import ConfigInvalid


def load(path: Path) -> ZoneConfig:
    """Read and check a file, or raise `ConfigInvalid` with everything that is wrong with it."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        hint = f"Write one with `bsfg init {path.parent} --zone NAME`, or give the right path."
        raise ConfigInvalid(f"there is no file {path}", hint=hint) from None
    except UnicodeDecodeError as error:
        raise ConfigInvalid(
            f"{path} is not UTF-8 text: byte {error.start} is wrong", hint="Save it as UTF-8."
        ) from None
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read: {error.strerror}", hint="Check the path and its rights.") from None
    return parse(text, path)


def parse(text: str, source: Path = Path("zone.toml")) -> ZoneConfig:
    """Check a configuration given as text; ``source`` is what its relative paths start from."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        line = int(found[1]) if found else len(text.splitlines())
        raise _invalid(source, [{"line": line, "key": "", "problem": f"is not TOML: {error}"}]) from None
    reader = ConfigReader()
    config = reader.file(ZoneConfig, data)
    problems = reader.problems
    if reader.whole:
        # A row with an unreadable key would only lead to second problems that follow from the first.
        broken = {problem.row for problem in problems}
        problems = problems + [problem for problem in problems_of(config) if problem.row not in broken]
    if problems:
        raise _invalid(source, _located(text, problems))
    return dataclasses.replace(config, source=source, digest=text_digest(text.encode("utf-8", "surrogatepass")))


def text_digest(data: bytes) -> str:
    """Give the digest by which the text of a file is known."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _located(text: str, problems: list[Problem]) -> list[dict[str, object]]:
    """Give each problem the line of its key, or that of the innermost table that is there."""
    lines = lines_of(text)
    found = []
    for problem in problems:
        path = problem.path
        while path not in lines:
            path = path[:-1]
        found.append({"line": lines[path], "key": problem.key, "problem": problem.says})
    return sorted(found, key=lambda row: (row["line"], row["key"]))


def _invalid(source: Path, problems: list[dict[str, object]]) -> ConfigInvalid:
    count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
    listed = "".join(
        f"\n  line {row['line']}: {row['key']}{': ' if row['key'] else ''}{row['problem']}" for row in problems
    )
    return ConfigInvalid(f"{source} has {count}:{listed}", file=str(source), problems=problems)
