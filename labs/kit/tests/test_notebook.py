"""The notebooks: traces, words, guesses, and whether the saved files are fit to be committed."""

import contextlib
import dataclasses
import io
import json
import re
from copy import deepcopy
from functools import cache
from itertools import pairwise

import pytest

from labs.kit.author import notebooks
from labs.kit.judge import loading, manifest
from labs.kit.learner.notebook import Quiz, check, in_milliseconds, show, steps_table, trace_of, traces
from labs.kit.learner.notebook.words import cell as shown
from labs.kit.tests import marks
from labs.kit.tests.files import solution
from mini_engine.show import figures
from mini_engine.sim.cost_model import CostModel, step_loads
from mini_engine.trace.metrics import request_metrics

NOTEBOOKS = sorted((manifest.LABS_DIR.parent / "notebooks").glob("*.ipynb"))
FIRST = "three prompts, ten tokens"


@cache
def read(path):
    import nbformat  # not above: it takes seconds, and each of pytest's processes imports this file

    return nbformat.read(path, as_version=4)


# ------------------------------------------------------------------------------- the learner's trace


@pytest.fixture
def learner(monkeypatch):
    """learner(lab_id, module) makes that module the learner's starter.py, under LAB_IMPL=starter."""

    def become(lab_id, module):
        real = loading.namespace
        monkeypatch.setenv("LAB_IMPL", "starter")
        monkeypatch.setattr(
            loading, "namespace", lambda lab, impl: module if impl == "starter" else real(lab, impl)
        )

    return become


def written(lab_id: str, old: str = "", new: str = ""):
    """The solution, with one thing changed, as if it stood in starter.py."""
    source = solution(lab_id)
    assert old in source
    return loading.execute(source.replace(old, new, 1) if old else source, "learner", "starter.py")


def test_what_runs_is_named_and_compared(capsys, monkeypatch):
    monkeypatch.delenv("LAB_IMPL", raising=False)
    assert trace_of("lab-01", FIRST).steps[0].scheduled == {"r0": 8, "r1": 2}
    assert capsys.readouterr().out == f"lab-01, '{FIRST}': the reference, 5 steps\n"
    monkeypatch.setenv("LAB_IMPL", "engine")
    trace_of("lab-03", "two in a tight pool")
    said = capsys.readouterr().out
    assert "mini_engine's own parts, 14 steps; it makes the same decisions as the reference" in said


@pytest.mark.parametrize("lab_id", manifest.lab_ids())
def test_an_unwritten_starter_gets_a_sentence(lab_id, learner, capsys):
    """No traceback, in any lab, and the page goes on with the reference's run."""
    learner(lab_id, loading.pristine_starter(manifest.find_lab(lab_id)))
    scenario = loading.load(lab_id, "scenarios").SCENARIOS[0]
    trace = trace_of(lab_id, scenario)
    said = capsys.readouterr().out
    assert f"write it in labs/{lab_id}/starter.py" in said and "the reference's run" in said
    assert "Traceback" not in said and len(said.splitlines()) == 2
    assert trace.end.end == "drained"


def test_a_right_starter_is_told_so(learner, capsys):
    """And what follows is the learner's own trace."""
    own = written("lab-01")
    ran = []
    own.schedule_step = lambda *args, step=own.schedule_step, **kw: ran.append(1) or step(*args, **kw)
    learner("lab-01", own)
    trace = trace_of("lab-01", FIRST)
    assert len(ran) == len(trace.steps) == 5
    assert "your starter.py, 5 steps; it makes the same decisions as the reference" in capsys.readouterr().out


def test_a_wrong_starter_sees_where_it_parts(learner, capsys, monkeypatch):
    """The departing step in words and as a figure; what follows is true, so it is the reference's."""
    shown = []
    monkeypatch.setattr(traces, "show", lambda axes, alt: shown.append((axes, alt)))
    whole = "budget = max_num_batched_tokens"
    learner("lab-01", written("lab-01", whole, f"{whole} - 1"))
    trace = trace_of("lab-01", FIRST)
    said = capsys.readouterr().out
    assert "differ from step 0 on" in said and "r0: 8, r1: 1" in said and "r0: 8, r1: 2" in said
    assert trace.steps[0].scheduled == {"r0": 8, "r1": 2}
    assert len(shown) == 1 and "from step 0 on" in shown[0][1]


STOPS = {
    "budget = max_num_batched_tokens / 0": r"ZeroDivisionError: division by zero \(starter\.py, line \d+\)",
    "while True: pass": r"no answer within 0\.3 s",
    "budget = 1": r"differ from step 0 on",
}


@pytest.mark.parametrize("line", STOPS)
def test_trouble_of_a_starter_is_a_sentence(line, learner, capsys, monkeypatch):
    """An error, an endless loop, a run too long to draw: the page goes on with the reference's run."""
    lab = dataclasses.replace(manifest.find_lab("lab-01"), timeout=0.3)
    monkeypatch.setattr(traces, "find_lab", lambda lab_id: lab)
    scenario = FIRST
    if line == "budget = 1":
        requests = [{"id": f"r{i}", "prompt": 2, "max_tokens": 2} for i in range(70)]
        scenario = {**loading.load("lab-01", "scenarios").SCENARIOS[4], "name": "70", "requests": requests}
    learner("lab-01", written("lab-01", "budget = max_num_batched_tokens", line))
    trace = trace_of("lab-01", scenario)
    output = capsys.readouterr().out
    assert re.search(STOPS[line], output) and "the reference's run" in output
    assert trace.end.end == "drained"


def test_unknown_scenarios_are_refused_by_name():
    with pytest.raises(manifest.LabError, match="lab-01 has no scenario 'nope'; it has 'three prompts"):
        trace_of("lab-01", "nope")
    with pytest.raises(manifest.LabError, match="there is no lab 'lab-99'"):
        trace_of("lab-99", FIRST)


def test_milliseconds_are_those_of_the_cost_model(monkeypatch):
    monkeypatch.delenv("LAB_IMPL", raising=False)
    steps = trace_of("lab-01", "a crowd for four slots")
    cost = CostModel(10.0, 1.0, 0.0)
    timed = in_milliseconds(steps, cost)
    ends = [record.t_end for record in timed.steps]
    prices = [cost.step_time(load) for load in step_loads(steps)]
    assert ends == pytest.approx([sum(prices[: i + 1]) for i in range(len(prices))])
    assert timed.header.unit == "ms" and steps.header.unit == "step"
    # r4 arrives with step 1: its clock starts when step 0 is over.
    assert request_metrics(timed)["r4"].queue_time == pytest.approx(prices[1])


# ------------------------------------------------------------------------------------ words and guesses


def test_steps_table_tells_every_decision(monkeypatch):
    monkeypatch.delenv("LAB_IMPL", raising=False)
    table = steps_table(trace_of("lab-03", "two in a tight pool"))
    text = " ".join(table.split())  # a long cell goes on below itself
    assert "r0 preempted: needed 2, free 1; r0 waits: this step makes room, admits none" in text
    assert "r0 waits: needs 11 blocks, 9 free" in text and "r1 finished (length)" in text
    assert max(map(len, table.splitlines())) <= 104
    assert table.splitlines()[2].split() == "0 r1 10, r0 6 16/16 - 2 r1 admitted; r0 admitted".split()


NO_GUESS = "No guess yet: replace the dots in the cell above, run it, and run this cell again.\n"
VERDICTS = [
    (..., 14.25, "no guess yet"),
    (14.25, 14.25, "right"),
    ("14.25 %", 14.25, "right"),
    (14, 14.25, "close"),
    (23, 14.25, "it is less"),
    (5, 14.25, "it is more"),
    (0, 0, "right"),
    ("many", 14.25, "give a number"),
    ("R0", "r0", "right"),
    ("r1", "r0", "no: see below"),
    (["r0", "r1"], ["r0", "r1"], "right"),
]


@pytest.mark.parametrize(("guess", "answer", "verdict"), VERDICTS)
def test_guesses_are_judged_kindly(guess, answer, verdict, capsys):
    check({"question": guess}, lambda: {"question": answer})
    said = capsys.readouterr().out
    if verdict == "no guess yet":
        assert said.startswith("No guess yet: replace the dots ") and "14.25" not in said
    else:
        assert said.splitlines()[2].endswith(f" {shown(answer):5}  {verdict}")


def test_without_a_guess_a_sentence_stands_for_the_run(capsys):
    for guesses in ({"one": ..., "two": ""}, {}):
        check(guesses, lambda: pytest.fail("the run was made"))
        assert capsys.readouterr().out == NO_GUESS


def test_an_open_question_keeps_its_answer(capsys):
    """Answers and the run stay hidden while one of two is open, or a question was deleted."""

    def answers():
        print("the run: 42 and 43")
        return {"one": 42, "two": 43}

    check({"one": 40, "two": ...}, answers)
    said = capsys.readouterr().out
    assert "close" in said and "42" in said and "43" not in said and "the run:" not in said
    assert "1 open question. The run is shown when each question has a guess." in said
    check({"one": 40, "two": 43}, answers)
    assert capsys.readouterr().out.endswith("right\n\nthe run: 42 and 43\n")
    check({"another": 3}, lambda: {"question": 7})
    said = capsys.readouterr().out
    assert "no guess yet" in said and "7" not in said


def test_a_quiz_unfolds_its_answers_and_its_text_gives_none_away():
    """HTML without a script or a style, so that it works in a saved page and under the book's policy."""
    quiz = Quiz("fused", "paging")
    page, text = quiz._repr_html_(), repr(quiz)
    assert page.count('class="question"') == page.count('class="choice right"') == len(quiz.questions) == 10
    assert "<script" not in page and "style=" not in page and "<code>[:, -1]</code>" in page
    assert "<dl" not in page  # JupyterLab sets its terms in a column of a fifth of the width
    assert "python -m labs quiz paging" in text and "Right" not in text
    answers = [answer for question in quiz.questions for answer in question.answers]
    assert all(answer.text in text and answer.why not in text for answer in answers)
    why = "no quiz is called 'speed'; the topics are scheduling, batching, "
    with pytest.raises(manifest.LabError, match=why):
        Quiz("speed")


def test_show_gives_the_picture_its_words(monkeypatch):
    import IPython.display
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: shown.append((data, options)))
    monkeypatch.delenv("LAB_IMPL", raising=False)
    others = plt.get_fignums()
    show(figures.timeline(trace_of("lab-01", FIRST)), "three bars")
    (data, options), *more = shown
    assert data["text/plain"] == options["metadata"]["image/png"]["alt"] == "three bars"
    assert data["image/png"].startswith("iVBORw0KGgo") and not more
    assert plt.get_fignums() == others  # or the cell would show it a second time


# ------------------------------------------------------------------------------------- the files


@pytest.mark.soak  # below, all that are committed are looked at
def test_saved_notebooks_hold_text_and_no_ids(tmp_path, monkeypatch):
    """A panel and LAB_IMPL=starter: what is saved is the reference's, without widget or machine."""
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    monkeypatch.setenv("LAB_IMPL", "starter")
    monkeypatch.setenv("PYTHONPATH", str(manifest.LABS_DIR.parent))
    path = tmp_path / "small.ipynb"
    code = (
        "from labs.kit import load\nfrom labs.kit.learner.notebook import Panel, trace_of\n"
        f"trace_of('lab-01', '{FIRST}')\nPanel(load('lab-01', 'scenarios').SCENARIOS[0])"
    )
    nbformat.write(new_notebook(cells=[new_code_cell(code)]), path)
    notebooks.main(str(path))
    saved = read(path)
    said, panel = saved.cells[0].outputs
    assert said["text"] == f"lab-01, '{FIRST}': the reference, 5 steps\n"
    assert set(panel["data"]) == {"image/svg+xml", "text/plain"}
    assert panel["data"]["text/plain"].startswith("The player, with sliders, stands here")
    assert set(saved.metadata) == {"kernelspec", "language_info"} and not saved.cells[0].metadata


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_fit_to_be_committed(path):
    from nbformat import validate

    text = path.read_text(encoding="utf-8")
    notebook = read(path)
    validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids) and (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert "widget-view+json" not in text
    wrong = r"requests? who\b|(?<![\d,.])1 (?:steps|preemptions|requests|tokens|blocks)\b"
    assert not re.search(wrong, read_aloud(notebook.cells)), "one is one"
    assert not re.search(r"(?:/home/|/root/|/tmp/|/Users/|[A-Z]:\\\\\\\\Users|site-packages)", text)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        assert cell.execution_count, f"{cell.id} was never run"
        kinds = {output.output_type for output in cell.outputs}
        assert "error" not in kinds and not any(o.get("name") == "stderr" for o in cell.outputs), cell.id
        text = json.dumps(cell.metadata) + cell.source
        excused = re.search(r"nbval[-_](?:ignore|skip)", text, re.IGNORECASE)
        assert not excused or "#" in cell.source, f"{cell.id} is excused from comparison and does not say why"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_its_parts(path):
    """A guess, figures with their words, something to change, a quiz, where to go on, and its lab."""
    notebook = read(path)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "my_guess" in code and "check(" in code
    assert "What to change, and what to expect" in prose and "LAB_IMPL=starter" in prose
    (asked,) = re.findall(r"^Quiz\((.+)\)$", code, re.M)
    quiz = Quiz(*re.findall(r'"(\w+)"', asked))
    (saved,) = [output.data for cell in notebook.cells if cell.id == "quiz" for output in cell.outputs]
    assert saved["text/html"] == quiz._repr_html_() and saved["text/plain"] == repr(quiz)
    assert f"mini-engine trace play out/{path.stem}.jsonl" in prose
    assert f'write_trace("../out/{path.stem}.jsonl"' in code
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    for picture in pictures:
        assert picture.metadata["image/png"]["alt"] == picture.data["text/plain"] != ""
    # It and its lab link each other, and no link to a file leads nowhere.
    links = re.findall(r"\]\(([^)#]+)\)", prose)
    lab = f"lab-{max(int(path.stem[:2]), 1):02}"
    assert f"../labs/{lab}/README.md" in links
    assert all((path.parent / link).exists() for link in links if not link.startswith("https://"))
    if not path.stem.startswith("00"):
        assert f"../../notebooks/{path.name}" in manifest.find_lab(lab).file("README.md").read_text("utf-8")


def unfolded(cells):
    """The text of some cells that can be read without opening anything."""
    shown = [
        type(c)({**c, "outputs": []}) if c.metadata.get("jupyter", {}).get("outputs_hidden") else c
        for c in cells
    ]
    return re.sub(r"<details>.*?</details>", "", read_aloud(shown), flags=re.S)


def read_aloud(cells):
    """All text of some cells: what they say, and what they print."""
    outputs = [output for c in cells for output in c.get("outputs", ())]
    printed = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join([c.source for c in cells] + printed)


# ----------------------------------------------------------------- predictions, and what gives them away

# What the predictions of each page come to, in the order of their questions.
ANSWERS = {
    "00-why-batching": [[14.25, 82.61, 5.797]],
    "01-schedule-step": [[8, 2, 0, 2, 5]],
    "02-clamp": [[4, 16, 28.53, 13.27, 112.5, 209.9]],
    "03-preemption": [["r0", 2, 1, 11, 19]],
    "04-fused-batch": [[32, 11, 21], [4]],
    "05-paged-kv": [[11.72, 63.62, 5, 2]],
    "06-prefix-cache": [[3, 2, 1]],
    "07-engine": [[5.054, 2.354, 8.844]],
    "08-sampling": [[2, 3, 3, 2, 2]],
    "09-structured-output": [[3, 5, 2]],
    "10-speculative-decoding": [[7, 5, 13]],
    "11-server-front": [[0.3, 0.4, 0.4]],
}
# The cells whose saved outputs answer a prediction.
FOLDED = {
    "00-why-batching": "figure figure-table numbers speed",
    "01-schedule-step": "figure figure-table",
    "02-clamp": "dial figure figure-table whole",
    "03-preemption": "figure figure-table pool pool-table",
    "04-fused-batch": "text",
    "05-paged-kv": "run map map-table figure figure-table reserve sizes",
    "06-prefix-cache": "figure figure-table",
    "07-engine": "ladder ladder-table",
    "08-sampling": "figure figure-table",
    "09-structured-output": "",
    "10-speculative-decoding": "figure figure-table",
    "11-server-front": "",
}


def predictions(cells):
    """The cells of each guess and of its check, which follows at once."""
    pairs = [(one, other) for one, other in pairwise(cells) if re.fullmatch(r"guess(-\d)?", one.id)]
    assert [judged.id for _, judged in pairs] == [guess.id.replace("guess", "check") for guess, _ in pairs]
    return pairs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_prediction_is_spoiled(path):
    """No guess is committed, and no answer that is telling can be read without opening what is folded.

    That a run without a guess reveals nothing either is nbval's proof: it must find as little as is here.
    """
    cells = read(path).cells
    folded = [c.id for c in cells if c.metadata.get("jupyter", {}).get("outputs_hidden")]
    assert folded == FOLDED[path.stem].split()
    assert folded == [c.id for c in cells if "hide-output" in c.metadata.get("tags", ())], "in the book too"
    assert bool(folded) == ("is folded: open those outputs afterwards." in read_aloud(cells))
    open_to_all = unfolded(cells)
    for (guess, judged), answers in zip(predictions(cells), ANSWERS[path.stem], strict=True):
        assert guess.outputs == [] and guess.source.count("...") == len(answers)
        assert [output.text for output in judged.outputs] == [NO_GUESS]
        assert "nbval" not in json.dumps([guess.metadata, judged.metadata, judged.source]).lower()
        telling = [f"{n:.{digits}g}" for n in answers if isinstance(n, float) and n > 1 for digits in (3, 4)]
        assert not [n for n in telling if re.search(rf"(?<![\d.,]){n}(?!\d)", open_to_all)]
    first = cells.index(predictions(cells)[0][0])
    unseen = [c for c in cells[:first] if c.get("outputs")]
    assert not unseen or path.stem == "07-engine"  # whose prediction is about the ladder, half way down


def tries(answer):
    """A right, a close and a wrong guess, each with its verdict."""
    if isinstance(answer, str):
        return [(answer.upper(), "right"), (f" {answer}", "right"), ("r9", "no: see below")]
    close = (answer * 1.05, "close") if isinstance(answer, float) else (str(answer), "right")
    return [(answer, "right"), close, (3 * answer + 1, "it is less")]


@pytest.mark.parametrize(
    "path",
    marks.some(NOTEBOOKS, *(path for path in NOTEBOOKS if path.stem[:2] not in ("00", "04", "07"))),  # slow
    ids=lambda path: path.stem,
)
def test_a_guess_brings_its_answer(path, tmp_path, monkeypatch):
    """Its cells run with guesses, right, close and wrong by turns: each answer appears, with a verdict."""
    monkeypatch.delenv("LAB_IMPL", raising=False)
    monkeypatch.chdir(tmp_path)
    cells, asked = deepcopy(read(path).cells), []
    for (guess, judged), answers in zip(predictions(cells), ANSWERS[path.stem], strict=True):
        guesses = [tries(answer)[i % 3] for i, answer in enumerate(answers)]
        for mine, _ in guesses:
            guess.source = guess.source.replace("...", repr(mine), 1)
        asked.append((judged.id, list(zip(guesses, answers, strict=True))))
    # Of what stands between, only what the checks need; in this process, for nbval starts a kernel for each.
    needed = ("setup", "guess", "check", "model", "pads", "guess-2", "check-2")
    names, outputs = {"__name__": "__main__"}, {}
    for cell in cells:
        if cell.id in needed:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(cell.source, cell.id, "exec"), names)
            outputs[cell.id] = output.getvalue()
    for judged, rows in asked:
        said = outputs[judged]
        lines = said.splitlines()[2:]
        assert len(lines) >= len(rows), said
        for line, ((mine, verdict), answer) in zip(lines, rows, strict=False):
            assert re.search(rf" {re.escape(shown(mine).strip())} +{answer} +{verdict}$", line), line
        assert "question" in said and "open question" not in said
