"""Bad input gets one clear error: a row for each bad value, with the words of the error.

An error is one short line that says what is wrong, and with which value; the command line ends with exit
code 2. Damaged files (bits flipped, or cut) are read or refused in one sentence, never with a traceback.
"""

import copy
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFValue, GGUFValueType
from typer.testing import CliRunner

from mini_engine.commands import app
from mini_engine.config import EngineConfig, SpeculativeConfig
from mini_engine.engine import Engine
from mini_engine.llm import LLM
from mini_engine.loading.checkpoint import choose_device, load
from mini_engine.loading.config import read_config
from mini_engine.loading.registry import resolve
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.request import Request, SamplingParams
from mini_engine.show.perfetto import to_perfetto
from mini_engine.show.player import ready_setup, write_player
from mini_engine.sim.simulate import simulate
from mini_engine.sim.workloads import read_arrivals, workload
from mini_engine.tests.helpers import ascii_id, refusal, table, until
from mini_engine.tests.soak import SOAK, count
from mini_engine.tests.test_checkpoint import CONFIG, tensors_of, whole_folder, write_gguf
from mini_engine.text.output_text import OutputText
from mini_engine.trace import Finished, read_trace, write_trace

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
NAN, INF, HUGE, LONE = math.nan, math.inf, 10**400, "a\udcff"
MISSING = (ValueError, FileNotFoundError)


def each(*groups):
    """A test for each value of each name in the groups (names, values, words of the error).

    In the words, KEY is the last part of the name; without any, they are "NAME must be".
    """
    rows = []
    for names, values, *words in groups:
        for name in names.split():
            said = words[0].replace("KEY", repr(name.split(".")[-1])) if words else f"{name} must be"
            rows += [(name, value, said) for value in values]
    ids = [ascii_id(i, row[0]) for i, row in enumerate(rows)]
    return pytest.mark.parametrize("name, value, words", rows, ids=ids)


# --------------------------------------------------------------------------------------- Python API


@each(
    (
        "temperature",
        (HUGE, Fraction(HUGE), -1, NAN, INF, "1", None, True, 1e31, [1]),
        "temperature must be 0",
    ),
    ("top_k", (2**63, -2, 1.5, "3", None, True, HUGE, NAN)),
    ("top_p", (0, 1e-50, 1.1, NAN, "1", None, -0.1, HUGE)),
    ("min_p", (-0.1, 1.1, NAN, "0", None, HUGE)),
    ("repetition_penalty", (0, HUGE, 1e-40, 1e40, -1, NAN, INF, "1", None)),
    ("max_tokens", (0, -1, 1.5, "5", True, NAN)),
    ("logprobs prompt_logprobs", (-2, 0.5, "2", True, 10**12)),
    ("seed", (-1, 1.5, "1", True, [1])),
    ("stop bad_words", ("", [""], [1], 5, LONE, ["a", None], b"ab", {"a": 1})),
    ("stop_token_ids", (5, ["a"], [-1], [2**32], {1: 2}, np.array([[1]]), np.array([0.5]), torch.tensor(3))),
    ("allowed_token_ids", ([], 5, [-1], ["a"], {1: 2})),
    ("logit_bias", ({"a": 1}, {1: NAN}, {-1: 1}, {1: "1"}, [1], 5, {1: INF})),
    ("logits_processors", ([5], 5, [print], [lambda logits: logits], {"a": 1})),
    ("presence_penalty frequency_penalty", (2.1, -2.1, NAN, "1", None, True)),
    ("n", (0, -1, 1.5, "2", None, True, 10**6)),
    ("min_tokens", (-1, 1.5, "2", None, True)),
    ("truncate_prompt_tokens", (0, -2, 1.5, "2", True)),
    ("ignore_eos detokenize skip_special_tokens include_stop_str_in_output", (1, "no", None)),
)
def test_sampling_params(name, value, words):
    refusal(lambda: SamplingParams(**{name: value}), words, "but is ")


@each(
    ("cache_salt request_id", (None, 5, b"x", LONE), ""),
    ("sampling_params", ({}, {"top_k": 1}, None, "greedy"), "must be a SamplingParams"),
    ("priority", (None, "high", 1.5, True)),
    ("prompt_token_ids", ([1.5], ["a"], [None], [[1]]), "is not a token id"),
    ("prompt_token_ids", ([],), "empty prompt"),
)
def test_requests(name, value, words):
    given = {"request_id": "a", "prompt_token_ids": [1], name: value}
    refusal(lambda: Request(**given), words or name)


@each(
    ("block_size", (1.5, 0, -1, "16", None, True, 10**12, HUGE)),
    ("num_blocks", (10**12, 0, 2.5, "8", True, HUGE)),
    ("long_prefill_token_threshold", (2.5, -1, "1", None)),
    ("max_num_batched_tokens", (0, 2.5, "8", None, True), "max_num_"),
    ("max_num_seqs", (0, 1.5, "8", 10**6), "max_num_seqs"),
    ("watermark", (0.5, "1")),
    ("max_model_len", (0, 1.5, "8")),
    ("kv_cache_bytes", (0, 1.5, None)),
    ("policy", ("best", None, 5, ["fcfs"])),
    ("enable_prefix_caching", (1, None, "yes")),
    ("seed", (0.5,)),
    ("speculative_config", ("ngram:4", 4, [], True)),
    ("speculative_config", ({"method": "ngram"},), "needs num_speculative_tokens"),
    ("speculative_config", ({"num_speculative_tokens": 4, "k": 1}, {5: 5}), "speculative_config has no"),
)
def test_engine_settings(name, value, words):
    refusal(lambda: EngineConfig(**{name: value}), words)


@each(
    ("structured_outputs", (5, "a", [], ["regex"])),
    ("structured_outputs", ({},), "must have one of json, regex and choice, but has none"),
    ("structured_outputs", ({"regex": "a", "json": {}},), "but has json, regex"),
    ("structured_outputs", ({"grammar": "x"}, {5: 5}), "structured_outputs has no"),
    ("structured_outputs", ({"regex": 5}, {"regex": LONE}), "regex must be text"),
    (
        "structured_outputs",
        ({"choice": []}, {"choice": [""]}, {"choice": 5}, {"choice": [5]}),
        "choice must be",
    ),
    ("structured_outputs", ({"choice": ["a", LONE]},), "choice must be text, without lone surrogates"),
    (
        "structured_outputs",
        ({"json": "{"}, {"json": "5"}, {"json": 5}, {"json": {5: {1}}}),
        "json must be a JSON",
    ),
    ("structured_outputs", ({"regex": "a", "disable_any_whitespace": 1},), "disable_any_whitespace must be"),
)
def test_shapes(name, value, words):
    refusal(lambda: SamplingParams(**{name: value}), words)


@each(
    ("num_speculative_tokens prompt_lookup_max prompt_lookup_min", (0, -1, 65, 1.5, "4", True, HUGE)),
    ("num_speculative_tokens", (None,)),
    ("method", ("eagle", None, 5, ["ngram"])),
    ("method", ("draft_model",), "model must be a name or a path with method draft_model"),
    ("model", ("shakespeare-draft", ""), "None with ngram"),
    ("draft_sample_method", ("gumbel", None, 5, [])),
    ("prompt_lookup_max", (1,), "prompt_lookup_min 2 exceeds prompt_lookup_max 1"),
)
def test_speculative_settings(name, value, words):
    given = {"num_speculative_tokens": 4, name: value}
    given |= {"prompt_lookup_min": 2} if name == "prompt_lookup_max" else {}
    refusal(lambda: SpeculativeConfig(**given), words)


@each(
    ("model", (None, "x", 5, {})),
    ("tokenizer", ("tok", 5, {})),
    ("config", ({}, "x", 5)),
    ("record", (1.5, -1, "", None, [], {})),
    ("clock", (5, "wall", {})),
    ("parts", ({}, [], "lab-01", 5)),
    ("part_names", ({"clamp": 5}, ["clamp"], "lab-01")),
    ("fast", ("numpy", 5, None)),
    ("num_block colour", (5,), "there is no setting"),
)
def test_engine_arguments(name, value, words, llm):
    given = {"model": llm.engine.model, "tokenizer": None, "num_blocks": 8} | {name: value}
    refusal(lambda: Engine(**given), words)


@each(
    ("logit_bias", ({99: 1.0},), "logit_bias's 99 is outside the vocabulary (0 to 66)"),
    ("allowed_token_ids stop_token_ids", ([67],), "67 is outside the vocabulary (0 to 66)"),
    ("logprobs prompt_logprobs", (68,), "exceeds the vocabulary of 67 tokens; -1 is all"),
    ("min_tokens", (10**6,), "min_tokens 1000000 exceeds the model's length"),
    ("bad_words", ([" "],), "which is not a token; leave it out"),
    ("n", (2,), "n must be 1 for one request, but is 2; LLM.generate makes n requests of it"),
)
def test_params_that_do_not_fit_the_model(name, value, words, llm):
    params = SamplingParams(**{"max_tokens": None, name: value})
    refusal(lambda: llm.engine.add_request("a", params), words)
    assert not llm.engine.has_work


CLASHES = [
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens 4, but is 5"),
    ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
    ({"stop": "a", "detokenize": False}, "stop needs the text"),
    ({"stop": ["a" * 2**15, "b" * 2**15, "c"]}, "stop must have at most 65,536 characters, but has 65,537"),
]


@pytest.mark.parametrize(("given", "words"), CLASHES)
def test_params_that_clash(given, words):
    refusal(lambda: SamplingParams(**given), words)


def test_a_logits_processor_that_gives_no_logits_ends_its_own_request(llm):
    """Also one that raises, and parameters that leave no token; the neighbour has its text."""
    quiet = SamplingParams(temperature=0, max_tokens=3)
    (alone,) = llm.generate("O ", quiet, use_tqdm=False)
    for processor, words in (
        (
            lambda outputs, logits: None,
            "must return logits of the shape (67,), but gave None",
        ),
        (lambda outputs, logits: 1 / 0, "ZeroDivisionError"),
        (lambda outputs, logits: logits.fill_(-INF), "its sampling_params leave no token to choose from"),
    ):
        loud = SamplingParams(max_tokens=3, logits_processors=[processor])
        broken, fine = llm.generate(["O ", "O "], [loud, quiet], use_tqdm=False)
        assert broken.outputs[0].finish_reason == "error" and words in broken.outputs[0].error
        assert fine.outputs[0].text == alone.outputs[0].text


@pytest.mark.parametrize("model", ["", " ", None, 5, b"shakespeare"])
def test_names_of_models(model):
    refusal(lambda: LLM(model), "model must be a name or a path, but is")


def test_a_long_stop_string_costs_little():
    """A token's text costs the same beside a stop string of 65,536 characters; 0.11 s were seen."""
    text = OutputText(None, ("a" * (2**16 - 1) + "b",))
    started = time.process_time()
    for _ in range(1000):
        assert text.append("aaaa") is None and text.take(finished=False) == ""
    assert time.process_time() - started < 1


def test_a_pool_that_no_machine_holds():
    config = EngineConfig(num_blocks=2**20, block_size=2**16)
    refusal(lambda: config.fitted(128, 1000), "num_blocks 1048576 of block_size 65536 take")


@pytest.fixture(scope="module")
def llm():
    model = LLM()
    model.engine.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return model


@each(
    ("prompts", (None, 5, b"abc", 1.5)),
    ("prompts", ([None], [b"ab"], [{}], [1.5], {}, {"prompt": None}), "prompts[0] must be"),
    ("prompts", ({"a": 1}, [{"prompt": "a", 5: 1}]), "prompts[0] has the key"),
    ("prompts", ({"prompt": 5}, {"prompt_token_ids": 5}, {"prompt_token_ids": "a"}), "prompts[0]'s 'prompt"),
    ("prompts", ({"prompt": "a", "cache_salt": 5},), "cache_salt must be a string"),
    ("use_tqdm", (None, 1, "no")),
    ("prompts", ([["a"]], [[None]]), "is not a token id"),
    ("prompts", (["a", 5],), "prompts[1] must be"),
    ("prompts", ([[10**9]],), "outside the vocabulary"),
    ("prompts", ([[]],), "empty prompt"),
    ("prompts", (LONE,), "lone surrogate"),
    ("prompts", ("x" * 10_000_000,), "10,000,000 characters"),
    ("sampling_params", ({}, {"top_k": 1}, 5, "hot", [{}], [None], []), "sampling_params"),
    ("priority", ("a", True, 1.5, [None], ["high"], []), "priority"),
)
def test_generate(name, value, words, llm):
    given = {"prompts": ["a"], "use_tqdm": False} | {name: value}
    refusal(lambda: llm.generate(**given), words)
    assert not llm.engine.has_work, "nothing is left behind"


@each(
    ("content", (None, 5, [{"type": "text"}], {}), "messages[0][KEY] must be a string"),
    ("content", (LONE,), "messages[0][KEY] has a lone surrogate"),
    ("role", (None, 5), "messages[0][KEY] must be a string"),
)
def test_messages(name, value, words, llm):
    refusal(lambda: llm.chat([{"role": "user", "content": "a", name: value}], use_tqdm=False), words)
    refusal(lambda: llm.chat([{name: "a"}], use_tqdm=False), "messages[0] must be {")


@pytest.mark.parametrize("messages", ["hello", 5, None, {"role": "user", "content": "a"}, [[]], ["a"]])
def test_conversations(messages, llm):
    refusal(lambda: llm.chat(messages, use_tqdm=False), "messages")


TEMPLATES = [
    "{{ 1 / 0 }}",
    "{{ messages[9]['content'] }}",
    "{{ 'a' + 1 }}",
    "{{ raise_exception('no\nway') }}",
    "{{ undefined_name.x }}",
    "{% for i in range(10**9) %}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_raises(template, llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "a"}]
    refusal(lambda: llm.chat(messages, use_tqdm=False), "the chat template of", "failed:")


def test_what_is_meant_is_taken(llm):
    """Like in vLLM, top_k -1 is off. Arrays, fractions and empty lists are what they stand for."""
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop_token_ids=np.array([0, 2])).stop_token_ids == (0, 2)
    assert SamplingParams(stop_token_ids=torch.tensor([3])).stop_token_ids == (3,)
    assert SamplingParams(temperature=Fraction(1, 2)).temperature == 0.5
    assert llm.generate([], use_tqdm=False) == []
    assert len(llm.generate(torch.tensor([1, 2]), SamplingParams(max_tokens=1), use_tqdm=False)) == 1


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "abacus", "", "cpu:x", 5.5])
def test_devices(device):
    refusal(lambda: choose_device(device), "device must be auto, cpu or cuda, but is")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, "int8", "", None, 5], ids=str)
def test_dtypes(dtype):
    refusal(lambda: load("shakespeare", dtype), "dtype must be auto, float32, bfloat16, float64")


# -------------------------------------------------------------------------------------- checkpoints

KEYS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
)
EQUAL = {"low_freq_factor": 4, "high_freq_factor": 4}
LLAMA3 = {"type": "llama3", "factor": 8, "original_max_position_embeddings": 32}


@each(
    (f"{KEYS} num_key_value_heads head_dim", ("64", 1.5, 0, -1, True, [64], 10**12)),
    (KEYS, (None,), "the key KEY is missing"),
    ("rms_norm_eps rope_theta", ("1", 0, -1, NAN, INF, True, [1])),
    ("tie_word_embeddings attention_bias mlp_bias use_sliding_window", (1, "yes", [])),
    ("use_sliding_window", (True,), "use_sliding_window is not supported"),
    ("model_type", (None, 5, ["llama"], {}, "gpt2"), "is not supported; mini-engine runs llama"),
    ("hidden_act", (5, ["silu"], "gelu"), "is not supported; only silu is"),
    ("rope_scaling", ("linear", 5, [1]), "rope scaling must be an object"),
    ("rope_scaling", ({"type": ["linear"]},), "rope scaling ['linear'] is not supported"),
    ("rope_scaling", ({"rope_type": "yarn", "factor": 4.0},), "rope scaling 'yarn' is not supported"),
    ("rope_scaling", ({"type": "linear"},), "rope scaling 'linear' needs the key 'factor', which is missing"),
    ("rope_scaling", (LLAMA3,), "rope scaling 'llama3' needs the key 'low_freq_factor'"),
    ("rope_scaling", (LLAMA3 | EQUAL,), "must be below high_freq_factor"),
    ("rope_scaling", [{"type": "linear", "factor": v} for v in ("8", 0)], "factor must be a number above 0"),
    ("partial_rotary_factor", (0.5,), "partial_rotary_factor 0.5 is not supported"),
    ("head_dim", (5,), "head_dim must be even"),
    ("num_attention_heads", (128,), "head_dim must be even"),
)
def test_config_json(name, value, words):
    refusal(lambda: read_config({**CONFIG, name: value}), "config.json", words)


@pytest.fixture
def folder(tmp_path):
    return whole_folder(tmp_path / "model")


BOS_TOKENS = [{"bos_token": v} for v in (5, [1], {"content": 5}, True)]
CHAT_TEMPLATES = [{"chat_template": v} for v in (5, {"a": 1}, [{"name": "default", "template": 5}])]
WEIGHT_MAPS = [{"weight_map": {"a": v}} for v in (5, None, "../x.safetensors", "/etc/passwd", [])]


@each(
    ("config.json", (b"\xff\xfe", b"{,"), "config.json: not valid JSON"),
    ("config.json", (b"[" * 100_000,), "config.json: nested deeper"),
    ("config.json", (b"7",), "config.json: expected a JSON object, found int"),
    ("config.json", (None,), "there is no such file"),
    ("config.json", ({"eos_token_id": "x"},), "eos_token_id must be a whole number, but is 'x'"),
    ("config.json", ({"eos_token_id": [1, None, 1.5]},), "eos_token_id must be a whole number, but is 1.5"),
    ("config.json", ({"eos_token_id": -1},), "eos_token_id must be a whole number, but is -1"),
    ("config.json", ({"bos_token_id": [1]},), "bos_token_id must be a whole number, but is [1]"),
    ("config.json", ({"num_hidden_layers": 1000},), "num_hidden_layers is 1000, but the weights have 2"),
    ("config.json", ({"hidden_size": 2**30, "head_dim": 16}, {"vocab_size": 100}), "has shape (257, 64)"),
    ("config.json", ({"intermediate_size": 2**30},), "has shape (96, 64)"),
    ("generation_config.json", ({"eos_token_id": {"a": 1}},), "eos_token_id must be a whole number"),
    ("generation_config.json", (b"{",), "generation_config.json: not valid JSON"),
    ("tokenizer_config.json", (b"[]",), "tokenizer_config.json: expected a JSON object, found list"),
    ("tokenizer_config.json", BOS_TOKENS, "bos_token must be a token's text"),
    ("tokenizer_config.json", CHAT_TEMPLATES, "chat_template must be text"),
    ("chat_template.jinja", (b"\xff",), "chat_template.jinja: not UTF-8"),
    ("tokenizer.json", ({"version": "x" * 5000}, b"{}", b"\xff"), "tokenizer.json: not a tokenizer that can"),
    ("tokenizer.json model.safetensors", (None,), "there is no such file"),
    ("model.safetensors", (b"", b"\xff" * 64), "model.safetensors: damaged or cut short"),
    ("model.safetensors.index.json", ({}, {"weight_map": {}}), "'weight_map' is missing"),
    ("model.safetensors.index.json", WEIGHT_MAPS, "which is not a file of this folder"),
    (
        "model.safetensors.index.json",
        ({"weight_map": {"a": "b"}},),
        "though model.safetensors.index.json names it",
    ),
)
def test_files_of_a_model_folder(name, value, words, folder):
    file = folder / name
    if value is None:
        file.unlink()
    elif isinstance(value, bytes):
        file.write_bytes(value)
    else:
        there = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(there | value))
    refusal(lambda: load(folder), f"{name}: {words}" if value is None else words, error=MISSING)


def test_a_shard_without_its_index_says_what_to_do(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    refusal(lambda: load(folder), "index.json: there is no such file", "copy it too", error=MISSING)


def read_or_refused(file, raw, read):
    """The bytes are read, or refused in one short sentence that names the file."""
    file.write_bytes(raw)
    started = time.perf_counter()
    try:
        read(file)
    except (ValueError, OSError) as error:
        assert file.stem in str(error) and len(str(error).splitlines()) == 1, error
    assert time.perf_counter() - started < 5


def damaged(raw, seed, within):
    """The bytes cut short, or with one to three bits flipped in the first `within`."""
    rng, raw = random.Random(seed), bytearray(raw)
    if seed % 5 == 0:
        return bytes(raw[: rng.randrange(len(raw))])
    for _ in range(rng.randint(1, 3)):
        raw[rng.randrange(within)] ^= 1 << rng.randrange(8)
    return bytes(raw)


@pytest.mark.parametrize("start", range(0, 1000 if SOAK else 60, 20))
def test_damaged_safetensors(start, folder):
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    for seed in range(start, start + 20):
        read_or_refused(file, damaged(raw, seed, header), lambda file: load(folder))
    count("damaged safetensors files", 20)


# --------------------------------------------------------------------------------------------- GGUF


def put(key, value):
    """An edit of a GGUF file: this value under this key, in GGUF's type for it."""
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    is_list = isinstance(value, list)
    kind = kinds.get(type(value[0] if is_list else value), GGUFValueType.STRING)
    entry = GGUFValue(value, GGUFValueType.ARRAY, kind) if is_list else GGUFValue(value, kind)
    return lambda writer: writer.kv_data[0].__setitem__(key, entry)


def vocabulary(writer):
    writer.add_tokenizer_model("gpt2")
    put("tokenizer.ggml.tokens", ["a", "b", "ab", "<e>"])(writer)
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)


def gguf_file(path, *edits):
    return write_gguf(path, CONFIG, tensors_of(CONFIG), extra=[vocabulary, *edits])


IDS = "tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.padding_token_id"
TOKENS_65 = ["a", "b", "ab", *map(str, range(62))]


@each(
    (IDS, (4, 2**32 - 1), "must be one of 4 tokens"),
    ("tokenizer.ggml.bos_token_id", ("x",), "must be one of 4 tokens, but is 'x'"),
    ("tokenizer.ggml.merges", (["a zz"], ["ab"]), "merges do not fit the tokens"),
    ("tokenizer.ggml.merges", ([1, 2],), "merges[0] must be str, but is 1"),
    ("tokenizer.ggml.tokens", ([1, 2],), "tokens[0] must be str, but is 1"),
    ("tokenizer.ggml.tokens", ("abc",), "tokens must be list, but is 'abc'"),
    ("tokenizer.ggml.tokens", ([b"\xff", b"b"],), "tokens' cannot be read"),
    ("tokenizer.ggml.tokens", (TOKENS_65,), "has 4 entries for 65 tokens"),
    ("tokenizer.ggml.token_type", ([1, 1],), "token_type has 2 entries for 4 tokens"),
    ("tokenizer.ggml.token_type", (["a"] * 4,), "token_type[0] must be int, but is 'a'"),
    ("tokenizer.ggml.token_type", (5,), "token_type must be list, but is 5"),
    ("tokenizer.ggml.model", (5,), "model must be str, but is 5"),
    ("tokenizer.ggml.model", ("magic",), "tokenizer.ggml.model 'magic' is not supported"),
    ("tokenizer.ggml.model", ("llama",), "the metadata key 'tokenizer.ggml.scores' is missing"),
    ("tokenizer.ggml.pre", (5,), "pre must be str, but is 5"),
    ("tokenizer.ggml.pre", ("mine",), "tokenizer.ggml.pre 'mine' is not supported"),
    ("tokenizer.ggml.add_bos_token", ("yes",), "add_bos_token must be bool, but is 'yes'"),
    ("tokenizer.chat_template", (5,), "chat_template must be str, but is 5"),
    ("tokenizer.chat_template", (b"\xff\xff",), "chat_template' cannot be read"),
    ("general.architecture", (b"\xff",), "architecture' cannot be read"),
    ("general.architecture", (5,), "architecture must be str, but is 5"),
    ("split.count", ("two",), "split.count must be int, but is 'two'"),
    ("llama.expert_count", (8,), "llama.expert_count is not supported"),
    ("llama.attention.head_count", (0, [4, 4], "4"), "num_attention_heads must be a whole number from 1"),
    ("llama.rope.dimension_count", (8,), "llama.rope.dimension_count is 8, but head_dim is 16"),
    ("llama.rope.scaling.type", ("yarn",), "rope scaling 'yarn' is not supported"),
    ("llama.block_count", (9000,), "num_hidden_layers is 9000, but the weights have 2 layers"),
    ("llama.embedding_length", (32, 2**30), "has shape"),
)
def test_gguf_metadata(name, value, words, tmp_path):
    file = gguf_file(tmp_path / "m.gguf", put(name, value))
    refusal(lambda: load(file), "m.gguf", words)


def test_more_tokens_than_embeddings(tmp_path):
    edits = put("tokenizer.ggml.tokens", TOKENS_65), put("tokenizer.ggml.token_type", [1] * 65)
    file = gguf_file(tmp_path / "m.gguf", *edits)
    refusal(lambda: load(file), "m.gguf: 65 tokens, but embeddings for 64 only")


@pytest.mark.parametrize("start", [*range(0, 2505 if SOAK else 60, 15), 1616, 3044])
def test_damaged_gguf(start, tmp_path):
    """Bits flipped in metadata, vocabulary and tensor table, and files cut anywhere."""
    whole = gguf_file(tmp_path / "whole.gguf")
    raw, tensors = whole.read_bytes(), gguf.GGUFReader(whole).data_offset
    for seed in range(start, start + 15):
        read_or_refused(tmp_path / "m.gguf", damaged(raw, seed, tensors), load)
    count("damaged GGUF files", 15)


# ------------------------------------------------------------------------------------------- traces

LINES = [json.loads(json.dumps(record.to_json())) for record in ready_setup().lines()]


def changed(line, path, value):
    """The text of a trace in which one line has another value at a dotted path."""
    lines = copy.deepcopy(LINES)
    *above, last = path.split(".")
    at = lines[line]
    for key in above:
        at = at[key]
    at[last] = value
    return "\n".join(map(json.dumps, lines))


@each(
    ("config.num_blocks config.block_size", (0, -1, 10**9, "4", 1.5, None, True), "config's KEY must be"),
    ("config.max_num_batched_tokens config.max_num_seqs", (0, "4", None), "the header's config's KEY must"),
    ("config.prefix_caching config.policy", (5, None), "the header's config's KEY must be"),
    ("config", (None, 5, [], {}), "the header"),
    ("clock unit backend", (None, 5), "the header's KEY must be"),
    ("clock", ("sundial",), "the header's 'clock' must be virtual or wall, but is 'sundial'"),
    ("parts", ({"Scheduler": 5},), "the header's 'parts' must be"),
    ("cached_blocks", ([99],), "the header's 'cached_blocks' must be 0 to 19, but is 99"),
    ("requests", ([{"request_id": "x"}],), "the header's request has no 'num_prompt_tokens'"),
)
def test_headers_of_traces(name, value, words, tmp_path):
    (tmp_path / "bad.jsonl").write_text(changed(0, name, value))
    refusal(lambda: read_trace(tmp_path / "bad.jsonl"), "bad.jsonl, line 1: ", words)


def scheduled(**changes):
    return [{"type": "SCHEDULED", "id": "r0", "num_cached_tokens": 0, "cached_blocks": []} | changes]


def finished(name):
    return [{"type": "FINISHED", "id": name, "reason": "stop"}]


@each(
    ("t t_end", (None, "1", NAN, INF, True, []), "the step's KEY must be"),
    ("num_running num_batched_tokens num_free_blocks", (None, 1.5, "2", 2**60), "the step's KEY must be"),
    ("scheduled blocks new_tokens events", (None, 5, "r0"), "the step's KEY must be"),
    ("scheduled.x", (1,), "names request 'x', which was never QUEUED"),
    ("blocks.x new_tokens.x", ([1],), "names request 'x', which was never QUEUED"),
    ("step", (0,), "the step's 'step' must increase, but is 0 after 0"),
    ("t_end", (0.5,), "must not decrease"),
    ("t", (-1,), "must not decrease"),
    ("scheduled.r0", (-5,), "the step's 'scheduled' must be at least 0, but is -5"),
    ("blocks.r0", ([20],), "the step's 'blocks' must be 0 to 19, but is 20"),
    ("blocks.r0", ([-1],), "the step's 'blocks' must be 0 to 19, but is -1"),
    ("num_free_blocks", (21,), "the step's 'num_free_blocks' must be 0 to 20, but is 21"),
    ("blocked", ({"reason": None},), "the step's 'blocked''s 'reason' must be str"),
    ("events", ([7], [{"type": ["QUEUED"], "id": "a"}]), "the event's 'type' must be one of"),
    ("events", (scheduled(num_cached_tokens=-1),), "num_cached_tokens' must be at least 0"),
    ("events", (scheduled(num_forked_tokens=1),), "num_forked_tokens' must be 0 to 0, but is 1"),
    ("events", (scheduled(cached_blocks=[77]),), "cached_blocks' must be 0 to 19, but is 77"),
    ("events", (finished("x"),), "the event's 'id' names request 'x'"),
    ("events", (finished("\ud800"),), "must be text without lone surrogates"),
    ("scheduled.\ud800", (1,), "must be text without lone surrogates"),
)
def test_steps_of_traces(name, value, words, tmp_path):
    """The second step stands in line 3; what is wrong there is named with line and field."""
    (tmp_path / "bad.jsonl").write_text(changed(2, name, value))
    refusal(lambda: read_trace(tmp_path / "bad.jsonl"), "bad.jsonl, line 3: ", words)


def test_a_wrong_scheduler_that_goes_on_with_what_has_finished_can_be_exported():
    trace = ready_setup()
    first = next(iter(trace.steps[0].scheduled))
    trace.steps[0].events += [Finished(first, "abort"), Finished(first, "abort")]
    assert to_perfetto(trace)["traceEvents"]


HEADER, FIRST, *_ = map(json.dumps, LINES)
END = json.dumps({"end": "drained", "step": 1, "events": finished("x")})


@table(
    [
        ("deep", "[" * 100_000, "line 1: nested too deeply for a trace"),
        ("digits", '{"trace":' + "9" * 5000 + "}", "line 1: "),
        ("two files", "\n".join([*map(json.dumps, LINES), FIRST]), "a line after the end of the trace"),
        ("no header", FIRST, "line 1: not the header"),
        ("an unknown request", f"{HEADER}\n{END}", "line 2: the event's 'id' names request 'x'"),
    ]
)
def test_trace_files(row, tmp_path):
    (tmp_path / "bad.jsonl").write_text(row[1])
    refusal(lambda: read_trace(tmp_path / "bad.jsonl"), "bad.jsonl", row[2])


@pytest.mark.parametrize("seed", range(300 if SOAK else 12))
def test_a_trace_that_is_read_can_be_looked_at(seed, tmp_path):
    """Values of the file exchanged at random: refused with its line, or good for every view of it."""
    rng, lines = random.Random(seed), copy.deepcopy(LINES)
    for _ in range(rng.randint(1, 2)):
        at = rng.choice(lines[: rng.choice([1, 8])])
        while isinstance(at, dict | list) and at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key, holder = rng.choice(keys), at
            at = at[key]
        holder[key] = rng.choice(
            [None, 0, -1, 2**40, 10**400, 1e300, "", "x", "[/b]", "$\\frac$", [], {}, True, [[]], 1.5]
        )
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    views = ["summary", f"export -o {tmp_path}/t.json", f"play --no-open -o {tmp_path}/t.html"]
    for view in [*views, *([f"timeline -o {tmp_path}/t.png"] if seed % 6 == 0 else [])]:
        verb, *options = view.split()
        ended = command("trace", verb, file, *options)
        assert ended.exit_code in (0, 2), (ended.output, ended.exception)
        assert len(ended.stderr.splitlines()) <= 1


# ---------------------------------------------------------------------------------------- workloads

ARRIVAL = {"timestamp": 0, "input_length": 4, "output_length": 2}


@each(
    ("input_length output_length", (0, -1, 1.5, "4", None, True, 10**12, [4]), "a whole number from 1 to"),
    ("timestamp", (None, "0", NAN, INF, True, HUGE, [0]), "timestamp must be a number of milliseconds"),
    ("prefix_length", ("x", 1.5, -1, 10**12, [1], True), "prefix_length must be a whole number from 0"),
    ("prefix_group", ([1], {}, 1.5, True), "prefix_group must be a name or a number"),
    ("priority", (None, "high", 1.5, True, HUGE), "priority must be a whole number"),
    ("hash_ids", (None, 5, "abc", {"a": 1}), "hash_ids must be a list"),
    ("hash_ids", (["a"], [1.5], [-1], [None], [HUGE], [10**40]), "hash_ids must be a whole number"),
    ("hash_ids", ([0] * 20_000,), "hash_ids has 20000 entries"),
    ("colour", ("red",), "colour"),
)
def test_workloads(name, value, words, tmp_path):
    file = tmp_path / "w.jsonl"
    group = {"prefix_group": "a"} if name == "prefix_length" else {}
    file.write_text(json.dumps(ARRIVAL) + "\n" + json.dumps(ARRIVAL | group | {name: value}))
    refusal(lambda: list(read_arrivals(file)), "w.jsonl, line 2: not an arrival (", name, words)


@table(
    [
        ("latin-1", b'{"timestamp": 0, "input_length": 4, "prefix_group": "\xe9"}', "lone surrogate"),
        ("json", b"{", "Expecting property name"),
        ("deep", b"[" * 100_000, "nested too deep"),
        ("list", b"[]", "a JSON object is needed, not []"),
        ("missing", b'{"timestamp": 0}', "input_length"),
    ]
)
def test_lines_of_workloads(row, tmp_path):
    (tmp_path / "w.jsonl").write_bytes(row[1])
    refusal(lambda: list(read_arrivals(tmp_path / "w.jsonl")), "w.jsonl, line 1: not an arrival (", row[2])


# ------------------------------------------------------------------------------------- command line


def command(*arguments, **kwargs):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **kwargs)


COMMANDS = [
    ("generate -p a\udcff", "--prompt has a lone surrogate"),
    ("generate -p a --device cuda:99", "CUDA device"),
    ("generate -p a --dtype int8", "dtype must be auto"),
    ("generate -p a --temperature nan", "temperature must be"),
    ("generate -p a -m FOLDER", "config.json: there is no such file"),
    ("generate -p a -m bad.gguf", "bad.gguf: not a whole GGUF file"),
    ("generate -p a -m gpt5", "unknown model 'gpt5'"),
    ("generate -p a -m ./nowhere", "no such folder or file"),
    ("generate -p ", "empty prompt"),
    ("generate -p a -m ", "model must be a name or a path, but is ''"),
    ("generate -p a -n 0", "n must be a whole number from 1"),
    ("generate -p a -n 2 -t 0", "n must be 1 with temperature 0"),
    ("generate -p a --min-tokens 99", "min_tokens must be at most max_tokens 64"),
    ("generate -p a --presence-penalty 3", "presence_penalty must be between -2 and 2"),
    ("generate -p a --frequency-penalty nan", "frequency_penalty must be between -2 and 2"),
    ("generate -p a --logprobs 68", "logprobs 68 exceeds the vocabulary of 67 tokens"),
    ("generate -p a --seed -1", "seed must be a whole number, 0 or more"),
    ("simulate --seed -1", "Usage"),
    ("generate -p a --max-tokens 999999", "exceeds the model's length"),
    ("generate -p a --chat", "chat template"),
    ("chat --model shakespeare", "no chat template"),
    ("trace play", "give a trace.jsonl"),
    ("chat --system a\udcff", "--system has a lone surrogate"),
    ("demo --out t.jsonl/deeper", "t.jsonl is not a writable folder"),
    ("trace timeline t.jsonl -o t.jsonl", "t.jsonl is also the input; name another file"),
    ("trace timeline t.jsonl -o FOLDER", "is a folder; name the file to write in it"),
    ("trace timeline t.jsonl -o x.xyz", "xyz"),
    ("trace timeline t.jsonl -o t.jsonl/x.png", "t.jsonl"),
    ("trace export t.jsonl -o t.jsonl", "t.jsonl is also the input; name another file"),
    ("trace play t.jsonl t2.jsonl --no-open -o t2.jsonl", "t2.jsonl is also the input; name another file"),
    ("trace summary FOLDER", "FOLDER"),
    ("trace summary no.jsonl", "no.jsonl: there is no such file; `mini-engine demo` writes one to out/trace"),
    ("trace summary bad.gguf", "bad.gguf, line 1: not JSON"),
    ("trace fit t.jsonl", "only a trace in wall time can be fitted"),
    ("simulate -w w.jsonl -b mixed -o w.jsonl", "No such option"),
    ("simulate -w w.jsonl -b mixed --out w.jsonl", "w.jsonl is also the input; name another file"),
    ("simulate -w nowhere.jsonl", "nowhere.jsonl"),
    ("simulate -w FOLDER", "workload must be one of"),
    ("simulate -b tidal", "baseline must be one of"),
    ("simulate --rate nan", "rate must be above 0"),
    ("simulate --fit t.jsonl", "only a trace in wall time can be fitted"),
    ("simulate --requests 99999999999999", "Usage"),
    ("simulate -b mixed --requests 3 --ttft-limit nan", "--ttft-limit must be above 0, in ms, but is nan"),
    ("simulate -b mixed --requests 3 --tpot-limit -5", "--tpot-limit must be above 0, in ms, but is -5"),
    ("simulate -b mixed --requests 3 --out pipe", "pipe is not a regular file"),
    ("simulate --replicas 0", "replicas must be 1 to 256, but is 0"),
    ("simulate --replicas 99999999999999999999", "replicas must be 1 to 256, but is 99999999999999999999"),
    ("simulate --replicas 2 --router tidal", "router must be one of random, least-loaded, prefix"),
    ("simulate --replicas 2 --prefill 2", "prefill must be 0 to 1 with 2 replicas"),
    ("simulate --replicas 2 --prefill -1", "prefill must be 0 to 1 with 2 replicas"),
    ("simulate --replicas 2 --transfer nan", "per_block must be 0 or more, in ms, but is nan"),
    ("simulate --router prefix", "--router, --prefill and --transfer are a cluster's; give --replicas, too"),
    ("simulate --prefill 1", "give --replicas, too"),
    ("simulate --replicas 2 -b mixed", "--baseline is of one engine"),
    ("simulate --replicas 2 --out FOLDER", "--out needs exactly one router; name it with --router"),
    ("simulate --replicas 2 --router prefix --requests 3 --out t.jsonl", "not a writable folder"),
    ("trace timeline t.jsonl -o pipe.png", "pipe.png is not a regular file"),
    ("trace export t.jsonl -o pipe", "pipe is not a regular file"),
    ("demo --out pipe", "pipe is not a writable folder"),
    ("models fetch gpt5", "unknown model 'gpt5'"),
    ("models fetch", "Missing argument"),
    ("kernels build x", "unexpected extra argument"),
    ("trace play --example --no-open -o t.jsonl/x", "t.jsonl is not a writable folder"),
    ("trace play t.jsonl FOLDER --no-open", "FOLDER is a folder; name a trace.jsonl in it"),
    ("trace play FOLDER t.jsonl --no-open", "the folder FOLDER is played alone"),
    ("trace play FOLDER --no-open", "FOLDER has no traces; `mini-engine simulate --replicas 2 --out` writes"),
    (
        "trace play MIXED --no-open",
        "MIXED has traces of different clocks; a cluster's have one virtual clock",
    ),
    ("trace export FOLDER", "FOLDER is a folder; name a trace.jsonl in it"),
    ("trace export t.jsonl -o t.jsonl/x", "t.jsonl is not a writable folder"),
    ("trace record-vllm", "give a scenario"),
    ("trace record-vllm nothing", "there is no scenario 'nothing'"),
    ("trace record-vllm t.jsonl", "there is no scenario 't.jsonl'"),
    ("trace record-vllm w.json", "w.json"),
    ("trace record-vllm demo -p x", "give a scenario"),
    ("trace record-vllm --prompt=", "a prompt must have at least one character"),
    ("trace record-vllm -p x --max-tokens 0", "--max-tokens"),
    ("trace record-vllm -p x --beside b.jsonl", "--beside needs a scenario"),
    ("trace record-vllm demo --beside x.jsonl -o x.jsonl", "--beside and --out are both x.jsonl"),
    ("trace record-vllm demo -m shakespeare --python nowhere", "nowhere cannot be started"),
    ("trace record-vllm demo -m shakespeare --python=", "cannot be started"),
    ("trace record-vllm demo -m shakespeare --python /bin/true", "/bin/true wrote no trace"),
    ("trace record-vllm demo -m shakespeare --python false", "vLLM failed: exit code 1"),
    ("trace record-vllm mine.json --beside x.jsonl", "its prompt is text"),
    ("trace record-vllm demo --option x", "--option must be name=value, but is 'x'"),
    ("trace record-vllm demo --option =x", "--option must be name=value, but is '=x'"),
    ("trace record-vllm demo -o FOLDER", "FOLDER is a folder; name the file to write in it"),
    ("serve --replicas 2", "2 replicas are served on Ray; add --ray"),
    ("serve --max-replicas 3", "3 replicas are served on Ray; add --ray"),
    ("serve --ray --tensor-parallel 2", "--ray and --tensor-parallel exclude each other"),
    ("serve --ray --replicas 3 --max-replicas 2", "--max-replicas 2 is less than --replicas 3"),
    ("bench -w nothing", "unknown workload 'nothing'"),
    ("bench -m gpt5", "unknown model 'gpt5'"),
    ("bench --against transformers -m FOLDER", "FOLDER"),
    ("bench --against transformers -m bad.gguf", "bad.gguf"),
    ("bench --against nothing", "there is no peer 'nothing'"),
    ("bench --against transformers/x", "transformers has no variant 'x'; it has batch|"),
    ("bench --against transformers/0", "transformers has no variant '0'"),
    ("bench --against llama.cpp/4", "llama.cpp has no variant '4'"),
    ("bench --rounds 0", "--rounds"),
    ("bench --prompts 100001", "--prompts"),
    ("bench --threads 1025", "--threads"),
    ("bench --device tpu", "device must be auto, cpu or cuda"),
    ("bench --against transformers -m shakespeare --dtype int8", "dtype must be float32 or bfloat16"),
    ("bench --speculative ngram:0", "num_speculative_tokens must be 1 to 64"),
    ("bench --out t.jsonl", "t.jsonl is not a writable folder"),
    ("bench peers nothing", "no environment is made for 'nothing'"),
    ("bench gpu --device tpu", "device must be auto, cpu or cuda"),
    ("bench gpu --requests 0", "--requests"),
    ("bench scheduler --nano-vllm FOLDER", "FOLDER is not nano-vllm's source"),
    ("bench scheduler --requests 100001", "--requests"),
]


def fill(folder):
    """Write what commands read."""
    (folder / "FOLDER").mkdir()
    (folder / "MIXED").mkdir()
    for name, unit in (("t", "step"), ("t2", "step"), ("MIXED/steps", "steps"), ("MIXED/ms", "ms")):
        trace = ready_setup()
        write_trace(folder / f"{name}.jsonl", replace(trace, header=replace(trace.header, unit=unit)))
    if PIPES:
        os.mkfifo(folder / "pipe")
        os.mkfifo(folder / "pipe.png")
    (folder / "bad.gguf").write_bytes(b"not a model")
    (folder / "w.jsonl").write_text(json.dumps(ARRIVAL))
    asked = {"id": "a", "prompt": "Hi", "max_tokens": 1}
    mine = {"name": "x", "config": {"num_blocks": 4}, "requests": [asked]}
    (folder / "mine.json").write_text(json.dumps(mine))
    return folder


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder for tests that leave its files as they are."""
    return fill(tmp_path_factory.mktemp("files"))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(fill(tmp_path))


PIPES = hasattr(os, "mkfifo")  # Windows has none


@table([row for row in COMMANDS if PIPES or "pipe" not in row[0]])
def test_commands(row, filled, monkeypatch):
    monkeypatch.chdir(filled)
    line, words = row
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    ended = command(*line.split(" "))
    assert ended.exit_code == 2, (ended.output, ended.exception)
    assert words in ended.stderr, ended.stderr
    said = [line for line in ended.stderr.splitlines() if not line.startswith(("loading ", "starting "))]
    assert len(said) == 1 or "Usage" in said[0]
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


def test_pictures_and_pages_go_where_it_says(files):
    """A name without a suffix gets one, and it says so; folders are made; $ and [ in an id are letters."""
    lines, ids = json.dumps(LINES), ("a$x^$", "job[/x]", "user[a]")
    for i, name in enumerate(ids, 1):
        lines = lines.replace(f'"r{i}"', f'"{name}"')
    Path("t.jsonl").write_text("\n".join(map(json.dumps, json.loads(lines))))
    assert command("trace", "timeline", "t.jsonl", "-o", "new/pic").stdout == "wrote new/pic.png\n"
    assert Path("new/pic.png").is_file()
    assert command("trace", "export", "t.jsonl", "-o", "newer/x.json").exit_code == 0
    assert Path("newer/x.json").is_file()
    printed = command("trace", "summary", "t.jsonl").stdout
    assert all(name in printed for name in ids)


def test_what_a_simulation_refuses_it_names(files):
    Path("w.jsonl").write_text(json.dumps(ARRIVAL | {"input_length": 20_000}))
    printed = command("simulate", "-w", "w.jsonl", "-b", "mixed").stdout
    assert "mixed refused 1 request that" in printed and "'r0'" in printed and "20000" in printed


@pytest.fixture
def chats(monkeypatch):
    """The embedded model with a chat template."""
    tokenizer = load_tokenizer(resolve("shakespeare"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    asked, encode = [], type(tokenizer).encode_chat

    def noted(self, messages):
        asked.append([message["content"] for message in messages])
        return encode(self, messages)

    monkeypatch.setattr(type(tokenizer), "encode_chat", noted)
    monkeypatch.setattr("mini_engine.loading.checkpoint.load_tokenizer", lambda path: tokenizer)
    return asked


def test_a_chat_goes_on_when_its_context_is_full(chats):
    """The system message and the latest turns stay; a message too long by itself is refused, and no more."""
    lines = ["a" * 300, "b" * 300, "c" * 5000, "d", "", ""]
    ended = command("chat", "-m", "shakespeare", "--max-tokens", "3", "--system", "S", input="\n".join(lines))
    assert ended.exit_code == 0, ended.output
    assert "the context is full" in ended.stderr and "exceeds the model's length" in ended.stderr
    assert chats[-1][0] == "S" and chats[-1][-1] == "d" and "c" * 5000 not in chats[-1]


def test_a_chat_goes_on_after_a_line_that_is_no_text(chats):
    ended = command("chat", "-m", "shakespeare", "--max-tokens", "3", input=b"caf\xe9\nhello\n\n")
    assert ended.exit_code == 0 and "lone surrogate" in ended.stderr
    assert chats[-1] == ["hello"]


# ------------------------------------------------------------------------- the process and its streams

MAIN = [sys.executable, "-c", "from mini_engine.commands import main; main()"]


STREAMS = [
    ("full disk, help", "--help > /dev/full", 2, "No space left on device"),
    ("closed pipe", "simulate -b mixed --requests 3 | true", 0, ""),
    ("closed stdout", "simulate -b mixed --requests 3 >&-", 0, ""),
    ("not UTF-8", "generate -p $'caf\\xe9'", 2, "--prompt has a lone surrogate"),
    ("a path that is not UTF-8", "trace play --example --no-open -o $'out\\xe9.html'", 0, ""),
]
IN_SOAK = [
    ("full disk, table", "simulate -b mixed --requests 3 > /dev/full", 2, "No space left on device"),
    ("full disk", "generate -p a --max-tokens 2 > /dev/full", 2, "No space left on device"),
    ("no progress in a pipe", "generate -p a -p b --max-tokens 1 -m shakespeare | grep -c '^$'", 1, ""),
]


@table(STREAMS + IN_SOAK * SOAK)
def test_streams(row, tmp_path):
    _, line, code, words = row
    ended = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {line}', MAIN[0], MAIN[2]], capture_output=True, cwd=tmp_path, env=ENV
    )
    said = ended.stderr.decode()
    assert ended.returncode == code and words in said and "Traceback" not in said, said
    assert len(said.splitlines()) == (1 if words else 0), said


def test_sigterm_leaves_nothing_half_written(tmp_path):
    line = "simulate -b mixed --requests 200000 --out run.jsonl".split()
    run = subprocess.Popen([*MAIN, *line], cwd=tmp_path, env=ENV, stderr=subprocess.PIPE)
    until(lambda: list(tmp_path.glob("*.part")))
    run.terminate()
    assert run.communicate(timeout=20)[1] == b"error: terminated (SIGTERM)\n"
    assert run.returncode == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_ends_the_processes_of_a_comparison(tmp_path):
    """A terminal sends it to all of them: one line is printed, and all processes end."""
    line = "simulate -b mixed -b static --requests 200000".split()
    run = subprocess.Popen([*MAIN, *line], env=ENV, stderr=subprocess.PIPE, start_new_session=True)
    listed = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    until(lambda: len(listed.read_text().split()) >= min(2, os.cpu_count() or 1))
    children = listed.read_text().split()
    time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    assert run.communicate(timeout=20)[1] == b"error: interrupted\n"
    assert run.returncode == 130
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


@pytest.mark.skipif(not PIPES, reason="Windows has no pipes in folders")
def test_no_file_takes_the_place_of_a_pipe_or_a_device(tmp_path):
    """Under --out, and in Python: a run that writes /dev/stdout or a pipe must not put a file there."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (
        lambda: write_trace(pipe, ready_setup()),
        lambda: write_player(pipe, ready_setup()),
        lambda: list(simulate(workload(num_requests=1), keep=pipe).trace.steps),
    ):
        refusal(write, "pipe is not a regular file; name another")
    assert pipe.is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("of an earlier run")

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("write_bytes", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, full)
            with pytest.raises(OSError, match="No space"):
                write_player(page, ready_setup())
        assert page.read_text() == "of an earlier run" and len(list(tmp_path.iterdir())) == 1
