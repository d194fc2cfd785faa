"""Records docs/images/break_it.json: the judge's verdict on the front page's loop, which has a mistake.

python docs/images/break_it.py [OUT.json]
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import indent
from typing import Any

from labs.kit.author.export import export
from labs.kit.judge.manifest import LABS_DIR

RECORDING = Path(__file__).with_suffix(".json")
BEFORE = """\
from mini_engine.request import RequestStatus
from mini_engine.scheduler import clamp


def schedule_step(
    waiting,
    running,
    kv,
    *,
    max_num_batched_tokens,
    max_num_seqs,
    long_prefill_token_threshold=0,
    clamp=clamp,
):
    budget, threshold, scheduled = max_num_batched_tokens, long_prefill_token_threshold, {}
    for request in running:
        if num_tokens := clamp(request.num_new_tokens, budget, threshold):
            if not kv.allocate(request, num_tokens):
                raise RuntimeError(f"no room for {request.request_id}")
            scheduled[request.request_id] = num_tokens
            budget -= num_tokens
"""
# The last line of the loop is missing: budget -= num_tokens
SHOWN = """\
# The running requests have their tokens; `budget` is left.
# Let in those that wait:
while waiting and budget > 0 and len(running) < max_num_seqs:
    request = waiting.peek()
    if not kv.admit(request):
        break
    waiting.pop()
    running.append(request)
    request.status = RequestStatus.RUNNING
    num_tokens = clamp(request.num_new_tokens, budget, threshold)
    scheduled[request.request_id] = num_tokens
return scheduled
"""
JUDGE = "import sys; from labs.kit.browser import run; print(run.run('lab-01', sys.stdin.read()))"


def record(shown: str = SHOWN) -> dict[str, Any]:
    """Return the verdict of the labs' pages on the loop, from a copy of the course."""
    with tempfile.TemporaryDirectory(prefix="labs-") as folder:
        course = Path(folder, "course")
        export(course)
        (course / "labs" / "kit" / "browser").mkdir(exist_ok=True)
        for name in ("__init__.py", "run.py"):
            shutil.copy(LABS_DIR / "kit" / "browser" / name, course / "labs" / "kit" / "browser")
        source = BEFORE + indent(shown, "    ")
        line = [sys.executable, "-c", JUDGE]
        done = subprocess.run(line, cwd=course, input=source, capture_output=True, text=True, check=True)
    verdict: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    del verdict["fingerprints"]
    return verdict


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDING
    verdict = record()
    out.write_text(json.dumps(verdict) + "\n", encoding="utf-8")
    print(f"{out}: {verdict['report'].splitlines()[0]}")
