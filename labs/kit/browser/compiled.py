"""Compiled code that a browser keeps between visits: most of the time of the course's import is compiling.

Pyodide comes as sources, the library in a zip. The worker runs this file before any import of the course.
"""

import marshal
import zipimport
from importlib.machinery import SourceFileLoader
from importlib.util import source_hash
from pathlib import Path
from types import CodeType
from typing import Any

DIGEST = 8  # bytes that `source_hash` makes; those of another Python differ


class Compiled:
    """The code of each source file, as far as `kept`, a file of an earlier visit, has it unchanged.

    A file that is missing, damaged or another Python's is as if it were empty.
    """

    def __init__(self, kept: Path) -> None:
        self.kept, self.new = kept, 0
        self.codes: dict[str, tuple[bytes, bytes]] = {}  # by path: the digest of the source, the code
        written = kept.read_bytes() if kept.is_file() else b""
        if source_hash(written[DIGEST:]) == written[:DIGEST]:
            self.codes = marshal.loads(written[DIGEST:])

    def compile(self, source: Any, path: str, **options: Any) -> CodeType:
        """Return the code of a file, compiled if need be; importlib's `source_to_code`."""
        digest = source_hash(source) if isinstance(source, bytes) else b""
        before, code = self.codes.get(path, (b"", b""))
        if not digest or before != digest:
            code = marshal.dumps(compile(source, path, "exec", dont_inherit=True))
            self.codes[path], self.new = (digest, code), self.new + 1
        return marshal.loads(code)  # type: ignore[no-any-return]  # which may be anything; this is code

    def install(self) -> None:
        """Use it for the imports of this process, also from the zip of the library.

        importlib has no public place for it, hence what mypy is to ignore; the Python is the shipped one.
        """
        SourceFileLoader.source_to_code = staticmethod(self.compile)  # type: ignore[method-assign, assignment]
        lines = zipimport._normalize_line_endings  # type: ignore[attr-defined]

        def of_zip(path: str, source: bytes) -> CodeType:
            return self.compile(lines(source), path)

        zipimport._compile_source = of_zip  # type: ignore[attr-defined]

    def write(self) -> bool:
        """Write all code to the file `kept`; False, and nothing is done, where it would be the same."""
        if not self.new:
            return False
        written = marshal.dumps(self.codes)
        self.kept.write_bytes(source_hash(written) + written)
        self.new = 0
        return True


def begin(kept: str) -> Compiled:
    """Return what a worker uses and, later, asks to `write`."""
    compiled = Compiled(Path(kept))
    compiled.install()
    return compiled
