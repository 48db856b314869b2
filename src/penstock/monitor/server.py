"""The page, the API behind it and the metrics, served by Starlette.

Rules: the page loads nothing from other hosts (the content security policy forbids it). A monitor that does not listen
on loopback needs a token. On loopback, a request with a foreign Host header, or to the API from another site's page, is
refused, so that a web page cannot reach it through the user's browser. Actions are refused unless they were allowed.
All this runs in one event loop; the watcher has a thread of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as MessageType

from penstock import __version__
from penstock.address import is_loopback
from penstock.errors import PenstockError
from penstock.monitor import actions, metrics, tail
from penstock.monitor.report import state_record
from penstock.observe.watcher import Watcher

__all__ = ["Settings", "application"]

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/plots.js": ("plots.js", "text/javascript"),
    "/graph.js": ("graph.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
))  # fmt: skip
COOKIE = "penstock_token"
#: Values of Sec-Fetch-Site that are let in: our own page, or the user's own navigation. Programs send no such header.
OWN_PAGE = ("same-origin", "none")
#: A page that takes no message for so long loses its tail.
STALLED_S = 10.0
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]@/?#\s]+))(?::\d{1,5})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Settings:
    """Who may connect and what they may do."""

    host: str = "127.0.0.1"
    token: str | None = None
    allow_actions: bool = False


class Door:
    """Middleware that refuses requests without permission and adds the security headers to each response."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MessageType) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refused = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if is_loopback(self._settings.host) and not _names_loopback(request.headers.getlist("host")):
            return PlainTextResponse("this monitor answers on loopback only", 421)
        if request.scope["path"].startswith("/api/") and request.headers.get("sec-fetch-site", "none") not in OWN_PAGE:
            return PlainTextResponse("only the monitor's own page may ask this", 403)
        token = self._settings.token
        if token is None:
            return None
        given = request.query_params.get("token")
        opens_page = request.method == "GET" and request.scope["path"] == "/"
        if given is not None and opens_page and _equal_secrets(given, token):
            # Move the token into a cookie at once: it must not stay in the address bar and the history.
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, quote(token, safe=""), httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _equal_secrets(bearer, token) or _equal_secrets(request.cookies.get(COOKIE, ""), quote(token, safe="")):
            return None
        return PlainTextResponse("a token is needed: open /?token=..., or send 'Authorization: Bearer ...'", 401)


def _names_loopback(hosts: list[str]) -> bool:
    """Whether the Host header is one name that means this machine alone (a defence against DNS rebinding)."""
    match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    return match is not None and is_loopback((match[1] or match[2]).lower())


def _equal_secrets(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def application(watcher: Watcher, settings: Settings, ending: Callable[[], bool] = lambda: False) -> Starlette:
    """The web application; the caller starts and stops the watcher. Streams end when ``ending`` says so."""
    api = _Api(watcher, settings, ending)
    routes = [Route(path, _file(path)) for path in FILES]
    routes += [
        Route("/api/state", api.state),
        Route("/api/history", api.history),
        Route("/api/events", api.events),
        Route("/api/tail", api.tail),
        Route("/api/actions/{name}", api.act, methods=["POST"]),
        Route("/metrics", api.metrics),
        Route("/health", api.health),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Door, settings=settings)])


def _file(path: str) -> Callable[[Request], Response]:
    name, kind = FILES[path]
    content = (PAGE / name).read_bytes()

    def serve(_request: Request) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return serve


class _Api:
    def __init__(self, watcher: Watcher, settings: Settings, ending: Callable[[], bool]) -> None:
        self._watcher = watcher
        self._settings = settings
        self._ending = ending

    def state(self, _request: Request) -> Response:
        return JSONResponse(self._record())

    def _record(self) -> dict[str, Any]:
        return {
            **state_record(self._watcher.state),
            "version": __version__,
            "actions": sorted(actions.ACTIONS) if self._settings.allow_actions else [],
        }

    def history(self, request: Request) -> Response:
        try:
            last = int(request.query_params.get("last", "900"))
        except ValueError:
            return JSONResponse({"error": "last is a number of samples"}, 400)
        names = request.query_params.getlist("name")
        return JSONResponse(self._watcher.history.series(names or None, last))

    async def events(self, request: Request) -> Response:
        """One event per look: the state, and the newest sample of every series."""

        async def stream() -> AsyncIterator[str]:
            seen = 0
            while not self._ending() and not await request.is_disconnected():
                state = await asyncio.to_thread(self._watcher.wait, seen, 0.5)
                if state.time_ns == seen:
                    yield ": nothing new\n\n"
                    continue
                seen = state.time_ns
                record = {"state": self._record(), "sample": self._watcher.history.series(None, 1)}
                yield f"data: {json.dumps(record)}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def tail(self, request: Request) -> Response:
        """Messages of one address as they come. This subscribes, because the user asked for it."""
        wanted = (request.query_params.get(name, "") for name in ("address", "filter", "fields"))
        source = tail.follow(*wanted)
        try:
            first = await asyncio.to_thread(next, source)
        except (PenstockError, OSError, ImportError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return StreamingResponse(_relay(request, first, source, self._ending), media_type="text/event-stream")

    async def act(self, request: Request) -> Response:
        """Only when allowed, and only from our own page (a header that a form cannot send)."""
        if not self._settings.allow_actions:
            return JSONResponse({"error": "this monitor only looks; start it with --allow-actions"}, 403)
        if request.headers.get("x-penstock-action") != "1":
            return JSONResponse({"error": "the header X-Penstock-Action: 1 is missing"}, 403)
        try:
            arguments = json.loads(await request.body() or b"{}")
            done = await asyncio.to_thread(actions.act, request.path_params["name"], arguments)
        except (PenstockError, OSError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"done": done})

    def metrics(self, _request: Request) -> Response:
        return Response(metrics.exposition(self._watcher), media_type="text/plain; version=0.0.4; charset=utf-8")

    def health(self, _request: Request) -> Response:
        state = self._watcher.state
        age_s = (time.time_ns() - state.time_ns) / 1e9
        fresh = age_s < 5 * max(1.0, self._watcher.every_s)
        record = {"status": "ok" if fresh else "stale", "age_s": round(age_s, 3), "alarms": len(state.alarms)}
        return JSONResponse(record, 200 if fresh else 503)


async def _relay(
    request: Request, first: dict[str, Any], source: Iterator[dict[str, Any]], ending: Callable[[], bool]
) -> AsyncIterator[str]:
    """The records of ``source`` as events, read by a thread that ends with the page. If it ends first, says why."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(256)
    stop = threading.Event()
    failures: list[str] = []

    def read() -> None:
        try:
            for record in source:
                if stop.is_set():
                    break
                _put(queue, record, loop)
        except Exception as error:  # of any kind: without an error the page would take an ended tail for a quiet one
            failures.append(str(error) or type(error).__name__)
        finally:
            source.close()  # type: ignore[attr-defined]

    thread = threading.Thread(target=read, name="penstock-tail", daemon=True)
    thread.start()
    try:
        yield f"data: {json.dumps(first)}\n\n"
        while not ending() and not await request.is_disconnected():
            ended = not thread.is_alive()  # before reading the queue: its last record is in there by then
            try:
                record = await asyncio.wait_for(queue.get(), 0.5)
            except TimeoutError:
                if ended:
                    yield f"data: {json.dumps({'error': failures[0] if failures else 'ended'})}\n\n"
                    return
                yield ": still here\n\n"
                continue
            yield f"data: {json.dumps(record)}\n\n"
    finally:
        stop.set()


def _put(queue: asyncio.Queue[dict[str, Any]], record: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
    """Put a record of the tail's thread into the page's queue; ``TimeoutError`` when the page takes nothing."""
    put = asyncio.run_coroutine_threadsafe(queue.put(record), loop)
    try:
        put.result(STALLED_S)
    except TimeoutError:
        put.cancel()
        raise TimeoutError(f"the page took no message for {STALLED_S:g} s: the tail has ended") from None
