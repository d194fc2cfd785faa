"""Old names work for one more release: on our classes, on classes without new ones, in learners' files."""

import pytest

from labs.kit import FakeKV
from labs.kit.judge import isolate
from labs.kit.judge.manifest import find_lab
from labs.kit.judge.pristine import pristine_source
from mini_engine.block_manager import BlockManager
from mini_engine.config import Policy, SchedulerPolicy
from mini_engine.engine import Engine
from mini_engine.parts import Parts
from mini_engine.renamed import NAMES, modernized, old_names
from mini_engine.request import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.tests.helpers import alone, drain, make_request, tokens_of


class Older(BlockManager):
    """Overrides one method under its old name, and calls the old name of another."""

    def publish(self, request):
        self.seen = len(self.find_prefix(request))
        super().publish(request)


class Oldest:
    """Has the old names only, as a solution of the last release."""

    def __init__(self, *args, **kwargs):
        self.kv = BlockManager(*args, **kwargs)

    def __getattr__(self, name):
        if name in NAMES.values():
            raise AttributeError(name)
        return getattr(self.kv, name)

    def find_prefix(self, request):
        return self.kv.get_computed_blocks(request)

    def publish(self, request):
        self.seen = len(self.find_prefix(request))
        self.kv.cache_blocks(request)


@pytest.mark.parametrize("manager", [Older, Oldest])
def test_a_manager_with_old_names_serves_an_engine(model, manager):
    engine = Engine(model, num_blocks=20, block_size=4, parts=Parts(BlockManager=manager))
    params = SamplingParams(temperature=0, max_tokens=5)
    for _ in range(2):
        request = engine.requests[engine.add_request(list(range(9)), params)]
        assert tokens_of(drain(engine)[request.request_id]) == alone(model, list(range(9)), params)
    assert request.num_cached_tokens == 8
    assert engine.scheduler.kv.seen > 0
    assert Scheduler(manager(8, 4), max_num_batched_tokens=8, max_num_seqs=2).kv.cache_blocks


def test_old_names_of_our_classes():
    request = make_request("a", 4)
    assert request.sampling is request.sampling_params and Policy == SchedulerPolicy
    for kv in (BlockManager(8, 4), FakeKV(8)):
        kv.admit(request)
        kv.publish(request)
        assert kv.publish == kv.cache_blocks
    assert BlockManager(8, 4).find_prefix(request) == []


def test_source_is_modernized_line_by_line():
    """Attributes and definitions are renamed; longer names, plain words and imports are not."""
    source = (
        "def publish(r):\n    kv.publish(r)  # publish\n    published = r.sampling.top_k, r.sampling_params"
    )
    new = source.replace("publish(r)", "cache_blocks(r)").replace("sampling.", "sampling_params.")
    assert modernized(source) == modernized(new) == new
    assert old_names(source) == {"publish": "cache_blocks", "sampling": "sampling_params"}


def test_a_starter_of_the_last_release_is_read():
    """Half written, it has the same tasks unwritten; and a task may be named as it was."""
    lab, old = find_lab("lab-06"), pristine_source(find_lab("lab-06"))
    for name, new in NAMES.items():
        old = old.replace(new, name)
    assert "find_prefix" in old and modernized(old) == pristine_source(lab)
    assert isolate.unwritten(lab, modernized(old)) == [task.name for task in lab.tasks]
    assert lab.task("find_prefix").name == "BlockManager.get_computed_blocks"
    assert lab.task("BlockManager.publish").name == "BlockManager.cache_blocks"
