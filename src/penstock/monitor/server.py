"""The page, the API behind it and the metrics, served by Starlette.

Rules: the page loads nothing from other hosts (the content security policy forbids it). A monitor that does not listen
on loopback needs a token. A request from another site's page (by its Origin or Sec-Fetch-Site) is refused, and on
loopback one with a foreign Host header, so that a web page cannot reach it through the user's browser. Actions are
refused unless they were allowed. A request's body is read up to ``MAX_BODY_BYTES`` and for ``BODY_S``; there are at
most ``MAX_PAGES`` pages at a time, and ``MAX_ANSWERS`` other answers. What a connection may do is in ``connections``.
All this runs in one event loop; the watcher has a thread of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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
from penstock.address import NETWORK, is_loopback, without_secrets
from penstock.errors import InvalidArgument, PenstockError, RefusedError
from penstock.monitor import actions, metrics, tail
from penstock.monitor.grafana import dashboard
from penstock.monitor.report import Changes, state_record
from penstock.observe.explain import explain
from penstock.observe.latency import BOUNDS_NS
from penstock.observe.snapshot import broker_address, live
from penstock.observe.watcher import Watcher

__all__ = ["Settings", "application"]

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("channel", "choices", "format", "graph", "page", "plots", "sums", "tail")
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
))  # fmt: skip
#: With the port that the browser asked for: it sends a cookie to all ports of a host, and each monitor has its token.
COOKIE = "penstock_token_{port}"
#: Values of Sec-Fetch-Site that are let in: our own page, or the user's own navigation. Programs send no such header.
OWN_PAGE = ("same-origin", "none")
#: A page that takes no message for so long loses its tail.
STALLED_S = 10.0
MAX_BODY_BYTES = 64 << 10
BODY_S = 10.0
#: Pages that are open (streams of events), and answers of the API that are made or sent at a time.
MAX_PAGES = 32
MAX_ANSWERS = 16
#: A longer answer is sent in pieces, so that the next one waits until the peer has taken the one before.
PIECE_BYTES = 64 << 10
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]@/?#\s]+))(?::\d{1,5})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Settings:
    """Who may connect and what they may do."""

    host: str = "127.0.0.1"
    token: str | None = None
    allow_actions: bool = False
    tls: bool = False


class Door:
    """Middleware that refuses requests without permission and adds the security headers to each response."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MessageType) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers.setdefault("Cache-Control", "no-store")
            body = message.get("body", b"")
            while len(body) > PIECE_BYTES:
                await send({"type": "http.response.body", "body": body[:PIECE_BYTES], "more_body": True})
                body = body[PIECE_BYTES:]
            await send({**message, "body": body} if "body" in message else message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refusal(Request(scope))
        kind, most = _bound(scope["path"])
        if refused is None and self._under_way[kind] >= most:
            refused = JSONResponse({"error": f"{most} {kind} are open already; ask again later"}, 503)
        if refused is not None:
            await refused(scope, receive, send_with_headers)
            return
        self._under_way[kind] += 1
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._under_way[kind] -= 1

    def _refusal(self, request: Request) -> Response | None:
        if is_loopback(self._settings.host) and not _names_loopback(request.headers.getlist("host")):
            return PlainTextResponse("this monitor answers on loopback only", 421)
        if request.scope["path"].startswith("/api/") and not self._is_own_page(request):
            return PlainTextResponse("only the monitor's own page may ask this", 403)
        token = self._settings.token
        if token is None:
            return None
        given = request.query_params.get("token")
        opens_page = request.method == "GET" and request.scope["path"] == "/"
        if given is not None and opens_page and _equal_secrets(given, token):
            # Move the token into a cookie at once: it must not stay in the address bar and the history.
            answer = RedirectResponse("/", 303)
            answer.set_cookie(
                _cookie(request), quote(token, safe=""), httponly=True, samesite="strict", secure=self._settings.tls
            )
            return answer
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal_secrets(bearer.strip(), token):
            return None
        if _equal_secrets(request.cookies.get(_cookie(request), ""), quote(token, safe="")):
            return None
        return PlainTextResponse("a token is needed: open /?token=..., or send 'Authorization: Bearer ...'", 401)

    def _is_own_page(self, request: Request) -> bool:
        """Whether the monitor's own page asks, or a program, which sends neither of these headers."""
        origin = request.headers.get("origin")
        scheme = "https" if self._settings.tls else "http"
        if origin is not None and origin != f"{scheme}://{request.headers.get('host', '')}":
            return False
        return request.headers.get("sec-fetch-site", "none") in OWN_PAGE


def _bound(path: str) -> tuple[str, int]:
    """What a request counts as, and how many of them there may be."""
    if path == "/api/events":
        return "pages", MAX_PAGES
    return ("tails", tail.MAX_TAILS + 1) if path == "/api/tail" else ("answers", MAX_ANSWERS)


def _cookie(request: Request) -> str:
    return COOKIE.format(port=request.url.port or request.url.scheme)


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
        Route("/api/channel", api.channel),
        Route("/api/actions/{name}", api.act, methods=["POST"]),
        Route("/metrics", api.metrics),
        Route("/grafana.json", lambda _request: JSONResponse(dashboard())),
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

    def state(self, request: Request) -> Response:
        return JSONResponse(self._record(request))

    def _record(self, request: Request) -> dict[str, Any]:
        return {
            **state_record(self._watcher.state, request.query_params.get("chosen", "")),
            "version": __version__,
            "actions": sorted(actions.ACTIONS) if self._settings.allow_actions else [],
        }

    def history(self, request: Request) -> Response:
        """The last samples, one a second; with ``span`` in seconds, one a minute from the file, up to a day."""
        try:
            last = int(request.query_params.get("last", "900"))
            span_s = int(request.query_params.get("span", "0"))
        except ValueError:
            return JSONResponse({"error": "last is a number of samples, span a number of seconds"}, 400)
        if span_s > 0 and self._watcher.long is not None:
            return JSONResponse(self._watcher.long.series(span_s, time.time()))
        names = request.query_params.getlist("name")
        return JSONResponse(self._watcher.history.series(names or None, last))

    async def events(self, request: Request) -> Response:
        """One event per look: what changed of the state, and the newest sample of every series; in between, beats."""

        changes = Changes()

        def event() -> str:
            record = {**changes.of(self._record(request)), "sample": self._watcher.history.series(None, 1)}
            return f"data: {json.dumps(record)}\n\n"

        async def stream() -> AsyncIterator[str]:
            seen = 0
            while not self._ending() and not await request.is_disconnected():
                if await self._looked_after(seen):
                    seen = self._watcher.state.time_ns
                    yield await asyncio.to_thread(event)
                else:  # the page takes silence for a connection that was lost
                    yield "event: beat\ndata: 1\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def _looked_after(self, seen_ns: int) -> bool:
        """Wait up to half a second for a newer look. Without a thread, of which there are few."""
        for _ in range(10):
            if self._watcher.state.time_ns > seen_ns:
                return True
            await asyncio.sleep(0.05)
        return False

    async def tail(self, request: Request) -> Response:
        """Messages of one address as they come. This subscribes, because the user asked for it."""
        source = tail.follow(request.query_params.get("address", ""), request.query_params.get("filter", ""))
        try:
            first = await asyncio.to_thread(next, source)
        except (PenstockError, OSError, ImportError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return StreamingResponse(_relay(request, first, source, self._ending), media_type="text/event-stream")

    def channel(self, request: Request) -> Response:
        """What ``penstock why`` says of an address, and the latencies that its readers have measured."""
        address = request.query_params.get("address", "")
        latencies = [
            look.block.latency_counts
            for look in self._watcher.state.looks
            if look.block.channel == address and look.block.latency_counts
        ]
        counts = [sum(column) for column in zip(*latencies, strict=True)] if latencies else []
        record: dict[str, Any] = {"address": address, "latency": _distribution(counts)}
        try:
            where = broker_address(address)
            _check_is_open_here(where)
            record["why"] = [dataclasses.asdict(finding) for finding in explain(where, watch_s=0.5)]
        except (PenstockError, OSError, ImportError, KeyError) as error:
            record["error"] = str(error)
        return JSONResponse(record)

    async def act(self, request: Request) -> Response:
        """Only when allowed, and only from our own page (a header that a form cannot send)."""
        if not self._settings.allow_actions:
            return JSONResponse({"error": "this monitor only looks; start it with --allow-actions"}, 403)
        if request.headers.get("x-penstock-action") != "1":
            return JSONResponse({"error": "the header X-Penstock-Action: 1 is missing"}, 403)
        try:
            async with asyncio.timeout(BODY_S):
                body = await _bounded_body(request)
        except TimeoutError:
            return JSONResponse({"error": f"the body did not come within {BODY_S:g} s"}, 408)
        try:
            if body is None:
                return JSONResponse({"error": f"a body has at most {MAX_BODY_BYTES} bytes"}, 413)
            arguments = json.loads(body or b"{}")
            if not isinstance(arguments, dict):
                raise InvalidArgument('the body is an object such as {"queue": "jobs", "pid": 4711}')
            done = await asyncio.to_thread(actions.act, request.path_params["name"], arguments)
        except RecursionError:
            return JSONResponse({"error": "the body is nested too deeply"}, 400)
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


def _check_is_open_here(address: str) -> None:
    """Refuse a host that nobody on this machine is connected to: a visitor could have ports tried out from here."""
    if address.startswith(tuple(f"{scheme}://" for scheme in NETWORK)):
        host = _host_of(address)
        if host not in {_host_of(block.address) for block in live()}:
            raise RefusedError(f"{host}: nobody on this machine has it open")


def _host_of(address: str) -> str:
    return "/".join(without_secrets(address).partition("?")[0].split("/")[:3])


async def _bounded_body(request: Request) -> bytes | None:
    """The request's body; None, without reading further, once it is longer than it may be."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _distribution(counts: Sequence[int]) -> list[dict[str, Any]]:
    """One bar per doubling, from the first that has a count to the last."""
    pairs = [sum(counts[at : at + 2]) for at in range(0, len(counts), 2)]
    bounds = [bound / 1e3 for bound in BOUNDS_NS[1::2]]
    bars = [{"below_us": below, "count": n} for n, below in itertools.zip_longest(pairs, bounds[: len(pairs)])]
    filled = [at for at, bar in enumerate(bars) if bar["count"]]
    return bars[filled[0] : filled[-1] + 1] if filled else []


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
