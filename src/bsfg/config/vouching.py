"""Whether a certificate stands for a row of [identities]: its authority must speak for the row's zone.

A name alone is not an identity where several authorities are trusted: any of them could sign any name. So each is bound
to zones by [authorities]. Where nothing is bound, the authority behind the node's own certificate speaks for all zones
and the others for none. What a certificate opened stays open for long, so its end and its revocation are asked here
too, with every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bsfg.config.access import Authority, Identity
from bsfg.config.kinds import ANY
from bsfg.errors import CertificateInvalid, IdentityRevoked, IdentityUnknown, ServerIdentityMismatch
from bsfg.wire.peer import PeerNames, Shown, check_end

if TYPE_CHECKING:
    from bsfg.wire.certs import IssuingAuthority, Trust


@dataclass(frozen=True, slots=True)
class Vouching:
    """The authorities as the files have them, and what the configuration lets them speak for.

    Without ``trust``, as where nobody shows a certificate, only the end of a certificate counts.
    """

    trust: Trust | None = None
    authorities: Mapping[str, Authority] = field(default_factory=dict)

    def check(self, peer: PeerNames, row: Identity, now_unix_ms: int) -> None:
        """Raise unless the certificate stands for the row at this moment.

        `IdentityUnknown` names an authority that does not speak for it; `CertificateInvalid` and `IdentityRevoked`
        are for a certificate that is no longer in force.
        """
        certificate = peer.certificate
        if certificate is None:
            return
        if self.trust is not None:
            self._check_authority(certificate, row, self.trust)
            self.trust.check(certificate, now_unix_ms)
        else:
            check_end(certificate, now_unix_ms)

    def check_server(self, peer: PeerNames, row: Identity, now_unix_ms: int) -> None:
        """Raise unless a server that has the right name is the one that is meant."""
        try:
            self.check(peer, row, now_unix_ms)
        except IdentityUnknown as error:
            raise ServerIdentityMismatch(error.message, hint=error.hint, expected=row.name) from None
        except IdentityRevoked as error:
            raise CertificateInvalid(error.message, hint="The other side must show another certificate.") from None

    def unbound(self) -> str | None:
        """Describe the trusted authorities that speak for nobody, None when there are none."""
        if self.trust is None:
            return None
        speaking = [row.key for row in self.authorities.values()] or [self.trust.home.key if self.trust.home else ""]
        tops = {self.trust.top(key) for key in speaking}
        idle = [str(each) for each in self.trust.signers if self.trust.top(each.key) not in tops]
        if not idle or (not self.authorities and len(self.trust.roots) == 1):
            return None
        return f"[tls] ca has authorities that speak for no zone for want of a row in [authorities]: {', '.join(idle)}"

    def stale(self, now_unix_ms: int) -> str | None:
        """Describe the revocation lists that are out of date, None when there are none."""
        found = self.trust.stale(datetime.fromtimestamp(now_unix_ms / 1000, UTC)) if self.trust is not None else []
        return f"no newer revocation list of {', '.join(found)}: what was revoked since is not known" if found else None

    def _check_authority(self, certificate: Shown, row: Identity, trust: Trust) -> None:
        path = trust.judge(certificate).path
        if row.authority is not None:
            allowed = any(each.key == self.authorities[row.authority].key for each in path)
        elif self.authorities:
            allowed = self._speaks(path, row.zone)
        else:
            allowed = self._is_home(path, trust)
        if allowed:
            return
        by = str(path[0]) if path else "an authority that is not in [tls] ca itself"
        hint = (
            f'Use a certificate of an authority that does, or bind this one: [authorities.NAME] zones = ["{row.zone}"].'
        )
        raise IdentityUnknown(
            f"{row.name!r} is shown by a certificate of {by}, which does not speak for the zone {row.zone!r}",
            hint=hint,
            identity=row.name,
            issuer=by,
        )

    def _speaks(self, path: tuple[IssuingAuthority, ...], zone: str) -> bool:
        """Let the nearest authority that has a row decide."""
        rows = {row.key: row for row in self.authorities.values()}
        bound = next((rows[each.key] for each in path if each.key in rows), None)
        return bound is not None and (ANY in bound.zones or zone in bound.zones)

    def _is_home(self, path: tuple[IssuingAuthority, ...], trust: Trust) -> bool:
        if len(trust.roots) == 1:
            return bool(path)
        return bool(path) and trust.home is not None and trust.top(path[-1].key) == trust.home.key
