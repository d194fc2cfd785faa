"""A student's results.json for Gradescope."""

import json

from labs.kit.grader.report.disclosure import Disclosed, LabDisclosed, TaskDisclosed
from labs.kit.grader.report.templates import differs, sum_of
from labs.kit.grader.results import RIGHT, WAITS, WRONG


def results(student: Disclosed) -> str:
    """Return the JSON of https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format"""
    value = {
        "score": round(student.earned, 2),
        "output": "\n\n".join([*weak(student), sum_of(student), *differs(student)]),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [test for lab in student.labs for test in tests(lab)],
        "extra_data": {"isolation": student.isolation, "withheld": student.withheld},
    }
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def weak(student: Disclosed) -> list[str]:
    if student.isolation == "namespaces":
        return []
    return ["Weak isolation: this was graded without namespaces of its own, which the machine refuses."]


def tests(lab: LabDisclosed) -> list[dict[str, object]]:
    """Return a test for each task; the first that is wrong shows the case that departs."""
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
    return "\n".join([*lines, *lab.notes])
