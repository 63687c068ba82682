"""What a log shows of itself over the wire: enough to audit a copy of it, and to another zone no more than that."""

from __future__ import annotations

import numpy as np
import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site

from bsfg.config.access import Identity
from bsfg.config.kinds import Role
from bsfg.digest import LogHistory, RangeDigest, Restore
from bsfg.errors import FrameInvalid, InvalidArgument, PermissionRefused
from bsfg.gaps import RangeSet, listed
from bsfg.node.service import gather
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, GapRecord, GapSet
from bsfg.retention import GapReason
from bsfg.stores.shared.buffer import SharedBuffer
from bsfg.testing.facts import batch
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.convert import LogEvidence, evidence_of, evidence_pieces, gap_set_message

PEER = "enterprise.operational"


async def told(site: Site, count: int = 30) -> list[bytes]:
    """Fill the store buffer and give the chain head after each frame."""
    store = await site.parts.store(STREAM)
    return [(await store.append(batch(10, first=first))).chain_head for first in range(0, count, 10)]


async def test_a_peer_sees_what_an_audit_needs(sites: Sites) -> None:
    """Bounds, chain, kept digests, gaps and its own cursor; heads are found, and strange ones are not."""
    site = await sites(storage="log")
    heads = await told(site)
    store = await site.parts.store(STREAM)
    cursors = site.parts.storage.cursors
    await cursors.create(ConsumerSpec(PEER, STREAM))
    await cursors.create(ConsumerSpec("historian", STREAM, required=False))
    await cursors.commit(PEER, Confirmation(through=29, peer_head=b"h" * 32))
    await store.truncate_before(30)
    heads += [(await store.append(batch(5, first=30))).chain_head]
    site.act_as("enterprise-bsfg")
    found = await site.client().evidence(STREAM, Buffer.STORE, [*heads, b"x" * 32])
    assert (found.log_id, found.start, found.end, found.chain_head) == (store.log_id, 30, 35, heads[-1])
    assert found.history.heads == {heads[0]: None, heads[1]: None, heads[2]: 30, heads[3]: 35, b"x" * 32: None}
    [kept] = found.history.kept
    digest = RangeDigest()
    digest.add(batch(30))
    assert (kept.first, kept.last, kept.range_digest) == (0, 29, digest.hexdigest())
    assert kept.chain_after == heads[2]
    [cursor] = found.cursors
    assert (cursor.spec.name, cursor.checkpoint.committed, cursor.peer_head) == (PEER, 29, b"h" * 32)
    assert cursor.spec.start == "earliest"


async def test_another_zone_does_not_see_what_concerns_others(sites: Sites) -> None:
    """Gap records of other consumers are shown to the zone's own callers alone."""
    site = await sites(storage="log")
    await told(site)
    gaps = [
        GapRecord(1, 1, GapReason.QUARANTINED, 1, "enterprise: conflict"),
        GapRecord(2, 2, GapReason.QUARANTINED, 1, "lab: conflict"),
        GapRecord(3, 3, GapReason.RETIRED, 1, "lab.operational: gone"),
        GapRecord(4, 4, GapReason.EVICTED, 1),
    ]
    await (await site.parts.store(STREAM)).record_gaps(gaps)
    client = site.client()
    site.act_as("enterprise-bsfg")
    assert [gap.first for gap in listed((await client.evidence(STREAM, Buffer.STORE)).gaps)] == [1, 4]
    site.act_as("pipeline")
    assert listed((await client.evidence(STREAM, Buffer.STORE)).gaps) == gaps


async def test_zone_and_not_role_decides_what_evidence_shows(sites: Sites) -> None:
    """Whatever its role, a row of another zone sees what concerns itself, and one of this zone sees all."""
    site = await sites(storage="log")
    await told(site)
    gaps = [
        GapRecord(1, 1, GapReason.QUARANTINED, 1, "enterprise: conflict"),
        GapRecord(2, 2, GapReason.QUARANTINED, 1, "lab: conflict"),
        GapRecord(3, 3, GapReason.RETIRED, 1, "lab.operational: gone"),
        GapRecord(4, 4, GapReason.QUARANTINED, 1, "historian: conflict"),
        GapRecord(5, 5, GapReason.RETIRED, 1, f"{PEER}: gone"),
        GapRecord(6, 6, GapReason.RETIRED, 1, "historian: gone"),
        GapRecord(7, 7, GapReason.EVICTED, 1),
    ]
    await (await site.parts.store(STREAM)).record_gaps(gaps)

    async def seen(zone: str, role: Role) -> list[int]:
        # The configuration allows another zone no role but peer: this is the rule behind that one.
        row = Identity(name="historian", zone=zone, roles=(role,), streams=("*",))
        found = await gather(site.parts, row, STREAM, Buffer.STORE, [])
        return [gap.first for gap in listed(found.gaps)]

    assert await seen("enterprise", Role.PEER) == [1, 5, 7]
    for role in set(Role) - {Role.PEER}:
        assert await seen("enterprise", role) == [4, 6, 7], role
    for role in Role:
        assert await seen("plant", role) == [1, 2, 3, 4, 5, 6, 7], role


async def test_evidence_is_refused_like_reading(sites: Sites) -> None:
    """Who may not read a buffer does not get its evidence, and nobody has the log searched without end."""
    site = await sites()
    client = site.client()
    for identity, buffer in (("enterprise-bsfg", Buffer.FORWARD), ("viewer", Buffer.STORE), ("narrow", Buffer.STORE)):
        site.act_as(identity)
        with pytest.raises(PermissionRefused):
            await client.evidence(STREAM, buffer)
    site.act_as("pipeline")
    with pytest.raises(InvalidArgument, match="the limit is 16"):
        await client.evidence(STREAM, Buffer.STORE, [bytes(32)] * 17)


async def test_a_storage_without_a_chain_answers_without_one(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the storage keeps no chain, heads get no answer instead of a wrong one."""
    monkeypatch.delattr(SharedBuffer, "history")
    site = await sites(storage="memory")
    await told(site)
    found = await site.client().evidence(STREAM, Buffer.STORE, [bytes(32)])
    assert (found.start, found.end, dict(found.history.heads), found.history.kept) == (0, 30, {}, ())


def test_the_restores_of_a_log_are_told() -> None:
    """Who audits a restored log learns from where on it is another one, since when, and which it was before."""
    history = LogHistory(restores=(Restore(400, 1_700_000_000_000, "ab" * 16), Restore(0, 5, "")))
    written = b"".join(evidence_pieces(LogEvidence("cd" * 16, 0, 500, b"", history=history)))
    found = evidence_of(pb.GetEvidenceResponse.FromString(written), STREAM, Buffer.STORE)
    assert found.history.restores == history.restores


async def test_more_ranges_than_anybody_lists_are_no_evidence(sites: Sites) -> None:
    """Four of them take a byte on the wire, and each is an object where they are looked at."""
    firsts = np.arange(0, 2 * 4_000_001, 2)
    ranges = RangeSet(firsts, firsts, np.zeros(len(firsts), dtype=np.int64))
    answer = pb.GetEvidenceResponse(gap_sets=[gap_set_message(GapSet(GapReason.EXPIRED, ranges))])
    client = (await sites()).client()

    async def lies(*arguments: object) -> pb.GetEvidenceResponse:
        return answer

    client.connection.call = lies  # type: ignore[method-assign,assignment]
    assert answer.ByteSize() < 2 << 20
    with pytest.raises(FrameInvalid, match="4000001 ranges"):
        await client.evidence(STREAM, Buffer.STORE)
