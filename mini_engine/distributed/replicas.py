"""Replicas of an engine on Ray Serve: each is one AsyncEngine in a process of its own, perhaps elsewhere.

Ray starts them, asks for their health, routes the requests, adds replicas when queues grow, and starts
another one when one is killed. `Replicas` is what a server calls instead of an AsyncEngine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from mini_engine.async_engine import AsyncEngine, EngineClosedError, EngineFullError
from mini_engine.engine import Engine
from mini_engine.input_processor import Prompt
from mini_engine.loading.checkpoint import load
from mini_engine.outputs import Delta
from mini_engine.request import SamplingParams

if TYPE_CHECKING:  # Ray is imported where a server is started with it
    from ray.serve.handle import DeploymentHandle

T = TypeVar("T")
NAME = "mini-engine"  # of the application in Ray
HEALTH_SECONDS = 60  # in which a replica's engine must have ended a step
LOOK_SECONDS = 30
LOST = "the replica that computed this request has ended, and the answer is lost; send the request again"
# Ray's own router by prefixes. Its public name imports what vLLM needs; this one needs Ray alone.
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
)
IMBALANCED = 8  # requests that one replica may have more than another for the sake of a prefix


@dataclass(frozen=True)
class Routed:
    """A request on its way to a replica. `prompt` is what the router compares: a character for each token."""

    token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str

    @cached_property
    def prompt(self) -> str:
        """The prompt for the router, which sends equal beginnings to one replica."""
        return self.cache_salt + "".join(map(chr, self.token_ids))


class Replica:
    """One engine, made before the replica counts as ready. Ray makes it, in a process of its own."""

    def __init__(self, model: str, dtype: str, device: str, settings: dict[str, Any], most: int):
        from ray import serve

        self.name = serve.get_replica_context().replica_id.unique_id
        self.front = AsyncEngine(Engine(*load(model, dtype, device), **settings), max_num_requests=most)
        self.numbers = count()

    async def stream(self, asked: Routed) -> AsyncGenerator[Delta, None]:
        """Yield the Deltas of a request, whose name in the engine begins with the replica's."""
        options: dict[str, Any] = {"priority": asked.priority, "cache_salt": asked.cache_salt}
        name = f"{self.name}-r{next(self.numbers)}"
        stream = self.front.stream(asked.token_ids, asked.params, request_id=name, **options)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta

    async def look(self, look: Callable[[Engine], T]) -> T:
        """Return what a function of the engine returns, between two steps."""
        return await self.front.call(look)

    async def check_health(self) -> None:
        """Raise an error, so that Ray replaces this replica, if the engine's thread does not answer."""
        await self.front.call(lambda engine: None)


class Replicas:
    """All replicas as one front of a server (serve.streaming.Front).

    A request goes to one replica and stays there. If that is killed, its streams raise EngineClosedError;
    those of others go on.
    """

    def __init__(self, handle: DeploymentHandle[Any], max_num_requests: int):
        self.handle, self.max_num_requests, self.num_requests = handle, max_num_requests, 0
        self._stream = handle.options(stream=True, method_name="stream")

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncGenerator[Delta, None]:
        """Yield the Deltas of a prompt, given as token ids. Leaving early aborts the request."""
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        if self.num_requests >= self.max_num_requests:
            raise EngineFullError(f"{self.num_requests} requests are open, the most that are taken")
        asked = Routed([*prompt], sampling_params, priority, cache_salt)
        self.num_requests += 1
        response = self._stream.remote(asked)
        try:
            async for delta in response:
                yield delta
        except RayTaskError as error:  # raised in the replica
            raise error.cause from None
        except (RayError, RayServeException):  # its process has ended
            raise EngineClosedError(LOST) from None
        finally:
            self.num_requests -= 1
            response.cancel()

    async def call(self, look: Callable[[Engine], T]) -> T:
        """Return what a function of an engine returns, of any one replica."""
        return (await self.each(look))[0]

    async def each(self, look: Callable[[Engine], T]) -> list[T]:
        """Return what a function of an engine returns, of each replica that answers.

        Raises EngineClosedError if none does.
        """
        from ray.serve.exceptions import RayServeException

        try:
            answers = self.handle.broadcast("look", look)
            found = await answers.results_async(timeout_s=LOOK_SECONDS, return_exceptions=True)
        except (TimeoutError, RayServeException) as error:
            raise EngineClosedError(f"no replica answers: {error}") from None
        if alive := [one for one in found if not isinstance(one, BaseException)]:
            return alive
        raise EngineClosedError("no replica answers; Ray is starting others")

    def close(self) -> None:
        """End all replicas, and Ray itself where this process has started it."""
        import ray
        from ray import serve

        serve.delete(NAME)
        ray.shutdown()


def start(
    model: str,
    dtype: str,
    device: str,
    settings: dict[str, Any],
    least: int,
    most: int,
    max_num_requests: int,
) -> Replicas:
    """Start replicas, and return them when all of the `least` are ready.

    Joins the cluster that RAY_ADDRESS names, or else starts Ray on this machine, for this process alone.
    Up to `most`, Ray adds replicas while each has more requests than its engine runs at once. Raises
    ConnectionError if Ray or a replica does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
    # Half of this is too short on a busy machine, and Ray waits no longer for the whole of its start.
    os.environ.setdefault("RAY_agent_register_timeout_ms", "30000")
    import ray
    from ray import serve

    here: dict[str, Any] = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    where = {} if os.environ.get("RAY_ADDRESS") else here
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **where)
        # What a dying replica loses, its clients learn.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        options = _options(settings, device, least, most) | {"max_ongoing_requests": max_num_requests}
        deployment = serve.deployment(Replica).options(**options)
        bound = deployment.bind(model, dtype, device, settings, max_num_requests)
        return Replicas(serve.run(bound, name=NAME, route_prefix=None), max_num_requests)
    except Exception as error:  # Ray raises Exception itself
        ray.shutdown()
        raise ConnectionError(f"Ray does not start the replicas: {error}") from error


def _options(settings: dict[str, Any], device: str, least: int, most: int) -> dict[str, Any]:
    """Return the options of the deployment: its numbers, its cores, its router, its health."""
    import ray
    from ray.serve.config import RequestRouterConfig

    number: dict[str, Any] = {"num_replicas": least}
    if least < most:
        number = {
            "autoscaling_config": {
                "min_replicas": least, "max_replicas": most, "initial_replicas": least,
                "target_ongoing_requests": settings.get("max_num_seqs") or 64, "upscale_delay_s": 10,
            }
        }  # fmt: skip
    there = ray.cluster_resources()
    cores = min(int(there.get("CPU", 1)), os.cpu_count() or 1)
    has_gpu = device.startswith("cuda") or (device == "auto" and "GPU" in there)
    return number | {
        "ray_actor_options": {
            "num_cpus": max(1, cores // most), "num_gpus": int(has_gpu)
        },
        "health_check_period_s": 5, "health_check_timeout_s": HEALTH_SECONDS,
        "logging_config": {"log_level": "WARNING"},
        "request_router_config": RequestRouterConfig(
            request_router_class=PREFIX_ROUTER, request_router_kwargs={"imbalanced_threshold": IMBALANCED}
        ),
    }  # fmt: skip
