"""A connection that ends when its client keeps it without need: half a header, or nothing read.

uvicorn itself waits for both without end, so that a few clients could use up all connections.
"""

import asyncio
from http import HTTPStatus
from json import dumps
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mini_engine.serve.protocol import APIError
from mini_engine.serve.streaming import ClientGoneError

HEADER_SECONDS = 30.0  # from the first byte of a header to its last, or from the connection to its first
HEADER_BYTES = 2**16
BODY_SECONDS = 30.0  # from the header to the body's last byte


def config(app: Any, **options: Any) -> uvicorn.Config:
    """Return the settings with which uvicorn serves an application of ours."""
    ours: dict[str, Any] = {
        "http": Connection, "ws": "none", "log_level": "warning", "server_header": False,
        "timeout_keep_alive": 30, "timeout_graceful_shutdown": 30, "proxy_headers": False,
        "access_log": False,
    }  # fmt: skip
    return uvicorn.Config(app, **ours | options)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits of a header's time and size, and with errors in OpenAI's shape.

    `request.state.cut_off` ends it at once: unsent bytes do not wait for a client that reads nothing.
    """

    header_seconds = HEADER_SECONDS
    _in_header, _header_bytes = True, 0
    _too_late: asyncio.TimerHandle | None = None

    # As uvicorn's own, which narrows the type of asyncio's protocol, too.
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

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_header, self._header_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_header = False
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES:
            raise ValueError("the header is too long")  # the parser gives up, and calls send_400_response

    def _mind_the_header(self) -> None:
        if not self._in_header:
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
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # in the midst of another answer there is no place for this one
            return
        body = dumps(error.to_json()).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
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
