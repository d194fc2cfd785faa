"""A class is graded once, by any workers in any order, whatever happens to them meanwhile."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from labs.kit.grader import arguments, cases, grading, known, pool, regrade, similarity, store, workers
from labs.kit.grader import run as commands
from labs.kit.grader.commands import grade as grade_command
from labs.kit.grader.pool import FAILED, GRADED, KEPT
from labs.kit.grader.results import Grade, LabGrade, TaskGrade
from labs.kit.grader.rules import Files
from labs.kit.grader.sandbox import WeakIsolation
from labs.kit.grader.submission import Settings, Submission
from labs.kit.judge.manifest import LABS_DIR, LabError, find_lab
from labs.kit.judge.pristine import starter_source
from labs.kit.tests import marks
from labs.kit.tests.files import another, solution

LABS = ("lab-01",)
SETTINGS = Settings(LABS, "seed", hidden=1, as_root=True)
NAMES = [f"s{n}" for n in range(8)]


def submission(student: str, source: bytes = b"1") -> Submission:
    return Submission(student, {"lab-01": source})


def klass(source: bytes = b"1") -> list[Submission]:
    return [submission(name, source) for name in NAMES]


def points(submission: Submission, settings: Settings) -> Grade:
    """A grader for tests: a file contains its points."""
    earned = float(submission.files["lab-01"].split()[0])
    labs = [LabGrade("lab-01", [TaskGrade("schedule_step", 100, earned, "right")])]
    digest = grading.digest(submission, settings)
    return Grade(submission.student, labs, settings.seed, "namespaces", digest)


def marked(folder: str, name: str) -> int:
    """Return how often this was called, in all processes."""
    with open(Path(folder) / name, "a") as file:
        file.write("x")
    return os.path.getsize(Path(folder) / name)


def ends_once(submission: Submission, settings: Settings) -> Grade:
    """End the process, the first time that s3 is graded."""
    words = submission.files["lab-01"].decode().split()
    if submission.student == "s3" and marked(words[1], "s3") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return points(submission, settings)


def ends_always(submission: Submission, settings: Settings) -> Grade:
    if submission.student == "s3":
        os.kill(os.getpid(), signal.SIGKILL)
    return points(submission, settings)


def slow(submission: Submission, settings: Settings) -> Grade:
    marked(submission.files["lab-01"].decode().split()[1], str(os.getpid()))
    time.sleep(0.3)
    return points(submission, settings)


class Here:
    """A pool without processes."""

    lost = workers.Local.lost

    def __init__(self, width=3):
        self.most, self.out = width, 0

    def share(self, settings):
        self.shared = settings.seed

    def submit(self, function, grade, submission, settings):
        future = Future()
        try:
            future.set_result(function(grade, submission, settings))
        except Exception as error:
            future.set_exception(error)
        return future

    def width(self):
        return self.most


def run(report, submissions, pool_, grade=points, settings=SETTINGS, **more):
    outcomes = pool.grade_class(submissions, settings, report / "grades", pool_, grading=grade, **more)
    return {one.student: one for one in outcomes}


def states(outcomes):
    return {student: one.state for student, one in outcomes.items()}


def stored(report):
    return {path.name: path.read_bytes() for path in (report / "grades").iterdir()}


def grades(report, *students):
    return store.Grades(report / "grades", students)


# --------------------------------------------------------------------------------- the same from any workers


@pytest.fixture(params=["processes", pytest.param("a cluster", marks=pytest.mark.soak)])
def any_workers(request):
    if request.param == "processes":
        made = workers.Local(2)
        yield made
        made.stop()
        return
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with distributed.LocalCluster(**settings) as cluster:
        made = workers.Cluster(cluster.scheduler_address, SETTINGS)
        yield made
        made.stop()


def test_any_workers_give_the_same_grades_and_repeat_those_of_a_lost_worker(tmp_path, any_workers):
    handed_in = klass(f"1 {tmp_path}".encode())
    outcomes = run(tmp_path / "a", handed_in, any_workers, ends_once)
    assert states(outcomes) == dict.fromkeys(NAMES, GRADED) and (tmp_path / "s3").read_text() == "xx"
    run(tmp_path / "b", handed_in, Here(1))
    run(tmp_path / "c", reversed(handed_in), Here(7))
    assert stored(tmp_path / "a") == stored(tmp_path / "b") == stored(tmp_path / "c")
    assert sorted(stored(tmp_path / "a")) == [f"{name}.json" for name in NAMES]


def test_what_is_there_is_not_graded_again(tmp_path):
    def never(submission, settings):
        raise AssertionError("graded again")

    run(tmp_path, klass(), Here())
    before = stored(tmp_path)
    assert states(run(tmp_path, klass(), Here(), never)) == dict.fromkeys(NAMES, KEPT)
    assert stored(tmp_path) == before
    changed = [submission("s5", b"2") if one.student == "s5" else one for one in klass()]
    after = states(run(tmp_path, changed, Here()))
    assert [name for name in NAMES if after[name] == GRADED] == ["s5"]
    other = run(tmp_path, changed, Here(), settings=replace(SETTINGS, seed="other"))
    assert states(other) == dict.fromkeys(NAMES, GRADED)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"student": "s0"}'])
def test_half_a_grade_is_none(tmp_path, text):
    (tmp_path / "grades").mkdir()
    (tmp_path / "grades" / "s0.json").write_text(text)
    (tmp_path / "grades" / "s0.json.7.0.part").write_text("left by a run that was killed")
    assert states(run(tmp_path, [submission("s0")], Here())) == {"s0": GRADED}
    assert list(stored(tmp_path)) == ["s0.json"]


def test_lateness_is_counted_anew_for_what_is_kept(tmp_path):
    run(tmp_path, [submission("s0", b"50")], Here())
    costs = {"lab-01": 7.0}
    late = run(tmp_path, [submission("s0", b"50")], Here(), finish=lambda one: replace(one, costs=costs))
    assert states(late) == {"s0": KEPT}
    (grade,) = grades(tmp_path, "s0")
    assert grade.earned == 43


# --------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.soak
def test_what_ends_its_worker_each_time_is_not_graded_and_costs_no_other(tmp_path):
    run(tmp_path, klass(), Here())
    one = workers.Local(1)
    outcomes = run(tmp_path, klass(b"2"), one, ends_always)
    one.stop()
    assert states(outcomes) == dict.fromkeys(NAMES, GRADED) | {"s3": FAILED}
    assert "3 times, the last time: BrokenProcessPool" in outcomes["s3"].why
    assert "s3.json" not in stored(tmp_path)  # nor the one of another submission, from before


def test_an_error_of_the_grader_gives_no_grade(tmp_path):
    def broken(submission, settings):
        if submission.student == "s3":
            raise ZeroDivisionError("a mistake\nof the grader")
        digest = {"digest": "of another course"} if submission.student == "s4" else {}
        return replace(points(submission, settings), **digest)

    outcomes = run(tmp_path, klass(), Here(), broken)
    assert outcomes["s3"].why == "ZeroDivisionError: a mistake"
    assert "another version of the course" in outcomes["s4"].why
    assert states(outcomes) == dict.fromkeys(NAMES, GRADED) | {"s3": FAILED, "s4": FAILED}
    assert stored(tmp_path).keys() == {f"{name}.json" for name in NAMES} - {"s3.json", "s4.json"}


def test_weak_isolation_ends_the_run(tmp_path):
    def weak(submission, settings):
        raise WeakIsolation("no namespaces")

    with pytest.raises(WeakIsolation):
        run(tmp_path, klass(), Here(), weak)


@pytest.mark.soak
def test_memory_does_not_grow_with_the_class(tmp_path):
    def most(count):
        tracemalloc.start()
        coming = (submission(f"s{n}", b"1 " + bytes(500_000)) for n in range(count))
        for _ in pool.grade_class(coming, SETTINGS, tmp_path / str(count), Here(), grading=points):
            pass
        for _ in store.Grades(tmp_path / str(count), (f"s{n}" for n in range(count))):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few, many = most(10), most(100)
    assert many < few + 500_000, (few, many)


# ------------------------------------------------------------------------------------------- kill -9, and on

SCRIPT = """
import sys
from pathlib import Path
from labs.kit.tests import test_grader_pool as tests
report, marks = map(Path, sys.argv[1:])
pool = tests.workers.Local(2)
print(pool.scratch, flush=True)
print(tests.run(report, tests.klass(f"1 {marks}".encode()), pool, tests.slow))
"""


def test_kill_9_leaves_no_worker_and_the_same_command_goes_on(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    line = [sys.executable, "-c", SCRIPT, str(tmp_path / "r"), str(marks)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=LABS_DIR.parent) as grader:
        scratch = Path(grader.stdout.readline().strip())
        wait_for(lambda: list((tmp_path / "r").glob("grades/s*.json")))
        grader.kill()
    pids = [int(path.name) for path in marks.iterdir()]
    assert pids
    wait_for(lambda: not any(map(alive, pids)) and not scratch.exists())
    before = stored(tmp_path / "r")
    source = f"1 {marks}".encode()
    outcomes = run(tmp_path / "r", klass(source), Here())
    kept = {f"{name}.json" for name, one in outcomes.items() if one.state == KEPT}
    assert kept == {name for name in before if name.startswith("s")} and 0 < len(kept) < len(NAMES)
    run(tmp_path / "whole", klass(source), Here())
    assert stored(tmp_path / "r") == stored(tmp_path / "whole")


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ------------------------------------------------------------------------------------------ against a report


def test_regrade_prints_what_changed(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    run(old, [submission("ann", b"10"), submission("bob", b"20"), submission("cy", b"1")], Here())
    later = [submission("ann", b"10"), submission("bob", b"30"), submission("di", b"5")]
    run(new, later, Here(), settings=replace(SETTINGS, seed="other"))
    assert list(regrade.changes(old, grades(new, "ann", "bob", "di"))) == [
        "bob: 20 -> 30 points",
        "    lab-01 schedule_step: right, 20 of 100 -> right, 30 of 100",
        "di: new, 5 points",
        "cy: was graded before, but not now",
        "the hidden cases were different: seed seed",
        f"against {old}: 1 changed, 1 the same, 1 new, 1 gone",
    ]


def test_regrade_with_fewer_labs_compares_those_and_names_the_others(tmp_path):
    def graded(earned, *labs, **values):
        made = [LabGrade(lab, [TaskGrade("task", 100, earned[lab], "right")]) for lab in labs]
        return Grade("ann", made, "seed", "namespaces", "digest", **values)

    late = {"late": {"lab-02": "1 day late"}, "costs": {"lab-02": 7.0}, "manual": {"lab-02": 2.0}}
    store.save(tmp_path / "grades", graded({"lab-01": 10, "lab-02": 70}, "lab-01", "lab-02", **late))
    compared = list(regrade.changes(tmp_path, [graded({"lab-01": 10, "lab-03": 5}, "lab-01", "lab-03")]))
    assert compared == [
        "lab-02: graded only then, so not compared, and in no points above",
        "lab-03: graded only now, so not compared, and in no points above",
        f"against {tmp_path}: 0 changed, 1 the same, 0 new, 0 gone",
    ]
    changed = list(regrade.changes(tmp_path, [graded({"lab-02": 50}, "lab-02")]))
    assert changed[:4] == [
        "ann: 65 -> 50 points",
        "    lab-02 task: right, 70 of 100 -> right, 50 of 100",
        "    withheld for lateness: 7 -> 0",
        "    manual points: 2 -> 0",
    ]


# ----------------------------------------------------------------------------------------------- the commands


def labs(*line):
    command = [sys.executable, "-m", "labs", *map(str, line)]
    return subprocess.run(command, capture_output=True, text=True, cwd=LABS_DIR.parent)


@marks.namespaces
def test_the_command_grades_goes_on_and_replays(tmp_path, capsys):
    """Two workers share what oracles say, one computes it by itself; the grades are the same."""
    lab = find_lab("lab-01")
    wrong = lab.mistakes[0].apply(solution("lab-01"))
    for student, source in {"ann": another("lab-01"), "bob": wrong, "cy": ""}.items():
        (tmp_path / "class" / student).mkdir(parents=True)
        (tmp_path / "class" / student / "lab-01.py").write_text(source, "utf-8")
    line = ("grade", tmp_path / "class", "--labs", "1", "--seed", "s", "--as-root", "--out")
    first = labs(*line, tmp_path / "a", "--jobs", "2")
    assert first.returncode == 0, first.stderr
    assert "3 graded; mean 33.3 of 100 points; isolation: namespaces; seed s" in first.stdout
    again = {"regrade": tmp_path / "a", "labs": "1", "as_root": True}
    with pytest.raises(typer.Exit) as end:  # of the report it has the seed
        grade_command(tmp_path / "class", tmp_path / "a", **again)
    said = capsys.readouterr().out
    assert not end.value.exit_code
    assert "3 graded (3 of them before)" in said and "0 changed, 3 the same" in said
    with pytest.raises(typer.Exit):
        grade_command(tmp_path / "class", tmp_path / "b", seed="s", jobs=1, **again)
    assert stored(tmp_path / "a") == stored(tmp_path / "b")
    played = {one.student: one.labs[0].cases for one in grades(tmp_path / "a", "ann", "bob")}
    wrong = next(case for case in played["bob"] if not case.passed and case.hidden)
    assert not commands.replay(tmp_path / "a", "bob", "1", wrong.name).passed
    assert "but should be" in capsys.readouterr().out
    assert commands.replay(tmp_path / "a", "ann", "1", wrong.name).passed
    assert f"ann, lab-01, {wrong.name}: passes" in capsys.readouterr().out


def test_what_oracles_say_is_computed_once_for_all_workers(tmp_path, monkeypatch):
    """And not again by a worker that finds it; another seed's is another."""
    monkeypatch.setattr(cases, "shared", tmp_path)
    settings = Settings(LABS, "shared", hidden=2)
    cases.share("lab-01", settings)
    script = cases.cases(find_lab("lab-01"), settings)[-1].script
    first = cases.expected("lab-01", script)
    cases.expected.cache_clear()
    cases.left.cache_clear()
    asked = []
    line = '{"call": ["a"], "seen": {}}'
    monkeypatch.setattr(cases.player, "log", lambda *call: asked.append(call) or [line])
    assert cases.expected("lab-01", script) == first and not asked
    cases.expected("lab-01", script.replace("{", "{ ", 1))
    assert len(asked) == 1
    cases.expected.cache_clear()
    cases.left.cache_clear()


def test_root_grades_and_replays_with_its_flag_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "is_root", lambda: True)
    monkeypatch.setattr(grading, "isolation", lambda: "namespaces")
    (tmp_path / "class" / "ann").mkdir(parents=True)
    settings = replace(SETTINGS, as_root=False)
    wished = (tmp_path / "class", tmp_path / "out", settings, 1, Files(), "", False, None)
    with pytest.raises(LabError, match="root should not run other people's code.* --as-root"):
        commands.grade(*wished)
    assert not (tmp_path / "out").exists()
    arguments.record(tmp_path / "out", tmp_path / "class", Files(), settings)
    with pytest.raises(LabError, match="--as-root"):
        commands.replay(tmp_path / "out", "ann", "1", "public 1")


def test_submissions_that_were_not_graded_are_printed_and_written_down(tmp_path, capsys):
    run(tmp_path, [submission("ann", b"10"), submission("bob", b"30")], Here())
    failed = [pool.Outcome("cy", FAILED, "why", attempt) for attempt in (2, 1)]
    outcomes = [pool.Outcome("ann", GRADED), pool.Outcome("bob", KEPT), *failed]
    two = grades(tmp_path, "ann", "bob")
    assert commands.summary(outcomes, two, SETTINGS, tmp_path) == 1
    printed = capsys.readouterr()
    lines = "".join(f"cy, attempt {n}: NOT GRADED, and in no table: why\n" for n in (1, 2))
    assert printed.err == lines == (tmp_path / "not-graded.txt").read_text()
    assert printed.out.startswith("2 graded (1 of them before); 2 NOT GRADED; mean 20.0 of 100 points;")
    assert commands.summary(outcomes[:2], two, SETTINGS, tmp_path) == 0
    assert not (tmp_path / "not-graded.txt").exists()


def test_similar_files_are_reported_and_never_imported(tmp_path):
    """Like each other, or like the reference, a known mistake or the engine's part, but not like a starter.

    The names of two students are those of modules.
    """
    lab = find_lab("lab-02")
    right = solution("lab-02")
    mistake = max(lab.mistakes, key=lambda one: len(one.apply(right)))
    source = f"open({str(tmp_path / 'imported')!r}, 'w')\nx = [{', '.join(map(str, range(300)))}]\n"
    engine = known.twins(lab)[0][0]
    files = {
        "json": source,
        "copydetect": source,
        "ann": right.replace("budget", "left"),
        "bob": mistake.apply(right),
        "cy": starter_source(lab),
        "dee": engine.read_text("utf-8").replace("budget", "left"),
    }
    handed_in = [Submission(name, {"lab-02": text.encode()}) for name, text in files.items()]
    lines, pairs = similarity.compare(handed_in, ["lab-01", "lab-02"], tmp_path / "report")
    assert lines == ["lab-01: no files, so there is nothing to compare", "lab-02: similarity/lab-02.html"]
    html = (tmp_path / "report/similarity/lab-02.html").read_text("utf-8")
    assert "json.py" in html and "copydetect.py" in html and not (tmp_path / "imported").exists()
    for pair in ("json and copydetect", "ann and the reference", f"dee and the engine's {engine.stem}"):
        assert any(line.startswith(f"lab-02: {pair}, ") for line in pairs), pairs
    assert sum(line.startswith("lab-02: bob and the ") for line in pairs) == 1
    assert not any(" cy" in line for line in pairs)


# --------------------------------------------------------------------------------------------- a cluster


def numbered(settings: Settings, dask_worker=None) -> str:
    """In place of workers.judging: the grader and the cluster's first worker have this course alone."""
    number = dask_worker.name if dask_worker else 0
    if number == 2:
        raise ModuleNotFoundError("No module named 'labs'")
    return f"course {number % 4}"


def test_a_worker_of_another_course_is_retired_also_one_that_joins_later(tmp_path, monkeypatch, capsys):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(workers, "judging", numbered)
    kinds = {"processes": False, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    with distributed.LocalCluster(n_workers=2, **kinds) as dask:
        made = workers.Cluster(dask.scheduler_address, SETTINGS)
        try:
            wait_for(lambda: made.width() == 4)
            good = dask.workers[0].address
            assert states(run(tmp_path, klass(), made)) == dict.fromkeys(NAMES, GRADED)
            assert [*made.client.nthreads()] == [good]
            dask.scale(4)
            wait_for(lambda: made.width() > 4)
            assert states(run(tmp_path, klass(b"2"), made)) == dict.fromkeys(NAMES, GRADED)
            wait_for(lambda: made.retire_others() or len(made.client.nthreads()) == 1)
            said = capsys.readouterr().err
            assert f"{workers.OTHER}\n" in said and "cluster: ModuleNotFoundError: No module" in said
            assert good in made.client.nthreads() and good not in said
            made.known.clear()
            monkeypatch.setattr(workers, "judging", lambda settings, dask_worker=None: bool(dask_worker))
            none = "no worker of the cluster is left; the same command resumes it"
            with pytest.raises(LabError, match=none):
                run(tmp_path, klass(b"3"), made)
        finally:
            made.stop()


def test_a_submission_whose_worker_may_be_at_fault_goes_to_another(tmp_path):
    """One that has just joined and lacks the course, or has another version of it."""
    tried = []

    def at_first(submission, settings):
        tried.append(submission.student)
        once = tried.count(submission.student) == 1
        if once and submission.student == "s3":
            raise ModuleNotFoundError("No module named 'labs'")
        found = points(submission, settings)
        return replace(found, digest="another") if once and submission.student == "s4" else found

    crew = Here()
    crew.lost = workers.Cluster.lost
    assert states(run(tmp_path, klass(), crew, at_first)) == dict.fromkeys(NAMES, GRADED)
    assert sorted(tried) == sorted([*NAMES, "s3", "s4"])


# ------------------------------------------------------------------------------------------- a big class

MANY = 1000


class Dask:
    """A scheduler and workers as processes, as an instructor starts them."""

    def __init__(self, port: int):
        self.address, self.running = f"tcp://127.0.0.1:{port}", []
        self.port = port

    def start(self, course: Path, kind: str, *line: str) -> subprocess.Popen:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *line]
        known = os.environ | {"PYTHONPATH": str(course)}
        quiet = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=known, cwd=course, **quiet)
        self.running.append(process)
        return process

    def scheduler(self) -> subprocess.Popen:
        line = ("scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard")
        process = self.start(LABS_DIR.parent, *line)
        wait_for(self.answers, 120)  # or a client on a busy machine gives up before it is there
        return process

    def answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def worker(self, course: Path = LABS_DIR.parent) -> subprocess.Popen:
        return self.start(course, "worker", self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard")

    def stop(self) -> None:
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait(30)
        self.running.clear()


def another_course(folder: Path) -> Path:
    """Return a copy of the course with another oracle in its first lab."""
    copy = folder / "another"
    for name in ("labs", "mini_engine"):
        ignored = shutil.ignore_patterns("__pycache__", "out", "*.png", "*.pt")
        shutil.copytree(LABS_DIR.parent / name, copy / name, ignore=ignored)
    with open(copy / "labs/lab-01/author/oracle.py", "a") as file:
        file.write("# of another year\n")
    return copy


@pytest.mark.soak
def test_a_thousand_submissions_outlive_their_scheduler_and_a_worker_of_another_course(tmp_path, capsys):
    """The scheduler ends in the middle; the same command goes on, and each student has the right grade."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dask, everyone = Dask(port), [submission(f"s{n:04}", str(n % 101).encode()) for n in range(MANY)]

    def grading_run() -> dict[str, str]:
        cluster = workers.Cluster(dask.address, SETTINGS)
        try:
            cluster.client.wait_for_workers(2, timeout=120)  # or one takes all before the other is there
            coming = pool.grade_class(everyone, SETTINGS, tmp_path / "grades", cluster, grading=points)
            return {one.student: one.state for one in coming}
        finally:
            cluster.stop()

    def killed_later() -> None:
        wait_for(lambda: len([*(tmp_path / "grades").glob("s*.json")]) > 200, 300)
        scheduler.kill()

    (tmp_path / "grades").mkdir()
    try:
        scheduler = dask.scheduler()
        dask.worker(), dask.worker()
        ended = threading.Thread(target=killed_later)
        ended.start()
        with pytest.raises(LabError, match=workers.GONE):
            grading_run()
        ended.join()
        before = len(stored(tmp_path))
        assert 200 < before < MANY
        dask.stop()
        dask.scheduler(), dask.worker(), dask.worker(another_course(tmp_path))
        states = grading_run()
        assert {*states.values()} == {KEPT, GRADED} and list(states.values()).count(KEPT) == before
        assert f"is retired from the cluster: {workers.OTHER}" in capsys.readouterr().err
    finally:
        dask.stop()
    names = {one.student: float(one.files["lab-01"]) for one in everyone}
    assert {one.student: one.earned for one in grades(tmp_path, *names)} == names
