"""The server of several replicas: OpenAI's API as for one engine, and their numbers together."""

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from mini_engine.async_engine import EngineClosedError
from mini_engine.distributed.replicas import Replicas
from mini_engine.llm import state_of
from mini_engine.model import ModelConfig
from mini_engine.serve import pages
from mini_engine.serve.app import Limits, Server, app_of
from mini_engine.serve.protocol import APIError
from mini_engine.serve.streaming import Served
from mini_engine.text.tokenizer import Tokenizer

Numbers = tuple[dict[str, float], dict[str, float]]


class ReplicaServer(Server):
    """A Server whose engines are elsewhere: what a Server reports of one engine, it reports of all."""

    def __init__(
        self,
        replicas: Replicas,
        tokenizer: Tokenizer,
        config: ModelConfig,
        model: str,
        api_key: str | None,
        limits: Limits,
    ):
        self.replicas = replicas
        self.numbers: Numbers = ({}, {})  # when Prometheus last asked
        lengths = config.max_position_embeddings, config.vocab_size
        super().__init__(Served(replicas, tokenizer, *lengths, lambda: self.numbers), model, api_key, limits)

    async def health(self, request: HTTPRequest) -> Response:
        """Answer if a replica does, with how many do. GET /health"""
        try:
            alive = await self.replicas.each(lambda engine: None)
        except EngineClosedError as error:
            return JSONResponse({"status": str(error)}, 503)
        return JSONResponse({"status": "ok", "replicas": len(alive)})

    async def metrics_page(self, request: HTTPRequest) -> Response:
        """Return the numbers for Prometheus, those of the engines added up. GET /metrics"""
        self.numbers = together(await self.replicas.each(lambda engine: state_of(engine.scheduler)))
        return await super().metrics_page(request)

    async def steps(self, request: HTTPRequest) -> Response:
        """Refuse: replicas keep no trace. GET /trace/steps"""
        raise APIError("replicas keep no trace; serve one engine without --ray to see its steps", status=404)

    async def state(self, request: HTTPRequest) -> Response:
        """Return the requests and the memory of all replicas. GET /state"""
        found = await self.replicas.each(pages.state_of)
        rows = [row for state in found for row in state["requests"]]
        free, blocks = (sum(state[name] for state in found) for name in ("free", "blocks"))
        state = {"requests": rows, "free": free, "blocks": blocks, "replicas": len(found)}
        return JSONResponse(state | {"model": self.model, "chats": self.tokenizer.chat_template is not None})


def together(found: list[Numbers]) -> Numbers:
    """Return gauges and counters added up; of a percentage, the mean."""
    gauges, counters = (
        {name: sum(one[name] for one in numbers) for name in numbers[0]}
        for numbers in zip(*found, strict=True)
    )
    shares = {name: value / len(found) for name, value in gauges.items() if name.endswith("_perc")}
    return gauges | shares, counters


def make_app(
    replicas: Replicas,
    tokenizer: Tokenizer,
    config: ModelConfig,
    model: str,
    api_key: str | None,
    limits: Limits,
) -> Starlette:
    """Return the application, ASGI, that serves replicas. It owns them."""
    return app_of(ReplicaServer(replicas, tokenizer, config, model, api_key, limits))
