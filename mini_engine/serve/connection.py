"""A connection that ends when its client keeps it without need: half a header, or nothing read.

uvicorn itself waits for both without end, so that a few clients could use up all connections.
"""

import asyncio
from json import dumps
from typing import Any

import h11
import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_engine.serve.protocol import APIError
from mini_engine.serve.streaming import ClientGoneError

HEADER_SECONDS = 10.0  # from the first byte of a header to its last, or from the connection to its first
HEADER_BYTES = 2**16
BODY_SECONDS = 30.0  # from the header to the body's last byte


def config(app: Any, **options: Any) -> uvicorn.Config:
    """Return the settings with which uvicorn serves an application of ours."""
    ours: dict[str, Any] = {
        "http": Connection, "ws": "none", "log_level": "warning", "server_header": False,
        "h11_max_incomplete_event_size": HEADER_BYTES, "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": 30,
    }  # fmt: skip
    return uvicorn.Config(app, **ours | options)


class Connection(H11Protocol):
    """uvicorn's connection over h11, with a limit of time for a header, and with errors in OpenAI's shape.

    `request.state.cut_off` ends it at once: unsent bytes do not wait for a client that reads nothing.
    """

    header_seconds = HEADER_SECONDS
    _too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = self.app_state | {"cut_off": transport.abort}
        self._mind_the_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._mind_the_header()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _mind_the_header(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._too_late is None:
            self._too_late = self.loop.call_later(self.header_seconds, self._end)

    def _forget(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _end(self) -> None:
        self._refuse(APIError(f"no header came within {self.header_seconds:g} seconds", status=408))

    def send_400_response(self, msg: str) -> None:
        rule = f"this is no HTTP request, or its header has more than {HEADER_BYTES} bytes"
        self._refuse(APIError(rule, code="invalid_http"))

    def _refuse(self, error: APIError) -> None:
        body = dumps(error.to_json()).encode()
        headers: list[Any] = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers += [(b"content-length", str(len(body)).encode())]
        try:
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer had begun
            self.transport.abort()
        self.transport.close()


async def body_of(request: Request, most: int) -> bytes:
    """Return a request's body. Raises APIError if it is larger than `most` bytes, or too long in coming."""
    data = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    rule = f"the body is larger than {most} bytes"
                    raise APIError(rule, code="body_too_large", status=413)
    except TimeoutError:
        raise APIError(f"no body came within {BODY_SECONDS:g} s", code="timeout", status=408) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return data
