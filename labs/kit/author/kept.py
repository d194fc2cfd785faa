"""Outcomes of a lab's tests, kept in a folder until something changes that they depend on.

Playing all known mistakes of a lab takes up to a minute; while one lab is edited, the others are read back.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labs.kit.judge import processes
from labs.kit.judge.manifest import LABS_DIR, Lab

ROOT = LABS_DIR.parent
DATA = ROOT / "mini_engine" / "loading" / "shakespeare"  # that no import shows


def outcomes_of(lab: Lab, variants: list[str], folder: Path) -> processes.Outcomes:
    """Return what the lab's tests do with these variants: from the folder, or found out and kept there."""
    rows, key = folder / f"{lab.id}.jsonl", folder / f"{lab.id}.key.json"
    if rows.exists() and key.exists():
        then = json.loads(key.read_text("utf-8"))
        if then == depends(lab, variants, then["files"]):
            return processes.read_outcomes(lab, rows)
    key.unlink(missing_ok=True)
    began = time.time()
    outcomes = processes.run_matrix(lab, variants, rows)
    now = depends(lab, variants, outcomes.modules)
    if not outcomes.trouble and all(Path(name).stat().st_mtime < began for name in now["files"]):
        key.write_text(json.dumps(now, indent=1), "utf-8")
    return outcomes


def depends(lab: Lab, variants: Sequence[str], files: Iterable[str]) -> dict[str, Any]:
    """Return all that outcomes depend on: variants, versions, and a digest of each file.

    Of `files`, the modules that were imported, the course's own count; of all others their versions.
    """
    own = {path for pattern in ("*.py", "*.toml") for path in lab.path.rglob(pattern)} | {*DATA.iterdir()}
    own |= {Path(name) for name in files if Path(name).is_relative_to(ROOT) and ".venv" not in name}
    own -= {lab.file("starter.py")}  # judged by its pristine form
    digests = {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(own) if path.is_file()
    }
    versions = [sys.version, *map(version, ("torch", "numpy", "tokenizers", "pytest"))]
    return {"variants": [*variants], "versions": versions, "files": digests}
