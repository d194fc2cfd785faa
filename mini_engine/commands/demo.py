"""`mini-engine demo`, which is in show/demo.py. `python -m labs demo` is the same with a learner's parts."""

from pathlib import Path

import typer
from rich.console import Console

from mini_engine.commands.common import (
    DemoOut,
    DemoTemperature,
    Device,
    Dtype,
    Model,
    Speculative,
    check_folder,
    engine_settings,
    working,
)
from mini_engine.commands.quick import import_torch


def demo(
    model: Model = "shakespeare",
    out: DemoOut = Path("out"),
    temperature: DemoTemperature = None,
    speculative: Speculative = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve several requests at once and show every decision."""
    check_folder(out)
    settings = engine_settings(speculative)
    with working(f"loading {model}"):
        import_torch()
        from mini_engine.fast import kernels
        from mini_engine.loading.checkpoint import load
        from mini_engine.show.demo import run_demo

        loaded, tokenizer = load(model, dtype, device)
        on_cpu, built = loaded.device.type == "cpu", kernels.load(loaded.dtype)
    run_demo(loaded, tokenizer, Console(), out, temperature, **settings)
    if on_cpu and built:
        typer.echo("\nComputed with the C++ kernels.")
    elif on_cpu:
        typer.echo("\nComputed with torch alone; the command `mini-engine kernels build` makes it faster.")
