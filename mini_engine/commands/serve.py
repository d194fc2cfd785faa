"""`mini-engine serve`: OpenAI's API over HTTP, a chat page, and the player on the last steps."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mini_engine.commands.common import (
    Device,
    Dtype,
    Model,
    Speculative,
    TensorParallel,
    engine_settings,
    errors,
    is_worker,
    loaded,
    working,
)

if TYPE_CHECKING:  # --help loads neither torch nor the server
    from starlette.applications import Starlette

    from mini_engine.engine import Engine
    from mini_engine.serve.streaming import MakeFront

KEY = "MINI_ENGINE_API_KEY"
STEPS = 200  # that the trace keeps
UNREAD_SECONDS = 60


def serve(
    model: Model = "smollm2",
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients; default: what --model says.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 is any free one.")] = 8000,
    max_num_requests: Annotated[
        int, typer.Option(min=1, help="Open requests; a client that sends more gets 429.")
    ] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 600.0,
    shutdown_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that open requests have when the server is asked to end.")
    ] = 30,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks; few of them show on the pages how memory fills.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at once; default: 64. Others wait.")
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed in a step.")] = 512,
    trace: Annotated[bool, typer.Option(help="Keep the last 200 steps, for /trace.")] = True,
    speculative: Speculative = None,
    tensor_parallel: TensorParallel = 1,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Serve replicas of the engine on Ray, of the cluster in RAY_ADDRESS."),
    ] = False,
    replicas: Annotated[int, typer.Option(min=1, max=1024, help="Replicas to begin with; needs --ray.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, max=1024, help="The most; Ray adds them while requests queue.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve a model to OpenAI's clients. The API key, if there is to be one, is in MINI_ENGINE_API_KEY."""
    settings = engine_settings(speculative)
    most = replicas if max_replicas is None else max_replicas
    if not ray and most > 1:
        raise ValueError(f"{most} replicas are served on Ray; add --ray")
    if ray and tensor_parallel > 1:
        raise ValueError("--ray and --tensor-parallel exclude each other here; choose one")
    if most < replicas:
        raise ValueError(f"--max-replicas {most} is less than --replicas {replicas}")
    from mini_engine.engine import Engine

    settings |= {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs}
    settings["max_num_batched_tokens"] = max_num_batched_tokens
    check_installed()
    # Before the model is loaded, which takes a while.
    listening = None if is_worker(tensor_parallel) else listen(host, port)
    name = served_model_name or model
    limits: dict[str, Any] = {"max_num_requests": max_num_requests, "timeout": timeout}
    if ray:
        assert listening is not None
        wanted = {"dtype": dtype, "device": device, "settings": settings, "least": replicas, "most": most}
        app = replicas_app(name, model, limits, **wanted)
        return serve_app(app, name, listening, shutdown_timeout)
    with loaded(model, dtype, device, tensor_parallel) as (lm, tokenizer, others):
        assert listening is not None
        engine = Engine(lm, tokenizer, record=STEPS if trace else False, **settings, **others)
        serve_engine(engine, name, listening, shutdown_timeout=shutdown_timeout, **limits)


def serve_engine(
    engine: "Engine",
    model: str,
    listening: socket.socket,
    front: "MakeFront | None" = None,
    shutdown_timeout: int = 30,
    **limits: Any,
) -> None:
    """Serve an engine at a listening socket until Ctrl-C; `limits` are those of serve.app.Limits."""
    from mini_engine.serve.app import Limits, make_app

    others = {"front": front} if front else {}
    app = make_app(engine, model, os.environ.get(KEY), Limits(**limits), **others)
    serve_app(app, model, listening, shutdown_timeout)


def serve_app(app: "Starlette", model: str, listening: socket.socket, shutdown_timeout: int) -> None:
    """Serve an application at a listening socket until Ctrl-C."""
    import uvicorn

    from mini_engine.serve.connection import config

    host, port = listening.getsockname()[:2]
    at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    errors.print(f"{model} is served at {at}/v1, the chat page at {at}/; Ctrl-C ends it", markup=False)
    settings = config(app, timeout_graceful_shutdown=shutdown_timeout)
    uvicorn.Server(settings).run(sockets=[listening])


def replicas_app(name: str, model: str, limits: dict[str, Any], **wanted: Any) -> "Starlette":
    """Start replicas on Ray, and return the application; `wanted` has what distributed.replicas.start takes.

    Raises ValueError if Ray is missing, or as `load` does; RuntimeError if no replica can start.
    """
    from mini_engine.distributed.replica_server import make_app
    from mini_engine.distributed.replicas import start
    from mini_engine.loading.checkpoint import read_model
    from mini_engine.serve.app import Limits

    tokenizer, config = read_model(model)
    path, most = Path(model).absolute(), limits["max_num_requests"]
    with working("Ray starts the replicas ..."):
        try:
            replicas = start(str(path if path.exists() else model), max_num_requests=most, **wanted)
        except ImportError as error:
            raise _missing(error, "serve,ray") from None
    return make_app(replicas, tokenizer, config, name, os.environ.get(KEY), Limits(**limits))


def check_installed() -> None:
    """Raise ValueError, with the command to install it, if a package of the server is missing."""
    try:
        import uvicorn  # noqa: F401

        import mini_engine.serve.app  # noqa: F401
    except ImportError as error:
        raise _missing(error, "serve") from None


def _missing(error: ImportError, extras: str) -> ValueError:
    return ValueError(f'{error.name} is missing; install it with: pip install "mini-engine[{extras}]"')


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ValueError where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise ValueError(f"cannot listen at {host}, port {port}: {why}; choose another") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # ends connections to which nothing can be sent for so long
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)
    return listening
