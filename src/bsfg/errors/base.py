"""The base of all errors."""

from __future__ import annotations

from typing import Any, ClassVar


class BsfgError(Exception):
    """The base of all errors: a message, a stable ``code``, whether a retry can help, and what to do next."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = "This is a defect in BSFG; please report it with the log around it."
    registry: ClassVar[dict[str, type[BsfgError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.code in BsfgError.registry:
            raise TypeError(f"error code {cls.code!r} is taken by {BsfgError.registry[cls.code].__name__}")
        BsfgError.registry[cls.code] = cls

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.details = details

    def to_dict(self) -> dict[str, Any]:
        """Give the form used in JSON bodies, logs and ``--json``."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "hint": self.hint,
            **({"details": self.details} if self.details else {}),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> BsfgError:
        """Rebuild an error that crossed the wire; an unknown code keeps its code as a detail."""
        cls = BsfgError.registry.get(str(data.get("code")), RemoteError)
        error = cls(str(data.get("message", "")), hint=str(data.get("hint") or "") or None)
        details = data.get("details")
        # Set, not passed: a stranger's detail may be called like an argument.
        error.details = dict(details) if isinstance(details, dict) else {}
        if cls is RemoteError:
            error.details.setdefault("remote_code", data.get("code"))
        return error


def unforeseen(error: BaseException, doing: str) -> BsfgError:
    """Give an error as one of ours: what is not is a defect, and whoever waits for the work is told of it as one."""
    return error if isinstance(error, BsfgError) else BsfgError(f"{doing} failed: {error!r}")


class RemoteError(BsfgError):
    """The other side reported an error that this version does not know."""

    code = "remote_error"
    default_hint = "The other side runs another version of BSFG; look at its log for the full record."


OF_ONE_FACT = frozenset(
    {
        "artifact_missing",
        "conflicting_duplicate",
        "digest_mismatch",
        "fact_too_large",
        "hash_collision",
        "implausible_time",
        "invalid_fact",
        "message_too_large",
        "signature_invalid",
        "signature_missing",
    }
)
"""The codes of what is wrong with a fact itself: sending it again cannot help, the others are still worth sending."""
