"""Access to the page: the token and headers of requests, and limits on connections.

Anyone with the token may look, from this machine only, and no foreign web page may. The token comes in the address
once, and then in a cookie that no script can read; programs send it as a header. The host name in requests is checked,
so that a foreign page whose name was made to point here (DNS rebinding) gets nothing. Any local user can open
connections, so idle ones are few and end soon.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
MOST_WAITING: Final = 64  # Most connections without a request in flight; for one more, the oldest is closed.
PATIENCE: Final = 5.0  # Seconds that a connection may take to send a whole request.
_NO_TOKEN: Final = "This page needs its token: open the address that `offbeat watch` has printed.\n"  # noqa: S105


class TokenGuard:
    """Passes on requests that have the token, and adds headers to every response."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = f"offbeat-{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        in_query = QueryParams(scope["query_string"]).get("token")
        refusal: PlainTextResponse | None = None
        if headers.get("host", "") not in self._hosts:
            refusal = PlainTextResponse("This server answers only to 127.0.0.1 and localhost.\n", 403)
        elif not any(map(self._is_right, (in_query, _bearer(headers), self._from_cookie(headers)))):
            refusal = PlainTextResponse(_NO_TOKEN, 401)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                own.update(HEADERS)
                if refusal is not None:
                    own["connection"] = "close"
                if self._is_right(in_query):
                    token = self._token.decode()
                    own.append("set-cookie", f"{self._cookie}={token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await (refusal or self._app)(scope, receive, guarded)

    def _is_right(self, token: str | None) -> bool:
        return token is not None and secrets.compare_digest(token.encode(), self._token)

    def _from_cookie(self, headers: Headers) -> str | None:
        """Our cookie; those of other servers on this machine come along, whatever is in them."""
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self._cookie), None)


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP, except that idle connections are closed.

    Their file descriptors belong to the process that serves the page, which may be a run's launcher.
    """

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, and close the oldest idle one if there are too many."""
        self._opened: float = self.loop.time()
        super().connection_made(transport)
        known: Any = self.connections
        waiting = sorted((other._opened, id(other), other) for other in known if other._waits)
        if len(waiting) > MOST_WAITING:
            waiting[0][-1].transport.abort()
        self.loop.call_later(PATIENCE, self._look, None)

    @property
    def _waits(self) -> bool:
        """Whether no request is in flight."""
        cycle: Any = self.cycle
        return not self.transport.is_closing() and (cycle is None or cycle.response_complete)

    def _look(self, last: Any) -> None:
        """Close the connection if no request has come since `last`, the latest one at the previous look."""
        if self.transport.is_closing():
            return
        if self._waits and self.cycle is last:
            self.transport.abort()
        else:
            self.loop.call_later(PATIENCE, self._look, self.cycle)
