"""Serves the built site on this machine, with the headers of its file `_headers`."""

from fnmatch import fnmatch
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(SimpleHTTPRequestHandler):
    """Serves one folder. It sets the types: a Windows registry may say that .js is plain text."""

    protocol_version = "HTTP/1.1"
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".svg": "image/svg+xml",
        ".txt": "text/plain; charset=utf-8",
    }

    def end_headers(self) -> None:
        path = self.path.partition("?")[0]
        for pattern, name, value in rules(Path(self.directory)):
            if fnmatch(path, pattern):
                self.send_header(name, value)
        self.send_header("Cache-Control", "no-cache")  # a new build is shown
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def rules(site: Path) -> list[tuple[str, str, str]]:
    """Return path pattern, header and value of each rule in `_headers`."""
    found, pattern = [], ""
    file = site / "_headers"
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        if line.startswith(" "):
            name, _, value = line.strip().partition(": ")
            found.append((pattern, name, value))
        else:
            pattern = line
    return found


def server(site: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server for this machine alone, not started. Raise OSError if the port is taken."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(site)))
