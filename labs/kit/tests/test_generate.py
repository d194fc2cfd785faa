"""The starter is the solution without the tasks' bodies; a mistake is the solution with one idea changed."""

import ast
from dataclasses import replace

import pytest

from labs.kit.judge.manifest import Lab, LabError, Mistake, Task, find_lab, functions, replace_body
from labs.kit.judge.pristine import interface, starter_source

SOLUTION = '''"""The reference."""

import heapq
from math import inf, pi

from mini_engine.request import Request

LIMIT = inf


def given(x: Request):
    """Stays."""
    return heapq.nlargest(1, x)  # as it is


class Queue:
    """A queue."""

    def __init__(self):
        self.items = []  # given

    def push(self, item):
        """Put it in.

        O(log n).
        """
        # why a heap
        heapq.heappush(self.items, pi)

    @property
    def first(self):
        return self.items[0]


def area(radius):
    return pi * radius**2
'''


def lab_with(tmp_path, tasks, source=SOLUTION) -> Lab:
    (tmp_path / "solution.py").write_text(source, "utf-8")
    tasks = tuple(Task(name, 1, "", (), ()) for name in tasks)
    return Lab("lab-99", tmp_path, "toy", "?", 1, (), tasks)


def test_task_bodies_go_and_all_else_stays(tmp_path):
    starter = starter_source(lab_with(tmp_path, ["Queue.push"]))
    assert 'raise NotImplementedError("lab-99: Queue.push is not written yet")' in starter
    assert "heappush" not in starter and "why a heap" not in starter
    texts = "O(log n).", "# as it is", "self.items = []  # given", "LIMIT = inf", "return self.items[0]"
    assert [text for text in texts if text not in starter] == []
    assert starter.startswith('"""lab-99, toy: your file.')
    assert "The reference." not in starter


def test_a_class_as_a_task_means_all_its_methods(tmp_path):
    starter = starter_source(lab_with(tmp_path, ["Queue"]))
    assert starter.count("NotImplementedError(") == 3
    assert "Queue.first is not written yet" in starter


def test_unused_imports_go(tmp_path):
    starter = starter_source(lab_with(tmp_path, ["Queue.push", "given", "area"]))
    imported = [ast.unparse(n) for n in ast.parse(starter).body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert imported == ["from math import inf", "from mini_engine.request import Request"]


def test_interface_stays(tmp_path):
    starter = starter_source(lab_with(tmp_path, ["Queue", "given"]))
    assert interface(starter) == interface(SOLUTION)
    assert interface(starter)["given"] == "(x: Request)"


def test_a_body_on_the_line_of_its_def_is_refused(tmp_path):
    with pytest.raises(LabError, match="f: put its body on a line of its own"):
        starter_source(lab_with(tmp_path, ["f"], '"""Doc."""\ndef f(): return 1\n'))


def test_unknown_task_is_named(tmp_path):
    with pytest.raises(LabError, match="no 'Queue.pop'"):
        starter_source(lab_with(tmp_path, ["Queue.pop"]))


def test_replaced_body_keeps_docstring_and_neighbours():
    new = replace_body(SOLUTION, "Queue.push", "\n    self.items.append(item)\n    return 7\n")
    assert "O(log n)." in new and "heappush" not in new
    assert "        self.items.append(item)\n        return 7\n\n    @property" in new


MISTAKE = Mistake("x", "x", "x", "x", "test_x")


def test_a_snippet_must_occur_exactly_once():
    assert "return None" in replace(MISTAKE, edits=(("return self.items[0]", "return None"),)).apply(SOLUTION)
    for snippet, times in (("heapq.", "2 times"), ("no such", "0 times")):
        with pytest.raises(LabError, match=times):
            replace(MISTAKE, edits=((snippet, ""),)).apply(SOLUTION)


def test_a_mistake_can_be_a_whole_body():
    source = replace(MISTAKE, task="Queue.push", body="self.items.insert(0, item)").apply(SOLUTION)
    assert "        self.items.insert(0, item)\n" in source
    assert "heappush" not in source


def test_labs_are_found_by_any_spelling():
    paths = ["labs/lab-01", "labs/lab-01/", "./labs/lab-01/starter.py"]
    for name in ("lab-01", "1", "01", "LAB_1", *paths, *(path.replace("/", "\\") for path in paths)):
        assert find_lab(name).id == "lab-01"


def test_whatever_cannot_be_parsed_is_a_syntax_error():
    """A null byte is a ValueError before Python 3.11.4."""
    for source in ("def f(:", "x = 1\0", "x = '\ud800'"):
        with pytest.raises(SyntaxError):
            functions(source)
