"""Names of the labs' API that have changed. A starter.py that uses an old name works for one more release.

The old names are replaced when the file is read, in memory only.
"""

import re

from labs.kit.judge.manifest import Lab

NEW_NAMES = {"find_prefix": "get_computed_blocks", "publish": "cache_blocks"}


def old_names(lab: Lab, source: str) -> dict[str, str]:
    """Return the old names that a starter defines or uses, where the lab has the new ones."""
    old_ones = [old for old in NEW_NAMES if re.search(rf"(\bdef\s+|\.){old}\b", source)]
    tested = lab.file("test_lab.py").read_text(encoding="utf-8") if old_ones else ""
    found = {old: NEW_NAMES[old] for old in old_ones}
    return {
        old: new
        for old, new in found.items()
        if re.search(rf"\b{new}\b", tested) and not re.search(rf"\b{new}\b", source)
    }


def with_new_names(lab: Lab, source: str) -> str:
    """Return the source with the new names, line for line."""
    for old, new in old_names(lab, source).items():
        source = re.sub(rf"\b{old}\b", new, source)
    return source


def notices(lab: Lab, source: str) -> list[str]:
    """Return one line for each old name that a starter uses."""
    return [
        f"{lab.id}: {old} is now called {new}; the old name works for one more release"
        for old, new in old_names(lab, source).items()
    ]
