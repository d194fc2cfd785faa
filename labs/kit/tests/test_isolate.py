"""One task of a file among the reference's others."""

from pathlib import Path

import pytest

from labs.kit.judge import isolate, loading
from labs.kit.judge.manifest import find_lab, functions, lab_ids, replace_body
from labs.kit.judge.pristine import pristine_source, with_given
from labs.kit.tests import marks
from labs.kit.tests.files import another, solution
from labs.kit.toys.requests import make_request


def alone(lab_id: str, task: str, source: str):
    lab = find_lab(lab_id)
    return isolate.isolated(lab, lab.task(task), source, Path("starter.py"))


QUICK = "lab-02", "lab-04", "lab-05", "lab-07", "lab-10", "lab-11"


@pytest.mark.parametrize("lab_id", marks.some(lab_ids(), *QUICK))
def test_in_an_unwritten_file_one_task_alone_is_not_written(lab_id):
    """And where it is the reference's as well, nothing unwritten is left."""
    lab = find_lab(lab_id)
    pristine = pristine_source(lab)
    assert isolate.unwritten(lab, pristine) == [task.name for task in lab.tasks]
    for task in lab.tasks:
        module = isolate.isolated(lab, task, pristine, Path("starter.py"))
        defined = {f.__qualname__: str(f.__code__.co_consts) for f in isolate.defined_in(module)}
        found = [name for name, constants in defined.items() if "is not written yet" in constants]
        assert found and all(f"{name}.".startswith(f"{task.name}.") for name in found)


def test_a_reference_s_function_calls_the_file_s_own():
    source = pristine_source(find_lab("lab-03"))
    source = replace_body(source, "policy_key", "return (0, -request.arrival)")
    module = alone("lab-03", "policy_key", source)
    assert module.RequestQueue.push.__globals__ is module.__dict__
    assert module.RequestQueue.push.__globals__["policy_key"] is module.policy_key


def test_a_default_that_was_bound_before_is_the_reference_s_too():
    """BlockManager's hash_block=hash_block was bound when the class was made."""
    module = alone("lab-06", "BlockManager.free", pristine_source(find_lab("lab-06")))
    bound = module.BlockManager.__init__.__kwdefaults__["hash_block"]
    assert bound is module.hash_block and bound(b"", (1,))


def test_a_class_with_books_of_its_own_is_left_whole():
    """A reference's method would look for attributes that it does not have, and the other way round."""
    source = another("lab-05")
    method = alone("lab-05", "BlockManager.free", source)
    assert method.BlockManager.admit.__code__.co_filename == "starter.py"
    assert method.write_kv.__code__.co_filename != "starter.py"
    function = alone("lab-05", "write_kv", source)
    assert function.write_kv.__code__.co_filename == "starter.py"
    assert function.BlockManager.__init__.__code__.co_filename != "starter.py"


def test_another_container_of_the_same_name_is_no_book_of_its_own():
    source = solution("lab-05").replace("list(reversed(range(num_blocks)))", "deque(range(num_blocks))")
    method = alone("lab-05", "BlockManager.free", f"from collections import deque\n{source}")
    assert method.BlockManager.admit.__code__.co_filename != "starter.py"


def test_what_is_given_now_is_filled_into_a_starter_of_an_earlier_edition(tmp_path):
    """Two methods were left to write; where the file has another container, its method still is."""
    lab = find_lab("lab-05")
    path, made, admit = tmp_path / "starter.py", "BlockManager.__init__", "BlockManager.admit"
    given = "BlockManager.num_free_blocks", "BlockManager.block_table"
    for containers, filled in (("self._free, self._tables", 2), ("self._free_ids, self._tables", 1), ("", 2)):
        source = pristine_source(lab)
        for name in given:
            unwritten = f'raise NotImplementedError("lab-05: {name} is not written yet")'
            source = replace_body(source, name, unwritten)
        if containers:
            source = replace_body(source, made, f"{containers} = [0, 1], {{}}")
        path.write_text(replace_body(source, admit, "return True"), "utf-8")
        found = loading.read(lab, path)
        assert sum(f"{name} is not written" not in found for name in given) == filled
        assert {made, admit} - {*isolate.unwritten(lab, found)} == ({made, admit} if containers else {admit})
        assert len(found.splitlines()) == len(source.splitlines())


def test_what_takes_several_lines_stands_behind_such_a_starter():
    """Lab-03's queue and abort were left to write, one of them has been; its tests then go as they should."""
    lab = find_lab("lab-03")
    source = pristine = pristine_source(lab)
    once = [name for name in functions(pristine) if name.startswith("RequestQueue.")] + ["Scheduler.abort"]
    for name in once:
        source = replace_body(source, name, f'raise NotImplementedError("lab-03: {name} is not written yet")')
    for line in ("import heapq\n", "from mini_engine.request import RequestStatus\n"):
        source = source.replace(line, "")
    source = replace_body(source, "Scheduler.abort", "return 'its own'")
    source = replace_body(source, "policy_key", "return (0, -request.arrival)")
    found = with_given(lab, source)
    assert with_given(lab, pristine) == pristine
    module = loading.execute(found, "earlier", "starter.py")
    queue = module.RequestQueue("priority")
    for arrival in range(3):
        request = make_request(f"r{arrival}", 1)
        request.arrival = arrival
        queue.push(request)
    queue.remove(queue.peek())
    assert [request.arrival for request in queue] == [1, 0] and len(queue) == 2
    assert module.Scheduler.abort(None, "r0") == "its own"
    with pytest.raises(ValueError, match="shortest"):
        module.RequestQueue("shortest")
    assert found.splitlines().index("class Scheduler:") == source.splitlines().index("class Scheduler:")


def test_what_only_the_tasks_needed_is_imported():
    """The starter's unused imports are gone; the reference's functions find theirs."""
    module = alone("lab-01", "schedule_step", pristine_source(find_lab("lab-01")))
    assert module.RequestStatus is loading.load("lab-01", "solution").RequestStatus


def test_a_task_with_a_line_of_its_own_is_written():
    lab = find_lab("lab-02")
    source = replace_body(pristine_source(lab), "clamp", "return 0")
    assert "clamp" not in isolate.unwritten(lab, source)
    other_words = pristine_source(lab).replace("At most `threshold`", "No more than `threshold`")
    assert "clamp" in isolate.unwritten(lab, other_words) and other_words != pristine_source(lab)
    assert isolate.unwritten(lab, "def clamp(:") == []


def test_a_given_helper_is_the_reference_s_for_the_reference_s_code_alone():
    lab = find_lab("lab-06")
    source = solution("lab-06").replace("return -(-num_tokens // self.block_size)", "return 7")
    source = source.replace("return len(self.free_blocks) + len(self.free_cached)", "return 9")
    module, reference = loading.execute(source, "two_sets", "starter.py"), loading.load("lab-06", "solution")
    made = isolate.made(lab, reference)
    isolate.filled_in(lab, [lab.task("BlockManager.take")], module, reference, [], made, two_sets=True)
    manager = module.BlockManager(4, 2)
    assert (manager.blocks_for(3), manager.num_free_blocks) == (7, 9)  # in any other call
    assert manager.admit(make_request("a", 3)) and len(manager.tables["a"]) == 2
    assert not manager.admit(make_request("b", 5))
