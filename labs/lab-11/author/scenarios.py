"""lab-11's scenarios: clients that come, read slowly, stall and leave, on a virtual clock."""

from labs.kit.toys.clients import Play


def scenario(name, *ops, slots=4, max_num_requests=4):
    config = {"slots": slots, "max_num_requests": max_num_requests}
    return {"name": name, "config": config, "ops": [list(op) for op in ops]}


def run(lab, scenario, *, raise_errors=True):
    """The log of the calls of one scenario."""
    return Play(lab, scenario["config"]).log(scenario, raise_errors)


SCENARIOS = [
    scenario("one reader", ("open", "a", "r1", 3), ("wait", 0.15), ("wait", 0.1), ("drain",)),
    scenario(
        "a second comes in the middle of a step", ("open", "a", "r1", 4), ("wait", 0.13),
        ("open", "b", "r2", 2), ("wait", 0.05), ("wait", 0.05), ("drain",),
    ),
    scenario(
        "a slow reader", ("open", "a", "r1", 5, 1), ("open", "b", "r2", 3), ("wait", 0.25), ("wait", 0.3),
        ("resume", "a"), ("drain",),
    ),
    scenario(
        "one leaves", ("open", "a", "r1", 9), ("open", "b", "r2", 4), ("wait", 0.13), ("leave", "a"),
        ("wait", 0.1), ("drain",),
    ),
    scenario(
        "too many", ("open", "a", "r1", 3), ("open", "b", "r2", 1), ("open", "c", "r3", 1), ("wait", 0.15),
        ("open", "d", "r4", 1), ("drain",), max_num_requests=2,
    ),
    scenario(
        "an id again", ("open", "a", "r1", 5), ("wait", 0.13), ("leave", "a"), ("open", "b", "r1", 2),
        ("wait", 0.15), ("drain",),
    ),
    scenario(
        "somebody looks", ("open", "a", "r1", 4), ("wait", 0.03), ("look", "x", 0.05), ("look", "y", 0.05),
        ("wait", 0.1), ("look", "z", 0.01), ("drain",),
    ),
    scenario(
        "a step fails", ("open", "a", "r1", 5), ("open", "b", "r2", 5), ("wait", 0.13),
        ("fail", "out of memory"), ("wait", 0.1), ("open", "c", "r1", 2), ("drain",),
    ),
    scenario(
        "the device is gone", ("open", "a", "r1", 5), ("open", "b", "r2", 5), ("wait", 0.13),
        ("fail", "the device is gone"), ("wait", 0.1), ("open", "c", "r3", 2), ("drain",),
    ),
    scenario(
        "the engine is closed", ("open", "a", "r1", 5), ("open", "b", "r2", 5), ("wait", 0.13), ("close",),
        ("open", "c", "r3", 5), ("wait", 0.1), ("open", "d", "r4", 2), ("drain",),
    ),
]  # fmt: skip
