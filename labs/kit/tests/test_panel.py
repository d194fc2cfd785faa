"""The panel: every control reaches the run, the learner's code is read again, its errors are reported."""

import os
import re
import signal
import socket
import subprocess
import sys
from time import monotonic, sleep
from xml.etree import ElementTree

import pytest

from labs.kit.judge import loading
from labs.kit.learner.notebook import Panel, run_scenario, trace_of

pytest.importorskip("anywidget", reason="anywidget is not installed (the dev extra has it)")

LIMIT = "len(running) < max_num_seqs"


def scenario(lab_id: str, name: str) -> dict:
    return next(entry for entry in loading.load(lab_id, "scenarios").SCENARIOS if entry["name"] == name)


@pytest.fixture(autouse=True)
def without_impl(monkeypatch):
    monkeypatch.delenv("LAB_IMPL", raising=False)


@pytest.fixture
def tight() -> dict:
    return scenario("lab-03", "two in a tight pool")


def said(panel: Panel) -> str:
    return re.sub("<[^>]+>", "", panel.message.value)


def played(panel: Panel) -> list[str]:
    return [trace["name"] for trace in panel.player.payload["traces"]]


@pytest.mark.parametrize("entry", loading.load("lab-03", "scenarios").SCENARIOS, ids=lambda e: e["name"])
def test_the_engines_parts_decide_as_the_lab_does(entry):
    ours, lab = run_scenario(entry), trace_of("lab-03", entry)
    assert ours.end.end == "drained"
    assert [list(r.scheduled.items()) for r in ours.steps] == [list(r.scheduled.items()) for r in lab.steps]


def test_every_control_reaches_the_run(tight):
    panel = Panel(tight)
    panel.widget()
    wanted = {
        "max_num_batched_tokens": 9, "max_num_seqs": 3, "long_prefill_token_threshold": 4, "num_blocks": 12,
        "block_size": 3, "watermark": 2, "policy": "fcfs", "prefix_caching": True,
    }  # fmt: skip
    assert set(panel.controls) == set(wanted)
    for name, value in wanted.items():
        panel.controls[name].value = value
    (trace,) = panel.player.payload["traces"]
    assert trace["header"]["config"].items() >= wanted.items()
    assert trace["steps"][0]["scheduled"] == [("r0", 4), ("r1", 4)]


def test_settings_that_cannot_work_are_said_and_the_panel_goes_on(tight):
    panel = Panel(tight)
    panel.widget()
    panel.controls["num_blocks"].value = 12
    assert "These settings cannot work" in said(panel) and "needs KV room for 19" in said(panel)
    panel.controls["num_blocks"].value = 22
    assert said(panel) == ""
    panel.controls["max_num_batched_tokens"].value = 2
    assert "max_num_seqs 4 exceeds max_num_batched_tokens 2" in said(panel)


def test_the_place_is_kept_when_a_setting_changes(tight):
    """The step stays as it was; at the end it stays at the end."""
    panel = Panel(tight)
    panel.widget()
    assert panel.player.step == 0
    panel.player.step = 4  # as the page reports it
    panel.controls["num_blocks"].value = 30
    assert panel.player.step == 4
    for blocks in (22, 40):
        panel.player.step = len(panel.player.payload["traces"][0]["steps"]) - 1
        panel.controls["num_blocks"].value = blocks
        assert panel.player.step == len(panel.player.payload["traces"][0]["steps"]) - 1


@pytest.fixture
def panel(copied_lab):
    """A panel of lab-01 in a course of one's own."""
    made = Panel(scenario("lab-01", "a crowd for four slots"), "lab-01", step=5)
    made.widget()
    return made


def test_the_switch_says_whose_code_runs(panel, course):
    """starter.py is read again each time, without a new kernel."""
    assert panel.switch.value == "engine" and played(panel) == ["the reference"]  # nothing is written yet
    panel.switch.value = "solution"
    assert said(panel) == "The run of solution.py is the same as the reference&#x27;s in every step."
    panel.switch.value = "starter"
    assert "schedule_step is not written yet" in said(panel) and played(panel) == ["the reference"]
    course.solve(LIMIT, LIMIT.replace("<", "<="))
    panel.again.click()
    assert said(panel) == "The runs of your starter.py and of the reference differ from step 1 on."
    sentence = "Your step 1 admits r4; the reference does not: 4 requests run, and at most 4 may."
    assert panel.player.payload["said"] == sentence
    assert played(panel) == ["your starter.py", "the reference"] and panel.player.step == 1
    panel.controls["max_num_seqs"].value = 11  # more than come
    assert played(panel) == ["your starter.py, as the reference"]
    course.solve()
    panel.controls["max_num_seqs"].value = 4
    assert said(panel) == "The run of your starter.py is the same as the reference&#x27;s in every step."
    made = Panel(panel.scenario, "lab-01")
    made.widget()
    assert made.switch.value == "starter"  # what is written is what one wants to see


WRONG = {
    "while True: pass": "no answer within 0.5 s of computing: a loop that never ends?",
    "import os; os._exit(1)": "it stops with SystemExit",
    "print('x' * 10**6); return {}": "more than 20000 characters were printed",
    "return {'nobody': 3}": "is scheduled but not in running",
    "syntax error": "starter.py does not parse",
}


def test_a_starter_that_goes_wrong_says_so_in_words(panel, course, monkeypatch):
    """Unwritten, raising, endless, loud, or no Python at all: the panel says it, and the reference plays."""
    monkeypatch.setattr("labs.kit.learner.notebook.panel.SECONDS", 0.5)
    panel.switch.value = "starter"
    for body, words in WRONG.items():
        course.write(body)
        panel.again.click()
        assert words in said(panel) and "the reference" in played(panel)[-1]
        course.solve()
        panel.again.click()
        assert played(panel) == ["your starter.py, as the reference"]


def test_a_run_that_stops_halfway_is_shown_as_far_as_it_went(panel, course):
    course.solve("scheduled = {}", "scheduled = {}\n    assert len(running) < 4 or not waiting, 'no idea'")
    panel.switch.value = "starter"
    assert "AssertionError: no idea (starter.py, line" in said(panel)
    yours, reference = panel.player.payload["traces"]
    assert 0 < len(yours["steps"]) < len(reference["steps"]) and yours["end"]["end"] == "error"


@pytest.mark.parametrize("lab_id", ["lab-02", "lab-03", "lab-04", "lab-05", "lab-06", "lab-07", "lab-10"])
def test_it_serves_every_lab(lab_id):
    """The solution's part decides as the engine's, under settings that no scenario of the lab has."""
    scenarios = loading.load(lab_id, "scenarios")
    if lab_id == "lab-05":
        entry = scenarios.workload(0, 4)
    else:
        entry = next(entry for entry in scenarios.SCENARIOS if "requests" in entry)
    panel = Panel(entry, lab_id)
    panel.widget()
    panel.switch.value = "solution"
    panel.controls["max_num_batched_tokens"].value += 3
    assert said(panel) == "The run of solution.py is the same as the reference&#x27;s in every step."


def test_on_paper_it_is_a_picture(tight, monkeypatch):
    """The same every time, and all there is where anywidget is missing."""
    alive = Panel(tight, "lab-03", step=2)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in alive
    monkeypatch.setitem(sys.modules, "mini_engine.show.player.widget", None)
    paper = Panel(tight, "lab-03", step=2)._repr_mimebundle_()
    assert list(paper) == ["text/plain", "image/svg+xml"]
    assert all(paper[kind] == alive[kind] for kind in paper)
    assert "anywidget" in paper["text/plain"] and "r0 is preempted" in paper["text/plain"]
    assert "r0 is preempted" in " ".join(ElementTree.fromstring(paper["image/svg+xml"]).itertext())


# --------------------------------------------------------------------------------------- in JupyterLab

NOTEBOOK = {
    "cells": [{
        "cell_type": "code", "id": "panel", "metadata": {}, "outputs": [], "execution_count": None,
        "source": "from labs.kit import load\nfrom labs.kit.learner.notebook import Panel\n"
        "entries = {entry['name']: entry for entry in load('lab-01', 'scenarios').SCENARIOS}\n"
        "Panel(entries['a crowd for four slots'], 'lab-01')",
    }],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    "nbformat": 4, "nbformat_minor": 5,
}  # fmt: skip


@pytest.fixture
def jupyter(course, tmp_path):
    """JupyterLab over the course of one's own, with settings of its own; its address."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed (the dev extra has it)")
    import json

    import mini_engine

    (course.root / "panel.ipynb").write_text(json.dumps(NOTEBOOK), encoding="utf-8")
    (course.root / "mini_engine").symlink_to(mini_engine.__path__[0], target_is_directory=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    line = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", "--IdentityProvider.token=a-token", f"--ServerApp.root_dir={course.root}",
    ]  # fmt: skip
    environment = {**course.environment(), **places, "PYTHONPATH": str(course.root)}
    environment["IPYTHONDIR"] = str(tmp_path / "ipython")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    server = subprocess.Popen(line, env=environment, cwd=course.root, **quiet)
    try:
        until = monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert monotonic() < until and server.poll() is None, "JupyterLab does not start"
                sleep(0.2)
        yield f"http://127.0.0.1:{port}/lab/tree/panel.ipynb?token=a-token"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


@pytest.mark.soak  # what the panel does is tested above, and each notebook's kernel by nbval
@pytest.mark.skipif(os.name == "nt", reason="ends JupyterLab as POSIX does")
def test_the_panel_in_jupyterlab(jupyter, course, browser):
    """A learner at work: not written, wrong, right, without a new kernel; Step, Back and To the end."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(60_000)
    page.goto(jupyter)
    page.get_by_text("| Idle").first.wait_for()
    page.locator(".jp-Cell .cm-content").first.click()
    readout, status = page.locator("#readout"), page.locator("[role=status]")
    until = monotonic() + 60
    while not readout.count() and monotonic() < until:  # until the kernel listens, nothing happens
        page.keyboard.press("Control+Enter")
        page.wait_for_timeout(2000)
    readout.filter(has_text="Step 0 of 8").wait_for()
    page.get_by_role("button", name="your starter.py").click()
    status.filter(has_text="schedule_step is not written yet").wait_for()
    course.solve(LIMIT, LIMIT.replace("<", "<="))
    page.get_by_role("button", name="Run again").click()
    status.filter(has_text="differ from step 1 on").wait_for()
    page.locator("#difference-summary").filter(has_text="from equal state").wait_for()
    assert page.locator(".pane .name").all_text_contents() == ["your starter.py", "the reference"]
    course.solve()
    page.get_by_role("button", name="Run again").click()
    status.filter(has_text="is the same as the reference's in every step").wait_for()
    for button, step in (("Step", 2), ("Step", 3), ("Back", 2), ("To the end", 8)):
        page.locator(".buttons").get_by_text(button, exact=True).click()
        assert readout.text_content() == f"Step {step} of 8"
    page.locator("#back").press("ArrowLeft")  # which JupyterLab would take for itself
    assert readout.text_content() == "Step 7 of 8"
