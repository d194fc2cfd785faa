"""lab-11's scripts: clients that come, stall and leave at random times, and an engine that fails.

No two things that a script does by itself fall together: each time has a few microseconds of its own.
"""

from labs.kit.toys.clients import GONE, OUT_OF_MEMORY
from labs.kit.toys.clients import Play as Play

SCRIPTS = 150
KINDS = ("calm", "looks", "crowd", "ids", "fail", "gone", "close")


def draw(rng):
    kind = rng.choices(KINDS, (4, 4, 3, 4, 3, 2, 3))[0]
    names, ids = list("abcdefgh"), ["r1", "r2"] if kind == "ids" else [f"r{n}" for n in range(1, 9)]
    config = {"slots": rng.choice((1, 2, 4)), "max_num_requests": rng.choice((1, 2, 3, 8))}
    if kind in ("ids", "fail", "gone", "close"):
        config["max_num_requests"] = rng.choice((1, 2, 4))
    calls, came, num_waits, num_looks, over = [], [], 0, 0, False

    def wait():
        nonlocal num_waits
        num_waits += 1
        return ["wait", rng.choice((0.02, 0.05, 0.1, 0.1, 0.2)) + 2**num_waits * 1e-7]

    if kind == "close" and rng.random() < 0.5:  # a reader that holds the only place when the engine closes
        config["max_num_requests"], over = 1, True
        calls += [["open", names.pop(0), ids.pop(0), 5, 1], wait(), wait(), ["close"], wait()]
        came.append("a")
    for _ in range(rng.randint(6, 13)):
        move = rng.random()
        if names and (move < 0.4 or not came):
            name = names.pop(0)
            request_id = ids[0] if kind != "ids" else rng.choice(ids)
            ids = ids if kind == "ids" else ids[1:]
            came.append(name)
            num_tokens, reads = rng.choice((1, 2, 3, 5)), (1, 1, 99) if kind == "close" else (99, 99, 1, 2)
            calls.append(["open", name, request_id, num_tokens, rng.choice(reads)])
        elif move < 0.65:
            calls.append(["leave", rng.choice(came)])
        elif move < 0.75:
            calls.append(["resume", rng.choice(came)])
        elif kind == "looks":
            for _ in range(rng.choice((1, 1, 2))):
                num_looks += 1
                seconds = rng.choice((0.01, 0.03, 0.06)) + 2**-num_looks * 1e-5
                calls.append(["look", f"look {num_looks}", seconds])
        elif kind in ("fail", "gone") and not over:
            over = kind == "gone"
            calls.append(["fail", GONE if over else OUT_OF_MEMORY])
        elif kind == "close" and not over and move > 0.8:
            over = True
            calls += [wait(), ["close"], wait(), ["open", "z", "r9", 1, 99]]
            calls += [["leave", name] for name in came]
        elif rng.random() < 0.3:
            num_looks += 1
            calls.append(["look", f"look {num_looks}", rng.choice((0.0, 0.0, -1.0))])
        if num_waits < 14 and rng.random() < 0.6:
            calls.append(wait())
    return {"config": config, "calls": [*calls, wait(), ["drain"], *[["resume", n] for n in came], ["drain"]]}
