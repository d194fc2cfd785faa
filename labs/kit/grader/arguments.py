"""Checks the instructor's arguments, and keeps those of a run in the report's settings.json."""

import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labs.kit.grader.results import typed
from labs.kit.grader.rules import Files
from labs.kit.grader.submission import Settings
from labs.kit.judge import loading, random_scripts
from labs.kit.judge.manifest import LabError, find_lab, lab_ids
from labs.kit.toys.scripts import Script
from labs.kit.toys.words import brief, describe
from mini_engine.trace.file import write_whole

SETTINGS = "settings.json"


def chosen(labs: str) -> tuple[str, ...]:
    """Return the ids of the labs. Raise LabError if one does not exist."""
    names = labs.replace(",", " ").split()
    if labs and not names:
        raise LabError(f"--labs {labs} names no lab; there are {', '.join(lab_ids())}")
    return tuple(sorted({find_lab(name).id for name in names})) if names else tuple(lab_ids())


def seed(text: str, report: Path | None = None) -> str:
    """Return the seed, else that of the report, else a new one. Raise LabError if it does not print."""
    text = text or (earlier(report).get("seed", "") if report else "")
    if not text.isprintable() or len(text) > 100:
        raise LabError(f"--seed should be at most 100 letters that print, but is {brief(text)}")
    return text or secrets.token_hex(8)


def own_cases(folder: Path | None, labs: tuple[str, ...]) -> Path | None:
    """Return the folder of an instructor's own cases. Raise LabError if a case in it cannot be played."""
    if folder is None:
        return None
    files = [file for lab_id in labs for file in sorted((folder / lab_id).glob("*.json"))]
    if not files:
        raise LabError(f"{folder} has no cases for {', '.join(labs)}; they are called lab-NN/NAME.json")
    for file in files:
        try:
            case = json.loads(file.read_text("utf-8"))
            calls = all(isinstance(call[0], str) for call in case["calls"])
            fits = calls and isinstance(case["config"], dict)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            fits = False
        if not fits:
            form = '{"config": {...}, "calls": [[name, arguments ...], ...]}'
            raise LabError(f"{file} is not a case: {form}")
        if why := unplayable(file.parent.name, case):
            where = "the form of a script is in the lab's author/random_scripts.py"
            raise LabError(f"{file} cannot be played: {why}; {where}")
    return folder.resolve()


def unplayable(lab_id: str, case: Script) -> str:
    """Return why no submission could pass a case, or ""."""
    try:
        oracle = random_scripts.run(lab_id, None, case)
        reference = random_scripts.run(lab_id, loading.load(lab_id, "solution"), case)
    except Exception as error:  # a script of another form may raise anything
        return describe(error)
    departs = random_scripts.departure(reference, oracle) is not None
    return "the reference departs from the oracle in it" if departs else ""


# ------------------------------------------------------------------------------------------- settings.json


def record(report: Path, submissions: Path, files: Files, settings: Settings) -> None:
    """Write the arguments that a later run needs to go on, and `replay` to play a case."""
    paths = {key: one.resolve() if isinstance(one, Path) else one for key, one in vars(files).items()}
    known = asdict(settings) | {"submissions": submissions.resolve(), "files": paths}
    text = json.dumps(known, indent=1, sort_keys=True, default=str)
    write_whole(report / SETTINGS, text + "\n")


def earlier(report: Path) -> dict[str, Any]:
    """Return the arguments of an earlier run, or {} if there was none."""
    try:
        found = json.loads((report / SETTINGS).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("seed"), str) else {}


def recorded(report: Path) -> tuple[Settings, Path, Files]:
    """Return an earlier run's settings, submissions and other files. Raise LabError if there was none."""
    known = earlier(report)
    if not known:
        raise LabError(f"{report} is not a report: it has no {SETTINGS} that can be read")
    try:
        submissions, files = Path(known.pop("submissions")), known.pop("files")
        files |= {key: Path(files[key]) for key in ("late", "roster", "manual") if files[key]}
        known |= {"labs": tuple(known["labs"]), "own": Path(known["own"]) if known["own"] else None}
        return typed(Settings(**known)), submissions, typed(Files(**files))
    except (KeyError, TypeError) as error:
        raise LabError(f"{report} is not a report: its {SETTINGS} was edited ({error})") from None
