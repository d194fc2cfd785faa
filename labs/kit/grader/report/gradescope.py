"""A student's results.json, as Gradescope reads it."""

import json

from labs.kit.grader.report.disclosure import Disclosed, LabDisclosed, TaskDisclosed
from labs.kit.grader.report.words import differs, summed
from labs.kit.grader.results import RIGHT, WAITS, WRONG


def results(told: Disclosed) -> str:
    """https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format"""
    value = {
        "score": round(told.earned, 2),
        "output": "\n\n".join([*weak(told), summed(told), *differs(told)]),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [test for lab in told.labs for test in tests(lab)],
        "extra_data": {"seed": told.seed, "isolation": told.isolation, "withheld": told.withheld},
    }
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def weak(told: Disclosed) -> list[str]:
    if told.isolation == "namespaces":
        return []
    return ["Weak isolation: this was graded without namespaces of its own, which the machine refuses."]


def tests(lab: LabDisclosed) -> list[dict[str, object]]:
    """A test a task; the first that is wrong has the case that departs."""
    at_fault = next((task for task in lab.tasks if task.state == WRONG), None)
    return [
        {
            "name": f"{lab.id}: {task.name}",
            "score": round(task.earned, 2),
            "max_score": task.points,
            "status": "passed" if task.state in (RIGHT, WAITS) else "failed",
            "output": output(lab, task, task is at_fault),
            "output_format": "text",
            "visibility": "visible",
        }
        for task in lab.tasks
    ]


def output(lab: LabDisclosed, task: TaskDisclosed, is_first: bool) -> str:
    lines = [task.words + (f"; {task.passed} of {task.total} cases pass" if task.total else "")]
    lines += [lab.problem] if lab.problem else []
    if task.mistake:
        lines += [f"looks like: {task.mistake}", task.hint]
    if is_first:
        lines += [lab.counts] if lab.counts else []
        lines += ["", f"{lab.case}, the first that departs:", *lab.story] if lab.case else []
    lines += [f"late: {lab.late}"] if lab.late else []
    return "\n".join(lines)
