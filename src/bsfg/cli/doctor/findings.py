"""What the checks of `bsfg doctor` say, and what they look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bsfg.cli.inspect.gather import FolderInfo
    from bsfg.config import ZoneConfig
    from bsfg.wire.tls import TlsFiles


class DoctorLevel(StrEnum):
    """How a finding counts; only a problem keeps a node from doing its work."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One thing that was looked at: what was found and, unless it is right, what to do next."""

    level: DoctorLevel
    check: str
    says: str
    do: str = ""

    def to_dict(self) -> dict[str, str]:
        """Give the form for ``--json``."""
        result = {"level": str(self.level), "check": self.check, "says": self.says}
        return result | ({"do": self.do} if self.do else {})


@dataclass(frozen=True)
class Subject:
    """What is examined: a zone's configuration on this machine, at one moment."""

    config: ZoneConfig
    now: datetime
    writer_pid: int | None = None
    """The process that has the data folder open for writing: the zone's own node, if it runs."""
    progress: Callable[[int, int], None] | None = None
    """Is told how many bytes were verified, and how many there are."""

    @cached_property
    def data(self) -> FolderInfo:
        """What is in the data folder; it is gathered once for all checks."""
        from bsfg.cli.inspect.gather import gather

        return gather(self.config.data_folder)

    @property
    def tls_files(self) -> TlsFiles | None:
        """The node's certificate files, None when it serves without TLS."""
        from bsfg.wire.tls import TlsFiles

        tls, config = self.config.tls, self.config
        if tls.ca is None or tls.certificate is None or tls.key is None:
            return None
        return TlsFiles(config.path(tls.ca), config.path(tls.certificate), config.path(tls.key))


Check = Callable[[Subject], Iterator[DoctorFinding]]


@dataclass(frozen=True, slots=True)
class Says:
    """Makes the findings of one check."""

    check: str

    def ok(self, says: str) -> DoctorFinding:
        """Say that something is right."""
        return DoctorFinding(DoctorLevel.OK, self.check, says)

    def warning(self, says: str, do: str) -> DoctorFinding:
        """Say that something works but should be looked at."""
        return DoctorFinding(DoctorLevel.WARNING, self.check, says, do)

    def problem(self, says: str, do: str) -> DoctorFinding:
        """Say that something does not work."""
        return DoctorFinding(DoctorLevel.PROBLEM, self.check, says, do)


def existing_parent(path: Path) -> Path:
    """Give the path itself, or the innermost folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def counted(number: int, what: str) -> str:
    """Write a number of things."""
    plural = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{number:,} {what if number == 1 else plural}"
