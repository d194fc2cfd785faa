"""The learner's part at work in a page: six chats are answered in the order that their part decides.

The embedded model needs torch, which a page has not. A token depends on its own chat alone, whatever is
computed beside it; so what the engine recorded (docs/images/hero.py) is what it would write here.
"""

import json
from pathlib import Path

from labs.kit.browser.run import forget
from labs.kit.judge import loading
from labs.kit.judge.guard import deadline, kept_alive, silence
from labs.kit.judge.manifest import find_lab
from labs.kit.toys.driver import LIMITS, drive
from mini_engine.block_manager import BlockManager
from mini_engine.request import Request
from mini_engine.scheduler import Scheduler
from mini_engine.show.player import payload

ANSWERS = Path(__file__).with_name("answers.json")  # the build writes it: see answers in build.py
PATIENCE = 20.0  # seconds
# The learner's part, by lab.
PARTS = {"lab-01": "schedule_step", "lab-02": "clamp", "lab-03": "Scheduler", "lab-06": "BlockManager"}


class Recorded:
    """A model that gives each request the tokens that were recorded for it."""

    def __init__(self, tokens: dict[str, list[int]]):
        self.tokens = tokens

    def forward(self, rows: list[tuple[Request, list[int], list[int], bool]]) -> dict[str, list[int]]:
        ends = [request for request, _, _, sample in rows if sample]
        return {r.request_id: [self.tokens[r.request_id][len(r.output_token_ids)]] for r in ends}


def demo(lab_id: str, source: str) -> str:
    """Return the run as the player's data, or {"problem": ...} where there is none to play.

    A run that does not end well says so in its last step.
    """
    lab = find_lab(lab_id)
    lab.file("starter.py").write_text(source, encoding="utf-8")
    forget()
    module = loading.namespace(lab_id, "starter")
    if isinstance(module, loading.Broken):
        return json.dumps({"problem": str(module._problem)})
    part = PARTS[lab_id]
    own = {part: getattr(module, part)}
    answers = json.loads(ANSWERS.read_text("utf-8"))
    config = answers["scenario"]["config"]
    manager, scheduler = own.pop("BlockManager", BlockManager), own.pop("Scheduler", Scheduler)
    kv = manager(config["num_blocks"], config["block_size"], watermark=config["watermark"])
    with deadline(PATIENCE), silence(), kept_alive():
        trace = drive(
            scheduler(kv, **{name: config[name] for name in LIMITS}, **own),
            answers["scenario"],
            model=Recorded(answers["tokens"]),  # type: ignore[arg-type]  # only its tokens are asked for
            raise_errors=False,
            parts={part: lab_id},
        )
    if not trace.steps:
        return json.dumps({"problem": trace.end.error if trace.end else ""})
    return json.dumps(payload(trace, names=("your part in the engine",), texts=answers["texts"]))
