"""The routes of the server. `make_app` returns the application; `mini-engine serve` runs it."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mini_engine.async_engine import LONG, AsyncEngine, EngineClosedError, EngineFullError
from mini_engine.engine import Engine
from mini_engine.serve import pages
from mini_engine.serve.answers import Answer
from mini_engine.serve.connection import body_of
from mini_engine.serve.metrics import ServerMetrics
from mini_engine.serve.protocol import APIError, Asked, read_body, read_chat, read_completion, refusal
from mini_engine.serve.streaming import (
    TOO_LATE,
    Answering,
    Choices,
    ClientGoneError,
    MakeFront,
    Served,
    merged,
    unless_gone,
)
from mini_engine.show.player import payload

Handler = Callable[[HTTPRequest], Awaitable[Response]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The limits of what a client may ask of the server."""

    max_num_requests: int = 256  # that are open at once; more are answered with 429
    max_body_bytes: int = 2**21
    max_answers: int = 128  # of one request: its prompts, times n
    timeout: float = 600.0  # seconds for one request, from its first byte to its last


class Server:
    """The handlers of one model. `model` is its name for clients."""

    def __init__(self, served: Served, model: str, api_key: str | None, limits: Limits):
        self.served, self.tokenizer, self.model = served, served.tokenizer, model
        self.api_key, self.limits = api_key, limits
        self.async_engine, self.metrics = served.front, ServerMetrics(served.state, model)
        self.began = int(time.time())

    # ---------------------------------------------------------------------------------- the API

    async def models(self, request: HTTPRequest) -> Response:
        """List the model. GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: HTTPRequest) -> Response:
        """Describe the model. GET /v1/models/NAME"""
        if (name := request.path_params["name"]) != self.model:
            raise APIError.of_model(repr(name), self.model)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model, "object": "model", "created": self.began, "owned_by": "mini-engine",
            "max_model_len": self.served.max_model_len,
        }  # fmt: skip

    async def completions(self, request: HTTPRequest) -> Response:
        """Complete prompts. POST /v1/completions"""
        asked = read_completion(await self._body(request), self.model)
        return await self._answered(request, asked)

    async def chat(self, request: HTTPRequest) -> Response:
        """Answer a conversation. POST /v1/chat/completions"""
        body = await self._body(request)
        if self.tokenizer.chat_template is None:
            raise APIError(f"{self.model} has no chat template; use /v1/completions", code="no_chat_template")
        asked = await asyncio.to_thread(read_chat, body, self.model, self.tokenizer.encode_chat)
        return await self._answered(request, asked)

    async def _answered(self, request: HTTPRequest, asked: Asked) -> Response:
        number, n = len(asked.prompts), asked.params.n
        if number * n > self.limits.max_answers:
            most = f"one request may have {self.limits.max_answers} answers"
            raise APIError(f"{most}, but asks for {number} times {n}", "n" if number == 1 else "prompt")
        encode = partial(map, self._encode, asked.prompts)
        is_short = sum(map(len, asked.prompts)) < LONG
        encoded = [*encode()] if is_short else await asyncio.to_thread(lambda: [*encode()])
        echoes = ["" for _ in encoded]
        if asked.echo:
            # Special tokens, too: a prompt comes back whole, and logprobs.text_offset counts them.
            decode = partial(self.tokenizer.decode, skip_special_tokens=False)
            pairs = zip(asked.prompts, encoded, strict=True)
            echoes = [prompt if isinstance(prompt, str) else decode(ids) for prompt, ids in pairs]
        answer = Answer(asked, encoded, echoes, self.tokenizer.token_bytes, self.tokenizer.special_tokens)
        deltas = self._deltas(asked, encoded)
        # The first Delta shows that the request is accepted: until then the status is open.
        first = await unless_gone(request.receive, anext(deltas))
        ends = request.state.ends
        return Answering(answer, first, deltas, ends, self.refuse, self.metrics.count)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            vocab = self.served.vocab_size
            if (wrong := next((i for i in prompt if not 0 <= i < vocab), None)) is not None:
                words = f"token id {wrong} is outside the vocabulary (0 to {vocab - 1})"
                raise APIError(words, "prompt", "invalid_value")
            return prompt
        try:
            return self.tokenizer.encode(prompt)
        except ValueError as error:
            raise APIError(str(error), "prompt") from None

    def _deltas(self, asked: Asked, encoded: list[list[int]]) -> Choices:
        """Return a stream of (choice, Delta) of all prompts. Raises APIError, as the stream does."""
        if self.async_engine.num_requests + len(encoded) > self.limits.max_num_requests:
            raise self._full()
        streams = [self._stream(asked, *one) for one in enumerate(encoded)]
        return streams[0] if len(streams) == 1 else merged(streams)

    async def _stream(self, asked: Asked, number: int, token_ids: list[int]) -> Choices:
        """Yield (choice, Delta) of one prompt. Raises APIError for what is refused.

        No Delta is taken before the one before it was sent: a slow reader's request stays open, and counts.
        """
        began, last, first = time.monotonic(), dict[int, float](), number * asked.params.n
        options: dict[str, Any] = {"priority": asked.priority, "cache_salt": asked.cache_salt}
        try:
            async with aclosing(self.async_engine.stream(token_ids, asked.params, **options)) as deltas:
                async for delta in deltas:
                    self.metrics.take(delta, began, last)
                    yield first + delta.index, delta
        except ValueError as error:
            raise refusal(error) from None
        except EngineFullError:
            raise self._full() from None
        except EngineClosedError as error:
            raise _closed(error) from None

    def _full(self) -> APIError:
        most = self.limits.max_num_requests
        rule = f"{most} requests are open, the most that are taken"
        return APIError(rule, code="rate_limit_exceeded", status=429)

    async def tokenize(self, request: HTTPRequest) -> Response:
        """Return the token ids of a text or a conversation. POST /tokenize"""
        body = await self._body(request)
        special = body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise APIError("add_special_tokens must be true or false", "add_special_tokens")
        try:
            if "messages" in body:
                ids = self.tokenizer.encode_chat(body["messages"])
            elif isinstance(body.get("prompt"), str):
                ids = self.tokenizer.encode(body["prompt"], add_special_tokens=special)
            else:
                raise APIError("give a prompt, which is text, or messages", "prompt")
        except ValueError as error:
            raise APIError(str(error)) from None
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.served.max_model_len})

    async def detokenize(self, request: HTTPRequest) -> Response:
        """Return the text of token ids. POST /detokenize"""
        ids = (await self._body(request)).get("tokens")
        vocab = self.served.vocab_size
        if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < vocab for i in ids):
            raise APIError(f"tokens must be a list of token ids from 0 to {vocab - 1}", "tokens")
        return JSONResponse({"prompt": self.tokenizer.decode(ids, skip_special_tokens=False)})

    # --------------------------------------------------------------------------- about the server

    async def health(self, request: HTTPRequest) -> Response:
        """Answer when the engine's thread does. GET /health"""
        try:
            await asyncio.wait_for(self.async_engine.call(lambda engine: None), self.limits.timeout)
        except (TimeoutError, EngineClosedError) as error:
            return JSONResponse({"status": str(error) or "the engine does not answer"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics_page(self, request: HTTPRequest) -> Response:
        """Return all numbers for Prometheus. GET /metrics"""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def steps(self, request: HTTPRequest) -> Response:
        """Return the last steps for the player. GET /trace/steps"""
        trace = await self.async_engine.call(lambda engine: engine.trace if engine.recorder else None)
        if trace is None:
            raise APIError("this server keeps no trace; start it without --no-trace", status=404)
        if not trace.steps:
            return JSONResponse({"traces": []})
        return JSONResponse(payload(trace, names=["live"], step=trace.steps[-1].step))

    async def state(self, request: HTTPRequest) -> Response:
        """Return the engine as the chat page draws it: each request, and the memory. GET /state"""
        state = await self.async_engine.call(pages.state_of)
        return JSONResponse(state | {"model": self.model, "chats": self.tokenizer.chat_template is not None})

    # ------------------------------------------------------------------------------------ helpers

    async def _body(self, request: HTTPRequest) -> dict[str, Any]:
        return read_body(await body_of(request, self.limits.max_body_bytes))

    def guarded(self, handler: Handler) -> Handler:
        """Return the handler behind the API key, with errors in OpenAI's shape."""

        async def handle(request: HTTPRequest) -> Response:
            request.state.ends = asyncio.get_running_loop().time() + self.limits.timeout
            try:
                self._check_key(request)
                async with asyncio.timeout_at(request.state.ends):
                    return await handler(request)
            except APIError as error:
                return self.refuse(error)
            except EngineClosedError as error:
                return self.refuse(_closed(error))
            except ClientGoneError:
                return Response(status_code=499)  # the client has gone
            except TimeoutError:
                return self.refuse(TOO_LATE)
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                return self.refuse(APIError("the server has a fault; its log says which", status=500))

        return handle

    def refuse(self, error: APIError) -> Response:
        self.metrics.refused.labels(self.model, str(error.status)).inc()
        headers = {"Retry-After": "1"} if error.status == 429 else {}
        if error.status in (408, 413):  # the rest of the body is not read
            headers["Connection"] = "close"
        return JSONResponse(error.to_json(), error.status, headers)

    def _check_key(self, request: HTTPRequest) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key and not hmac.compare_digest(given.encode(), self.api_key.encode()):
            raise APIError("the API key is missing or wrong", code="invalid_api_key", status=401)


def _closed(error: EngineClosedError) -> APIError:
    return APIError(str(error), code="engine_closed", status=503)


def make_app(
    engine: Engine,
    model: str,
    api_key: str | None = None,
    limits: Limits = Limits(),
    front: MakeFront = AsyncEngine,
) -> Starlette:
    """Return the application, ASGI, that serves an engine under a model's name. It owns the engine."""
    return app_of(Server(Served.by(engine, front, limits.max_num_requests), model, api_key, limits))


def app_of(server: Server) -> Starlette:
    """Return the application of a server."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.async_engine.close)

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, server.guarded(handler), methods=[method])

    routes = [
        route("/v1/models", server.models),
        route("/v1/models/{name:path}", server.one_model),
        route("/v1/completions", server.completions, "POST"),
        route("/v1/chat/completions", server.chat, "POST"),
        route("/tokenize", server.tokenize, "POST"),
        route("/detokenize", server.detokenize, "POST"),
        route("/metrics", server.metrics_page),
        route("/trace/steps", server.steps),
        route("/state", server.state),
        Route("/health", server.health),
        *pages.routes(),
    ]

    async def http_error(request: HTTPRequest, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        words = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} takes another method"}
        return server.refuse(APIError(words.get(status, "the request is wrong"), status=status))

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: http_error})
    app.state.server = server
    return app
