"""The arena: what breaks a rule, what is counted, and what the shipped policies claim."""

import json
import re
from dataclasses import astuple, replace

import pytest
from typer.testing import CliRunner

from labs.__main__ import every_command
from labs.kit.arena import board, page, referee
from labs.kit.arena.board import Row, by_game, front, known, ranking, shipped
from labs.kit.arena.chart import spread
from labs.kit.arena.course import COURSE
from labs.kit.arena.games import BLOCK_SIZE, BUDGET, GAMES, SLOTS, Game, steady
from labs.kit.arena.referee import Foul, Score, judged
from labs.kit.grader import arena as of_class
from labs.kit.grader.sandbox import is_root
from labs.kit.judge.manifest import LABS_DIR
from labs.kit.learner.screen import columns
from labs.kit.tests import marks
from mini_engine.sim.simulate import simulate
from mini_engine.sim.workloads import Arrival

FEW = Game("few", "", steady(40, rate=1000, output_length=60), num_blocks=1000)
TIGHT = replace(FEW, num_blocks=60)
BY_NAME = {game.name: game for game in GAMES}
POLICIES = {**COURSE, **shipped()}


def step(body: str) -> str:
    """Return a policy whose schedule_step has these lines; `engine(**all)` is the engine's."""
    head = "from functools import partial\nfrom mini_engine.scheduler import schedule_step as step\n"
    head += "def schedule_step(waiting, running, kv, **all):\n"
    head += "    engine = partial(step, waiting, running, kv)\n"
    return head + "".join(f"    {line}\n" for line in body.splitlines())


BROKEN = {
    "the budget": (
        step("return engine(**all | {'max_num_batched_tokens': 9000})"),
        r"of a budget of 2048 .rule 'budget",
    ),
    "the slots": (step("return engine(**all | {'max_num_seqs': 33})"), "33 run on 32 slots"),
    "more than there is": (
        step("return {name: n + 1 for name, n in engine(**all).items()}"),
        r"tokens of \d+ left .rule 'computed'",
    ),
    "less than nothing": (step("return {name: -n for name, n in engine(**all).items()}"), r"-\d+ tokens"),
    "half a token": (
        step("return {name: n / 2 for name, n in engine(**all).items()}"),
        r"scheduled for \d+\.\d tokens",
    ),
    "one that waits": (
        step("return engine(**all) | {one.request_id: 1 for one in waiting}"),
        "scheduled and does not run",
    ),
    "one that never came": (step("return engine(**all) | {'r99': 1}"), "'r99' is scheduled and does not run"),
    # The second's block is written into the first one's table, and not asked for.
    "a block owned twice": (
        step(
            "for one in running:\n"
            "    if kv.num_new_blocks(one, one.num_new_tokens):\n"
            "        kv.block_table(one).append(kv.block_table(running[-1])[0])\n"
            "return engine(**all)"
        ),
        r"it computes up to \d+ with room for \d+ .rule 'blocks'",
    ),
    "a block given twice": (
        step("kv._kv._free.extend(range(20))\nreturn engine(**all)"),
        "is admitted, and memory has no room for it",
    ),
    "admitted twice": (step("kv.admit(waiting.peek())\nreturn engine(**all)"), "'r0' holds blocks already"),
    "waits too long": (
        step("return engine(**all | {'max_num_seqs': 1, 'long_prefill_token_threshold': 1})"),
        r"'r\d+' has waited 30\.\d s; the bound is 30 s",
    ),
    "never ends": (step("return {}"), r"nothing is scheduled, and \d+ are served|nothing is scheduled with"),
    "an endless loop": (step("while True: pass"), "no answer within 0.3 s of computing"),
    "an endless loop, at once": ("while True: pass", "no answer within 0.3 s of computing"),
    "raises": (step("raise ValueError('oh')"), r"step 0: the policy ended: ValueError: oh .line 5"),
    "leaves": (step("raise SystemExit(3)"), "the policy ended: SystemExit: 3"),
    "ends the process": (step("import os\nos._exit(0)"), "the policy ended: SystemExit"),
    "a flood": (step("print('x' * 30_000)"), "more than 20000 characters were printed"),
    "no dict": (step("engine(**all)"), "schedule_step returned None, which is not a dict"),
    "no victim": ("def pick_victim(running, policy): pass", "pick_victim returned None, which does not run"),
    "no key": ("def policy_key(request, policy): return 1 / 0", "ZeroDivisionError"),
    "a shorter answer": (
        step("for one in waiting: one.max_tokens = 1\nreturn engine(**all)"),
        "36 run on 32 slots",
    ),
    "a computed prompt": (
        step("for one in running: one.num_computed_tokens += 1\nreturn engine(**all)"),
        "'r0' had 405 computed tokens, and 406 after schedule_step",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_gives_its_sentence_and_no_score(what, monkeypatch):
    monkeypatch.setattr(board, "SECONDS", 0.3 if "loop" in what else 20)
    policy, sentence = BROKEN[what]
    game = TIGHT if what in ("a block owned twice", "a block given twice", "no victim") else FEW
    with pytest.raises(Foul, match=sentence) as foul:
        board.play(policy, game)
    assert "\n" not in str(foul.value)


def test_a_policy_that_changes_nothing_serves_as_the_engine_does():
    """The replay of its decisions has the latencies of a plain simulation, preemptions included."""
    game = BY_NAME["memory"]
    settings = {"max_num_batched_tokens": BUDGET, "max_num_seqs": SLOTS, "num_blocks": game.num_blocks}
    plain = simulate(game.arrivals(0), block_size=BLOCK_SIZE, **settings).summary()
    score = board.play(COURSE["fcfs"], game)
    assert plain.num_preemptions > 0
    assert (score.ttft, score.itl) == pytest.approx((plain.ttft.p99, plain.itl.p99))


def test_a_request_alone_is_served_as_fairly_and_as_well_as_can_be():
    """The time alone that speeds are measured by is the time that the simulator gives."""
    game = Game("one", "", lambda seed: [Arrival(9000.0 * n, 5000, 40) for n in range(2)])
    plain = simulate([Arrival(0.0, 5000, 40)], max_num_batched_tokens=BUDGET, num_blocks=1024)
    (request,) = plain.metrics.requests().values()
    assert referee.alone(request) == pytest.approx(request.e2e)
    assert board.play(COURSE["fcfs"], game).goodput == 1


@pytest.mark.parametrize("ttft, itl, goodput", [(0.0, 1e9, 0.0), (1e9, 0.0, 0.0), (1e9, 1e9, 1.0)])
def test_goodput_counts_the_requests_that_met_both_limits(ttft, itl, goodput, monkeypatch):
    monkeypatch.setattr(referee, "ITL", itl)
    few = replace(FEW, ttft={0: ttft})
    assert board.play(COURSE["fcfs"], few).goodput == goodput


def test_fairness_is_lower_where_one_waits_for_the_others():
    alike = Game("alike", "", lambda seed: [Arrival(0.0, 100, 20)] * 8)
    one_by_one = step("return engine(**all | {'max_num_seqs': 1})")
    together, apart = board.play(COURSE["fcfs"], alike), board.play(one_by_one, alike)
    assert together.fairness == pytest.approx(1)
    # The k-th waits for k - 1: speeds are 1, 1/2, ... 1/8.
    speeds = [1 / k for k in range(1, 9)]
    assert apart.fairness == pytest.approx(sum(speeds) ** 2 / 8 / sum(v * v for v in speeds), rel=1e-2)


@pytest.mark.parametrize("name", ["fcfs", "triage"])
def test_the_same_policy_and_seed_give_the_same_score_which_is_stored(name):
    stored = json.loads(board.SCORES.read_text("utf-8"))
    assert [*stored] == [*POLICIES] and all([*games] == [*BY_NAME] for games in stored.values())
    score = board.play(POLICIES[name], BY_NAME["memory"])
    assert [round(value, 4) for value in astuple(score)] == stored[name]["memory"]
    assert board.play(POLICIES[name], BY_NAME["memory"], seed=1) != score


@pytest.mark.soak
@pytest.mark.parametrize("name", POLICIES)
def test_every_stored_score_is_what_is_played(name):
    scores = board.row(name, POLICIES[name]).scores
    rounded = {game: [round(value, 4) for value in astuple(score)] for game, score in scores.items()}
    assert rounded == json.loads(board.SCORES.read_text("utf-8"))[name]


def better_than_fcfs(rows: list[Row]) -> None:
    """triage has more goodput than fcfs in each game in which fcfs has less than all."""
    named = {row.name: row for row in rows}
    for game in GAMES:
        fcfs, triage = (named[name].scores[game.name].goodput for name in ("fcfs", "triage"))
        assert triage > fcfs or fcfs == triage == 1, game.name


def test_triage_beats_fcfs_on_goodput_in_every_game_and_five_are_shipped():
    better_than_fcfs(list(known()))
    assert len(shipped()) == 5


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_triage_beats_fcfs_with_other_requests_too(seed):
    better_than_fcfs([board.row(name, POLICIES[name], seed) for name in ("fcfs", "triage")])


def test_the_book_has_the_tables_that_the_command_prints():
    text = (LABS_DIR.parent / "docs" / "arena.md").read_text("utf-8")
    rows = [*known()]
    mine = next(replace(row, name="triage.py", kind=board.YOURS) for row in rows if row.name == "triage")
    for table in ranking(rows), by_game([mine, *rows], mine):
        assert "\n".join(["```", *columns(table), "```"]) in text
    assert all(f"**{name}**" in text for name in shipped()) and all(f"`{name}`" in text for name in COURSE)
    assert all(f"| `{name}` |" in text for name in BY_NAME)


def test_a_page_gets_the_same_tables_and_sentences(monkeypatch):
    play, said = board.play, []
    monkeypatch.setattr(board, "play", lambda policy, game, seed: play(policy, FEW, seed))
    verdict = json.loads(page.run("arena", shipped()["steady"], said.append, 80, 1.0))
    assert [json.loads(row) for row in said] == [{"begun": name} for name in BY_NAME]
    (mine,) = (cells for cells in verdict["ranking"] if cells[0] == "yours")
    assert verdict["foul"] == "" and mine[1].endswith("%") and verdict["games"][0][1:3] == ["yours", "fcfs"]
    assert {"yours", "course", "shipped"} == {kind for _, kind, _, _ in verdict["points"]}
    best = {name for name, _, *place in verdict["points"] if place in verdict["front"]}
    assert best == {cells[0] for cells in verdict["ranking"] if cells[3]}
    wrong = {"x = 1": "your file: it has none of", step("return {}"): "chat, step 0: nothing"}
    for source, sentence in wrong.items():
        assert sentence in json.loads(page.run("arena", source, said.append, 80, 1.0))["foul"]


def made(name: str, goodput: float, fairness: float, **kind: str) -> Row:
    return Row(name, {game.name: Score(goodput, fairness, 1.0, 1.0) for game in GAMES}, **kind)


def test_the_front_has_those_that_no_other_exceeds():
    scores = {"a": (0.9, 0.5), "b": (0.8, 0.5), "c": (0.5, 0.9), "d": (0.4, 0.8), "e": (0.7, 0.7)}
    rows = [made(name, *score) for name, score in scores.items()]
    rows.append(Row("f", foul="chat, it broke a rule"))
    assert [row.name for row in front(rows)] == ["c", "e", "a"]
    assert [cells[0] for cells in ranking(rows) if cells[-1] == "front"] == ["a", "e", "c"]
    assert "f" not in [cells[0] for cells in ranking(rows)]


def test_a_file_named_like_a_policy_of_the_course_is_not_taken_for_it():
    rows = [made("fcfs", 1.0, 1.0), *known()]
    table = by_game(rows, rows[0])
    assert table[0][:3] == ("workload", "fcfs", "fcfs") and table[1][1:3] == ("100%", "68%")


def labs(*line: object):
    return CliRunner().invoke(every_command(), ["arena", *map(str, line)], env={"COLUMNS": "80"})


def test_the_command_prints_tables_and_writes_the_chart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    play = board.play
    monkeypatch.setattr(board, "play", lambda policy, game, seed: play(policy, FEW, seed))
    (tmp_path / "mine.py").write_text(shipped()["steady"], "utf-8")
    done = labs("mine.py")
    assert done.exit_code == 0, done.output
    assert "mine.py" in done.output and "chat" in done.output and "triage" in done.output
    assert (tmp_path / "out" / "arena.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text, said, code",
    [
        (step("return {}"), "mine.py has no score. chat, step 0", 1),
        ("x = 1", "it has none of schedule_step, policy_key, pick_victim", 2),
        ("def policy_key(", "it does not parse, line 1", 2),
        ("import nothing_of_this_name", "it does not load: ModuleNotFoundError", 2),
        ("\xff", "not UTF-8", 2),
        (None, "cannot be read", 2),
    ],
)
def test_what_the_command_cannot_score_is_one_sentence(text, said, code, tmp_path):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text, "latin-1")
    done = labs(path, "--out", tmp_path / "chart.png")
    assert said in (str(done.exception) if code == 2 else done.output)
    assert (tmp_path / "chart.png").exists() == (code == 1)


def test_the_chart_does_not_replace_the_policy(tmp_path):
    (tmp_path / "mine.py").write_text("def policy_key(request, policy): return 0", "utf-8")
    assert "is also the input" in str(labs(tmp_path / "mine.py", "--out", tmp_path / "mine.py").exception)


def test_names_beside_the_chart_stand_apart_and_within_it():
    for heights in ([99.0, 98, 97, 3, 2, 1], [50.0] * 60, [0.0, 0, 0], [100.0]):
        places = spread(heights)
        assert all(a - b >= 1.6 for a, b in zip(places, places[1:], strict=False))
        assert 0 < places[-1] and places[0] <= 101


FORGED = {
    "no decision": {},
    "no lists": {"ops": 3, "rows": {}},
    "no dict": {"ops": [], "rows": [["r0", 1]]},
    "another call": {"ops": [["__class__", "r0"]], "rows": {"r0": 1}},
    "a call without a request": {"ops": [["admit"]], "rows": {"r0": 1}},
    "a request that is none": {"ops": [["admit", ["r0"]]], "rows": {"r0": 1}},
    "more than a call takes": {"ops": [["admit", "r0", 1]], "rows": {"r0": 1}},
    "a text of tokens": {"ops": [["admit", "r0"], ["allocate", "r0", "9"]], "rows": {"r0": 1}},
    "no end of tokens": {"ops": [["admit", "r0"], ["allocate", "r0", 10**4000]], "rows": {"r0": 1}},
    "no end of a row": {"ops": [["admit", "r0"]], "rows": {"r0": 10**4000}},
    "true for one": {"ops": [["admit", "r0"]], "rows": {"r0": True}},
    "preempted while it waits": {"ops": [["preempt", "r0"]], "rows": {"r0": 1}},
    "not admitted": {"ops": [], "rows": {"r0": 1}},
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_decision_is_a_foul_and_no_error(what):
    with pytest.raises(Foul):
        judged(FEW, 0, [FORGED[what]] * 9)


@pytest.fixture
def sandbox(monkeypatch):
    """The arena's sandbox, with a second a game, and with the smallest game only."""
    monkeypatch.setattr(of_class, "GAMES", [BY_NAME["memory"]])
    monkeypatch.setattr(of_class, "SECONDS", 1.0)
    of_class.box.cache_clear()
    yield
    of_class.box(False).stop()
    of_class.box.cache_clear()


CLASS = {
    "triage.py": (shipped()["triage"], ""),
    "loop.py": (
        step("while True: pass"),
        "memory, step 0: the policy ended: no answer within 1 s of computing",
    ),
    "leaves.py": (step("raise SystemExit"), "the policy ended: SystemExit"),
    "reads.py": ("import os\n", "it does not load: ImportError: a graded file may not import os"),
    "opens.py": (step("open('/etc/passwd')"), "the policy ended: PermissionError"),
    "forges.py": (
        step("kv._ops.append(['__class__', 'r0'])\nreturn engine(**all)"),
        "is not there|is waiting|cannot be read",
    ),
    "none.py": ("x = 1", "it has none of schedule_step, policy_key, pick_victim"),
    "colours.py": (step("raise ValueError('\\x1b[31m')"), r"ValueError: .x1b"),
    "folder/policy.py": (shipped()["steady"], ""),
    "two/a.py": ("x = 1", "it has no file policy.py, or several"),
    "text.txt": ("hello", "not a zip"),
    "latin.py": ("# \xff", "it is not UTF-8 text"),
}


@marks.namespaces
def test_a_class_is_played_in_the_sandbox_and_hostile_files_get_their_sentence(sandbox, tmp_path):
    for name, (text, _) in CLASS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "latin-1")
    (tmp_path / "two" / "b.py").write_text("x = 1", "utf-8")
    (tmp_path / "link.py").symlink_to("/etc/passwd")
    expected = {name.partition("/")[0]: sentence for name, (_, sentence) in CLASS.items()}
    for name, sentence in {**expected, "link.py": "cannot be read"}.items():
        row = of_class.row_of(tmp_path / name, 0, False)
        assert (row.name, bool(row.scores)) == (name, not sentence), row.foul
        assert re.search(sentence, row.foul) and row.foul.isprintable(), row.foul
        if name == "triage.py":  # as outside of the sandbox
            stored = json.loads(board.SCORES.read_text("utf-8"))["triage"]["memory"]
            assert [round(value, 4) for value in astuple(row.scores["memory"])] == stored


@marks.namespaces
def test_the_command_makes_a_class_s_table(tmp_path):
    folder, options = tmp_path / "class", ("--out", tmp_path / "chart.png", "--jobs", 1)
    refused = labs("--class", folder, *options, *["--as-root"] * is_root())
    assert "is not a folder" in str(refused.exception)
    folder.mkdir()
    (folder / "anna.py").write_text(step("return {}"), "utf-8")
    done = labs("--class", folder, *options, *["--as-root"] * is_root())
    assert done.exit_code == 0, done.output
    assert "anna.py has no score. chat, step 0: nothing is scheduled" in " ".join(done.output.split())
    assert "triage" in done.output and (tmp_path / "chart.png").exists()
    both = labs(folder / "anna.py", "--class", folder)
    assert "name one of them" in str(both.exception)
