"""Who may see the page: whoever has the token, on this machine, and no page of somebody else's.

The token comes in the address once, and then in a cookie that no script can read; programs send it as a header. The
name by which the server was called is checked, so that a foreign page whose name was made to point here (DNS
rebinding) gets nothing.
"""

from __future__ import annotations

import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
_NO_TOKEN: Final = "This page needs its token: open the address that `offbeat watch` has printed.\n"  # noqa: S105


class TokenGuard:
    """Lets in what has the token, and gives every answer its headers."""

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
        asked = QueryParams(scope["query_string"]).get("token")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    own[name] = value
                if self._right(asked):
                    token = self._token.decode()
                    own.append("set-cookie", f"{self._cookie}={token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        async def refused(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await guarded(message)

        if headers.get("host", "") not in self._hosts:
            answer = PlainTextResponse("This server answers only to 127.0.0.1 and localhost.\n", 403)
            await answer(scope, receive, refused)
        elif not any(map(self._right, (asked, _bearer(headers), self._kept(headers)))):
            await PlainTextResponse(_NO_TOKEN, 401)(scope, receive, refused)
        else:
            await self._app(scope, receive, guarded)

    def _right(self, token: str | None) -> bool:
        return token is not None and secrets.compare_digest(token.encode(), self._token)

    def _kept(self, headers: Headers) -> str | None:
        """Ours among the cookies; those of other servers on this machine come along, whatever is in them."""
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self._cookie), None)


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None
