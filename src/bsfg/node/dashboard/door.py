"""The door of the dashboard: who looks, as whom he acts, and whether it is our own page that asks.

Somebody is known by his certificate, or by the token he signed in with. Both are things that a browser adds by itself,
also when the page of somebody else asks; so whatever changes something must come from our origin, and repeat the key
that only our page was given.
"""

from __future__ import annotations

import hmac

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from bsfg.config.words import Action
from bsfg.errors import BsfgError, IdentityUnknown, PermissionRefused, SignInRequired
from bsfg.node.authorize import Decision, Request, Rule
from bsfg.node.dashboard.sessions import Session, Sessions
from bsfg.node.dashboard.tokens import Tokens
from bsfg.node.parts import Parts
from bsfg.wire.answering import caller_of
from bsfg.wire.service import Caller

PAGE_KEY_HEADER = "x-bsfg-page-key"
VIEW = Request(Action.VIEW)
ACT = Request(Action.ACT)


class Door:
    """Decides who comes in."""

    def __init__(self, parts: Parts, tokens: Tokens, sessions: Sessions) -> None:
        self._parts, self._tokens, self._sessions = parts, tokens, sessions

    # Callers of operations.

    def caller(self, request: HttpRequest) -> Caller:
        """Give who asks for an operation: by the token in its header, else by certificate."""
        caller = caller_of(request)
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._tokens:
            return self._bearer(caller, shown, SignInRequired("the token is not known here"))
        if caller.names is None and request.url.scheme == "https":
            raise SignInRequired("neither a certificate nor a token was shown")
        return caller

    def sign_in(self, request: HttpRequest, token: str) -> str:
        """Begin the session of somebody who has shown a token, and give its cookie."""
        self.check_origin(request)
        caller = self._bearer(caller_of(request), token, IdentityUnknown("That is not a token of this zone."))
        self._parts.guard.check(caller, VIEW)
        self._sessions.end(self.cookie(request))
        mark = self._tokens.mark_of(caller.token or "")
        return self._sessions.begin(caller, may_act=self._parts.guard.allows(caller, ACT), mark=mark)[0]

    def _bearer(self, caller: Caller, token: str, error: BsfgError) -> Caller:
        name = self._tokens.name_of(token)
        if name is None:
            raise self._refused(caller, Rule.TOKEN, error)
        return Caller(caller.names, caller.address, name)

    # Sessions.

    def enter(self, request: HttpRequest) -> tuple[Session, str | None]:
        """Give the session of a browser that opens the page, or begin one for the holder of a certificate.

        The second value is the cookie of a session that was begun. Raises `SignInRequired` when a token is wanted.
        """
        session = self._sessions.find(self.cookie(request))
        if session is not None and self._same(session, caller_of(request)):
            self._parts.guard.check(session.caller, VIEW)
            self._sessions.used(session)
            return session, None
        caller = caller_of(request)
        if caller.names is None and request.url.scheme == "https":
            raise SignInRequired("sign in with a token, or use a client certificate")
        self._parts.guard.check(caller, VIEW)
        cookie, session = self._sessions.begin(caller, may_act=self._parts.guard.allows(caller, ACT))
        return session, cookie

    def session(self, request: HttpRequest) -> Session:
        """Give the session of a request of our page, or raise `SignInRequired`."""
        caller = caller_of(request)
        session = self._sessions.find(self.cookie(request))
        if session is None or not self._same(session, caller):
            raise SignInRequired("there is no session, or it has ended")
        # Whoever has lost the right to look since he came has lost it for everything.
        self._parts.guard.check(session.caller, VIEW)
        return session

    def acting(self, request: HttpRequest) -> Session:
        """Give the session of a request that changes something, which only our own page may make."""
        self.check_origin(request)
        session = self.session(request)
        shown = request.headers.get(PAGE_KEY_HEADER, "")
        if not hmac.compare_digest(shown.encode(), session.page_key.encode()):
            says = "the request does not repeat the key of its page"
            raise self._refused(session.caller, Rule.SESSION, PermissionRefused(says, hint="Load the page again."))
        self._sessions.used(session)
        return session

    def awake(self, request: HttpRequest) -> Session:
        """Give the session of a browser at which somebody has just moved a hand."""
        session = self.session(request)
        self._sessions.used(session)
        return session

    def may_watch(self, session: Session) -> bool:
        """Tell whether a session may still be given what happens."""
        return self._sessions.known(session) and self._parts.guard.allows(session.caller, VIEW)

    def may_act(self, session: Session) -> bool:
        """Tell whether a session belongs to an operator."""
        return self._parts.guard.allows(session.caller, ACT)

    def sign_out(self, request: HttpRequest) -> None:
        """End the session of a request."""
        self._sessions.end(self.cookie(request))

    def _same(self, session: Session, caller: Caller) -> bool:
        """Tell whether a session is used by whom it was begun for: a stolen cookie is worth nothing."""
        if session.caller.token is not None:
            return True
        begun_with, shown = session.caller.names, caller.names
        if begun_with is None or shown is None:
            return begun_with == shown
        return begun_with == shown and begun_with.certificate == shown.certificate

    # Cookies: browsers share them between the ports of a machine, so their names tell zones apart.

    def cookie(self, request: HttpRequest) -> str | None:
        """Give the value of the session's cookie."""
        return request.cookies.get(self._cookie_name(request))

    def set_cookie(self, request: HttpRequest, response: Response, value: str) -> None:
        """Have the browser keep a session: for our pages only, out of reach of scripts, gone when it is closed."""
        secure = request.url.scheme == "https"
        response.set_cookie(
            self._cookie_name(request), value, path="/", secure=secure, httponly=True, samesite="strict"
        )

    def forget_cookie(self, request: HttpRequest, response: Response) -> None:
        """Have the browser forget a session."""
        secure = request.url.scheme == "https"
        response.delete_cookie(self._cookie_name(request), path="/", secure=secure, httponly=True, samesite="strict")

    def _cookie_name(self, request: HttpRequest) -> str:
        prefix = "__Host-" if request.url.scheme == "https" else ""
        return f"{prefix}bsfg-{self._parts.settings.zone}"

    # Where a request comes from.

    def check_origin(self, request: HttpRequest) -> None:
        """Refuse what did not come from a page of this node."""
        origin = request.headers.get("origin", "")
        if not origin or origin.lower() != f"{request.url.scheme}://{request.headers.get('host', '')}".lower():
            says = f"the request comes from {origin[:200] or 'nowhere'}, not from a page of this node"
            hint = "Open the dashboard at the address that the node itself is called by."
            raise self._refused(caller_of(request), Rule.ORIGIN, PermissionRefused(says, hint=hint))

    def _refused(self, caller: Caller, rule: Rule, error: BsfgError) -> BsfgError:
        """Record a refusal and give its error."""
        guard = self._parts.guard
        guard.audit(Decision(guard.identity(caller), None, ACT, rule, error), caller)
        return error
