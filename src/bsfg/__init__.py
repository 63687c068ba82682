"""Bidirectional Store-and-Forward Gateway: facts cross zone boundaries durably, once per key, and nobody blocks.

What applications use is imported from here: ``from bsfg import Producer, Consumer, LocalReader, Fact``. Each name is
loaded when it is first used, so that ``import bsfg`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bsfg.batch import EntryBatch as EntryBatch
    from bsfg.batch import FactBatch as FactBatch
    from bsfg.errors import BsfgError as BsfgError
    from bsfg.fact import ArtifactRef as ArtifactRef
    from bsfg.fact import Buffer as Buffer
    from bsfg.fact import Entry as Entry
    from bsfg.fact import Envelope as Envelope
    from bsfg.fact import Fact as Fact
    from bsfg.fact import Key as Key
    from bsfg.fact import Message as Message
    from bsfg.journey.link import AppendedFact as AppendedFact
    from bsfg.ports import Receipt as Receipt
    from bsfg.ports import Result as Result
    from bsfg.retention import GapRecord as GapRecord
    from bsfg.sdk.artifacts import ArtifactClient as ArtifactClient
    from bsfg.sdk.artifacts import AsyncArtifactClient as AsyncArtifactClient
    from bsfg.sdk.consumer import AsyncConsumer as AsyncConsumer
    from bsfg.sdk.consumer import Consumer as Consumer
    from bsfg.sdk.endpoint import Endpoint as Endpoint
    from bsfg.sdk.futures import BatchFuture as BatchFuture
    from bsfg.sdk.futures import FactFuture as FactFuture
    from bsfg.sdk.light import LightNode as LightNode
    from bsfg.sdk.lightconsumer import LightConsumer as LightConsumer
    from bsfg.sdk.lightproducer import LightProducer as LightProducer
    from bsfg.sdk.lightproducer import SentFact as SentFact
    from bsfg.sdk.local import LocalReader as LocalReader
    from bsfg.sdk.outbox import RefusedFact as RefusedFact
    from bsfg.sdk.outbox import refused_facts as refused_facts
    from bsfg.sdk.producer import AsyncProducer as AsyncProducer
    from bsfg.sdk.producer import Producer as Producer
    from bsfg.sdk.signing import Signer as Signer
    from bsfg.sdk.signing import TrustedKeys as TrustedKeys

__version__ = "0.2.0"

_HOMES = {
    "ArtifactClient": "sdk.artifacts",
    "ArtifactRef": "fact",
    "AppendedFact": "journey.link",
    "AsyncArtifactClient": "sdk.artifacts",
    "AsyncConsumer": "sdk.consumer",
    "AsyncProducer": "sdk.producer",
    "BatchFuture": "sdk.futures",
    "BsfgError": "errors",
    "Buffer": "fact",
    "Consumer": "sdk.consumer",
    "Endpoint": "sdk.endpoint",
    "Entry": "fact",
    "EntryBatch": "batch",
    "Envelope": "fact",
    "Fact": "fact",
    "FactBatch": "batch",
    "FactFuture": "sdk.futures",
    "GapRecord": "retention",
    "Key": "fact",
    "LightConsumer": "sdk.lightconsumer",
    "LightNode": "sdk.light",
    "LightProducer": "sdk.lightproducer",
    "LocalReader": "sdk.local",
    "Message": "fact",
    "Producer": "sdk.producer",
    "Receipt": "ports",
    "RefusedFact": "sdk.outbox",
    "Result": "ports",
    "SentFact": "sdk.lightproducer",
    "Signer": "sdk.signing",
    "TrustedKeys": "sdk.signing",
    "refused_facts": "sdk.outbox",
}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bsfg' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"bsfg.{home}"), name)
    except ModuleNotFoundError as error:
        from bsfg.errors import ExtraMissing

        missing = ExtraMissing.behind(error, f"bsfg.{name}")
        if missing is None:
            raise
        raise ImportError(f"{missing.message}; {missing.hint}", name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
