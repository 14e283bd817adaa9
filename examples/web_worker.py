"""A web service of several workers: one `delta-prop serve` has the directory, each worker is a client of it.

delta-prop serve --config examples/deploy/delta-prop.toml --data facts
uvicorn examples.web_worker:app --workers 4        (or any other ASGI server)
curl -d '{"vector_id": "apple", "op": "create", "vector": [1, 0]}' localhost:8000/facts
curl localhost:8000/facts/apple
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from delta_prop import DeltaPropError, InvalidDelta, Refused, UsageError, delta_from_line
from delta_prop.client import Producer, facts

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICE = os.environ.get("DELTA_PROP_SERVICE", "127.0.0.1:7373")
LOCKS = Path(os.environ.get("WORKER_LOCKS", gettempdir()))
WORKERS_MAX = 64
BODY_BYTES_MAX = 1 << 20


@contextmanager
def claim_name() -> Iterator[str]:
    """Claim a name that no other running worker on this machine has. It is free again when the process ends.

    Two producers with one name would fence each other; a new name for each start would accumulate in the
    service.
    """
    for number in range(WORKERS_MAX):
        with open(LOCKS / f"web-{number}.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the end of the process releases it
            except BlockingIOError:
                continue
            yield f"web-{number}"
            return
    raise UsageError(f"{WORKERS_MAX} workers already have names in {LOCKS}: raise WORKERS_MAX")


class Worker:
    """An ASGI application. A fact that one worker has acknowledged is visible to all of them."""

    producer: Producer

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.run_lifespan(receive, send)
        elif scope["type"] == "http":
            status, content = await self.respond(scope, receive)
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    async def run_lifespan(self, receive: Any, send: Any) -> None:
        """Connect in the worker's own process, after the fork."""
        await receive()
        with claim_name() as name:
            async with Producer(SERVICE, name=name) as self.producer:
                await send({"type": "lifespan.startup.complete"})
                await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def respond(self, scope: dict[str, Any], receive: Any) -> tuple[int, Any]:
        try:
            match scope["method"], scope["path"].split("/")[1:]:
                case "POST", ["facts"]:
                    ack = await self.producer.publish(delta_from_line(await read_body(receive)), timeout_s=5)
                    return 200, {"offset": ack.offset, "worker": self.producer.name}
                case "GET", ["facts", vector_id]:
                    fact = await anyio.to_thread.run_sync(facts.get, SERVICE, vector_id)
                    if fact.state.value == "vector":
                        return 200, {"vector": fact.vector.tolist(), "worker": self.producer.name}
            return 404, {"error": "unknown path or vector: use POST /facts, or GET /facts/ID"}
        except InvalidDelta as refusal:
            return 422, {"error": str(refusal), "field": refusal.field}
        except Refused as refusal:  # the service is full or too slow: the client retries
            return 503, {"error": str(refusal), "retry_after_ms": refusal.retry_after_ms}
        except (UsageError, ValueError) as error:
            return 400, {"error": str(error)}
        except (DeltaPropError, OSError) as error:  # no answer: the service may be restarting
            return 503, {"error": str(error)}


async def read_body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"more than {BODY_BYTES_MAX} bytes: send one delta per request")
    return body


app = Worker()
