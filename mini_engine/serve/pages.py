"""The pages: a chat with the engine's picture beside it, and the player on the last steps."""

from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mini_engine.engine import Engine
from mini_engine.show.player import script

# They load from this server alone, and only they may put each other into a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self'; "
    "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
PAGES = {"/": "chat.html", "/trace": "trace.html"}  # other files have their own names
PAGES |= {f"/{name}": name for name in ("chat.js", "pages.css", "trace.js")}
PAGES |= {f"/player/{name}": name for name in ("shell.html", "player.js", "player.css")}


def routes() -> list[Route]:
    """Return the routes of all files that the pages consist of."""
    return [_route(path, name) for path, name in PAGES.items()]


def _route(path: str, name: str) -> Route:
    of_player = path.startswith("/player/")
    folder = files("mini_engine.show.player") if of_player else files("mini_engine.serve") / "page"
    text = script("shell") if path == "/player/player.js" else (folder / name).read_text("utf-8")
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}

    async def answer(request: Request) -> Response:
        return Response(text, media_type=KINDS[name.rpartition(".")[2]], headers=headers)

    return Route(path, answer)


def state_of(engine: Engine) -> dict[str, Any]:
    """Return what the chat page draws: the requests in the scheduler's order, and the blocks in use."""
    scheduler, kv = engine.scheduler, engine.scheduler.kv

    def row(request: Any, place: str) -> dict[str, Any]:
        return {
            "id": request.request_id, "place": place, "prompt": request.num_prompt_tokens,
            "computed": request.num_computed_tokens, "outputs": len(request.output_token_ids),
            "cached": request.num_cached_tokens, "blocks": len(kv.block_table(request)),
        }  # fmt: skip

    rows = [row(request, "running") for request in scheduler.running]
    rows += [row(request, "waiting") for request in scheduler.waiting]
    return {"requests": rows, "free": kv.num_free_blocks, "blocks": kv.num_blocks}
