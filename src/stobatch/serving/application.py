"""The routes of the server, and who may use them.

Pictures are kept for as long as their answer takes, in memory alone, and nothing of a request is logged. Errors are the
protocol's, a sentence each, and name no path of the machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from importlib import resources
from importlib.metadata import version
from time import monotonic
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stobatch.errors import StobatchError
from stobatch.serving.batching import Answer, Batcher, QueueFullError, ServedModel
from stobatch.serving.metrics import Metrics
from stobatch.serving.protocol import (
    EXTENSIONS,
    HEADER,
    Request,
    RequestError,
    describe_model,
    read_request,
    version_of,
    write_answer,
)

OPEN = ("/", "/page.js", "/page.css", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
"""What needs no token: it says nothing about models or pictures."""
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_DISCARD_BYTES = 2**28
_DISCARD_S = 3.0
_READ = "stobatch.body_read"
CONNECTION = "stobatch.connection"
"""In the scope of a request: what it came by, whose `on_lost` is called when the client goes away."""
_LARGE = 2**17
"""Bodies above this are read by another thread, so that nobody waits for one client's JSON."""


@dataclass(frozen=True)
class Limits:
    """What one client, and all of them together, may ask for."""

    body_bytes: int = 8 * 2**20
    body_s: float = 20.0
    """In which a body has to have arrived."""
    rows: int = 512
    """Pictures of one request."""
    queue_rows: int = 2048
    """Pictures that wait, of all requests."""
    per_client: int = 128
    """Requests of one address that are being answered."""


class HttpError(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.code, self.headers = code, {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> Response:
        return JSONResponse({"error": str(self)}, self.code, self.headers)


class Service:
    """Models, their queue, and what is counted."""

    def __init__(self, models: Mapping[str, ServedModel], limits: Limits) -> None:
        self.models, self.limits = dict(models), limits
        self.metrics = Metrics({name: version_of(model) for name, model in models.items()})
        self.batcher = Batcher(limits.queue_rows, on_batch=self.metrics.add_batch)
        self.reader = ThreadPoolExecutor(1, "stobatch-reader")
        self.draining = False
        self.in_flight: Counter[str] = Counter()

    def model(self, request: HttpRequest) -> ServedModel:
        model = self.models.get(request.path_params["name"])
        if model is None:
            raise HttpError(404, "there is no model of this name. GET /v2/models lists them.")
        if request.path_params.get("version", version_of(model)) != version_of(model):
            raise HttpError(404, f"this model is served in version {version_of(model)} alone.")
        return model

    def close(self) -> None:
        self.batcher.stop()
        self.reader.shutdown()


def make_application(service: Service, *, token: str | None, hosts: frozenset[str] | None, tls: bool) -> ASGIApp:
    """Return the server's application; `hosts` are the names that requests may call it by, None for any."""

    def route(path: str, endpoint: Callable[..., Awaitable[Response]], method: str = "GET") -> Route:
        async def called(request: HttpRequest) -> Response:
            return await endpoint(service, request)

        return Route(path, called, methods=[method])

    # The first that fits is taken: what is asked most stands first.
    routes = list[Route]()
    for suffix in ("", "/versions/{version}"):
        path = f"/v2/models/{{name}}{suffix}"
        routes += [route(f"{path}/infer", _infer, "POST"), route(f"{path}/attack", _attack, "POST")]
        routes += [route(path, _model), route(f"{path}/ready", _model_ready)]
    routes += [
        route("/", _page),
        route("/page.js", _file),
        route("/page.css", _file),
        route("/openapi.json", _file),
        route("/docs", _docs),
        route("/card", _card),
        route("/metrics", _metrics),
        route("/v2", _server),
        route("/v2/health/live", _live),
        route("/v2/health/ready", _ready),
        route("/v2/models", _models),
    ]
    handlers = {HTTPException: _unknown, HttpError: _problem, Exception: _failed}
    application = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(application, service, token=token, hosts=hosts, tls=tls)


async def _unknown(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "there is nothing at this address. See /docs.", 405: "this method is not for this address. See /docs."}
    return JSONResponse({"error": said.get(error.status_code, error.detail)}, error.status_code, error.headers)


async def _problem(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    await _discard(request.scope, request.receive)
    return error.response()


async def _failed(request: HttpRequest, error: Exception) -> Response:
    return HttpError(500, "the server failed; nothing of the request was kept.").response()


class Guard:
    """Let nobody in who may not, add the headers of security to every answer, and count it."""

    def __init__(
        self, application: ASGIApp, service: Service, *, token: str | None, hosts: frozenset[str] | None, tls: bool
    ) -> None:
        self.application, self.service, self.hosts = application, service, hosts
        told = SECURITY | ({"strict-transport-security": "max-age=31536000"} if tls else {})
        self.headers = [(name.encode(), value.encode()) for name, value in told.items()]
        self.token = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        service, client = self.service, (scope.get("client") or ("",))[0]

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                service.metrics.count_request(_pattern(scope), message["status"])
                message["headers"] = [*message.get("headers", ()), *self.headers]
            await send(message)

        service.in_flight[client] += 1
        try:
            self._admit(scope, client)
            await self.application(scope, receive, send_guarded)
        except HttpError as problem:
            await _discard(scope, receive)
            await problem.response()(scope, receive, send_guarded)
        except Exception as error:  # it has been answered, and is no reason to stop
            service.metrics.count("failures", "", 1)
            print(f"stobatch: a request failed inside: {type(error).__name__}", file=sys.stderr, flush=True)
        finally:
            service.in_flight[client] -= 1
            if not service.in_flight[client]:
                del service.in_flight[client]

    def _admit(self, scope: Scope, client: str) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and _name_of(host) not in self.hosts:
            # A page of somebody else whose name was made to point here could else read answers.
            raise HttpError(421, "this server does not go by that name.")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            raise HttpError(403, "pages of other sites may not ask this server.")
        if self.token is not None and scope["path"] not in OPEN:
            given = headers.get(b"authorization", b"")
            kind, _, word = given.partition(b" ")
            # Digests have one length, and are compared in constant time.
            if not hmac.compare_digest(_digest(word.strip()), self.token) or kind.lower() != b"bearer":
                raise HttpError(401, "a token is needed. Send Authorization: Bearer TOKEN.", www_authenticate="Bearer")
        if self.service.in_flight[client] > self.service.limits.per_client:
            raise HttpError(
                429, "too many requests of this address are being answered. Wait for some.", retry_after="1"
            )


def _digest(word: bytes) -> bytes:
    return hashlib.sha256(word).digest()


def _name_of(host: str) -> str:
    """Return a host without its port.

    >>> _name_of("localhost:8080"), _name_of("[::1]:8080"), _name_of("::1")
    ('localhost', '::1', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.lower() if host.count(":") > 1 else host.partition(":")[0].lower()


def _pattern(scope: Scope) -> str:
    """Return the route for the metrics: no name that a client made up."""
    route = scope.get("route")
    return str(getattr(route, "path", "unknown"))


async def _discard(scope: Scope, receive: Receive) -> None:
    """Take in what is still being sent, for a moment: a client that cannot send does not read the answer either."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if scope.get(_READ) or (length.isdigit() and int(length) > _DISCARD_BYTES):
        return
    taken = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while taken < _DISCARD_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                taken += len(message.get("body", b""))
    except TimeoutError:
        return


async def _read_body(request: HttpRequest, limits: Limits) -> bytes:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HttpError(415, "compressed bodies are not taken. Send it as it is.")
    too_large = HttpError(413, f"the body is larger than {limits.body_bytes:,} bytes. Send fewer pictures at once.")
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or int(length) > limits.body_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise too_large
                parts.append(part)
    except ClientDisconnect:
        raise HttpError(499, "the client has gone.") from None
    except TimeoutError:
        request.scope[_READ] = True
        raise HttpError(408, f"the body did not arrive within {limits.body_s:g} s.", connection="close") from None
    request.scope[_READ] = True
    return b"".join(parts)


# Questions.


async def _infer(service: Service, request: HttpRequest) -> Response:
    return await _ask(service, request, attack=False)


async def _attack(service: Service, request: HttpRequest) -> Response:
    return await _ask(service, request, attack=True)


async def _ask(service: Service, request: HttpRequest, *, attack: bool) -> Response:
    arrived, model = monotonic(), service.model(request)
    if service.draining:
        raise HttpError(503, "the server is being shut down.", retry_after="5", connection="close")
    body = await _read_body(request, service.limits)
    header, loop = request.headers.get(HEADER), asyncio.get_running_loop()
    try:
        # Files are decoded, and much JSON is read, beside the loop that serves everybody.
        reading = (body, header, model, service.limits.rows)
        beside = len(body) > _LARGE or b'"BYTES"' in body
        asked = await loop.run_in_executor(service.reader, read_request, *reading) if beside else read_request(*reading)
        del body, reading
        if attack and (asked.radius is None or len(asked.inputs) != 1):
            raise RequestError(
                "an attack needs one picture and a radius.", remedy="Send one, and the parameter radius."
            )
        answer = await _answer(service, request, model, asked, arrived, attack=attack)
        content, length = write_answer(answer, asked, model)
    except QueueFullError as error:
        raise HttpError(503, str(error), retry_after="1") from None
    except StobatchError as error:
        raise HttpError(400, str(error)) from None
    service.metrics.add_seconds(model.name, monotonic() - arrived)
    service.metrics.count("pictures", model.name, len(asked.inputs))
    service.metrics.count("draws", model.name, int(answer.draws.sum()))
    service.metrics.count("abstentions", model.name, int(answer.abstains.sum()))
    if length is None:
        return Response(content, media_type="application/json")
    return Response(content, media_type="application/octet-stream", headers={HEADER: str(length)})


async def _answer(
    service: Service, request: HttpRequest, model: ServedModel, asked: Request, arrived: float, *, attack: bool
) -> Answer:
    """Wait for an answer, or for the client to go away, who then costs nothing more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Answer] = loop.create_future()

    def settle(result: Answer | Exception) -> None:
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def tell(result: Answer | Exception) -> None:
        loop.call_soon_threadsafe(settle, result)

    ticket = service.batcher.submit(model, asked.inputs, asked.question(arrived, attack=attack), tell)
    connection = request.scope.get(CONNECTION)
    if connection is not None:
        connection.on_lost = lambda: settle(HttpError(499, "the client has gone."))
    try:
        return await future
    finally:
        ticket.gone = True
        if connection is not None:
            connection.on_lost = None


# What there is.


async def _server(service: Service, request: HttpRequest) -> Response:
    return JSONResponse({"name": "stobatch", "version": version("stobatch"), "extensions": list(EXTENSIONS)})


async def _live(service: Service, request: HttpRequest) -> Response:
    alive = service.batcher.is_alive
    return JSONResponse({"live": alive}, 200 if alive else 500)


async def _ready(service: Service, request: HttpRequest) -> Response:
    return JSONResponse({"ready": not service.draining}, 503 if service.draining else 200)


async def _models(service: Service, request: HttpRequest) -> Response:
    return JSONResponse({"models": list(service.models)})


async def _model(service: Service, request: HttpRequest) -> Response:
    return JSONResponse(describe_model(service.model(request)))


async def _model_ready(service: Service, request: HttpRequest) -> Response:
    name = service.model(request).name
    return JSONResponse({"name": name, "ready": not service.draining}, 503 if service.draining else 200)


async def _metrics(service: Service, request: HttpRequest) -> Response:
    gauges = {"waiting_pictures": service.batcher.waiting_rows, "requests_in_flight": service.in_flight.total()}
    return PlainTextResponse(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")


async def _card(service: Service, request: HttpRequest) -> Response:
    """What each model guarantees: about its training data, and with its radii."""
    return JSONResponse({"models": {name: card_of(model) for name, model in service.models.items()}})


def card_of(model: ServedModel) -> dict[str, Any]:
    """Return what is guaranteed of a model, by whom, and on what assumptions."""
    from stobatch.reporting.guarantee import STATUS_MEANINGS

    return {
        "weights_sha256": model.model.weights_sha256,
        "method": model.model.config.method.title,
        "input_shape": list(model.model.network.input_shape),
        "class_names": list(model.model.class_names),
        "warning": model.warning,
        "privacy": {
            "status": str(model.guarantee.status),
            "line": str(model.guarantee),
            "meaning": STATUS_MEANINGS[model.guarantee.status],
            **model.guarantee.to_dict(),
        },
        "certificates": [kind.to_dict() for kind in model.kinds],
        "answers_by": None if model.kind is None else model.kind.name,
    }


_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "json": "application/json"}


async def _page(service: Service, request: HttpRequest) -> Response:
    return _read_file("index.html")


async def _file(service: Service, request: HttpRequest) -> Response:
    return _read_file(request.url.path.removeprefix("/"))


async def _docs(service: Service, request: HttpRequest) -> Response:
    """Return the OpenAPI document as a page, which needs nothing from elsewhere."""
    document = json.loads(_site("openapi.json"))
    schemas = document["components"]["schemas"]
    asked = schemas["InferRequest"]["properties"]["parameters"]["properties"]
    parts = {
        "addresses": "\n".join(
            f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{escape(what['summary'])}</td></tr>"
            for path, methods in document["paths"].items()
            for method, what in methods.items()
        ),
        "parameters": "\n".join(
            f"<dt><code>{name}</code></dt><dd>{escape(one['description'])}</dd>" for name, one in asked.items()
        ),
        "outputs": escape(schemas["InferResponse"]["properties"]["outputs"]["items"]["description"]),
    }
    page = _site("docs.html").decode()
    for name, part in parts.items():
        page = page.replace(f"<!-- {name} -->", part)
    return Response(page, media_type=_KINDS["html"])


def _site(name: str) -> bytes:
    return resources.files("stobatch.serving").joinpath("site", name).read_bytes()


def _read_file(name: str) -> Response:
    return Response(_site(name), media_type=_KINDS[name.rpartition(".")[2]])
