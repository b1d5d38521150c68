"""python -m runtime_py serve: a session behind OpenAI's HTTP API. One generation at a time, others wait in line.

All requests share one session, so a conversation that goes on runs only what is new, if no other came in between.
"""

import json
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from . import openai_api as api
from .events import Event, ToolCall
from .openai_api import Answer, ApiError
from .session import Reply, Session

MAX_REQUEST_BYTES = 4 << 20
MAX_WAITING = 8  # requests in line behind the one that runs
SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Line:
    """One at a time, in the order they came; ApiError 429 where too many wait."""

    def __init__(self, max_waiting: int):
        self._max_waiting, self._lock, self.waiting = max_waiting, anyio.Lock(), 0

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        if self.busy and self.waiting >= self._max_waiting:
            raise ApiError(429, f"{self.waiting} requests wait already; try again later", "queue_full")
        self.waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._lock.release()


async def _items(session: Session, request: api.Request) -> AsyncIterator[Event | Reply]:
    """A session's stream, each step in a thread. Left or cancelled, it ends after the block that runs."""
    if request.messages is None:
        stream = session.stream(request.prompt, request.settings)
    else:
        stream = session.stream_chat(request.messages, request.settings, request.tools, request.variables)
    try:
        while (item := await _next(session, stream)) is not None:
            yield item
    finally:
        stream.close()


async def _next(session: Session, stream: Iterator[Event | Reply]) -> Event | Reply | None:
    finished, results = anyio.Event(), []

    async def step() -> None:
        with anyio.CancelScope(shield=True):
            try:
                results.append(await anyio.to_thread.run_sync(next, stream, None))
            except Exception as error:  # passed on below
                results.append(error)
            finished.set()

    async with anyio.create_task_group() as group:
        group.start_soon(step)
        try:
            await finished.wait()
        except anyio.get_cancelled_exc_class():
            session.cancel()
            raise
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


class Generation:
    """The response, as an ASGI application: waits for its turn, then sends the answer, until the client goes."""

    def __init__(self, session: Session, line: Line, request: api.Request, answer: Answer):
        self._session, self._line, self._request, self._answer = session, line, request, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:

            async def leave_with_client() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(leave_with_client)
            try:
                async with self._line.turn():
                    await self._send(scope, receive, send)
            except ApiError as error:
                await _error(error)(scope, receive, send)
            group.cancel_scope.cancel()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, calls = False, 0
        async with aclosing(_items(self._session, self._request)) as items:
            try:
                async for item in items:
                    if not self._request.stream:
                        continue
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": SSE})
                        await _send_events(send, api.first_chunk(self._answer))
                        started = True
                    await _send_events(send, api.chunks(self._answer, item, calls, self._request.include_usage))
                    calls += isinstance(item, ToolCall)
            except ValueError as error:
                if not started:
                    raise ApiError(400, " ".join(str(error).splitlines())) from None
                await _send_events(send, [ApiError(500, " ".join(str(error).splitlines())).body()])
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
        if self._request.stream:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        else:
            await JSONResponse(api.whole(self._answer, item))(scope, receive, send)


async def _send_events(send: Send, events: list[dict]) -> None:
    for event in events:
        body = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})


def make_app(session: Session, max_waiting: int = MAX_WAITING, max_request_bytes: int = MAX_REQUEST_BYTES) -> Starlette:
    """The ASGI application."""
    model, line = session.pair.manifest.name, Line(max_waiting)

    async def generation(request: Request) -> Generation:
        chat = request.url.path == "/v1/chat/completions"
        data = _parse(await _body(request, max_request_bytes))
        try:
            read = api.read_request(data, chat, model, session.pair.manifest.sampling)
        except ApiError:
            raise
        except ValueError as error:  # of a sampling option
            raise ApiError(400, str(error)) from None
        return Generation(session, line, read, Answer(model, chat))

    async def models(request: Request) -> JSONResponse:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "busy": line.busy, "waiting": line.waiting})

    routes = [
        Route("/v1/chat/completions", generation, methods=["POST"]),
        Route("/v1/completions", generation, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    handlers = {
        ApiError: lambda request, error: _error(error),
        HTTPException: lambda request, error: _error(
            ApiError(error.status_code, f"{request.url.path}: {error.detail}")
        ),
        ClientDisconnect: lambda request, error: _error(ApiError(400, "the client has gone")),
    }
    return Starlette(routes=routes, exception_handlers=handlers)


def _error(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, {"retry-after": "1"} if error.status == 429 else None)


async def _body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(
                413, f"the request has more than {max_bytes} bytes; send a shorter conversation", "request_too_large"
            )
    return bytes(body)


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is no JSON ({error})") from None


def run(session: Session, host: str, port: int) -> None:
    """Serve until interrupted. ValueError if the address cannot be had; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror.partition(" (while")[0]
        raise ValueError(
            f"--host {host} --port {port}: {reason}; give another, or port 0 for one that is free"
        ) from None
    with listener:
        config = uvicorn.Config(make_app(session), log_level="warning", lifespan="off")
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/v1"
        print(f"{session.pair.manifest.name} on {address}", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listener])
