"""The task that is blamed for a known mistake: an examination as of a learner's file, on recorded results."""

from io import StringIO
from threading import Lock

from labs.kit.judge import isolate, loading
from labs.kit.judge.examine import Examination, task_of
from labs.kit.judge.manifest import Lab, Mistake
from labs.kit.judge.processes import Outcomes
from labs.kit.judge.task_status import Result

_one_at_a_time = Lock()  # playing scripts redirects what the process prints


class Replayed(Examination):
    """Takes the results of tests from the outcomes; a task that the mistake does not touch passes alone."""

    def __init__(self, lab: Lab, mistake: Mistake, outcomes: Outcomes, left_whole: set[str]):
        super().__init__(lab, [], StringIO())
        self.mistake, self.outcomes, self.left_whole = mistake, outcomes, left_whole
        self.part = loading.mistaken(lab, mistake)
        self.touched = isolate.tasks_of(lab, mistake)

    def run(self, variants: list[str], wanted: dict[str, set[str]]) -> bool:
        for variant in variants:
            task, whole = task_of(variant), f"mistake:{self.mistake.id}"
            as_whole = not task or isolate.class_of(self.lab.task(task)) in self.left_whole
            by_itself = f"{whole}@{task}" if len(self.touched) > 1 and task in self.touched else whole
            for result in self.outcomes.results[whole if as_whole else by_itself]:
                if not task or result.test in wanted[task]:
                    mine = as_whole or task in self.touched
                    self.keep(variant, result if mine else Result(result.test, True))
        return True


def wrongly_blamed(lab: Lab, outcomes: Outcomes) -> list[str]:
    """Return a sentence for each mistake for which a task is blamed that it does not sit in.

    Where __init__ is a task, a learner's attributes may have any names, and the class is judged whole: so it
    is here once more.
    """
    classes = isolate.of_ones_own(lab)
    found = []
    for mistake in lab.mistakes:
        touched = isolate.tasks_of(lab, mistake)
        if mistake.caught_by not in outcomes.failed(f"mistake:{mistake.id}"):
            continue  # which is a fault of its own
        is_whole = any(name.partition(".")[0] in classes for name in touched)
        for left_whole in [set(), classes] if is_whole else [set()]:
            with _one_at_a_time:
                one = Replayed(lab, mistake, outcomes, left_whole)
                one.examine()
            blamed = one.status.next_task
            if blamed is None or blamed.name not in (*touched, *(mistake.or_in if left_whole else ())):
                where = " where the class is judged whole" if left_whole else ""
                sits, name = " or ".join(touched), blamed and blamed.name
                found.append(f"mistake {mistake.id} sits in {sits}, but {name} is blamed{where}")
    return found
