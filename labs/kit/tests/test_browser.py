"""The labs' web pages: judged in Pyodide as in a terminal, and driven as a learner would, in Chromium."""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labs.kit.author.export import ROOT
from labs.kit.browser.build import LABS, MOST, first_load
from labs.kit.browser.compiled import Compiled
from labs.kit.browser.demo import PARTS
from labs.kit.judge import isolate
from labs.kit.judge.manifest import find_lab, replace_body
from labs.kit.judge.pristine import starter_source
from labs.kit.tests.files import mistaken, solution
from mini_engine.tests.soak import count

MISTAKES = Path(__file__).with_name("browser_mistakes.mjs")
NATIVE = """
import json, sys
from pathlib import Path
from labs.kit.browser import run
for lab, source in json.loads(Path(sys.argv[1]).read_text("utf-8")):
    print(json.dumps(json.loads(run.run(lab, source))))
"""
FIRST = "    for request in running:\n"  # of lab-01's solution
PLACES = """[...document.querySelectorAll(".top > *, #editor, .tabs")].map((one) => {
    const { x, y } = one.getBoundingClientRect();
    return [one.id || one.className, x, y];
})"""
KEPT = "caches.open('labs-python')"  # what Python compiled, for the next visit
LINE = "labPage.editor.view.state.doc.lineAt(labPage.editor.view.state.selection.main.head).text"
SAME = ("started", "problem", "done", "tasks", "next", "name", "fingerprints")


@pytest.fixture(scope="module")
def course(pages, tmp_path_factory):
    """The pages' Python files, for a Python of this machine."""
    folder = tmp_path_factory.mktemp("course")
    with zipfile.ZipFile(pages / "app" / "course.zip") as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.startswith("site/")])
    return folder


def verdicts(command, cwd=ROOT):
    own = {k: v for k, v in os.environ.items() if k not in ("LAB_IMPL", "PYTEST_ADDOPTS", "PYTHONPATH")}
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


# A page's Python may go less deep: far enough for a function that calls itself once a request.
DEEP = "    (lambda f: f(f, 256))(lambda f, n: n and f(f, n - 1))\n"
ENDLESS = DEEP.replace("n and ", "")


def deep(calls):
    """Return lab-01's solution with calls of calls at its first line."""
    head, body = solution("lab-01").split(FIRST, 1)
    return head + calls + FIRST + body


def in_time(*both):
    """Return both fingerprints without tests that ran out of time in either: a page's Python is slower."""
    late = {
        (task, test[0])
        for side in both
        for task, tests in side.items()
        for test in tests
        if test[2] == "TimeUp"
    }
    return [
        {task: [test for test in tests if (task, test[0]) not in late] for task, tests in side.items()}
        for side in both
    ]


@pytest.mark.soak  # minutes; make test compares the verdicts on two files, in a page
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("lab_id", LABS)
def test_a_browser_judges_as_a_terminal_does(lab_id, pages, course, tmp_path):
    """References, pristine starters and the known mistakes: the same failures, runs, names and next task."""
    lab = find_lab(lab_id)
    there = {task.name for task in lab.without_torch.tasks}  # a page judges no other task
    mistakes = [one for one in lab.mistakes if there.issuperset(isolate.tasks_of(lab, one))]
    assert mistakes
    named = {"solution": solution(lab_id), "starter": starter_source(lab)}
    named |= {mistake.id: mistake.apply(solution(lab_id)) for mistake in mistakes}
    if lab.id == "lab-01":
        named |= {"deep": deep(DEEP), "endless": deep(ENDLESS)}
    written = tmp_path / "files.json"
    written.write_text(json.dumps([(lab.id, source) for source in named.values()]), encoding="utf-8")
    with ThreadPoolExecutor() as both:
        browser = both.submit(verdicts, ["node", str(MISTAKES), str(pages), str(written)])
        here = verdicts([sys.executable, "-c", NATIVE, str(written)], course)
        there = browser.result()
    done = {"solution": True, "deep": True, "starter": None}
    assert [one.get("done") for one in there] == [done.get(name, False) for name in named]
    differing = []
    for name, one, other in zip(named, there, here, strict=True):
        for key in SAME:
            pair = one.get(key), other.get(key)
            if key == "fingerprints" and pair[0] and pair[1]:
                pair = in_time(*pair)
            if pair[0] != pair[1]:
                differing.append((name, key, *pair))
    assert differing == []
    count("mistakes judged in a browser", len(mistakes))


@pytest.mark.soak
@pytest.mark.timeout(10_000)
def test_a_busy_machine_fails_no_right_solution_in_a_page(pages, spinning, tmp_path):
    """The time in which other programs compute is not counted as the learner's."""
    written = tmp_path / "files.json"
    written.write_text(json.dumps([(lab_id, solution(lab_id)) for lab_id in LABS]), encoding="utf-8")
    with spinning(8, everywhere=True):
        found = verdicts(["node", str(MISTAKES), str(pages), str(written)])
    assert [(one["done"], one["problem"], one["report"]) for one in found] == [(True, "", "")] * len(LABS)
    count("right solutions in a page on a busy machine", len(LABS))


def test_the_engine_writes_with_the_learner_s_part(course, tmp_path):
    """All six chats get the recorded letters under each lab's part; what fails says so."""
    texts = {lab: solution(lab) for lab in PARTS}
    broken = starter_source(find_lab("lab-01"))
    files = [*texts.items(), ("lab-01", broken), ("lab-01", "def (")]
    written = tmp_path / "files.json"
    written.write_text(json.dumps(files), encoding="utf-8")
    code = NATIVE.replace("import run", "import demo").replace("run.run(lab", "demo.demo(lab")
    *done, unwritten, unparsed = verdicts([sys.executable, "-c", code, str(written)], course)
    for (lab, part), played in zip(PARTS.items(), done, strict=True):
        (trace,) = played["traces"]
        assert (trace["header"]["parts"], trace["end"]["end"]) == ({part: lab}, "drained")
        got = Counter(name for step in trace["steps"] for name in step["new_tokens"])
        assert got == {name: len(letters) for name, (_, letters) in trace["texts"].items()} and len(got) == 6
    assert "schedule_step is not written yet" in unwritten["problem"]
    assert "does not parse, line 1" in unparsed["problem"]


def test_a_run_that_no_test_shows_has_the_judge_s_sentence_too(course):
    """Where the failed test has no run, the player shows a scenario that departs."""
    starter = course / "labs" / "lab-01" / "starter.py"
    starter.write_text(mistaken("lab-01", "budget-not-decremented"), encoding="utf-8")
    played = "from labs.kit.browser import run; print(run.json.dumps(run.played(run.find_lab('lab-01'))))"
    (shown,) = verdicts([sys.executable, "-c", played], course)
    assert (shown["step"], len(shown["traces"])) == (0, 2)
    assert shown["said"] == "Your step 0 admits r2; the reference does not: the budget of 10 is used up."


def test_it_ships_the_student_edition_and_loads_little(pages):
    """No solution that can be read, no known mistakes, and a first look at any page is below the limit."""
    lines = [line for lab_id in LABS for line in solution(lab_id).splitlines()]
    shapes = {line.strip() for line in lines if len(line) > 60 and "=" in line}
    given = "".join(starter_source(find_lab(lab_id)) for lab_id in LABS)
    secret = {line for line in shapes if line not in given}
    assert len(secret) > 3
    with zipfile.ZipFile(pages / "app" / "course.zip") as archive:
        ours = [name for name in archive.namelist() if not name.startswith("site/")]
        assert not [
            name
            for name in ours
            if re.search(r"solution\.py|mistakes\.toml|kit/author/|/grader/|/tests/", name)
        ]
        texts = {name: archive.read(name).decode("utf-8") for name in ours if name.endswith((".py", ".toml"))}
    texts |= {p.name: p.read_text("utf-8") for p in pages.rglob("*") if p.suffix in (".txt", ".json")}
    assert {name for name, text in texts.items() for line in secret if line in text} == set()
    for lab_id in LABS:
        assert sum(first_load(pages, lab_id).values()) < MOST


def test_code_is_compiled_once_for_all_visits(tmp_path):
    """A file in a folder, as the course is, and one in a zip, as Python's library is."""
    (tmp_path / "of_folder.py").write_text("x = 1\n")
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        archive.writestr("of_zip.py", "y = 2\n")
    code = (
        "import sys; from labs.kit.browser.compiled import begin; from pathlib import Path\n"
        "here = Path(sys.argv[1]); sys.path[:0] = [str(here), str(here / 'library.zip')]\n"
        "compiled = begin(str(here / 'kept')); import of_folder, of_zip\n"
        "print(of_folder.x + of_zip.y, compiled.new, compiled.write())"
    )
    visit = [sys.executable, "-B", "-c", code, str(tmp_path)]
    said = [subprocess.run(visit, cwd=ROOT, capture_output=True, text=True).stdout for _ in range(2)]
    assert said == ["3 2 True\n", "3 0 False\n"]


def test_kept_code_is_not_used_when_it_is_damaged_or_of_another_source(tmp_path):
    def x_of(compiled, source):
        names = {}
        exec(compiled.compile(source, "a.py"), names)
        return names["x"]

    kept = tmp_path / "kept"
    first = Compiled(kept)
    assert (x_of(first, b"x = 1"), first.write()) == (1, True)
    second = Compiled(kept)
    assert (x_of(second, b"x = 1"), second.new) == (1, 0)
    assert [x_of(second, b"x = 2"), x_of(second, "x = 3"), x_of(second, b"x = 1")] == [2, 3, 1]
    whole = kept.read_bytes()
    for damaged in (b"", whole[:5], whole[:-1], whole + b"0", bytes([whole[0] ^ 1]) + whole[1:]):
        kept.write_bytes(damaged)
        again = Compiled(kept)
        assert again.codes == {}
        assert (x_of(again, b"x = 1"), again.new) == (1, 1)


# ------------------------------------------------------------------------------------------- as a learner


class Learner:
    """A lab's page, and what a learner does in it. The page forbids eval, so that nothing waits inside it."""

    def __init__(self, page, address, lab_id="lab-01"):
        self.page, self.address = page, f"{address}/{lab_id}/"
        self.solution = solution(lab_id)
        self.troubles, self.outside = [], []
        own = (address, "blob:", "data:")
        page.on("console", lambda message: self.troubles.append(message.text))
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("request", lambda one: one.url.startswith(own) or self.outside.append(one.url))
        self.open()

    def open(self):
        self.page.goto(self.address)
        self.until("document.body.classList.contains('awake')")

    def until(self, expression, seconds=300):
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"{expression} is not so; {self.page.text_content('#status')}"
            time.sleep(0.05)

    def write(self, source):
        self.page.evaluate("(text) => { labPage.editor.text = text }", source)

    def body(self, code):
        self.write(replace_body(self.solution, "schedule_step", code))

    def run(self):
        self.page.click("#run")
        self.ended()

    def verdict(self):
        """Return what is the same in a terminal, of the last run."""
        found = self.page.evaluate("labPage.verdict")
        return {key: found[key] for key in SAME if key in found}

    def ended(self):
        self.until("document.querySelector('#verdict.good, #verdict.bad') && results.ariaBusy != 'true'")

    def says(self, selector):
        return self.page.text_content(selector)

    @property
    def player(self):
        return self.page.frame(url="**/shell.html")


@pytest.fixture(scope="module")
def opened(browser, pages, serving):
    """lab-01's page, open for all tests: Python takes seconds to start."""
    context = browser.new_context()
    learner = Learner(context.new_page(), serving(pages))
    yield learner
    context.close()


@pytest.fixture
def learner(opened):
    """lab-01's page. Whatever is done in it: no request to another host, and nothing in the console."""
    opened.page.set_viewport_size({"width": 1280, "height": 800})
    opened.troubles.clear()
    yield opened
    assert (opened.troubles, opened.outside) == ([], [])


def test_from_an_empty_function_to_a_right_one(learner, serious, course, tmp_path):
    """Wrong with a name and the run in the player, not to be parsed, not written, right; then it leads on.
    A reload keeps the code and the hint that was shown; what Python compiled is damaged before it. axe finds
    nothing serious in the page while the file fails, and when all passes. The terminal gives the same
    failures, runs and names."""
    page, mistake = learner.page, find_lab("lab-01").mistakes[0]
    mistaken, right = mistake.apply(learner.solution), learner.solution
    page.set_viewport_size({"width": 1440, "height": 900})
    learner.write(mistaken)
    page.click("#tab-hints")
    page.click("text=Show hint 1 of 3")
    page.evaluate(f"async () => (await {KEPT}).put('../app/compiled', new Response('damaged'))")
    page.reload()
    learner.until("document.body.classList.contains('awake')")
    page.evaluate("labPage.scale = 10")  # the machine is busy with other tests
    places = page.evaluate(PLACES)
    assert page.evaluate("labPage.editor.text") == mistaken
    assert page.locator("#hints .task p").count() == 1
    page.locator(".cm-content").press("Control+Enter")  # while Python is still loading: it runs then
    learner.ended()
    there = [learner.verdict()]
    assert learner.says("#name").startswith(f"This looks like: {mistake.title}")
    assert "fail." in learner.says("#verdict") and mistake.caught_by in learner.says("#report")
    assert "first that differs" in learner.says("#report")
    assert "opened at step" in learner.says("#playing")
    names = learner.player.locator(".name").all_text_contents()
    assert names == ["yours", "reference"]
    assert "Difference 1" in learner.player.text_content("#difference-summary")
    assert learner.player.text_content("#said") in learner.says("#report")
    ours, theirs = (pane.bounding_box() for pane in learner.player.locator(".pane").all())
    assert ours["y"] == theirs["y"] and ours["x"] + ours["width"] < theirs["x"]
    assert serious(page) == serious(learner.player) == []
    wrong = "    budget = max_num_batched_tokens\n"  # of the solution
    assert wrong in right
    learner.write(right.replace(wrong, wrong.replace("=", "= =")))
    learner.run()
    assert "does not parse" in learner.says("#verdict")
    assert page.evaluate(LINE) == wrong.replace("=", "= =").strip("\n")  # the cursor is there
    assert "the run of an earlier file" in learner.says("#playing")
    learner.write(starter_source(find_lab("lab-01")))
    page.click("#run")
    learner.until("verdict.textContent.includes('not written yet')")
    page.click("text=Go to line")
    assert "raise NotImplementedError" in page.evaluate(LINE)
    learner.write(right)
    learner.run()
    there.append(learner.verdict())
    assert learner.says("#verdict").startswith("All ") and learner.says("#status").startswith("All ")
    assert page.locator("#marks .failed").count() == 0
    assert page.evaluate(PLACES) == places  # as while Python was loading
    assert serious(page) == []
    size = page.evaluate(f"async () => (await (await (await {KEPT}).match('../app/compiled')).blob()).size")
    assert size > 1_000_000  # what was damaged has been replaced
    assert page.get_attribute("#verdict a", "href") == "#after"
    assert page.get_attribute("#next", "href").endswith("/lab-02/")
    assert learner.says("#board summary") == f"1 of {len(LABS)} labs done"
    assert page.locator(".labs .done").all_text_contents() == ["lab-01"]
    page.click("#own")
    learner.until("document.getElementById('status').textContent.includes('has served six chats')")
    seen = learner.player.locator(".texts-card .row").all_text_contents()
    assert len(seen) == 1 and "I love" in seen[0]  # it plays from the first step on
    learner.player.press("#last", "Enter")
    assert learner.player.locator(".texts-card .row .letter").all_text_contents().count("F") >= 4
    files = tmp_path / "files.json"
    files.write_text(json.dumps([("lab-01", mistaken), ("lab-01", right)]), encoding="utf-8")
    here = verdicts([sys.executable, "-c", NATIVE, str(files)], course)
    assert there == [{key: one[key] for key in SAME if key in one} for one in here]


@pytest.mark.soak  # a long walk in Pyodide
def test_what_never_ends_is_ended(learner):
    """A loop in Python becomes a failed test with its line, even if it takes longer than the page listens.
    A call that hangs in C ends with its worker, and a person may stop it before. A later file is judged as
    ever."""
    page = learner.page
    page.evaluate("labPage.quiet = 4_000")  # ms of silence, where learners are given longer
    learner.body("while True:\n    try:\n        pass\n    except:\n        pass")
    learner.run()
    assert "a loop that never ends? It was in starter.py, line" in learner.says("#report")
    learner.body("sum(iter(int, 1))")
    page.click("#run")
    learner.until("run.textContent == 'Stop'")
    page.click("#run")
    learner.until("run.textContent == 'Run the tests'")
    assert "Stopped" in learner.says("#status")
    page.click("#run")
    learner.until("verdict.textContent.includes('and nothing interrupts it')")
    page.evaluate("labPage.quiet = 60_000")
    learner.write(learner.solution)
    learner.run()
    assert learner.says("#verdict").startswith("All ")


@pytest.mark.soak  # a long walk in Pyodide
def test_what_learners_write_by_accident_is_answered_in_words(learner):
    words = {
        "def f(n): return f(n + 1)\nf(0)": "RecursionError",
        "import os\nos._exit(3)": "SystemExit",
        "for i in range(10**6): print(i)": "characters were printed",
        "input()": "stdin",
        "import torch": "No module named 'torch'",
    }
    for code, said in words.items():
        learner.body(code)
        learner.run()
        assert said in learner.says("#report"), code
    learner.write("def (")
    learner.run()
    assert learner.says("#verdict").startswith("starter.py does not parse, line 1")
    assert learner.says("#report") == "Go to line 1" and not learner.page.is_visible("#all")


def test_hints_files_and_keys(learner, tmp_path):
    """A hint at a time; the file goes out and comes in; tabs and editor go by keyboard alone."""
    page, lab = learner.page, find_lab("lab-01")
    page.click("#tab-hints")
    shown = page.locator("#hints .task p").count()
    page.click(f"text=Show hint {shown + 1} of 3")
    assert page.locator("#hints .task p").count() == shown + 1
    page.focus("#tab-hints")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-after" and page.is_visible("#after")
    learner.write("# mine\n")
    with page.expect_download() as download:
        page.click("#download")
    assert Path(download.value.path()).read_text("utf-8") == "# mine\n"
    assert download.value.suggested_filename == "lab-01-starter.py"
    page.evaluate("localStorage.setItem('mini-engine/lab-03/starter.py', '# ours, \u00e0 deux')")
    page.click("#laptop summary")
    with page.expect_download() as download:
        page.click("#laptop button")
    with zipfile.ZipFile(download.value.path()) as archive:
        assert archive.testzip() is None
        held = {name: archive.read(name).decode() for name in archive.namelist()}
    assert held == {"labs/lab-01/starter.py": "# mine\n", "labs/lab-03/starter.py": "# ours, à deux"}
    assert len(learner.says("#laptop pre").strip().splitlines()) == 3
    page.evaluate("localStorage.removeItem('mini-engine/lab-03/starter.py')")
    file = tmp_path / "starter.py"
    file.write_text("# from elsewhere\n", encoding="utf-8")
    page.set_input_files("#file", file)
    learner.until("labPage.editor.text == '# from elsewhere\\n'")
    page.click("#reset")
    assert page.evaluate("labPage.editor.text") == starter_source(lab)
    page.locator(".cm-content").press("Control+z")
    assert page.evaluate("labPage.editor.text") == "# from elsewhere\n"
    page.locator(".cm-content").press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") != "editor"
    ring = "getComputedStyle(document.getElementById('editor')).outlineStyle"
    assert page.evaluate(ring) == "none"
    page.locator(".cm-content").focus()
    assert page.evaluate(ring) == "solid"  # around the numbers of the lines, too


@pytest.mark.soak  # a long walk in Pyodide
def test_a_page_has_the_half_of_a_lab_that_needs_no_torch(browser, pages, serving):
    """lab-08 is done there without the two tasks on tensors, and a mistake before them is named."""
    lab, context = find_lab("lab-08"), browser.new_context()
    needs_torch = [task.name for task in lab.tasks if task.torch]
    assert needs_torch == ["batch_probabilities", "Sampler.__call__"]
    learner = Learner(context.new_page(), serving(pages), lab.id)
    half = learner.solution
    for name in needs_torch:
        half = replace_body(half, name, f'raise NotImplementedError("lab-08: {name} is not written yet")')
    learner.write(half)
    learner.run()
    assert learner.says("#verdict").startswith("All ")
    assert learner.page.locator("#hints .task").count() == len(lab.tasks) - 2
    mistake = next(one for one in lab.mistakes if one.id == "crossing-token-dropped")
    learner.write(mistake.apply(half))
    learner.run()
    assert learner.says("#name").startswith(f"This looks like: {mistake.title}")
    assert (learner.troubles, learner.outside) == ([], [])
    context.close()


def test_on_a_phone_one_part_is_shown_at_a_time(learner):
    page = learner.page
    page.set_viewport_size({"width": 390, "height": 844})
    wide = "document.documentElement.scrollWidth > innerWidth"
    for part in ("read", "write", "results", "play", "hints", "after"):
        page.click(f".jump a[href='#{part}']")
        assert page.locator(".pane:visible").evaluate_all("all => all.map((one) => one.id)") == [part]
        assert not page.evaluate(wide), part
    page.click(".jump a[href='#write']")
    learner.write("")
    page.locator(".cm-content").focus()
    for name in ("Insert ()", "Insert []", "Insert :", "Indent"):
        page.get_by_role("button", name=name, exact=True).click()
    assert page.evaluate("labPage.editor.text") == "    ([:])"
    page.get_by_role("button", name="Outdent").click()
    assert page.evaluate("[labPage.editor.text, document.activeElement.id]") == ["([:])", "editor"]
    learner.write("def (")
    learner.run()
    assert page.is_visible("#verdict")


def test_on_a_phone_the_strip_of_labs_shows_the_current_one(browser, pages, serving):
    context = browser.new_context(viewport={"width": 390, "height": 844})
    opened = context.new_page()
    opened.goto(f"{serving(pages)}/lab-11/")
    deadline = time.monotonic() + 30  # no wait_for_function: the page's policy may forbid what it evaluates
    while not opened.evaluate("document.querySelector('.labs').scrollLeft > 0"):
        assert time.monotonic() < deadline, "the strip does not scroll to the current lab"
    box = opened.locator(".labs [aria-current]").bounding_box()
    context.close()
    assert 0 <= box["x"] and box["x"] + box["width"] <= 390


@pytest.mark.soak  # a long walk in Pyodide
def test_a_policy_plays_in_the_arena_s_page_as_in_a_terminal(browser, pages, serving, serious):
    """A broken rule gives its sentence, an endless one is ended, a right one has the stored score."""
    context = browser.new_context()
    opened = context.new_page()
    said = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto(f"{serving(pages)}/arena/")

    def verdict(policy):
        opened.evaluate("(text) => { labPage.editor.text = text; verdict.className = '' }", policy)
        opened.click("#run")
        ends = time.monotonic() + 600
        while not opened.evaluate("verdict.className"):
            assert time.monotonic() < ends, opened.text_content("#status")
            opened.wait_for_timeout(100)
        return opened.text_content("#verdict")

    assert serious(opened) == []
    assert "chat, step 0: nothing is scheduled" in verdict("def schedule_step(*_, **limits): return {}")
    opened.evaluate("labPage.scale = 0.05")
    assert "chat, no answer within" in verdict("def policy_key(*_):\n    while True: pass")
    opened.evaluate("labPage.scale = 1")
    triage = (ROOT / "labs/kit/arena/policies/triage.py").read_text("utf-8")
    assert verdict(triage) == "96% goodput, 84% fairness: on the front."
    assert opened.locator("#ranking .yours").count() == 1 and opened.locator("#chart .yours").count() == 1
    assert serious(opened) == [] and said == []
    context.close()
