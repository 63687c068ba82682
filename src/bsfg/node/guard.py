"""The door of the node: who a caller is, whether he may, and a record of every refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bsfg.config.access import Identity
from bsfg.config.words import Action, Role
from bsfg.errors import IdentityUnknown, PermissionRefused
from bsfg.node.authorize import Decision, Matrix, Request, Rule
from bsfg.ports import Clock
from bsfg.wire.service import Caller

Audit = Callable[[Decision, Caller], None]
"""Takes every refusal; it must not raise."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Decides by the matrix; a caller without TLS acts as the one identity that the configuration names for it."""

    matrix: Matrix
    clock: Clock
    audit: Audit
    plaintext_identity: str | None = None

    def check(self, caller: Caller, request: Request) -> Identity:
        """Give the identity of a caller who may do this, or record the refusal and raise it."""
        decision = self._decide(caller, request)
        if not decision.allowed:
            self.audit(decision, caller)
        name = decision.checked().identity
        return self.matrix.identities[name] if caller.token is None else self.matrix.tokens[caller.token]

    def admit(self, caller: Caller, actions: tuple[str, ...]) -> str:
        """Give the name of a caller whose row is in force and allows one of the actions, or record and raise why not.

        Without actions any role will do. What an action is about is not known yet, and judged by `check` when it is.
        """
        decision = self._at_the_door(caller, actions)
        if not decision.allowed:
            self.audit(decision, caller)
        return decision.checked().identity

    def known(self, caller: Caller) -> str | None:
        """Give the name of a caller whose row is in force, None for anybody else, without recording anything."""
        decision = self._at_the_door(caller, ())
        return decision.identity if decision.allowed else None

    def _at_the_door(self, caller: Caller, actions: tuple[str, ...]) -> Decision:
        """Decide by row and role alone; of several refusals the first one counts."""
        first = None
        for action in actions or tuple(Action):
            decision = self._decide(caller, Request(Action(action), at_the_door=True))
            if decision.allowed:
                return decision
            first = first or decision
            if decision.rule != Rule.ROLE:
                break
        assert first is not None
        return first

    def allows(self, caller: Caller, request: Request) -> bool:
        """Tell whether a caller may do this, without recording anything."""
        return self._decide(caller, request).allowed

    def identity(self, caller: Caller) -> str:
        """Give the name by which a caller is known here, for records; his own words when he is not."""
        if caller.token is not None:
            return str(caller)
        if caller.names is None:
            return self.plaintext_identity or "plaintext"
        try:
            return self.matrix.name_of(caller.names)
        except IdentityUnknown:
            return str(caller.names)

    def _decide(self, caller: Caller, request: Request) -> Decision:
        now_unix_ms = self.clock.now_unix_ms()
        if caller.token is not None:
            return self.matrix.decide_token(caller.token, request, now_unix_ms)
        if caller.names is not None:
            return self.matrix.decide_peer(caller.names, request, now_unix_ms)
        if self.plaintext_identity is not None:
            return self.matrix.decide(self.plaintext_identity, request, now_unix_ms)
        # A listener with TLS lets such a caller through only as far as he may sign in; this is the lock behind it.
        error = PermissionRefused("callers without a certificate are not served here")
        return Decision("plaintext", None, request, Rule.UNKNOWN, error)


def speaker_of(row: Identity) -> str:
    """Name who refuses facts when an identity does: another zone's node does so for its zone."""
    return row.zone if is_peer(row) else row.name


def is_peer(row: Identity) -> bool:
    """Tell whether an identity is another zone's node."""
    return Role.PEER in row.roles
