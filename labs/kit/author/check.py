"""The author's promises, enforced: `python -m labs check`.

For every lab: the starter fails every test, solution and engine pass, every known mistake is caught
by the test it names and by no luck (no two mistakes behave alike), the task that it sits in is blamed, the
files agree with one another.
"""

import ast
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from labs.kit.author import kept
from labs.kit.author.blamed import wrongly_blamed
from labs.kit.judge import isolate, matrix, processes
from labs.kit.judge.manifest import LABS_DIR, Lab, LabError, Mistake, find_lab, functions, parsed
from labs.kit.judge.pristine import interface, starter_source
from labs.kit.judge.task_status import fingerprint, scripts_fingerprint
from mini_engine.trace.file import write_whole

MIN_MISTAKES = 12
FILES = (
    "README.md", "AFTER.md", "starter.py", "solution.py", "oracle.py", "test_lab.py", "random_scripts.py",
    "scenarios.py", "lab.toml", "mistakes.toml",
)  # fmt: skip
ALTERNATIVES = LABS_DIR / "kit" / "tests" / "alternatives"


@dataclass
class Verdict:
    """The report on one lab."""

    lab_id: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcomes: processes.Outcomes | None = None

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def check_labs(
    lab_ids: list[str], strict: bool = False, keep: Path | None = None, write: bool = False, depth: str = ""
) -> list[Verdict]:
    """Check two labs at a time, the slow ones first. `keep` is a folder for what the tests did.

    On each mistake the tests of the tasks that it changes are run; all with `write` or the depth `WHOLE`;
    with `QUICK` only those that must catch it, and names and blame are not checked.
    """

    def verdict(lab_id: str) -> Verdict:
        return check_lab(lab_id, strict, keep, write, matrix.WHOLE if write else depth)

    return processes.side_by_side(verdict, lab_ids[::-1])[::-1]


def check_lab(
    lab_id: str, strict: bool = False, keep: Path | None = None, write: bool = False, depth: str = ""
) -> Verdict:
    verdict = Verdict(lab_id)
    try:
        lab = find_lab(lab_id)
        missing = [name for name in FILES if not lab.file(name).exists()]
        verdict.require(not missing, f"missing: {', '.join(missing)}")
        if not missing:
            check_texts(lab, verdict)
            check_sources(lab, verdict, strict)
            check_behaviour(lab, verdict, keep, depth)
            if verdict.outcomes and not verdict.outcomes.trouble and depth != matrix.QUICK:
                check_names(lab, verdict.outcomes, verdict, write)
                verdict.problems += wrongly_blamed(lab, verdict.outcomes)
    except (LabError, SyntaxError) as error:
        verdict.problems.append(str(error))
    return verdict


def alternatives(lab: Lab) -> list[str]:
    """Right solutions of another shape, kept to prove that the tests judge behaviour."""
    return [f"file:{path}" for path in sorted(ALTERNATIVES.glob(f"{lab.id.replace('-', '_')}_*.py"))]


def check_texts(lab: Lab, verdict: Verdict) -> None:
    """README, AFTER, lab.toml and mistakes.toml are complete, and name what exists."""
    tests, listed = lab.claims, [test for task in lab.tasks for test in task.tests]
    ids = [mistake.id for mistake in lab.mistakes]
    verdict.problems += [
        *(f"{page} links {link}, which is not there" for page, link in dead_links(lab)),
        *(f"{test} has no docstring that says what it proves" for test, claim in tests.items() if not claim),
        *(f"lab.toml names {test}, which test_lab.py does not have" for test in listed if test not in tests),
        *(f"lab.toml gives {test} to no task" for test in tests if test not in listed),
        *(f"two mistakes share the id {mistake}" for mistake, n in Counter(ids).items() if n > 1),
    ]
    for task in lab.tasks:
        verdict.require(len({*task.tests}) == len(task.tests), f"task {task.name} lists a test twice")
        verdict.require(len(task.hints) == 3 and all(task.hints), f"task {task.name} needs three hints")
        verdict.require(task.points >= 1, f"task {task.name} needs points")
    for mistake in lab.mistakes:
        whole, test = all((mistake.title, mistake.misconception, mistake.hint)), mistake.caught_by
        verdict.require(whole, f"mistake {mistake.id} lacks a text")
        verdict.require(test in tests, f"mistake {mistake.id} names no test of this lab: {test!r}")
    verdict.require(bool(lab.pointers), "lab.toml needs pointers to the engine")
    few = f"mistakes.toml has {len(ids)} mistakes; it needs {MIN_MISTAKES}"
    verdict.require(len(ids) >= MIN_MISTAKES, few)


def dead_links(lab: Lab) -> list[tuple[str, str]]:
    """Links and pictures of the lab's pages that lead to nothing in its folder."""
    pages = {name: lab.file(name).read_text(encoding="utf-8") for name in ("README.md", "AFTER.md")}
    links = [(name, link) for name, text in pages.items() for link in re.findall(r"\]\(([^)#\s]+)", text)]
    own = [(name, link) for name, link in links if "://" not in link and not link.startswith("..")]
    return [(name, link) for name, link in own if not (lab.path / link).exists()]


def check_sources(lab: Lab, verdict: Verdict, strict: bool) -> None:
    """Solution and starter have the same interface, and the solution stands on its own feet."""
    solution = lab.file("solution.py").read_text(encoding="utf-8")
    named = {task.name for task in lab.tasks} | set(lab.given)
    for name in functions(solution):
        known = name in named or name.split(".")[0] in named
        verdict.require(known, f"solution.py: {name} is neither a task nor given in lab.toml")
    twins = {task.engine.replace(":", ".") for task in lab.tasks}
    for imported in sorted(imports(solution) & twins):
        verdict.problems.append(f"solution.py imports its engine twin {imported}")
    generated = starter_source(lab)
    committed = lab.file("starter.py").read_text(encoding="utf-8")
    if interface(generated) != interface(solution):
        verdict.problems.append("the generated starter has another interface than solution.py")
    if committed != generated:
        if strict:
            verdict.problems.append(f"starter.py is not what `python -m labs generate {lab.id}` writes")
        else:
            verdict.notes.append("starter.py was edited: work in progress, judged by its pristine form")


def outcomes_of(lab: Lab, keep: Path | None = None, depth: str = "") -> processes.Outcomes:
    """Return what the lab's tests do with all there is of it."""
    mistakes = [one for one in wrong(lab) if "@" not in one or depth != matrix.QUICK]
    variants = ["starter", *right(lab), *mistakes, *([depth] if depth else [])]
    return kept.outcomes_of(lab, variants, keep) if keep else processes.run_matrix(lab, variants)


def wrong(lab: Lab) -> list[str]:
    """Every mistake; and, where one touches several tasks, each of these by itself."""
    touched = {f"mistake:{mistake.id}": isolate.tasks_of(lab, mistake) for mistake in lab.mistakes}
    parts = (f"{one}@{task}" for one, tasks in touched.items() if len(tasks) > 1 for task in tasks)
    return [*touched, *parts]


def names(lab: Lab, outcomes: processes.Outcomes, verdict: Verdict) -> dict[str, dict[str, str]]:
    """Return the ids that fingerprints.json has: of the known mistakes, by task and by digest."""
    found: dict[str, dict[str, str]] = {task.name: {} for task in lab.tasks}
    by_scripts: dict[tuple[str, str], list[Mistake]] = {}
    by_id = {mistake.id: mistake for mistake in lab.mistakes}

    def alike(a: Mistake, b: Mistake) -> bool:
        return (a.title, a.hint.strip()) == (b.title, b.hint.strip())

    for mistake in lab.mistakes:
        touched = isolate.tasks_of(lab, mistake)
        for task in lab.tasks:
            variant = f"mistake:{mistake.id}" + (f"@{task.name}" if len(touched) > 1 else "")
            digest = fingerprint(task, outcomes.results.get(variant, ()))
            if task.name not in touched or not digest:
                continue
            other = by_id[found[task.name].setdefault(digest, mistake.id)]
            for result in outcomes.results[variant]:
                if result.test == matrix.RANDOM_SCRIPTS and not result.passed:
                    by_scripts.setdefault((task.name, scripts_fingerprint(result.runs)), []).append(mistake)
            both = f"mistake {mistake.id} does what {other.title!r} does in all tests of {task.name}"
            verdict.require(alike(other, mistake), f"{both}: give both one title and one hint")
    for (task_name, seen), those in by_scripts.items():
        if all(alike(one, those[0]) for one in those):  # else only a test distinguishes them
            found[task_name][seen] = those[0].id
    return {task: dict(sorted(digests.items())) for task, digests in found.items()}


def check_names(lab: Lab, outcomes: processes.Outcomes, verdict: Verdict, write: bool) -> None:
    """fingerprints.json has the ids of mistakes.toml. One that does not end in time keeps its names."""
    path, wanted = lab.file("fingerprints.json"), names(lab, outcomes, verdict)
    there = path.read_text(encoding="utf-8") if path.exists() else ""
    if late := {one.id for one in lab.mistakes if _is_late(outcomes, one.id)}:
        for task, digests in json.loads(there or "{}").items():
            named = {digest: name for digest, name in digests.items() if name in late}
            wanted[task] = dict(sorted({**named, **wanted.get(task, {})}.items()))
    text = json.dumps(wanted, indent=1, ensure_ascii=False) + "\n"
    if write:
        write_whole(path, text)
        there = text
    again = f"python -m labs check {lab.id} --write (and keeps_state = true for what keeps state"
    wrong_names = f"fingerprints.json does not name the mistakes as they are: {again} between calls)"
    verdict.require(there == text, wrong_names)


def _is_late(outcomes: processes.Outcomes, mistake_id: str) -> bool:
    """Whether the random scripts on the mistake, or on its part in a task, did not end in time."""
    variants = [one for one in outcomes.results if one.partition("@")[0] == f"mistake:{mistake_id}"]
    results = [result for one in variants for result in outcomes.results[one]]
    return any(r.test == matrix.RANDOM_SCRIPTS and r.said.startswith("TimeUp") for r in results)


def right(lab: Lab) -> list[str]:
    return ["solution", "engine", *alternatives(lab)]


def check_behaviour(lab: Lab, verdict: Verdict, keep: Path | None = None, depth: str = "") -> None:
    """The starter fails, the right ones pass; its test catches each mistake, and so do the random scripts."""
    files = f"{lab.id.replace('-', '_')}_*.py in {ALTERNATIVES}"
    verdict.require(len(alternatives(lab)) >= 2, f"it needs two right solutions of another shape, {files}")
    outcomes = verdict.outcomes = outcomes_of(lab, keep, depth)
    if outcomes.trouble:
        verdict.problems.append(f"pytest could not run the tests:\n{outcomes.trouble}")
        return
    for result in outcomes.results["starter"]:
        kind = result.said.startswith(("NotImplementedError", "Failed", "AssertionError"))
        verdict.require(not result.passed, f"the starter passes {result.test}")
        fails = f"the starter fails {result.test} with {result.said!r}"
        verdict.require(kind, f"{fails} instead of saying what is not written")
    for variant in right(lab):
        for result in outcomes.results[variant]:
            verdict.require(result.passed, f"{variant} fails {result.test}: {result.said}")
    seen: dict[str, str] = {}  # what a mistake does in every test: its id
    for mistake in lab.mistakes:
        variant = f"mistake:{mistake.id}"
        broken = [r for r in outcomes.results[variant] if r.said.startswith("LoadProblem")]
        caught = mistake.caught_by in outcomes.failed(variant)
        if broken:
            verdict.problems.append(f"mistake {mistake.id} cannot be made: {broken[0].said}")
            continue
        verdict.require(caught, f"mistake {mistake.id} is not caught by {mistake.caught_by}")
        verdict.require(
            matrix.RANDOM_SCRIPTS in outcomes.failed(variant) or bool(mistake.missed_by_scripts),
            f"the random scripts miss mistake {mistake.id}, and no reason is given",
        )
        does = outcomes.fingerprint(variant) if depth != matrix.QUICK else variant
        twin = seen.setdefault(does, mistake.id)
        verdict.require(twin == mistake.id, f"mistakes {twin} and {mistake.id} behave alike in every test")


def scripts_needed(outcomes: processes.Outcomes, mistake: Mistake) -> str:
    """Return how many random scripts it takes to catch a mistake."""
    results = outcomes.results[f"mistake:{mistake.id}"]
    said = next((r.said for r in results if r.test == matrix.RANDOM_SCRIPTS and not r.passed), "none")
    number = re.search(r"script (\d+) of", said)
    return f"script {number[1]}" if number else f"script: {said[:30]}"


def imports(source: str) -> set[str]:
    """Everything a file imports, as module.name."""
    nodes = list(ast.walk(parsed(source)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}


def kill_matrix(verdict: Verdict) -> list[str]:
    """One line a mistake: which tests catch it, the named one first."""
    outcomes = verdict.outcomes or processes.Outcomes(find_lab(verdict.lab_id))
    lines = []
    for mistake in outcomes.lab.mistakes:
        killers = outcomes.failed(f"mistake:{mistake.id}")
        mark = "caught" if mistake.caught_by in killers else "MISSED"
        others = len(killers - {mistake.caught_by})
        seed = scripts_needed(outcomes, mistake)
        lines.append(f"  {mark}  {mistake.id:32} {mistake.caught_by:52} and {others} more; {seed}")
    return lines
