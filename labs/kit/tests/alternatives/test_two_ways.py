"""Making room first, and preempting in the loop with a refund (vLLM's way), decide the same."""

from pathlib import Path

from labs.kit import load
from labs.kit.judge import loading
from mini_engine.trace import decisions

in_the_loop = Path(__file__).with_name("lab_03_b.py")


def test_both_ways_give_the_same_schedule():
    """On 200 random workloads short of memory, every step of the two is the same, row order included."""
    scenarios, room_first = load("lab-03", "scenarios"), load("lab-03", "solution")
    other = loading.execute(in_the_loop.read_text(encoding="utf-8"), "lab_03_in_the_loop", in_the_loop)
    preempting = 0
    for scenario in scenarios.draw(seed=7, count=200):
        first, second = (scenarios.run(way, scenario) for way in (room_first, other))
        assert first.end.end == second.end.end == "drained"
        assert [decisions(record) for record in first.steps] == [decisions(r) for r in second.steps]
        preempting += any(e.type == "PREEMPTED" for record in first.steps for e in record.events)
    assert preempting > 60
