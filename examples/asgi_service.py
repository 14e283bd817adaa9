"""A web service that keeps a search index up to date: the propagator lives as long as the service.

uvicorn examples.asgi_service:app        (or any other ASGI server)
curl -d '{"vector_id": "apple", "op": "create", "vector": [1, 0]}' localhost:8000/deltas
curl 'localhost:8000/nearest?vector=1,0.5&k=3'
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs

from delta_prop import InvalidDelta, Propagator, Refused, UsageError, delta_from_line
from delta_prop.sinks import IndexSink

BODY_BYTES_MAX = 1 << 20


class Service:
    """An ASGI application. A change is searchable when its request returns."""

    def __init__(self) -> None:
        self.propagator = Propagator()
        self.index = IndexSink()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.run_lifespan(receive, send)
        elif scope["type"] == "http":
            status, content = await self.respond(scope, receive)
            body = json.dumps(content).encode()
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def run_lifespan(self, receive: Any, send: Any) -> None:
        """Run the propagator from startup to shutdown; deltas published before shutdown still reach the
        index.
        """
        await receive()
        self.__init__()  # type: ignore[misc]  # new objects at each start
        async with self.propagator:
            await self.propagator.attach(self.index)
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def respond(self, scope: dict[str, Any], receive: Any) -> tuple[int, Any]:
        try:
            match scope["method"], scope["path"]:
                case "POST", "/deltas":
                    return 200, await self.publish(await read_body(receive))
                case "GET", "/nearest":
                    return 200, self.nearest(parse_qs(scope["query_string"].decode()))
            return 404, {"error": "unknown path: use POST /deltas or GET /nearest"}
        except InvalidDelta as refusal:
            return 422, {"error": str(refusal), "field": refusal.field}
        except Refused as refusal:  # the service is full or too slow: the client retries
            return 503, {"error": str(refusal), "retry_after_ms": refusal.retry_after_ms}
        except (UsageError, KeyError, ValueError) as error:
            return 400, {"error": str(error)}

    async def publish(self, body: bytes) -> dict[str, Any]:
        ack = await self.propagator.publish(delta_from_line(body), timeout_s=5)
        await self.propagator.wait_visible(ack, timeout_s=5)
        return {"offset": ack.offset, "duplicate": ack.duplicate}

    def nearest(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        vector = [float(number) for number in query["vector"][0].split(",")]
        hits = self.index.search(vector, k=int(query.get("k", ["10"])[0]))
        return [{"vector_id": hit.vector_id, "score": round(hit.score, 6)} for hit in hits]


async def read_body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"more than {BODY_BYTES_MAX} bytes: send one delta per request")
    return body


app = Service()
