"""Checks of what is installed and of the configuration."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.util import find_spec

import bsfg
from bsfg.cli.doctor.findings import Finding, Says, Subject, counted

NEEDED = ("cryptography", "google.protobuf", "grpc", "prometheus_client", "starlette", "structlog", "uvicorn")

TABLES = (("streams", "stream"), ("links", "link"), ("identities", "identity"))

_software, _config = Says("software"), Says("configuration")


def software() -> Iterator[Finding]:
    """Look whether everything a node needs is installed."""
    missing = [name for name in NEEDED if not _installed(name)]
    if missing:
        yield _software.problem(f"not installed: {', '.join(missing)}", "pip install 'bsfg[node]'")
    else:
        yield _software.ok(f"bsfg {bsfg.__version__} on Python {platform.python_version()}")


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def configuration(subject: Subject) -> Iterator[Finding]:
    """Look at what a correct file may still leave out."""
    from bsfg.config import Engine, Role, doubts_of

    config = subject.config
    counts = (counted(len(getattr(config, what)), one) for what, one in TABLES)
    yield _config.ok(f"{config.source}: zone {config.zone.name}, {', '.join(counts)}")
    for doubt in doubts_of(config):
        yield _config.warning(f"{doubt.key}: {doubt.says}", f"Correct the row in {config.source}.")
    roles = {role for row in config.identities.values() if not row.revoked for role in row.roles}
    if Role.OPERATOR not in roles:
        row = f'[identities.{config.zone.name}-operator] with roles = ["operator"] and streams = ["*"]'
        do = f"Add {row}, and issue its certificate."
        yield _config.warning("no identity is an operator, so nobody could hold a gate or settle quarantine", do)
    if not roles & {Role.PRODUCER, Role.PEER} and not config.links:
        yield _config.warning("nobody may append, and nothing is pulled", "Add a producer or a link.")
    for name, token in config.tokens.items():
        if token.expires_unix_ms is None:
            do = "Add expires, such as the date that `bsfg token` writes, or make a new token."
            yield _config.warning(f"the token of {name} never expires", do)
    spark = [name for name, link in config.links.items() if link.engine == Engine.SPARK]
    if spark and find_spec("pyspark") is None:
        do = "pip install 'bsfg[spark]' where the pipeline runs, or set engine = \"native\" to let the node pull."
        yield _config.warning(f"{', '.join(spark)} is moved by Spark, which is not installed here", do)
