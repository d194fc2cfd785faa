"""`mini-engine bench scheduler` serves the whole load, and compares other schedulers."""

import pytest

from mini_engine.bench import scheduler as bench
from mini_engine.bench.workloads import Workload

# In the shape of nano-vllm's source: a package whose import would need a model, and modules that do not.
SOURCE = {
    "__init__.py": "raise RuntimeError('the model')",
    "sampling_params.py": """
class SamplingParams:
    def __init__(self, max_tokens): self.max_tokens = max_tokens
""",
    "engine/sequence.py": """
class Sequence:
    def __init__(self, prompt, params): self.left = params.max_tokens
""",
    "engine/scheduler.py": """
from nanovllm.config import Config
class Scheduler:
    def __init__(self, config: Config): self.waiting = []
    def add(self, sequence): self.waiting.append(sequence)
    def is_finished(self): return not self.waiting
    def schedule(self): return self.waiting, False
    def postprocess(self, sequences, token_ids, is_prefill):
        for sequence, token_id in zip(sequences, token_ids, strict=True): sequence.left -= 1
        self.waiting = [sequence for sequence in sequences if sequence.left]
""",
}


@pytest.fixture
def source(tmp_path):
    for name, text in SOURCE.items():
        path = tmp_path / "nanovllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_whole_load_is_served(source):
    """Each contestant, traced or not, has a row for each output token, and a line of the table."""
    load = Workload.scheduling(2)
    assert all(100 <= len(prompt) <= 512 for prompt in load.prompts)
    assert all(64 <= n <= 256 for n in load.num_outputs)
    reported = []
    runs = bench.race(bench.contestants(source), load, 1, reported.append)
    names = ["traced, all kept", "traced, none kept", "mini-engine", "nano-vllm"]
    assert list(runs) == names and len(reported) == 4
    for rounds in runs.values():
        # All fit into one step, so each prompt is computed whole and gives the first of its tokens.
        assert {(run.num_rows, run.num_steps) for run in rounds} == {
            (sum(load.num_outputs), max(load.num_outputs))
        }
        assert all(run.seconds > 0 for run in rounds)
    shown = bench.table(runs)
    assert shown.row_count == 4 and shown.columns[-1].header == "time / nano-vllm"


def test_a_folder_that_is_not_nano_vllm_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="elsewhere is not nano-vllm's source: it has no nanovllm/engine"):
        bench.nano_vllm(tmp_path / "elsewhere")
    (source / "nanovllm" / "engine" / "scheduler.py").write_text("import no_such_package")
    with pytest.raises(ValueError, match="needs no_such_package: pip install no_such_package"):
        bench.nano_vllm(source)
