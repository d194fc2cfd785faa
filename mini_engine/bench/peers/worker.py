"""`python worker.py PEER`: a peer as a process that reads and writes JSON lines.

The first line in is its job (model, gguf, dtype, threads, device), the answer its versions. Every further
line is work for one of its variants, and the answer has the seconds that it took and the tokens. It runs
in any environment, so only the standard library is imported here.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def load(name: str) -> Any:
    """Return the class Peer of a module beside this one, whose name may be that of the library it imports."""
    spec = importlib.util.spec_from_file_location(f"peer_{name}", Path(__file__).parent / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Peer


def answer(peer: Any, variant: str, prompts: list[list[int]], num_outputs: list[int]) -> dict[str, Any]:
    """Serve the prompts, and time that alone. A variant that times itself returns a dict."""
    serve, settings = peer.variant(variant)
    start = time.perf_counter()
    said = serve(prompts, num_outputs)
    seconds = time.perf_counter() - start
    whole = said if isinstance(said, dict) else {"seconds": seconds, "tokens": said}
    return whole | {"settings": settings}


def main(name: str) -> None:
    # Libraries print to stdout too; the answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    peer = None
    for line in sys.stdin:
        try:
            if peer is None:
                peer = load(name)(**json.loads(line))
                said = {"versions": peer.versions}
            else:
                said = answer(peer, **json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)
    os._exit(0)  # large libraries take seconds to shut down


if __name__ == "__main__":
    main(sys.argv[1])
