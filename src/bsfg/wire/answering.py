"""What every request of the HTTP listener has in common: who calls, whether there is room, and errors as documents."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from bsfg.errors import BsfgError, PermissionRefused
from bsfg.wire.calls import told_to_caller
from bsfg.wire.limits import Admission
from bsfg.wire.operations import PAGES, Asks, Terms
from bsfg.wire.routes import PROBLEM
from bsfg.wire.service import Caller
from bsfg.wire.status import http_status

RETRY_AFTER_SECONDS = "1"
SAFE_METHODS = ("GET", "HEAD")

Handler = Callable[[Request, Caller], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]
Refused = Callable[[Request, BsfgError], Response]


def caller_of(request: Request) -> Caller:
    """Give who is at the other end; the listener's protocol put the certificate's names into the state."""
    client = request.client
    address = f"{client.host}:{client.port}" if client else ""
    return Caller(request.scope.get("state", {}).get("peer"), address)


def problem(error: BsfgError, status: int | None = None) -> Response:
    """Write an error as a problem document (RFC 9457) with BSFG's own fields beside the standard ones."""
    status = status or http_status(error)
    found = error.to_dict()
    body = {"type": "about:blank", "title": error.code.replace("_", " "), "status": status, "detail": error.message}
    body |= {name: value for name, value in found.items() if name != "message"}
    headers = {"retry-after": RETRY_AFTER_SECONDS} if error.retryable else None
    return Response(orjson.dumps(body, default=str), status, headers, media_type=PROBLEM)


def endpoint(
    admission: Admission,
    terms: Terms,
    handler: Handler,
    who: Callable[[Request], Caller] = caller_of,
    *,
    admit: Callable[[Request, Caller], str | None],
    refused: Refused = lambda request, error: problem(error),
) -> Endpoint:
    """Give what answers the requests of one operation: ``who`` tells or refuses the caller, ``refused`` writes errors.

    ``admit`` gives under whose name a caller is served, or refuses him, before anything of his body is read; None is
    somebody without a name. What is open and takes nothing is answered however many others are served.
    """
    placeless = terms.asks in (Asks.NOTHING, Asks.CERTIFICATE) and not terms.message_bytes

    async def answer(request: Request) -> Response:
        check_site(request)
        caller = who(request)
        owner = admit(request, caller)
        request.state.owner = owner or "strangers"
        if placeless:
            return await handler(request, caller)
        with admission.enter(owner) if owner is not None else admission.enter_stranger(_host(request)):
            return await handler(request, caller)

    async def call(request: Request) -> Response:
        started = time.perf_counter()

        def answered(code: str | None) -> None:
            if not placeless or code is not None:
                name = f"dashboard_{terms.name}" if terms.service == PAGES else terms.name
                admission.answered(f"http_{name}", time.perf_counter() - started, code)

        try:
            response = await answer(request)
            if placeless and request.state.owner == "strangers":
                await admission.slow_down(f"{_bucket(request)} asks {terms.name}")
            answered(None)
            return response
        except ClientDisconnect:
            answered(None)
            return Response(status_code=499)
        except Exception as error:
            told = told_to_caller(terms.name, error)
        # His place and his bytes are given back by now, and nothing of his request is left to wait with him.
        await admission.hold_back(_bucket(request), told)
        answered(told.code)
        return refused(request, told)

    return call


def check_site(request: Request) -> None:
    """Refuse what the page of another site has a browser ask for: the browser would add its user's certificate."""
    if request.method in SAFE_METHODS:
        return
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    own = f"{request.url.scheme}://{request.headers.get('host', '')}".lower()
    # Old browsers say only where the page is from, and programs say neither.
    if site not in (None, "same-origin", "none") or (origin is not None and origin.lower() != own):
        raise PermissionRefused("the page of another site asks for this", hint="Use the node's own pages.")


def _bucket(request: Request) -> str:
    """Give under which name a caller's faults are counted: somebody unknown by where he calls from."""
    caller = caller_of(request)
    if caller.names is None and request.url.scheme == "https":
        return f"anybody at {_host(request)}"
    return str(caller)


def _host(request: Request) -> str:
    return request.client.host if request.client else "nowhere"
