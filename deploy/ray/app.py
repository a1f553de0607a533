"""foretoken on Ray Serve: one process a replica, behind a gateway that routes by prefix.

    serve run deploy/ray/app.yaml

A request goes from Serve's proxy to a `Gateway`, which reads its body and asks the router of `Replica` for a replica;
the replica passes it to its foretoken process, and what comes back goes to the client as it is. Serve does the rest:
it starts, checks, replaces and removes replicas.
"""

import asyncio
import json
import logging
import random
import re
from urllib.parse import quote

import aiohttp
import ray
from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import RequestRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from yarl import URL

from deploy.ray.affinity import PrefixTable, by_cost, keys_of, prompt_of
from deploy.ray.process import Server, find_binary

logger = logging.getLogger("ray.serve")

ATTEMPTS = 3
"""Replicas that are tried for a request of which no byte of a reply has come yet."""
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
LOAD = re.compile(r"^\w+:num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")


class PrefixAffinityRouter(RequestRouter):
    """Sends a request to the replica where it costs least (see `affinity.cost`): where the beginning of its prompt has
    been computed, unless that replica has so many requests that another one is done sooner.

    It looks only at the replicas that were given the prompt's beginning and at two others, drawn at random, so the cost of
    a decision does not grow with the number of replicas. Each gateway has a table of its own.
    """

    def initialize_state(self, load_blocks=8.0, max_blocks=200_000):
        """`load_blocks`: how many blocks of 64 characters a replica computes in the time by which another request delays
        this one. `max_blocks`: of the table, about 200 bytes each."""
        self.load_blocks = load_blocks
        self.table = PrefixTable(max_blocks)

    def update_replicas(self, replicas):
        before = set(self._replicas)
        super().update_replicas(replicas)
        for gone in before - set(self._replicas):
            self.table.remove(gone)

    def on_replica_actor_died(self, replica_id):
        super().on_replica_actor_died(replica_id)
        self.table.remove(replica_id)

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        # If none of these accepts the request, wait before the next attempt.
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        options = pending_request.kwargs if pending_request is not None else {}
        keys, avoid = options.get("keys", ()), options.get("avoid", ())
        known = {r.replica_id: r for r in candidate_replicas}
        usable = {i: r for i, r in known.items() if i.unique_id not in avoid} or known
        matched = {i: n for i, n in self.table.matches(keys).items() if i in usable}
        others = random.sample(list(usable), min(2, len(usable)))
        chosen = list(dict.fromkeys([*matched, *others]))
        loads = await self._loads([usable[i] for i in chosen])
        ranked = by_cost(chosen, len(keys), matched, loads, self.load_blocks)
        return [[usable[i]] for i in ranked]

    async def _loads(self, replicas):
        """Requests of each replica: as its last answers said, or, where those are old, asked now."""
        loads = {r.replica_id: self._replica_queue_len_cache.get(r.replica_id) for r in replicas}
        unknown = [r for r in replicas if loads[r.replica_id] is None]
        if unknown:
            for replica, length in await self._probe_queue_lens(unknown, 0):
                loads[replica.replica_id] = length
        return {i: n if n is not None else 0 for i, n in loads.items()}

    def on_request_routed(self, pending_request, replica_id, result):
        self.table.insert(pending_request.kwargs.get("keys", ()), replica_id)


class AutoscalingPolicy:
    """As many replicas as the requests that run and wait need, by the servers' own metrics."""

    def __init__(self, target_requests=8.0):
        """`target_requests`: running and waiting requests that a replica should have on average."""
        self.target_requests = target_requests

    def __call__(self, context):
        metrics = context.aggregated_metrics or {}
        requests = sum(sum(metrics.get(name, {}).values()) for name in ("running", "waiting"))
        # What has not reached a replica yet is in the gateways' queues.
        requests += context.total_queued_requests or 0
        return requests / self.target_requests, {}


@serve.deployment
class Replica:
    """One foretoken process."""

    def __init__(self, binary=None, flags=None, ready_timeout=600.0):
        flags = {str(name).lstrip("-").replace("_", "-"): value for name, value in (flags or {}).items()}
        resources = ray.get_runtime_context().get_assigned_resources()
        # Clients send the Host of the gateway.
        flags.setdefault("allowed-hosts", "*")
        if "threads" not in flags and resources.get("CPU", 0) >= 1:
            flags["threads"] = int(resources["CPU"])
        if 0 < resources.get("GPU", 0) < 1:
            flags.setdefault("gpu-memory-utilization", round(0.9 * resources["GPU"], 3))
        self.shutdown_timeout = float(flags.get("shutdown-timeout", 30))
        self.id = serve.get_replica_context().replica_id.unique_id
        self.session = None
        self.server = Server(find_binary(binary), flags, ready_timeout)

    def _session(self):
        if self.session is None:
            self.session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self.session

    async def forward(self, method, target, headers, body, keys=(), avoid=()):
        """Passes a request on. Yields this replica's id, then status and headers, then the body as it arrives; and in
        place of what did not arrive, a text that says why. A caller that stops reading cancels the request."""
        yield self.id
        try:
            url = URL(self.server.url + target, encoded=True)
            async with self._session().request(
                method, url, headers=headers, data=body or None, allow_redirects=False
            ) as reply:
                yield reply.status, reply.raw_headers
                async for chunk in reply.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as e:
            yield f"{type(e).__name__}: {e}"

    async def get(self, path):
        async with self._session().get(self.server.url + path) as reply:
            reply.raise_for_status()
            return await reply.text()

    async def metrics(self):
        return self.id, await self.get("/metrics")

    async def reset_prefix_cache(self, headers):
        async with self._session().post(self.server.url + "/reset_prefix_cache", headers=headers) as reply:
            return reply.status, reply.raw_headers, await reply.read()

    async def check_health(self):
        if not self.server.alive():
            raise RuntimeError(f"foretoken ended with status {self.server.process.poll()}")
        await self.get("/health")

    async def record_autoscaling_stats(self):
        values = dict.fromkeys(("running", "waiting"), 0.0)
        for name, value in LOAD.findall(await self.get("/metrics")):
            values[name] += float(value)
        return values

    def __del__(self):
        # Serve calls this when the last request has ended. If that takes too long, Serve kills this process, and
        # foretoken gets its SIGTERM by that.
        if hasattr(self, "server"):
            self.server.stop(self.shutdown_timeout + 5)


@serve.deployment
class Gateway:
    """Reads requests, has the router choose a replica, and passes replies on."""

    def __init__(self, replicas, max_body_bytes=2 << 20):
        self.replicas = replicas
        self.forward = replicas.options(method_name="forward", stream=True)
        self.max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        # What the client asked for below the application's route_prefix.
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "").rstrip("/"))
        if body is None:
            return error(path, 413, f"the body is longer than {self.max_body_bytes} bytes", "invalid_request_error")
        headers = [(k, v) for k, v in request.headers.raw if k not in HOP_BY_HOP and k != b"content-length"]
        if path == "/metrics":
            return await self._metrics()
        if path == "/reset_prefix_cache" and request.method == "POST":
            return await self._reset_prefix_cache(decoded(headers))
        return await self._forward(request, path, decoded(headers), body)

    async def _body(self, request):
        """The whole body, or nothing if it is too long."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.max_body_bytes:
                return None
            parts.append(part)
        return b"".join(parts)

    async def _forward(self, request, path, headers, body):
        # As the client wrote it: `path` is decoded.
        raw_path = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
        raw_path = raw_path.removeprefix(request.scope.get("root_path", "").rstrip("/").encode())
        query = request.scope.get("query_string", b"")
        target = (raw_path + (b"?" + query if query else b"")).decode("latin-1")
        keys = request_keys(request.headers, body)
        avoid, reason = [], ""
        for _ in range(ATTEMPTS):
            replica = None
            parts = self.forward.remote(request.method, target, headers, body, keys=keys, avoid=avoid)
            try:
                replica = await anext(parts)
                head = await anext(parts)
                if not isinstance(head, str):
                    return reply(path, head, parts)
                reason = head
            except BackPressureError:
                return error(path, 429, "every replica is busy, and the queue is full", "server_overloaded")
            except (ray.exceptions.RayError, StopAsyncIteration) as e:
                reason = type(e).__name__
            # Nothing of a reply has been seen, and a request changes nothing on the server: another one may do it.
            if replica is not None:
                avoid.append(replica)
        logger.warning(f"no reply after {ATTEMPTS} attempts: {reason}")
        return error(path, 502, f"no replica could answer: {reason}", "server_error")

    async def _metrics(self):
        texts = await self.replicas.broadcast("metrics").results_async()
        return PlainTextResponse(merged_metrics(texts), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _reset_prefix_cache(self, headers):
        replies = await self.replicas.broadcast("reset_prefix_cache", headers).results_async()
        status, headers, body = max(replies, key=lambda r: r[0])
        response = Response(body, status)
        response.raw_headers = passed_on(headers)
        return response


def decoded(headers):
    return [(k.decode("latin-1"), v.decode("latin-1")) for k, v in headers]


def passed_on(headers):
    """The headers of a reply, without those that Serve's proxy writes itself."""
    return [(k, v) for k, v in headers if k.lower() not in HOP_BY_HOP and k.lower() != b"date"]


def request_keys(headers, body):
    """The keys of a request's prompt; none for what has no prompt."""
    try:
        request = json.loads(body)
    except ValueError:
        return []
    if not isinstance(request, dict):
        return []
    owner = [headers.get("authorization"), headers.get("x-api-key"), request.get("model"), request.get("cache_salt")]
    return keys_of(prompt_of(request), json.dumps(owner))


def reply(path, head, parts):
    status, headers = head
    is_stream = any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)

    async def body():
        reason = None
        try:
            async for part in parts:
                if isinstance(part, str):
                    reason = part
                else:
                    yield part
        except ray.exceptions.RayError as e:
            reason = type(e).__name__
        if reason is None:
            return
        logger.warning(f"a reply broke off: {reason}")
        if not is_stream:
            # The connection must end before its Content-Length: the client sees that something is missing.
            raise ConnectionError(reason)
        yield error_event(path, f"the replica broke off: {reason}")

    response = StreamingResponse(body(), status)
    response.raw_headers = passed_on(headers)
    return response


def error_body(path, message, kind):
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": "api_error", "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def error(path, status, message, kind):
    return JSONResponse(error_body(path, message, kind), status)


def error_event(path, message):
    """An event that ends a stream, in the form of the API that the path belongs to."""
    if path.startswith("/v1/responses"):
        data = {"type": "error", "code": "server_error", "message": message, "param": None}
    else:
        data = error_body(path, message, "server_error")
    name = "" if path.startswith(("/v1/chat", "/v1/completions")) else "event: error\n"
    # A blank line first ends an event that was cut in two.
    return f"\n\n{name}data: {json.dumps(data)}\n\n".encode()


def merged_metrics(texts):
    """Metrics of several replicas as one text, each sample with the label `replica`."""
    families = {}
    for replica, text in sorted(texts):
        family = None
        for line in text.splitlines():
            if line.startswith("# "):
                _, what, name, rest = (line.split(" ", 3) + [""])[:4]
                family = families.setdefault(name, ({}, []))
                family[0].setdefault(what, rest)
            elif family is not None and (sample := SAMPLE.match(line)):
                name, labels, value = sample.groups()
                family[1].append(f'{name}{{{labels + "," if labels else ""}replica="{replica}"}} {value}')
    lines = []
    for name, (about, samples) in families.items():
        lines += [f"# {what} {name} {rest}" for what, rest in about.items()]
        lines += samples
    return "\n".join(lines) + "\n"


def build(args):
    """The application of `app.yaml`; `args` are its arguments."""
    unknown = set(args) - {"binary", "flags", "ready_timeout"}
    if unknown:
        raise ValueError(f"args: {', '.join(sorted(unknown))}: binary, flags and ready_timeout are known")
    return Gateway.bind(Replica.bind(args.get("binary"), args.get("flags"), float(args.get("ready_timeout", 600))))
