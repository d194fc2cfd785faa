"""`python -m labs open`: the book and the labs' pages, served on this machine."""

import webbrowser
from typing import Annotated

import typer

from labs.kit.browser.csp import LABS
from labs.kit.browser.serve import server
from labs.kit.judge.manifest import LABS_DIR, LabError, find_lab
from labs.kit.learner.screen import say

SITE = LABS_DIR.parent / "docs" / "_build" / "site"


def open_site(
    lab_id: Annotated[
        str | None,
        typer.Argument(
            help="lab-01, or just 1: the page of that lab. Without it, the book.", show_default=False
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Your code is kept for each port: use the same one again.", min=1, max=65535)
    ] = 8140,
) -> None:
    """Open the book, or a lab's page, in your browser."""
    page = "docs/index.html"
    if lab_id:
        lab = find_lab(lab_id).id
        page = f"write/{lab}/index.html" if lab in LABS else f"labs/{lab}/README.html"
    if not (SITE / page).is_file():
        folder = "docs/_build/site"
        build = f"sphinx-build -c docs . {folder}, then: python -m labs.kit.browser.site {folder}"
        raise LabError(f"{page} is not built in {folder}; build it with: make docs (without make: {build})")
    try:
        running = server(SITE, port)
    except OSError:
        raise LabError(f"port {port} is taken; name another, as in --port 8141") from None
    address = f"http://localhost:{port}/{page}"
    with running:
        say(f"{address} (Ctrl+C stops the server)")
        try:
            webbrowser.open(address)
            running.serve_forever()
        except KeyboardInterrupt:
            say()
