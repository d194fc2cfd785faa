"""`python -m labs watch`: the tests run again whenever starter.py is saved."""

import queue
import sys
import threading

from labs.kit.judge.manifest import LABS_DIR, LabError, find_lab, lab_ids
from labs.kit.learner.hints import show_hint
from labs.kit.learner.progress import first_open, starter_text
from labs.kit.learner.screen import say
from labs.kit.learner.testing import show_test


def watch(lab_id: str | None) -> None:
    """Test a lab until the learner types q. Raise LabError without the package watchfiles."""
    try:
        from watchfiles import watch as changes
    except ImportError:
        raise LabError("watch needs the package watchfiles: pip install watchfiles") from None

    if lab_id:
        lab = find_lab(lab_id)
    else:
        status = first_open()
        lab = status.lab if status else find_lab(lab_ids()[0])
    keys: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_keys, args=(keys,), daemon=True).start()
    tested = None
    # The file's text says whether it has changed: an event may come too early, or twice.
    for _ in changes(LABS_DIR, debounce=300, rust_timeout=200, yield_on_timeout=True):
        while not keys.empty():
            key = keys.get()
            if key == "q":
                return
            if key == "h":
                show_hint(lab, None)
            if key == "n":
                ids = lab_ids()
                lab = find_lab(ids[(ids.index(lab.id) + 1) % len(ids)])
        if (lab.id, starter_text(lab)) != tested:
            tested = (lab.id, starter_text(lab))
            say()
            show_test(lab.id)
            say(
                f"Save labs/{lab.id}/starter.py to test it again. h, n or q, then Enter: hint, next lab, quit"
            )


def _read_keys(keys: queue.Queue[str]) -> None:
    for line in sys.stdin:
        keys.put(line.strip().lower()[:1])
