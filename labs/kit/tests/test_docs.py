"""The book: links and anchors, commands, snippets, what it says of runs, and the built pages."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from labs.__main__ import every_command
from labs.kit import load
from labs.kit.judge.manifest import LABS_DIR
from mini_engine.batch import build_batch
from mini_engine.block_manager import BlockManager
from mini_engine.commands import app as engine_app
from mini_engine.loading import registry as models

ROOT = LABS_DIR.parent
DOCS = ROOT / "docs"
OWN = sorted([*DOCS.glob("*.md"), *DOCS.glob("concepts/*.md")])
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *OWN, *sorted(LABS_DIR.glob("lab-*/*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def prose(text: str) -> str:
    """A page without its listings and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.S)


@cache
def anchors(path: str) -> set[str]:
    """Return the anchors of a page's headings, as forges and the book name them."""
    found = re.findall(r"^#{1,4} (.+)$", prose((ROOT / path).read_text("utf-8")), re.M)
    plain = (re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading) for heading in found)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


# ------------------------------------------------------------------------------------- voice


def test_no_docstring_opens_with_a_riddle():
    """A docstring opens with its subject or a verb: a noun phrase, Return, Raise."""
    files = [path for room in ("mini_engine", "labs", "docs") for path in (ROOT / room).rglob("*.py")]
    files = [path for path in files if path.name != "starter.py" and ".state" not in path.parts]
    opens = re.compile(r'^ *"""(?:What|Who|Whose|Whom|Of|As) .*', re.M)
    assert not [(path.name, line) for path in files for line in opens.findall(path.read_text("utf-8"))]


# ------------------------------------------------------------------------------------- links, pictures


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_to_headings_that_are_there(name):
    page = ROOT / name
    text = prose(page.read_text("utf-8"))
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.relative_to(ROOT).as_posix()), target
    for label in re.findall(r"\]\[([\w-]+)\]", text):
        assert re.search(rf"^\[{label}\]: https://", text, re.M), label
    for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text if page in OWN else ""):
        assert len(words) > 40 or target.endswith("architecture.svg"), target


def script(name: str):
    """A module of docs, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(name).stem}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_picture_of_the_concepts_is_made_by_the_script_and_shown():
    names = {f"{picture.__name__.replace('_', '-')}.svg" for picture in script("images/concepts").PICTURES}
    assert names == {path.name for path in (DOCS / "images" / "concepts").glob("*.svg")}
    shown = " ".join(page.read_text("utf-8") for page in DOCS.glob("concepts/*.md"))
    assert all(f"../images/concepts/{name}" in shown for name in names)


def test_every_picture_of_a_term_is_drawn_by_the_script_and_shown_with_its_words(tmp_path):
    drawing, page = script("images/glossary"), (DOCS / "glossary.md").read_text("utf-8")
    shown = re.findall(r"^!\[(.+)\]\(images/glossary/(.+)\.svg\)$", page, re.M)
    assert sorted(shown) == sorted((drawing.words(name), name) for name in drawing.ALL)
    assert {path.stem for path in drawing.FOLDER.iterdir()} == {*drawing.ALL}
    for name in ("preemption", "top-p", "slot-mapping", "itl"):  # of a run, and of each kind
        drawing.sheet_of(name).save(tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").read_bytes() == (drawing.FOLDER / f"{name}.svg").read_bytes()


@pytest.mark.parametrize("page", sorted(DOCS.glob("concepts/*.md")), ids=lambda page: page.stem)
def test_a_concept_is_one_page_with_a_picture_before_the_prose(page):
    text = page.read_text("utf-8")
    assert 300 <= len(prose(text).split()) <= 700
    assert text.split("\n\n")[1].startswith("![")


PLAY = re.compile(r"^<!-- \{play\} ([\w-]+) -->$", re.M)


def test_every_run_is_played_on_a_page_and_each_concept_plays_one():
    runs = script("_ext/runs").RUNS
    pages = {page.stem: PLAY.findall(page.read_text("utf-8")) for page in OWN}
    assert all(len(pages[page.stem]) == 1 for page in DOCS.glob("concepts/*.md"))
    assert sorted(name for names in pages.values() for name in names if name in runs) == sorted(runs)


# ------------------------------------------------------------------------------- what blocks claim to say


def snippets() -> list[tuple[str, str, str]]:
    """Each error of the gallery: its heading, the code, and what that says."""
    text = (DOCS / "errors.md").read_text("utf-8")
    found = []
    for section in text.split("\n## ")[1:]:
        assert "**Cause.**" in section and "**Fix.**" in section, section
        (_, code), (_, said) = FENCE.findall(section)[:2]
        found.append((section.partition("\n")[0], code, " ".join(said.split())))
    return found


@pytest.mark.parametrize("code, said", [pytest.param(c, s, id=h) for h, c, s in snippets()])
def test_an_error_of_the_gallery_says_what_the_page_says(code, said):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<errors.md>", "exec"), {"__name__": "errors"})
        really = out.getvalue()
    except Exception as error:
        really = f"{type(error).__name__}: {error}"
    assert " ".join(really.split()) == said


BUGS = script("images/real_bugs")


@pytest.mark.parametrize("case", BUGS.CASES, ids=lambda case: case.name)
def test_a_real_bug_departs_as_its_page_shows(case):
    page = (DOCS / "real-bugs.md").read_text("utf-8")
    if case.name in ("found-too-early", "old-name"):
        assert "```text\n" + case.text() + "\n```" in page
    else:
        assert case.text() in page
    assert f"<!-- {{play}} bug-{case.name} -->" in page
    if case.picture:
        assert f"(images/bugs/{case.name}.svg)" in page
        assert (DOCS / "images" / "bugs" / f"{case.name}.svg").is_file()
    if case.caught_by:
        assert f"`{case.caught_by}`" in page
        assert f"def {case.caught_by}(" in (LABS_DIR / case.lab / "test_lab.py").read_text("utf-8")


# Kinds of blocks that claim what something says or does, and who runs them.
CLAIMS = {
    "README.md python": "here",
    "labs/lab-04/AFTER.md python": "here",
    "labs/lab-07/AFTER.md python": "here",
    "labs/lab-11/AFTER.md python": "labs/kit/tests/test_front.py with that client",
    "docs/reliability.md python": "here",
    "docs/watch-the-real-one.md sh": "commands, parsed as all are",
    "docs/watch-the-real-one.md python": "mini_engine/tests/test_trace_vllm.py; it needs vLLM",
    "docs/errors.md python": "here",
    "docs/errors.md text": "here",
    "docs/real-bugs.md text": "here",
    "docs/reading-a-trace.md json": "here",
    "docs/serving.md python": "mini_engine/tests/test_serve.py with that client, and test_async_engine.py",
    "docs/scaling.md python": "mini_engine/tests/test_kv_connector.py, with another process",
    "docs/instructors.md console": "labs/kit/tests/test_grader_gradescope.py",
    "docs/instructors.md json": "labs/kit/tests/test_grader_gradescope.py",
    "docs/instructors.md yaml": "labs/kit/tests/test_grader_gradescope.py",
}


def blocks(name: str, *kinds: str) -> list[str]:
    return [body for kind, body in FENCE.findall((ROOT / name).read_text("utf-8")) if kind in kinds]


def events(run, kind: str) -> list:
    """The events of a run of one kind, with their steps."""
    return [(event, record.step) for record in run.steps for event in record.events if event.type == kind]


@pytest.mark.soak  # eight seconds of a large model
def test_the_readme_asks_a_model_and_gets_the_answer_that_is_shown():
    if not models.MODELS["smollm2"].is_present:
        pytest.skip("THE README'S PYTHON IS NOT TESTED: mini-engine models fetch smollm2")
    (code,) = blocks("README.md", "python")  # in a process of its own, which takes the model's memory with it
    given = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert given.returncode == 0 and f"# {given.stdout.strip()}" in code, given.stderr


def test_a_watched_run_is_as_the_page_has_it_and_after_the_last_lab_one_of_ones_own_is_played(capsys):
    exec(*blocks("docs/reliability.md", "python"), {})
    (code,) = blocks("labs/lab-07/AFTER.md", "python")
    exec(code.replace('"starter"', '"solution"'), {})
    assert "drained" in capsys.readouterr().out


def test_the_flat_batch_beside_the_rectangle_is_the_engines_own():
    """Each line that is quoted stands in its file, and the numbers are those of lab-04's example."""
    lab, page = LABS_DIR / "lab-04", blocks("labs/lab-04/AFTER.md", "python")
    for code, path in zip(page, (lab / "solution.py", ROOT / "mini_engine" / "batch.py"), strict=True):
        for line in code.splitlines():
            assert line.partition(" = ")[2].partition("   ")[0].strip() in path.read_text("utf-8"), line
    rows, _ = load("lab-04", "scenarios").worked_example()
    kv = BlockManager(64, 4, watermark=0)
    for row in rows:
        computed = row.request.num_computed_tokens
        assert kv.admit(row.request)
        row.request.num_computed_tokens = computed
    batch = build_batch(rows, kv)
    listing = next(b for b in blocks("labs/lab-04/AFTER.md", "") if "token_ids" in b)
    shown = {line.split()[0]: re.findall(r"\b\d+\b", line) for line in listing.splitlines()}
    for name in ("positions", "query_lens", "seq_lens", "last_rows"):
        own = [str(int(number)) for number in getattr(batch, name)]
        assert shown[name][: len(own)] == own, name


def test_every_block_that_claims_something_has_a_test():
    found = {
        f"{name} {kind}" for name in NAMES for kind, _ in FENCE.findall((ROOT / name).read_text("utf-8"))
    }
    assert {block for block in found if block.split()[-1] not in ("", *NAMES)} <= set(CLAIMS)


def test_what_a_page_says_of_its_run_is_so():
    runs = script("_ext/runs").RUNS
    static, continuous = runs["batching"]().runs
    assert (len(static.steps), len(continuous.steps)) == (48, 24)
    assert static.steps[5].num_batched_tokens == 1 and len(continuous.steps[4].scheduled) == 4
    whole, chunks = runs["chunks"]().runs
    assert whole.steps[3].num_batched_tokens == 2003 == max(r.num_batched_tokens for r in whole.steps)
    assert max(record.num_batched_tokens for record in chunks.steps) == 515
    first = [next(r.step for r in run.steps if "d" in r.new_tokens) for run in (whole, chunks)]
    assert first[1] - first[0] == 3
    victims = [[(e.id, step) for e, step in events(run, "PREEMPTED")] for run in runs["preemption"]().runs]
    assert victims == [[("r0", 2)], [("r1", 2)]]
    cached = {e.id: e.num_cached_tokens for e, _ in events(runs["prefix"]().runs[0], "SCHEDULED")}
    assert cached == {"a": 0, "b": 8, "c": 4, "d": 8}
    (five,) = runs["paging"]().runs
    assert [e.id for e, step in events(five, "PREEMPTED") if step == 8] == ["d", "e"]
    steps = runs["structured"]().runs[0].steps
    behind_199 = next(step for step in steps if step.observed["written"].get("a") == "199")
    assert behind_199.observed["allowed next"]["a"] == ["-", "-0"]
    first_ways, mixed = runs["cost"]().runs
    assert [r.step for r in first_ways.steps if "r0" not in r.scheduled] == [2, 3, 4, 5]
    assert all("r0" in record.scheduled for record in mixed.steps)

    page = (DOCS / "concepts" / "17-more-machines.md").read_text("utf-8")
    for router, hits in (("prefix", 15), ("random", None)):
        engines = script("_ext/runs").three_engines(router)
        computed = sum(record.num_batched_tokens for trace in engines for record in trace.steps)
        assert f"{computed:,} " in page
        cached = [e.num_cached_tokens for trace in engines for e, _ in events(trace, "SCHEDULED")]
        assert hits is None or (cached.count(256), cached.count(0)) == (hits, 18 - hits)

    step = json.loads(*blocks("docs/reading-a-trace.md", "json"))
    assert step["num_batched_tokens"] == sum(step["scheduled"].values())


# ----------------------------------------------------------------------------------------- commands

COMMAND = re.compile(
    r"^(?:LAB_IMPL=\w+ )?((?:mini-engine|python (?:-m )?\w[\w./-]*|make|pytest|jupyter)\b.*?)"
    r"(?:\s{2,}#.*| #.*)?$"
)


def commands(name: str) -> set[str]:
    """The commands of a page, from its listings and from code in its prose."""
    text = (ROOT / name).read_text("utf-8")
    shown = blocks(name, "", "console", "sh")
    lines = [line.removeprefix("$ ") for body in shown for line in body.splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCE.sub("", text))]
    return {
        re.split(r" [|;&>]", match[1])[0].strip() for line in lines if (match := COMMAND.match(line.strip()))
    }


@pytest.mark.parametrize("name", NAMES)
def test_commands_have_the_options_that_are_shown(name):
    for line in commands(name):
        words = shlex.split(line)
        if words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
            assert all(word in targets or "=" in word for word in words[1:]), line
        elif words[0] in ("pytest", "jupyter"):
            paths = [word for word in words[1:] if "/" in word or word == "notebooks"]
            assert all((ROOT / path).exists() for path in paths), line
            if "-k" in words:
                tests = "".join(Path(ROOT, path, "test_lab.py").read_text("utf-8") for path in paths)
                asked = words[words.index("-k") + 1]
                assert asked in " ".join(re.findall(r"def (test_\w+)", tests)), line
        elif words[0] == "python" and words[1:3] != ["-m", "labs"]:
            *_, what = words[:3] if words[1] == "-m" else words[:2]
            assert (ROOT / what).is_file() if words[1] != "-m" else importlib.util.find_spec(what), line
        else:
            parsed(words)


@cache
def the_command(name: str):
    """The whole command line of this name; to make it takes a tenth of a second."""
    return typer.main.get_command(engine_app if name == "mini-engine" else every_command())


def parsed(words: list[str]) -> None:
    """Hold the words against the real command; nothing is run."""
    command, rest = the_command(words[0]), words[1 if words[0] == "mini-engine" else 3 :]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        name, *rest = rest
        assert name in command.commands, f"{' '.join(words)}: there is no command {name}"
        command = command.commands[name]
    if "..." not in rest:
        _, left, _ = command.make_parser(command.context_class(command)).parse_args(list(rest))
        assert not left, " ".join(words)


RUN = re.compile(
    r"mini-engine (simulate|models list|generate --prompt)"
    r"|mini-engine trace (summary|timeline|export|fit)( --perfetto)? out/trace|python -m labs (quiz|arena$)"
)
# Why a command is not run here. What none of these fits is run.
NOT_RUN = {
    "the reader's files": r".*\b(FILE|DIR|REPORT|lab-NN|RUN\.jsonl|yours\.jsonl|out/simulated\.jsonl)\b",
    "the reader's policy; test_arena has some": r"python -m labs arena (policy\.py|--class FOLDER)",
    "does not end": r"mini-engine (trace play|chat|serve|prefill)"
    r"|jupyter|python -m labs (watch|open|test.* --open)",
    "the network, or vLLM": r"mini-engine (models fetch|trace record-vllm|.*--model smollm2)",
    "packages, sources and weights of others": r"python -m mini_engine\.tests\.outside",
    "minutes": r"mini-engine (bench|kernels)|make|python (docs/images|-m (labs\.kit|mini_engine\.bench))",
    "runs before the others, in `desk`": r"mini-engine demo",
    "a name in a sentence": r"mini-engine (trace|generate)$|mini-engine trace fit RUN",
    "the reader's own lab; test_cli has a copy": r"pytest"
    r"|python -m labs (test|hint|reset|solution|status|demo|check)",
    "test_grader_* and test_edition run them": r"python -m labs (grade|gradescope|replay|export|generate)",
    "Python's own": r"python -m (venv|pip|pydoc|http)",
}
TYPED = [name for name in NAMES if name.startswith(("README", "CONTRIBUTING", "docs/"))]
SHOWN = sorted({line for name in TYPED for line in commands(name)})
RUNNING = [line for line in SHOWN if RUN.match(line)]


@pytest.mark.parametrize("line", [line for line in SHOWN if line not in RUNNING])
def test_a_command_is_run_or_there_is_a_reason(line):
    assert any(re.match(rf"(?:{pattern})", line) for pattern in NOT_RUN.values()), f"add `{line}` to RUN"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder in which the demo has run."""
    folder = tmp_path_factory.mktemp("desk")
    with contextlib.chdir(folder):
        run("mini-engine demo")
    assert (folder / "out" / "trace.jsonl").is_file()
    return folder


@pytest.mark.parametrize("line", RUNNING)
def test_finite_commands_that_need_no_network_run(line, desk, monkeypatch):
    monkeypatch.chdir(desk)
    run(line)


def run(line: str) -> None:
    """Run a command in this process, which imports torch once."""
    words = shlex.split(line)
    app, arguments = (engine_app, words[1:]) if words[0] == "mini-engine" else (every_command(), words[3:])
    if arguments[0] == "simulate":
        arguments += ["--requests", "20"]  # test_simulate.py has whole loads
    result = CliRunner().invoke(app, arguments, input="q\n")
    assert result.exit_code == 0, result.output


# ----------------------------------------------------------------------------------------- the built pages


def test_every_page_is_in_the_book(site):
    for name in NAMES:
        assert (site / name).with_suffix(".html").is_file(), name
    assert 'url=docs/index.html"' in (site / "index.html").read_text("utf-8")


def test_no_style_asks_another_host_for_anything(site):
    for css in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import ['\"]?https?:", css.read_text("utf-8")), css.name


def test_a_run_and_a_quiz_are_in_their_page_and_stand_without_a_script(site):
    folder = site / "docs" / "concepts"
    assert (folder / "08-preemption.html").read_text("utf-8").count('<details class="choice right">') == 5
    for page in sorted(DOCS.glob("concepts/*.md")):
        (name,) = PLAY.findall(page.read_text("utf-8"))
        text = (folder / f"{page.stem}.html").read_text("utf-8")
        (data,) = re.findall(r'class="play .*?<script type="application/json">(.*?)</script>', text, re.S)
        traces = json.loads(data)["traces"]
        assert all(run["steps"] for run in traces)
        picture = site / "_static" / "runs" / f"{name}.svg"
        if traces[0]["header"]["trace"] == "mini-engine-ops":  # calls have no picture of a step
            assert not picture.exists() and '<div class="play full-width"' in text and "<img src" not in text
            continue
        for kind in ("light", "dark"):
            assert f'src="../../_static/runs/{name}-{kind}.svg"' in text
            assert picture.with_stem(f"{name}-{kind}").read_text("utf-8").startswith("<svg")
    mistakes = (site / "docs" / "real-bugs.html").read_text("utf-8")
    assert mistakes.count('<script type="application/json">') == len(BUGS.CASES)


HEIGHTS = """document.addEventListener("DOMContentLoaded", () => {
    const place = document.querySelector(".play"); // there is none in the frame
    window.heights = [];
    if (place) new ResizeObserver(([{ contentRect }]) => heights.push(contentRect.height)).observe(place);
});"""


def test_the_player_comes_where_it_is_scrolled_to_and_where_it_is_asked_for(site, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 700})
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.add_init_script(HEIGHTS)
    page.goto((site / "docs" / "concepts" / "08-preemption.html").as_uri())
    assert page.locator(".play img").count() == 2, "one for each ground"
    page.locator("h2").last.scroll_into_view_if_needed()
    player = page.frame_locator(".play iframe")
    assert player.locator("#readout").inner_text() == "Step 2 of 13"
    for step in range(3, 14):
        player.locator("#forward").click()
        assert player.locator("#readout").inner_text() == f"Step {step} of 13"
    heights = page.evaluate("window.heights")
    assert len(heights) == 2, heights  # of the picture, and of the player in each of its steps
    page.goto((site / "docs" / "real-bugs.html").as_uri())
    page.get_by_role("button", name="Play it").nth(5).click()
    assert page.locator("iframe").count() == 1
    player.get_by_role("heading", name="with the bug").wait_for()
    page.goto((site / "docs" / "index.html").as_uri())
    page.get_by_role("link", name="Watch it step by step").click()
    player.get_by_text("six chats in a pool of 32 blocks").first.wait_for()
    # No wait_for_function: it evaluates text, which the page's policy forbids.
    deadline = time.monotonic() + 10
    while page.locator("iframe").bounding_box()["height"] <= 700:
        assert time.monotonic() < deadline, "the frame does not grow to the player's height"
    assert not wrong


def test_the_first_use_of_a_term_leads_to_the_glossary(site):
    glossary = (site / "docs" / "glossary.html").read_text("utf-8")
    for name in ("docs/concepts/08-preemption.html", "labs/lab-03/README.html"):
        link = r'<a class="term[^"]*" href="[^"#]*glossary.html#([^"]+)"'
        targets = re.findall(link, (site / name).read_text("utf-8"))
        assert len(targets) >= 5 and len(set(targets)) == len(targets)
        assert all(f'id="{target}"' in glossary for target in targets)


def test_the_reference_has_what_the_labs_and_the_engine_offer(site):
    import labs.kit
    import labs.kit.learner.notebook
    import mini_engine

    page = (site / "docs" / "api.html").read_text("utf-8")
    known = {name.rpartition(".")[2] for name in re.findall(r'id="((?:mini_engine|labs)\.[\w.]+)"', page)}
    offered = {*labs.kit.__all__, *labs.kit.learner.notebook.__all__, *mini_engine.__all__}
    assert offered - known == {"Script"}  # another name for dict[str, Any]
