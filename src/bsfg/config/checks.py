"""What a single key cannot show: combinations of settings that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from os.path import normpath
from pathlib import PurePath
from urllib.parse import urlsplit

from bsfg.config.access import Identity, Link, Serve, Stream, consumer_name
from bsfg.config.declare import Problem
from bsfg.config.kinds import ANY, Address, PipelineKind, Role, Safety, nearest
from bsfg.config.positions import Path
from bsfg.config.settings import ZoneConfig
from bsfg.digest import hasher_named
from bsfg.errors import HasherUnknown, InvalidArgument, PolicyInvalid
from bsfg.ports import Buffer
from bsfg.retention import DAY_SECONDS, Overflow
from bsfg.sealing import WITH_FIELDS, MessageIds
from bsfg.wire.peer import looks_like
from bsfg.wire.service import PIPELINES_MAX

CONSUMER_NAME_MAX = 64
OUR_BACKENDS = ("jetstream", "log", "memory", "postgres")
BACKENDS = "bsfg.backends"
"""The group of entry points by which packages bring storages of their own."""
_LOCAL_ROLES = (Role.PRODUCER, Role.CONSUMER, Role.PIPELINE)


def problems_of(config: ZoneConfig) -> list[Problem]:
    """List every contradiction, in the order of the file's tables."""
    checks: tuple[Callable[[ZoneConfig], Iterator[Problem]], ...] = (
        _zone,
        _listen,
        _tls,
        _authorities,
        _identities,
        _tokens,
        _streams,
        _links,
        _serve,
        _consumer_names,
        _signing,
        _pipelines,
        _storage,
        _rest,
    )
    return [problem for check in checks for problem in check(config)]


def doubts_of(config: ZoneConfig) -> list[Problem]:
    """List what a correct file says and hardly means: rows that may do nothing, and streams that nobody may carry."""
    return [*_rows_without_streams(config), *_served_in_vain(config), *_pulled_in_vain(config)]


def _rows_without_streams(config: ZoneConfig) -> Iterator[Problem]:
    for name, row in config.identities.items():
        if not row.streams and not row.revoked:
            says = 'no stream is named, so it may use none; name them, or use ["*"] for all'
            yield Problem(("identities", name, "streams"), says)


def _served_in_vain(config: ZoneConfig) -> Iterator[Problem]:
    for zone, serve in config.serve.items():
        rows = [row for row in config.identities.values() if Role.PEER in row.roles and row.zone == zone]
        usable = {stream for row in rows for stream in config.streams_of(row)}
        for stream in config.streams_of(serve):
            if usable and stream not in usable:
                says = f"{stream!r} is kept for this zone, but no peer of it has {stream!r} in its row of [identities]"
                yield Problem(("serve", zone, "streams"), says)


def _pulled_in_vain(config: ZoneConfig) -> Iterator[Problem]:
    for name, link in config.links.items():
        row = config.identities[link.expected_server]
        for stream in config.streams_of(link):
            if row.streams and stream not in config.streams_of(row):
                says = f"{stream!r} cannot be brought: [identities.{row.name}] does not name it in streams"
                yield Problem(("links", name, "streams"), says)


def _zone(config: ZoneConfig) -> Iterator[Problem]:
    try:
        hasher_named(config.zone.hasher)
    except HasherUnknown:
        name = str(config.zone.hasher)
        yield Problem(("zone", "hasher"), f"\"{name}\" needs the extra that brings it: pip install 'bsfg[{name}]'")
    ids, fields = config.zone.message_ids, config.zone.semantic_fields
    if ids in WITH_FIELDS and not fields:
        yield Problem(("zone", "message_ids"), f'"{ids}" needs semantic_fields, such as ["produced_at_unix_ms"]')
    if fields and ids not in WITH_FIELDS:
        yield Problem(("zone", "semantic_fields"), 'has an effect only with message_ids = "semantic"; leave it out')
        return
    try:
        MessageIds(ids, fields)
    except InvalidArgument as error:
        yield Problem(("zone", "semantic_fields"), error.message)


def _listen(config: ZoneConfig) -> Iterator[Problem]:
    listen = config.listen
    if listen.http_enabled and listen.grpc == listen.http and listen.grpc.port:
        yield Problem(("listen", "http"), f"is the same address as grpc, {listen.grpc}")
    if not listen.plaintext:
        if listen.plaintext_identity is not None:
            yield Problem(("listen", "plaintext_identity"), "has an effect only with plaintext = true; leave it out")
        return
    for name, address in (("grpc", listen.grpc), ("http", listen.http)):
        if not address.is_loopback and (name == "grpc" or listen.http_enabled):
            says = f'plaintext = true needs a loopback address such as "127.0.0.1:{address.port}", not "{address}"'
            yield Problem(("listen", name), says)
    if listen.plaintext_identity is None:
        yield Problem(("listen", "plaintext"), "needs plaintext_identity: the row of [identities] that callers act as")
    elif listen.plaintext_identity not in config.identities:
        yield _no_identity(config, ("listen", "plaintext_identity"), listen.plaintext_identity)


def _tls(config: ZoneConfig) -> Iterator[Problem]:
    if config.listen.plaintext and not config.links:
        return
    for name in ("ca", "certificate", "key"):
        if getattr(config.tls, name) is None:
            yield Problem(("tls",), f"{name} is missing; make one with `bsfg certs`, or see [listen] plaintext")


def _authorities(config: ZoneConfig) -> Iterator[Problem]:
    keys: dict[str, str] = {}
    for name, row in config.authorities.items():
        path = ("authorities", name)
        if not row.zones:
            yield Problem((*path, "zones"), 'names no zone; leave the row out, or use ["*"] for all')
        other = keys.setdefault(row.key, name)
        if other != name:
            yield Problem((*path, "key"), f"is that of [authorities.{other}] too; an authority has one row")


def _identities(config: ZoneConfig) -> Iterator[Problem]:
    spelling = {config.zone.name.lower(): config.zone.name}
    looks: dict[str, str] = {}
    for name, row in config.identities.items():
        path = ("identities", name)
        other = looks.setdefault(looks_like(name), name)
        if other != name:
            yield Problem(path, f"could be taken for {other!r}, which has a row of its own; names differ in more")
        yield from _signed_by(config, row, path)
        known = spelling.setdefault(row.zone.lower(), row.zone)
        if known != row.zone:
            yield Problem((*path, "zone"), f"{row.zone!r} is spelled {known!r} elsewhere; a zone has one spelling")
        yield from _roles(config, row, path)
        if row.revoked and not row.reason.strip():
            yield Problem((*path, "revoked"), "needs a reason, which every refusal will show")
        if row.relay_for and not {Role.PEER, Role.PRODUCER} & set(row.roles):
            yield Problem((*path, "relay_for"), "has an effect only for the roles peer and producer; leave it out")
        yield from _known_streams(config, row, path)


def _signed_by(config: ZoneConfig, row: Identity, path: Path) -> Iterator[Problem]:
    if row.authority is None:
        return
    bound = config.authorities.get(row.authority)
    if bound is None:
        says = f"{row.authority!r} has no row in [authorities]{nearest(row.authority, config.authorities)}"
        yield Problem((*path, "authority"), says)
    elif ANY not in bound.zones and row.zone not in bound.zones:
        yield Problem((*path, "authority"), f"[authorities.{row.authority}] does not speak for the zone {row.zone!r}")


def _roles(config: ZoneConfig, row: Identity, path: Path) -> Iterator[Problem]:
    own = row.zone == config.zone.name
    if not row.roles:
        yield Problem((*path, "roles"), "names no role; leave the row out or set revoked = true")
    if Role.PEER in row.roles and own:
        yield Problem((*path, "roles"), f"a peer is another zone's node, but {row.zone!r} is this zone")
    for role in row.roles:
        if role in _LOCAL_ROLES and not own:
            says = f"a {role} belongs to this zone ({config.zone.name!r}), but zone is {row.zone!r}"
            yield Problem((*path, "roles"), f"{says}; another zone's node is a peer")


def _tokens(config: ZoneConfig) -> Iterator[Problem]:
    holders: dict[str, str] = {}
    for name, token in config.tokens.items():
        path = ("tokens", name)
        if config.listen.plaintext:
            yield Problem(path, "has an effect only with TLS; leave it out with plaintext = true")
        elif not config.listen.http_enabled:
            yield Problem(path, "has an effect only with http_enabled = true; leave it out")
        other = holders.setdefault(token.hash, name)
        if other != name:
            yield Problem((*path, "hash"), f"is that of [tokens.{other}] too; everybody has a token of his own")


def _streams(config: ZoneConfig) -> Iterator[Problem]:
    if not config.streams:
        yield Problem((), "no stream is configured; add a table such as [streams.operational]")
    for name, stream in config.streams.items():
        found = list(_policy(stream, ("streams", name)))
        yield from found
        if not found:
            # The core has the last word; what its own check says is reported even if no key can be named.
            for policy in (stream.store_policy, stream.forward_policy):
                try:
                    policy.checked()
                except PolicyInvalid as error:
                    yield Problem(("streams", name), error.message)


def _policy(stream: Stream, path: Path) -> Iterator[Problem]:
    if stream.safety == Safety.SIL and stream.overflow != Overflow.REJECT_NEW:
        yield Problem((*path, "overflow"), 'must be "reject_new" on a stream with safety = "sil"')
    if stream.retention_seconds > stream.max_age_seconds:
        yield Problem((*path, "retention"), "must not be longer than max_age (retention <= max_age <= key_horizon)")
    if stream.max_age_seconds > stream.key_horizon_seconds:
        yield Problem((*path, "max_age"), "must not be longer than key_horizon (retention <= max_age <= key_horizon)")
    if stream.safety == Safety.SIL and stream.key_horizon_seconds < DAY_SECONDS:
        # What a lost confirmation brings again is told by its key alone, and links are looked at from time to time.
        yield Problem((*path, "key_horizon"), 'must be at least "1d" on a stream with safety = "sil"')
    if stream.warning_fill_percent > stream.alert_fill_percent:
        yield Problem((*path, "warning_fill"), "must not be above alert_fill")
    if stream.max_object_bytes > stream.max_batch_bytes:
        yield Problem((*path, "max_object"), "must not be above max_batch")
    if stream.max_batch_bytes > stream.store_capacity_bytes:
        yield Problem((*path, "max_batch"), "must not be above store_capacity: such a batch could never be stored")


def _links(config: ZoneConfig) -> Iterator[Problem]:
    taken: dict[tuple[str, Buffer, str], str] = {}
    for name, link in config.links.items():
        path = ("links", name)
        if link.zone == config.zone.name:
            yield Problem((*path, "zone"), "is this zone; a link pulls from another one")
        else:
            yield from _server(config, link, path)
        yield from _known_streams(config, link, path)
        if link.normal_backlog > link.reconciliation_backlog:
            yield Problem((*path, "normal_backlog"), "must not be above reconciliation_backlog")
        if link.backoff_first_seconds > link.backoff_max_seconds:
            yield Problem((*path, "backoff_first"), "must not be longer than backoff_max")
        if link.priority and not link.bandwidth:
            yield Problem((*path, "priority"), "says who comes first where bandwidth bounds the link, and it has none")
        for stream in sorted(set(link.priority) - set(config.streams_of(link))):
            yield Problem((*path, "priority"), f"{stream!r} is not a stream of this link")
        for stream in config.streams_of(link):
            yield from _link_age(link, config.streams[stream], path)
            other = taken.setdefault((link.zone, link.buffer, stream), name)
            if other != name:
                says = f"{stream!r} is already pulled from {link.zone!r} by [links.{other}]; one lane has one link"
                yield Problem((*path, "streams"), says)


def _link_age(link: Link, stream: Stream, path: Path) -> Iterator[Problem]:
    """A fact that a link takes must be young enough for its key to be known, or a repeat would be a second fact."""
    if stream.safety == Safety.SIL or link.max_age_seconds is None:
        return
    if link.max_age_seconds > stream.key_horizon_seconds:
        yield Problem((*path, "max_age"), f"must not be longer than key_horizon of [streams.{stream.name}]")


def _server(config: ZoneConfig, link: Link, path: Path) -> Iterator[Problem]:
    row = config.identities.get(link.expected_server)
    if row is None:
        yield _no_identity(config, (*path, "server_identity"), link.expected_server)
        return
    if Role.PEER not in row.roles or row.zone != link.zone:
        says = f"[identities.{link.expected_server}] must be a peer of zone {link.zone!r} for this link"
        yield Problem((*path, "server_identity"), says)
    if link.buffer == Buffer.FORWARD and not row.relay_for:
        says = f'"forward" brings facts of other zones; name them in [identities.{link.expected_server}] relay_for'
        yield Problem((*path, "buffer"), says)


def _serve(config: ZoneConfig) -> Iterator[Problem]:
    peers = {row.zone for row in config.identities.values() if Role.PEER in row.roles}
    for zone, serve in config.serve.items():
        path = ("serve", zone)
        if zone not in peers:
            says = f"no row of [identities] is a peer of zone {zone!r}, so nobody could pull{nearest(zone, peers)}"
            yield Problem(path, says)
        if not serve.buffers:
            yield Problem((*path, "buffers"), 'names no buffer; use ["store"]')
        yield from _known_streams(config, serve, path)


def _consumer_names(config: ZoneConfig) -> Iterator[Problem]:
    """Two owners must never share a consumer, and a name must be one that the cursors accept."""
    owners: dict[str, tuple[str, str, Buffer]] = {}
    for zone, serve in config.serve.items():
        for stream in config.streams_of(serve):
            for buffer in serve.buffers:
                name, lane = consumer_name(zone, stream, buffer), (zone, stream, buffer)
                if len(name) > CONSUMER_NAME_MAX:
                    says = f"the consumer {name!r} would be longer than {CONSUMER_NAME_MAX} characters; shorten a name"
                    yield Problem(("serve", zone), says)
                elif owners.setdefault(name, lane) != lane:
                    other = owners[name]
                    says = f"the consumer {name!r} would also be that of zone {other[0]!r}, stream {other[1]!r}"
                    yield Problem(("serve", zone), says)
    for row in config.identities.values():
        foreign = sorted(name for name, lane in owners.items() if lane[0] != row.zone and _owns(config, row, name))
        if foreign:
            says = f"could confirm as {foreign[0]!r}, the consumer of zone {owners[foreign[0]][0]!r}"
            yield Problem(("identities", row.name), f"{says}; rename the identity or change its consumers")


def _owns(config: ZoneConfig, row: Identity, consumer: str) -> bool:
    """Tell whether a consumer would be an identity's own on any stream and buffer."""
    return any(row.owns_consumer(consumer, stream, buffer) for stream in config.streams_of(row) for buffer in Buffer)


def _signing(config: ZoneConfig) -> Iterator[Problem]:
    for zone, row in config.signing.items():
        path = ("signing", zone, "keys")
        if not row.keys:
            yield Problem(path, "names no key, so that no fact could be signed; leave the table out to check nothing")
        ids = [text.split(":")[1] for text in row.keys]
        if len(set(ids)) < len(ids):
            yield Problem(path, "has two keys of one id; what a key is called tells which one to use")


def _pipelines(config: ZoneConfig) -> Iterator[Problem]:
    if len(config.pipelines) > PIPELINES_MAX:
        says = f"has {len(config.pipelines)} tables, the limit is {PIPELINES_MAX}: a node is told of no more at once"
        yield Problem(("pipelines",), says)
    for name, row in config.pipelines.items():
        path, kinds = ("pipelines", name), row.kinds
        if len(kinds) != 1:
            found = f"has {' and '.join(kinds)}" if kinds else "says nothing of what it does"
            yield Problem(path, f"{found}; give one of {', '.join(PipelineKind)}")
            continue
        if row.every_seconds is not None and row.kind not in (PipelineKind.INGEST, PipelineKind.AUDIT):
            yield Problem(
                (*path, "every"), f"has an effect only with ingest and audit: {row.kind} never ends; leave it out"
            )
        if row.restart_after_seconds > row.restart_max_seconds:
            yield Problem((*path, "restart_after"), "must not be longer than restart_max")
        if row.identity is not None and row.identity not in config.identities:
            yield _no_identity(config, (*path, "identity"), row.identity)
    moving = [row.name for row in config.pipelines.values() if row.kinds == (PipelineKind.REPLICATE,) and row.enabled]
    for name in moving[1:]:
        yield Problem(
            ("pipelines", name, "replicate"), f"[pipelines.{moving[0]}] moves links already; name them all there"
        )
    landing = [row for row in config.pipelines.values() if row.kinds == (PipelineKind.LAND,) and row.enabled]
    folders: dict[str, str] = {}
    for row in landing:
        out = row.options.get("out")
        if isinstance(out, str):
            other = folders.setdefault(normpath(config.path(PurePath(out))), row.name)
            if other != row.name:
                yield Problem(("pipelines", row.name, "land"), f"[pipelines.{other}] lands in {out} already")


def _storage(config: ZoneConfig) -> Iterator[Problem]:
    backend, options = config.storage.backend, config.storage.options
    known = {*OUR_BACKENDS, *(point.name for point in entry_points(group=BACKENDS))}
    if backend not in known:
        says = f"no package that is installed brings {backend!r}{nearest(backend, known)}"
        yield Problem(("storage", "backend"), f"{says}; known here: {', '.join(sorted(known))}")
    if backend == "postgres" and config.postgres.dsn is None:
        yield Problem(("storage", "postgres"), "dsn is missing: it says how the server is reached")
    if backend != "postgres" and config.postgres.dsn is not None:
        yield Problem(("storage", "postgres", "dsn"), 'has an effect only with backend = "postgres"; leave it out')
    if backend == "jetstream" and not config.jetstream.servers:
        yield Problem(("storage", "jetstream"), "servers is missing: it says how the servers are reached")
    if backend != "jetstream" and config.jetstream.servers is not None:
        yield Problem(
            ("storage", "jetstream", "servers"), 'has an effect only with backend = "jetstream"; leave it out'
        )
    if options and backend in OUR_BACKENDS:
        yield Problem(("storage", "options"), "is for storages of other packages; leave it out")


def _rest(config: ZoneConfig) -> Iterator[Problem]:
    webhook = config.alerts.webhook
    if webhook and urlsplit(webhook).scheme == "http" and not Address(urlsplit(webhook).hostname or "", 0).is_loopback:
        yield Problem(("alerts", "webhook"), "must start with https:// unless it is on this machine")
    if config.limits.concurrent_per_identity > config.limits.concurrent_requests:
        yield Problem(("limits", "concurrent_per_identity"), "must not be above concurrent_requests")
    if config.artifacts.max_artifact_bytes > config.artifacts.capacity_bytes:
        yield Problem(("artifacts", "max_artifact"), "must not be above capacity")


def _known_streams(config: ZoneConfig, row: Identity | Link | Serve, path: Path) -> Iterator[Problem]:
    if not row.streams and not isinstance(row, Identity):
        yield Problem((*path, "streams"), 'names no stream; leave it out to mean all, or use ["*"]')
    for stream in row.streams:
        if stream not in (ANY, *config.streams):
            says = f"[streams.{stream}] is not configured{nearest(stream, config.streams)}"
            yield Problem((*path, "streams"), says)


def _no_identity(config: ZoneConfig, path: Path, name: str) -> Problem:
    return Problem(path, f"{name!r} has no row in [identities]{nearest(name, config.identities)}")
