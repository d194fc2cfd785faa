"""`mini-engine prefill`: an engine that computes prompts for decode engines in other processes."""

import os
from typing import Annotated

import typer

from mini_engine.commands.common import Device, Dtype, Model, errors
from mini_engine.commands.serve import KEY


def prefill(
    model: Model = "smollm2",
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 is any free one.")] = 6100,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Compute prompts, and hand their KV blocks to decode engines: docs/scaling.md has the other end.

    If MINI_ENGINE_API_KEY is set, they need the same key.
    """
    from mini_engine.distributed.kv_connector import KVConnector, listen
    from mini_engine.engine import Engine
    from mini_engine.loading.checkpoint import load

    try:
        listener = listen((host, port), os.environ.get(KEY))
    except OSError as error:
        raise ValueError(f"cannot listen at {host}, port {port}: {error.strerror}; choose another") from None
    with listener:
        connector = KVConnector(Engine(*load(model, dtype, device), num_blocks=num_blocks))
        at = ":".join(map(str, listener.address))
        errors.print(f"{model} computes prompts at {at}; Ctrl-C ends it", markup=False, highlight=False)
        connector.serve(listener)
