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
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from importlib.metadata import version
from time import monotonic
from typing import Any

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


@dataclass
class Exchange:
    """A request as it came, and what its address names."""

    scope: dict[str, Any]
    receive: Callable[[], Awaitable[dict[str, Any]]]
    named: dict[str, str] = field(default_factory=dict)
    is_read: bool = False
    """Whether nothing more of its body is to come."""

    def __post_init__(self) -> None:
        self.path: str = self.scope["path"]
        self.headers: dict[bytes, bytes] = dict(self.scope["headers"])


@dataclass(frozen=True)
class Response:
    """An answer to a request."""

    content: bytes
    kind: str = "application/json"
    code: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def _json(content: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content, separators=(",", ":")).encode(), code=code, headers=headers or {})


class HttpError(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.code, self.headers = code, {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> Response:
        return _json({"error": str(self)}, self.code, self.headers)


class Service:
    """Models, their queue, and what is counted."""

    def __init__(self, models: Mapping[str, ServedModel], limits: Limits) -> None:
        self.models, self.limits = dict(models), limits
        self.metrics = Metrics({name: version_of(model) for name, model in models.items()})
        self.batcher = Batcher(limits.queue_rows, on_batch=self.metrics.add_batch)
        self.reader = ThreadPoolExecutor(1, "stobatch-reader")
        self.draining, self.cut_off = False, 0
        self.in_flight: Counter[str] = Counter()
        self._settled: deque[tuple[asyncio.Future[Answer], Answer | Exception]] = deque()

    def settle(self, future: asyncio.Future[Answer], result: Answer | Exception) -> None:
        """Hand a result from the working thread to the loop, which is woken once for a whole batch."""
        self._settled.append((future, result))
        if len(self._settled) == 1:
            future.get_loop().call_soon_threadsafe(self._settle_all)

    def _settle_all(self) -> None:
        while self._settled:
            _settle(*self._settled.popleft())

    def model(self, request: Exchange) -> ServedModel:
        model = self.models.get(request.named["name"])
        if model is None:
            raise HttpError(404, "there is no model of this name. GET /v2/models lists them.")
        if request.named.get("version", version_of(model)) != version_of(model):
            raise HttpError(404, f"this model is served in version {version_of(model)} alone.")
        return model

    def close(self) -> None:
        self.batcher.stop()
        self.reader.shutdown()


class Application:
    """Let nobody in who may not, find who answers, add the headers of security to every answer, and count it."""

    def __init__(self, service: Service, *, token: str | None, hosts: frozenset[str] | None, tls: bool) -> None:
        """`hosts` are the names that requests may call the server by, None for any."""
        self.service, self.hosts = service, hosts
        told = SECURITY | ({"strict-transport-security": "max-age=31536000"} if tls else {})
        self.headers = [(name.encode(), value.encode()) for name, value in told.items()]
        self.token = None if token is None else _digest(token.encode())

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        service, client = self.service, (scope.get("client") or ("",))[0]
        request, pattern = Exchange(scope, receive), "unknown"
        service.in_flight[client] += 1
        try:
            self._admit(request, client)
            pattern, endpoint = _route(request)
            response = await endpoint(service, request)
        except HttpError as problem:
            await _discard(request)
            response = problem.response()
        except asyncio.CancelledError:  # a stop waits for a while, not for ever
            service.cut_off += 1
            raise
        except Exception as error:  # no reason to stop
            print(f"stobatch: a request failed inside: {type(error).__name__}", file=sys.stderr, flush=True)
            response = HttpError(500, "the server failed; nothing of the request was kept.").response()
        finally:
            service.in_flight[client] -= 1
            if not service.in_flight[client]:
                del service.in_flight[client]
        service.metrics.count_request(pattern, response.code)
        headers = {"content-type": response.kind, "content-length": str(len(response.content)), **response.headers}
        sent = [*((name.encode(), value.encode()) for name, value in headers.items()), *self.headers]
        await send({"type": "http.response.start", "status": response.code, "headers": sent})
        await send({"type": "http.response.body", "body": response.content})

    def _admit(self, request: Exchange, client: str) -> None:
        headers = request.headers
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and _name_of(host) not in self.hosts:
            # A page of somebody else whose name was made to point here could else read answers.
            raise HttpError(421, "this server does not go by that name.")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            raise HttpError(403, "pages of other sites may not ask this server.")
        if self.token is not None and request.path not in OPEN:
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


def _route(request: Exchange) -> tuple[str, Endpoint]:
    """Return who answers, under an address without the names that a client made up."""
    pattern = request.path
    if pattern.startswith(_MODEL):
        name, *rest = pattern.removeprefix(_MODEL).split("/")
        request.named = {"name": name}
        pattern = f"{_MODEL}{{name}}"
        if len(rest) > 1 and rest[0] == "versions":
            request.named["version"], rest = rest[1], rest[2:]
            pattern += "/versions/{version}"
        pattern = "/".join((pattern, *rest))
    if pattern not in ROUTES:
        raise HttpError(404, "there is nothing at this address. See /docs.")
    method, endpoint = ROUTES[pattern]
    if request.scope["method"] not in (method, "HEAD" if method == "GET" else method):
        raise HttpError(405, "this method is not for this address. See /docs.", allow=method)
    return pattern, endpoint


async def _discard(request: Exchange) -> None:
    """Take in what is still being sent, for a moment: a client that cannot send does not read the answer either."""
    length = request.headers.get(b"content-length", b"0")
    if request.is_read or (length.isdigit() and int(length) > _DISCARD_BYTES):
        return
    taken = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while taken < _DISCARD_BYTES:
                message = await request.receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                taken += len(message.get("body", b""))
    except TimeoutError:
        return


async def _read_body(request: Exchange, limits: Limits) -> bytes:
    if request.headers.get(b"content-encoding", b"identity") != b"identity":
        raise HttpError(415, "compressed bodies are not taken. Send it as it is.")
    length = request.headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > limits.body_bytes:
        raise _too_large(limits)
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(limits.body_s):
            while not request.is_read:
                message = await request.receive()
                if message["type"] != "http.request":
                    raise HttpError(499, "the client has gone.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limits.body_bytes:
                    raise _too_large(limits)
                request.is_read = not message.get("more_body")
    except TimeoutError:
        request.is_read = True
        raise HttpError(408, f"the body did not arrive within {limits.body_s:g} s.", connection="close") from None
    return b"".join(parts)


def _too_large(limits: Limits) -> HttpError:
    return HttpError(413, f"the body is larger than {limits.body_bytes:,} bytes. Send fewer pictures at once.")


# Questions.


async def _infer(service: Service, request: Exchange) -> Response:
    return await _ask(service, request, attack=False)


async def _attack(service: Service, request: Exchange) -> Response:
    return await _ask(service, request, attack=True)


async def _ask(service: Service, request: Exchange, *, attack: bool) -> Response:
    arrived, model = monotonic(), service.model(request)
    if service.draining:
        raise HttpError(503, "the server is being shut down.", retry_after="5", connection="close")
    body = await _read_body(request, service.limits)
    header, loop = request.headers.get(HEADER.encode()), asyncio.get_running_loop()
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
    service.metrics.add_answer(
        model.name,
        monotonic() - arrived,
        pictures=len(answer.label),
        draws=sum(answer.draws.tolist()),
        abstentions=sum(answer.abstains.tolist()),
    )
    if length is None:
        return Response(content)
    return Response(content, "application/octet-stream", headers={HEADER: str(length)})


async def _answer(
    service: Service, request: Exchange, model: ServedModel, asked: Request, arrived: float, *, attack: bool
) -> Answer:
    """Wait for an answer, or for the client to go away, who then costs nothing more."""
    connection, gone = request.scope[CONNECTION], HttpError(499, "the client has gone.")
    if connection.transport.is_closing():  # while the request was read
        raise gone
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    question = asked.question(arrived, attack=attack)
    ticket = service.batcher.submit(model, asked.inputs, question, lambda result: service.settle(future, result))
    connection.on_lost = lambda: _settle(future, gone)
    try:
        return await future
    finally:
        ticket.gone = True
        connection.on_lost = None


def _settle(future: asyncio.Future[Answer], result: Answer | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


# What there is.


async def _server(service: Service, request: Exchange) -> Response:
    return _json({"name": "stobatch", "version": version("stobatch"), "extensions": list(EXTENSIONS)})


async def _live(service: Service, request: Exchange) -> Response:
    alive = service.batcher.is_alive
    return _json({"live": alive}, 200 if alive else 500)


async def _ready(service: Service, request: Exchange) -> Response:
    return _json({"ready": not service.draining}, 503 if service.draining else 200)


async def _models(service: Service, request: Exchange) -> Response:
    return _json({"models": list(service.models)})


async def _model(service: Service, request: Exchange) -> Response:
    return _json(describe_model(service.model(request)))


async def _model_ready(service: Service, request: Exchange) -> Response:
    name = service.model(request).name
    return _json({"name": name, "ready": not service.draining}, 503 if service.draining else 200)


async def _metrics(service: Service, request: Exchange) -> Response:
    gauges = {"waiting_pictures": service.batcher.waiting_rows, "requests_in_flight": service.in_flight.total()}
    return Response(service.metrics.text(gauges).encode(), "text/plain; version=0.0.4; charset=utf-8")


async def _card(service: Service, request: Exchange) -> Response:
    """What each model guarantees: about its training data, and with its radii."""
    return _json({"models": {name: card_of(model) for name, model in service.models.items()}})


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


async def _file(service: Service, request: Exchange) -> Response:
    return _page(request.path.removeprefix("/") or "index.html")


async def _docs(service: Service, request: Exchange) -> Response:
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
    return _page("docs.html", page.encode())


def _site(name: str) -> bytes:
    return resources.files("stobatch.serving").joinpath("site", name).read_bytes()


def _page(name: str, content: bytes | None = None) -> Response:
    kind = _KINDS[name.rpartition(".")[2]]
    return Response(_site(name) if content is None else content, f"{kind}; charset=utf-8")


_MODEL = "/v2/models/"
Endpoint = Callable[[Service, Exchange], Awaitable[Response]]
ROUTES: dict[str, tuple[str, Endpoint]] = {
    "/": ("GET", _file),
    "/page.js": ("GET", _file),
    "/page.css": ("GET", _file),
    "/openapi.json": ("GET", _file),
    "/docs": ("GET", _docs),
    "/card": ("GET", _card),
    "/metrics": ("GET", _metrics),
    "/v2": ("GET", _server),
    "/v2/health/live": ("GET", _live),
    "/v2/health/ready": ("GET", _ready),
    "/v2/models": ("GET", _models),
}
for _path in (f"{_MODEL}{{name}}", f"{_MODEL}{{name}}/versions/{{version}}"):
    ROUTES |= {_path: ("GET", _model), f"{_path}/ready": ("GET", _model_ready)}
    ROUTES |= {f"{_path}/infer": ("POST", _infer), f"{_path}/attack": ("POST", _attack)}
