"""gradebook/canvas.csv and moodle.csv: points in the columns that these systems document for an import.

Canvas: Student, ID, SIS User ID, SIS Login ID, Section, a column for each assignment, a row of points
possible (Instructor Guide, "How do I import grades in the Gradebook?"; GradebookImporter in its source).
Moodle: columns are mapped at the import; one is an address or an ID number, and feedback goes with its points
(https://docs.moodle.org/en/Grade_import). An empty cell would clear what Canvas has, so there is none.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from labs.kit.grader.report.summary import Summary
from labs.kit.grader.report.table import no_formula, written
from labs.kit.grader.report.templates import points
from labs.kit.grader.rules import EMAIL, ID, NAME, SECTION

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")


def files(summary: Summary) -> dict[str, str]:
    """Return the files by name; none without a roster, which alone knows the ids."""
    if not summary.has_roster:
        return {}
    rows = [(row.member, row.net, row.notes) for row in summary.rows if row.member]
    rows.sort(key=lambda row: (row[0][NAME].casefold(), row[0][ID]))
    return {"canvas.csv": canvas(summary, rows), "moodle.csv": moodle(summary, rows)}


Rows = Sequence[tuple[Mapping[str, str], Mapping[str, float], Mapping[str, str]]]


def canvas(summary: Summary, rows: Rows) -> str:
    """Return Canvas's file. A lab's column has the name, with the number, of the roster's if that has one."""
    members = [member for member, _, _ in rows]
    possible = ["Points Possible", "", "", "", ""]
    possible += [points(sum(tasks.values())) for _, tasks in summary.labs.values()]
    lines = [[*CANVAS, *(column(lab, members) for lab in summary.labs)], possible]
    for member, earned, _ in rows:
        login = member.get("SIS Login ID") or member[EMAIL]
        who = [member[NAME], member[ID], member.get("SIS User ID", ""), login, member[SECTION]]
        lines.append([*map(no_formula, who), *(cell(earned, lab) for lab in summary.labs)])
    return written(lines)


def column(lab: str, members: Iterable[Mapping[str, str]]) -> str:
    """Return an assignment's name in Canvas: lab-01 (98765), as its own export has it, or lab-01."""
    names = (name for member in members for name in member if name.endswith(")"))
    return next((name for name in names if re.match(rf"{lab.replace('-', '[-_ ]?')}\b", name, re.I)), lab)


def moodle(summary: Summary, rows: Rows) -> str:
    """Return Moodle's file: of each lab the points, and as feedback what was noted on them."""
    heads = [head for lab in summary.labs for head in (lab, f"{lab} feedback")]
    lines = [["ID number", "Email address", "Full name", "Group", *heads]]
    for member, earned, notes in rows:
        who = [member[ID], member[EMAIL], member[NAME], member[SECTION]]
        cells = [text for lab in summary.labs for text in (cell(earned, lab), notes.get(lab, ""))]
        lines.append([no_formula(text) for text in (*who, *cells)])
    return written(lines)


def cell(earned: Mapping[str, float], lab: str) -> str:
    return points(earned[lab]) if lab in earned else ""
