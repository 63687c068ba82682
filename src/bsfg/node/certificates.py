"""The certificates of a node and how long they last: its own, its authorities', and those of callers beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from bsfg.config import ZoneConfig
from bsfg.errors import BsfgError
from bsfg.ports import Clock
from bsfg.wire.certcheck import Expiry, Lifetime, lifetime
from bsfg.wire.certs import load_certificates
from bsfg.wire.peer import names_of
from bsfg.wording import counted

LOOK_AGAIN_MS = 60_000


class Use(StrEnum):
    """What a certificate is for."""

    NODE = "node"
    AUTHORITY = "authority"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class SeenCertificate:
    """One certificate as it stands now; ``file`` is named as in the configuration."""

    use: Use
    file: str
    name: str
    not_after_unix_ms: int
    life: Lifetime

    @property
    def alert(self) -> str | None:
        """Give what an operator should hear, None when there is nothing."""
        if self.life.expiry == Expiry.OK:
            return None
        left = counted(self.life.left_days, "day")
        return f"{self.file} is {self.life.expiry}: {left} left; `bsfg certs renew` makes a new one"

    def to_dict(self) -> dict[str, Any]:
        """Give the form of the status document."""
        return {
            "use": str(self.use),
            "file": self.file,
            "name": self.name,
            "not_after_unix_ms": self.not_after_unix_ms,
            "days_left": self.life.left_days,
            "expiry": str(self.life.expiry),
        }


class Certificates:
    """Reads certificate files, and remembers for a while what was in them."""

    def __init__(self, config: ZoneConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._seen: list[dict[str, Any]] = []
        self._seen_ms: int | None = None

    def own(self) -> list[SeenCertificate]:
        """Look at the node's certificate and its authorities now; of a file with several, at the first to end.

        Raises `CertificateInvalid` for a file that cannot be read.
        """
        found = []
        for use, path in self._files():
            candidates = [self._look(use, path, certificate) for certificate in load_certificates(self._path(path))]
            # A node's file has its own certificate first and intermediates after it; each can end the chain.
            found.append(min(candidates, key=lambda seen: seen.life.left_seconds))
        return found

    def documents(self) -> list[dict[str, Any]]:
        """Describe all certificates that are at hand, callers' included; what cannot be read is left out."""
        now_ms = self._clock.monotonic_ms()
        if self._seen_ms is None or now_ms - self._seen_ms >= LOOK_AGAIN_MS:
            self._seen_ms, self._seen = now_ms, [seen.to_dict() for seen in self._all()]
        return self._seen

    def _all(self) -> Iterator[SeenCertificate]:
        for use, path in (*self._files(), *self._callers()):
            try:
                certificates = load_certificates(self._path(path))
            except (BsfgError, OSError):
                continue
            yield from (self._look(use, path, each) for each in certificates[: None if use == Use.AUTHORITY else 1])

    def _files(self) -> list[tuple[Use, PurePath]]:
        tls = self._config.tls
        named = [(Use.NODE, tls.certificate), (Use.AUTHORITY, tls.ca)]
        return [] if self._config.listen.plaintext else [(use, path) for use, path in named if path is not None]

    def _callers(self) -> Iterator[tuple[Use, PurePath]]:
        """Find the certificates of identities where `bsfg certs issue` puts them: beside the node's."""
        for _, path in self._files()[:1]:
            for name in self._config.identities:
                beside = path.with_name(f"{name}.crt") if "/" not in name else path
                if beside != path and self._path(beside).is_file():
                    yield Use.CALLER, beside

    def _path(self, path: PurePath) -> Path:
        return self._config.path(path)

    def _look(self, use: Use, path: PurePath, certificate: Any) -> SeenCertificate:
        now = datetime.fromtimestamp(self._clock.now_unix_ms() / 1000, UTC)
        life = lifetime(certificate, now, self._config.tls.expiry_warning_seconds)
        ends_unix_ms = int(certificate.not_valid_after_utc.timestamp() * 1000)
        return SeenCertificate(use, str(path), str(names_of(certificate)), ends_unix_ms, life)
