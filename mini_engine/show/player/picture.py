"""One step of a run as a picture, for places without scripts: a README, paper, a notebook on the web.

It is SVG, drawn from the fold in the player's colours (player.css), light or dark as the reader's system.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from textwrap import shorten, wrap

from mini_engine.show.figures.block_map import OWNERS
from mini_engine.show.figures.style import counted, drawn_state
from mini_engine.trace import Finished, Preempted, RequestView, Scheduled, StepTrace, Trace, replay

WIDTH, ROW, MOST = 760, 17, 24  # pixels; the most rows of a picture
LEFT, RIGHT = 44, 430  # the sides of the chart; the words are to its right
LEGEND = ("waiting", "prefill", "decode", "idle", "preempted")
STYLE = """text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:#1c1f24}.m{fill:#5a616b}.s{font-size:10px}
.b{font-weight:650;font-size:13px}.k{fill:#1a1a1a;font-weight:600;text-anchor:middle}.e{text-anchor:end}
.card{fill:#fff;stroke:#d8dade}.track{fill:#eceef0}.waiting{fill:#8c8c8c}.prefill{fill:#0072b2}.decode{fill:#f3b54a}
.preempted{fill:#d55e00}.used{fill:#8ccfbb}.head{fill:#1c1f2418;stroke:#1c1f24}.free,.idle{fill:none;stroke:#8c8c8c}
@media(prefers-color-scheme:dark){text{fill:#e9ebee}.m{fill:#a3abb6}.card{fill:#1d2127;stroke:#3a4049}
.track{fill:#2a2f37}.waiting{fill:#8f98a3}.prefill{fill:#3d9fd8}.decode{fill:#e69f00}.preempted{fill:#e8732a}
.used{fill:#3f8f78}.head{fill:#e9ebee18;stroke:#e9ebee}.k{fill:#1a1a1a}}"""
HATCH = (
    "<pattern id='hatch' width='4' height='4' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
    "<path d='M0 0V4' stroke='#3a1500' stroke-width='2'/></pattern>"
)

Views = dict[str, RequestView]


def step_picture(
    trace: Trace,
    step: int | None = None,
    other: Trace | None = None,
    *,
    names: Sequence[str] = ("", "reference"),
) -> str:
    """Return step `step` (its number; default: the first) as SVG; of two traces, one below the other, with
    their `names`. Raise ValueError for a step that neither has."""
    runs = [run for run in (trace, other) if run]
    steps = [record.step for run in runs for record in run.steps]
    if not steps or (step is not None and step not in steps):
        raise ValueError(f"the trace has no step {step}")
    step, parts, height, words = steps[0] if step is None else step, [], 0, []
    for name, run in zip(names, runs, strict=False):
        body, used, said = _panel(run, step, name, range(min(steps), max(steps) + 1))
        parts.append(f'<g transform="translate(0 {height})">{body}</g>')
        words += [name, *said]
        height += used + 10
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">'
    title = escape(" ".join(words).strip())
    return f"{head}<title>{title}</title><style>{STYLE}</style><defs>{HATCH}</defs>{''.join(parts)}</svg>"


def step_words(trace: Trace, step: int) -> list[str]:
    """Return the decisions of a step in sentences."""
    return _folded(trace, step)[2]


def _folded(trace: Trace, step: int) -> tuple[StepTrace | None, Views, list[str], list[dict[str, str]]]:
    """Return the step's record, its views (or the last ones), its sentences, and the states of every step."""
    found, views, words, states = None, Views(), [f"Step {step}: the run is over."], []
    for record, now in replay(trace):
        states.append({name: drawn_state(view) for name, view in now.items()})
        if record.step <= step:
            views = {name: RequestView.from_json(view.to_json()) for name, view in now.items()}
        if record.step == step:
            found, words = record, [f"Step {step} of {trace.steps[-1].step}.", *_sentences(record, now)]
    return found, views, words, states


def _panel(trace: Trace, step: int, name: str, span: range) -> tuple[str, int, list[str]]:
    """Return the picture of one run: the chart, the step and its sentences; its height; and the sentences."""
    record, views, words, states = _folded(trace, step)
    ids = list(dict.fromkeys(i for now in states for i in now))[:MOST]
    lines = [line for sentence in words[1:] for line in wrap(sentence, 46)]
    middle = 48 + ROW * len(ids)
    parts = [_text(16, 24, name or words[0].rstrip("."), "b"), *_chart(ids, states, trace, step, span)]
    parts += [_text(RIGHT + 26, 24, words[0].rstrip("."), "b") if name or not record else ""]
    parts += [_text(RIGHT + 26, 46 + 17 * n, line) for n, line in enumerate(lines)]
    height = max(middle, 62 + 17 * len(lines))
    if record:
        parts += _meters(record, views, trace.header.config, middle)
        pool, used = _pool(views, trace.header.config["num_blocks"], ids, middle + 74)
        parts.append(pool)
        height = max(height, middle + 74 + used)
    x = RIGHT + 26
    for state in LEGEND:
        if state == "idle" and not any("idle" in now.values() for now in states):
            continue
        parts += [_bar(state, x, height + 3, 12, 10), _text(x + 16, height + 12, state, "s m")]
        x += 28 + 5 * len(state)
    card = _rect("card", 0.5, 0.5, WIDTH - 1, height + 25, "rx='10'")
    return card + "".join(parts), height + 26, words


def _chart(
    ids: list[str], states: list[dict[str, str]], trace: Trace, step: int, span: range
) -> Iterator[str]:
    """Yield the chart: a row per request, a column per step, and a mark at the step."""
    column = (RIGHT - LEFT) / len(span)
    x = [LEFT + (record.step - span.start) * column for record in trace.steps]
    for row, name in enumerate(ids):
        yield _text(LEFT - 6, 48 + ROW * row, name[:6], "m s e")
        for state, indices in groupby(range(len(x)), key=lambda i: states[i].get(name)):  # noqa: B023
            now = list(indices)
            if state in LEGEND:
                yield _bar(state, x[now[0]], 36 + ROW * row, len(now) * column, 14)
    yield _rect("head", LEFT + (step - span.start) * column, 32, column, ROW * len(ids) + 6, "rx='2'")


def _bar(state: str, x: float, y: float, width: float, height: float) -> str:
    """Return a state's mark: waiting is thin and preemption hatched, so that neither needs its colour."""
    if state == "waiting":
        y, height = y + height / 2 - 1.5, 3
    hatch = _rect("", x, y, width, height, "fill='url(#hatch)'") if state == "preempted" else ""
    return _rect(state, x, y, width, height) + hatch


def _meters(record: StepTrace, views: Views, config: dict[str, int], y: int) -> Iterator[str]:
    """Yield budget, memory and slots; the running and the waiting requests."""
    rows = [(views[name].state, tokens) for name, tokens in record.scheduled.items()]
    used = config["num_blocks"] - record.num_free_blocks
    for n, (what, pieces, limit) in enumerate((
        ("tokens", rows, config["max_num_batched_tokens"]),
        ("blocks", [("used", used)], config["num_blocks"]),
        ("slots", [("waiting", record.num_running)], config["max_num_seqs"]),
    )):  # fmt: skip
        x: float = LEFT + n * 132
        yield _text(x, y + 12, f"{what} {sum(value for _, value in pieces)} of {limit}", "s m")
        yield _rect("track", x, y + 18, 122, 14)
        for name, value in pieces:
            yield _rect(name, x, y + 18, 122 * value / limit, 14)
            x += 122 * value / limit
    running = ", ".join(f"{name} +{tokens}" for name, tokens in record.scheduled.items())
    waiting = ", ".join(name for name, view in views.items() if view.state in ("waiting", "preempted"))
    for n, (what, ids) in enumerate((("running", running), ("waiting", waiting))):
        yield _text(LEFT, y + 48 + 14 * n, shorten(f"{what}: {ids or 'none'}", 70), "s")


def _pool(views: Views, total: int, ids: list[str], y: int) -> tuple[str, int]:
    """Return the block pool as a grid in the colours of the owners, and its height."""
    columns = min(total, 20 if total <= 200 else 60)
    side = min(24, (RIGHT - 20) // columns)
    owners = {block: name for name, view in views.items() for block in view.blocks}
    parts = []
    for block in range(total):
        x, top, owner = 16 + side * (block % columns), y + side * (block // columns), owners.get(block)
        tint = f"style='fill:{OWNERS[ids.index(owner) % len(OWNERS)]}'" if owner in ids else ""
        parts.append(_rect("free" if not owner or tint else "used", x + 1, top + 1, side - 2, side - 2, tint))
        if owner and side >= 18:
            parts.append(_text(x + side / 2, top + side / 2 + 4, owner[:3], "k s"))
    return "".join(parts), side * -(-total // columns) + 4


def _sentences(record: StepTrace, views: Views) -> Iterator[str]:
    for event in record.events:
        if isinstance(event, Preempted):
            yield f"{event.id} is preempted: {counted(event.needs, 'more block')} needed, {event.free} free."
        elif isinstance(event, Scheduled):
            where = "found in another answer to its prompt" if event.num_forked_tokens else "cached"
            where = "moved here from another engine" if event.num_external_computed_tokens else where
            num = event.num_cached_tokens
            yield f"{event.id} is admitted{f', with {num} of its tokens {where}' if num else ''}."
    decodes = [name for name in record.scheduled if views[name].state == "decode"]
    verifying = [name for name in decodes if name in record.draft_token_ids]
    if decodes := [name for name in decodes if name not in verifying]:
        yield f"{', '.join(decodes)} {'decodes' if len(decodes) == 1 else 'decode'}: one token each."
    for name in verifying:
        drafts, accepted = len(record.draft_token_ids[name]), record.num_accepted_tokens.get(name, 0)
        yield f"{name} verifies {counted(drafts, 'draft')}: {accepted} accepted."
    for name, tokens in record.scheduled.items():
        if views[name].state == "prefill":
            left = views[name].num_new_tokens - tokens
            rest = f"{left} {'is' if left == 1 else 'are'} left" if left else "the last"
            yield f"{name} computes {tokens} of its tokens, {rest}."
    for event in record.events:
        if isinstance(event, Finished):
            yield f"{event.id} finishes ({event.reason})."
    why = record.blocked
    reasons = {
        "preempted": "memory was short, so none is admitted",
        "slots": "all slots are taken",
        "budget": "the budget is spent",
        "memory": f"{counted(why.needs or 0, 'block')} needed, {why.free} free",
        "none": "this scheduler does not admit it",
    }
    if why.reason in reasons:
        yield f"{why.id} waits: {reasons[why.reason]}."


def _rect(name: str, x: float, y: float, width: float, height: float, more: str = "") -> str:
    return f'<rect class="{name}" x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}" {more}/>'


def _text(x: float, y: float, words: str, name: str = "") -> str:
    return f'<text class="{name}" x="{x:.6g}" y="{y:.6g}">{escape(words)}</text>'
