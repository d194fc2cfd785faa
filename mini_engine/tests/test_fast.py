"""The faster ways give the same results: in float64 to rounding, on SmolLM2 token for token.

Each test runs with torch alone and with kernels.cpp, which is built here where a compiler is.
"""

import ctypes
import gc
import random
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock

from mini_engine.attention import PagedBackend, paged_attention, write_kv
from mini_engine.backends.two_pass import TwoPassBackend
from mini_engine.batch import build_batch
from mini_engine.bench import measure
from mini_engine.block_manager import BlockManager
from mini_engine.engine import Engine
from mini_engine.fast import blocks, kernels, onednn, panels
from mini_engine.fast.attention import PADDING, FastBackend, groups_of_similar_length, tiles
from mini_engine.fast.model import FastLM, prepare
from mini_engine.loading import registry
from mini_engine.loading.checkpoint import load_model
from mini_engine.model import sdpa
from mini_engine.parts import Parts
from mini_engine.tests import test_isolation as isolation
from mini_engine.tests.helpers import dense_logits, generated, greedy, make_request, row, tiny_model


@pytest.fixture(scope="session")
def built(pytestconfig):
    """A folder with the kernels in it, kept until they change: to build them takes eight seconds."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler is here to build the kernels with")
    folder = pytestconfig.rootpath / "out" / "kernels"
    folder.parent.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, FileLock(f"{folder}.lock"):
        patch.setattr(kernels, "cache_dir", lambda: folder)
        kernels.build()
    return folder


@pytest.fixture
def library(built, monkeypatch):
    """The kernels are found, in this folder."""
    monkeypatch.setattr(kernels, "cache_dir", lambda: built)
    return built


@pytest.fixture(params=["torch", "kernels"])
def way(request):
    """The way to compute: FastLM's `use_kernels`, True only with kernels that are really there."""
    if request.param == "torch":
        return False
    request.getfixturevalue("library")
    assert kernels.load(torch.float64) is not None
    return True


def same(found, expected):
    return found.shape == expected.shape and (found - expected).abs().max() < 1e-11


MODELS = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one key head, dim 64": {"num_key_value_heads": 1, "head_dim": 64},
    "no groups": {"num_key_value_heads": 4, "head_dim": 8},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_model_gives_the_same_logits_of_a_padded_batch(kind, way):
    model = tiny_model(**MODELS[kind])
    fast = FastLM(model, way)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    positions = torch.tensor([[0, 1, 2, 3], [40, 41, 42, 43]])

    def attend(layer, q, k, v):
        return sdpa(q, k, v, is_causal=True) + layer

    assert same(fast.logits(fast(ids, positions, attend)), model.logits(model(ids, positions, attend)))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "one key head, dim 64", "no groups"])
def test_the_backend_gives_the_same_logits(kind, block_size, way):
    """Steps that mix first chunks, later chunks and decodes of all lengths; every logit, in float64."""
    model, rng = tiny_model(**MODELS[kind]), random.Random(1)
    backend = FastBackend(FastLM(model, way), BlockManager(400, block_size))
    requests = [
        make_request(str(i), [rng.randrange(64) for _ in range(n)]) for i, n in enumerate(range(1, 60, 7))
    ]
    assert all(map(backend.kv.admit, requests))
    num_chunks = 0
    for _ in range(8):
        rows = [row(r, min(r.num_new_tokens, 50 if i % 2 else 13)) for i, r in enumerate(requests)]
        logits = backend.forward(rows)
        for request, num_tokens, is_last in rows:
            num_chunks += num_tokens > 1 and request.num_computed_tokens > 0
            request.num_computed_tokens += num_tokens
            if is_last:
                found, logits = logits[0], logits[1:]
                assert same(found, dense_logits(model, request.token_ids())[-1])
                request.output_token_ids.append(rng.randrange(64))
                assert backend.kv.allocate(request, 1)
    assert num_chunks


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("kind", ["llama", "no groups"])
def test_decodes_that_share_blocks_give_the_same_logits(kind, block_size, way):
    """Two groups among each other and among others, with a chunk, a member that ends where its blocks do and
    one that is long; then members leave."""
    model, rng = tiny_model(**MODELS[kind]), random.Random(2)
    backend = FastBackend(FastLM(model, way), BlockManager(2000, block_size))
    starts = [[rng.randrange(64) for _ in range(n)] for n in (96, 150)]
    own = [5, 1, 16, 90, 2, 0, 33, 8, 4, 3, 48, 7]
    requests = []
    for i, num_own in enumerate(own):
        prompt = starts[i % 2] + [rng.randrange(64) for _ in range(num_own)] if i != 6 else [i] * 70
        requests.append(make_request(str(i), prompt))
        assert backend.kv.admit(requests[i])
        if ahead := requests[i].num_new_tokens - 1:
            backend.forward([row(requests[i], ahead)])
            requests[i].num_computed_tokens += ahead
        backend.kv.cache_blocks(requests[i])
    chunk = make_request("chunk", [rng.randrange(64) for _ in range(40)])
    assert backend.kv.admit(chunk)
    for present, shared, num_members in (
        (requests, (96, 149), 11),
        (requests[1:9], (96, 149), 7),
        (requests[:3], (96,), 2),
    ):
        rows = [row(r, 1) for r in present]
        rows.insert(2, row(chunk, chunk.num_new_tokens))
        pieces, members = tiles(build_batch(rows, backend.kv))
        assert {*pieces[:, 3].tolist()} == {0, *(n // block_size * block_size for n in shared)}
        assert len(members) - 1 == num_members
        logits = backend.forward(rows)
        for found, (request, _, _) in zip(logits, rows, strict=True):
            assert same(found, dense_logits(model, request.token_ids())[-1])


@pytest.mark.parametrize("block_size", [3, pytest.param(16, marks=pytest.mark.soak)])
def test_requests_are_isolated(model, monkeypatch, block_size, way):
    """test_isolation's tight pools, preemptions and poisoned slots, with FastBackend in place."""

    class Watched(isolation.Watched, FastBackend):
        def __init__(self, given, *args):
            super().__init__(FastLM(given, way), *args)

    monkeypatch.setattr(isolation, "PagedBackend", FastBackend)
    monkeypatch.setattr(isolation, "Watched", Watched)
    isolation.test_tight_pools(model, block_size, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_a_packed_product_is_the_product(dtype, rows):
    if not onednn.can_pack(dtype):
        pytest.skip(f"oneDNN does not pack {dtype} on this processor")
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, 40), (70, 40), (70,)))
    for b in (None, bias):
        linear = onednn.Linear(weight, b)
        assert linear.packed and linear(x).shape == (rows, 70)
        close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
        torch.testing.assert_close(linear(x), F.linear(x, weight, b), **close)


@pytest.mark.soak
def test_products_of_all_sizes_take_little_memory():
    """Little more is kept after 300 sizes of step than after 20: without a bound it is 300 MB."""
    code = """if True:
        import torch
        from mini_engine.fast.onednn import Linear

        def products(sizes):
            for rows in sizes:
                for linear in linears:
                    linear(torch.ones(rows, 192))
            return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20

        linears = [Linear(torch.ones(outputs, 192)) for outputs in (65, 192, 576, 1024)]
        print(-products(range(1, 21)) + products(range(21, 300)))
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("there is no /proc to read the memory from")
    grown = int(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert grown < 100, f"{grown} MB"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 13, 300])
@pytest.mark.parametrize(("outputs", "columns"), [(16, 2), (70, 41), (1, 1), (49, 576)])
def test_a_product_in_panels_is_the_product_rounded_once(dtype, rows, outputs, columns, library):
    x, weight, bias = (
        torch.randn(*shape).to(dtype) for shape in ((rows, columns), (outputs, columns), (outputs,))
    )
    for b in (None, bias):
        linear = panels.Linear(kernels.load(dtype), weight, b)
        exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
        found = linear(x)
        assert found.shape == (rows, outputs) and found.dtype == dtype
        # Half of the last of eight bits, and what float32 loses in the sums.
        close = {"rtol": 2**-8 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-4}
        torch.testing.assert_close(found.double(), exact, **close)
        # A row is summed in the same order whatever stands beside it.
        assert all(
            torch.equal(linear(x[i : i + 1])[0], found[i]) for i in [*range(min(rows, 8)), rows - 1][:rows]
        )
        assert linear.sums().shape == (1, outputs)


def test_float32_is_in_panels_where_they_are_faster(library, monkeypatch):
    """With AVX2 alone, for all of a model's matrices; with AVX-512, or without the kernels, oneDNN packs."""
    if not onednn.can_pack(torch.float32):
        pytest.skip("oneDNN does not pack float32 on this processor")
    for capability, product in (
        ("AVX2", panels.Linear),
        ("AVX512", onednn.Linear),
        ("DEFAULT", onednn.Linear),
    ):
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        fast = prepare(tiny_model().float())
        assert {type(fast.head), *(type(layer.down) for layer in fast.packed_layers)} == {product}
        assert type(prepare(tiny_model().float(), "torch").head) is onednn.Linear


def test_bfloat16_is_fast_without_instructions_for_it(library, monkeypatch):
    """SmolLM2's and Qwen's kinds of layer in panels: within rounding of the plain model, one after another
    as in a batch, and a weight that is not finite has its name."""
    monkeypatch.setattr(onednn, "can_pack", lambda dtype: False)
    monkeypatch.setattr(panels, "are_faster", lambda: False)
    assert prepare(tiny_model().float()).__class__ is not FastLM  # nothing would be faster
    for kind in ("llama", "qwen2", "tied"):
        model = tiny_model(**MODELS[kind]).bfloat16()
        assert not isinstance(prepare(model, "torch"), FastLM)
        fast = prepare(model)
        assert isinstance(fast, FastLM) and isinstance(fast.head, panels.Linear) and not fast.not_finite()
        ids, positions = torch.arange(200).remainder(64).view(10, 20), torch.arange(20).expand(10, 20)

        def attend(layer, q, k, v):
            return sdpa(q, k, v, is_causal=True)

        wide = tiny_model(**MODELS[kind])
        wide.load_state_dict({name: w.double() for name, w in model.state_dict().items()})
        exact = wide.logits(wide(ids, positions, attend))
        errors = [(m.logits(m(ids, positions, attend)) - exact).square().mean() for m in (fast, model)]
        assert errors[0] <= 1.1 * errors[1]
        with torch.no_grad():
            model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
        assert FastLM(model).not_finite() == "layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 13, 100])
@pytest.mark.parametrize(("outputs", "columns"), [(16, 32), (70, 41), (1, 1), (49, 576)])
def test_a_product_in_blocks_is_the_rounded_weights(bits, rows, outputs, columns, library):
    """The product is that of weights half a step away at most and of x in 16 bits, whatever stands beside a
    row."""
    x, weight, bias = torch.randn(rows, columns), torch.randn(outputs, columns), torch.randn(outputs)
    for b in (None, bias):
        linear = blocks.Linear(kernels.load(torch.float32), bits, weight, b)
        kept = linear.weight()
        steps = (
            F.pad(weight, (0, -columns % 32)).view(outputs, -1, 32).abs().amax(-1)
            * 2
            / (15 if bits == 4 else 254)
        )
        errors = F.pad(kept - weight, (0, -columns % 32)).view(outputs, -1, 32).abs().amax(-1)
        assert kept.shape == weight.shape and (errors <= steps / 2 + 1e-5).all()
        parts = F.pad(x, (0, -columns % 32)).unflatten(1, (-1, 32)).double()
        step = parts.abs().amax(-1, keepdim=True) / 32767
        rounded = ((parts / step).round() * step).flatten(1)[:, :columns]
        exact = F.linear(rounded, kept.double(), None if b is None else b.double())
        found = linear(x)
        assert found.shape == (rows, outputs) and found.dtype == torch.float32
        # What lies half-way between two numbers may become either, which moves a product by a step of x times
        # a weight: here by 3e-4 at most.
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=6e-4)
        assert all(torch.equal(linear(x[i : i + 1])[0], found[i]) for i in range(min(rows, 8)))
        for wrong in (float("nan"), float("inf")) if rows > 1 else ():
            spoilt = x.clone()
            spoilt[1, columns // 2] = wrong
            assert not linear(spoilt)[1].isfinite().any() and torch.equal(linear(spoilt)[0], found[0])


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_1"), (8, "Q8_0")])
def test_numbers_of_a_gguf_file_are_kept_as_they_are(bits, kind, library):
    """Blocks of all equal numbers, of zeros, and of one sign among them."""
    from gguf import GGMLQuantizationType, quants

    weight = torch.randn(64, 96) * torch.rand(64, 1)
    weight[0], weight[1], weight[2] = 0, 0.25, weight[2].abs() + 1
    stored = GGMLQuantizationType[kind]
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), stored), stored))
    kept = blocks.Linear(kernels.load(torch.float32), bits, theirs).weight()
    torch.testing.assert_close(kept, theirs, rtol=1e-5, atol=1e-6)


def test_q4_says_what_float32_says_of_the_same_weights(library, monkeypatch):
    """A model whose weights are in steps already: the same tokens through an engine, by both; one whose are
    not is another model, a weight that is not finite has its name, and what q4 needs is said."""
    packed = kernels.load(torch.float32)

    prompts = [5, 6, 7], [9] * 20, [3, 1, 4, 1, 5]
    for kind in ("llama", "qwen2", "tied"):
        small = tiny_model(dtype="float32", **MODELS[kind])
        with torch.no_grad():
            for name, weight in small.named_parameters():
                if weight.ndim == 2:
                    bits = 8 if name in ("lm_head.weight", "embed_tokens.weight") else 4
                    weight.copy_(blocks.Linear(packed, bits, weight).weight())
        expected = generated(Engine(small), prompts, greedy(20))
        small.quantized = True
        engine = Engine(small)
        assert isinstance(engine.model.packed_layers[0].down, blocks.Linear) and engine.model.head.bits == 8
        assert generated(engine, prompts, greedy(20)) == expected
    for fast in (False, "torch"):
        with pytest.raises(ValueError, match=f"dtype q4 needs the CPU and fast=True, .* fast={fast!r}"):
            Engine(small, fast=fast)
    with torch.no_grad():
        small.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    assert prepare(small).not_finite() == "layers.1.mlp.down_proj.weight"
    monkeypatch.setattr(kernels, "cache_dir", lambda: library / "none")
    with pytest.raises(ValueError, match="dtype q4 needs the kernels; run `mini-engine kernels build`"):
        Engine(small)


def test_decodes_are_grouped_by_length():
    """All are there, longest first, and no group pads more than it may; few groups where few suffice."""
    for seed in range(50):
        rng = random.Random(seed)
        lens = [rng.randint(1, 3000) for _ in range(rng.randint(1, 40))]
        groups = groups_of_similar_length(lens)
        assert [lens[i] for group in groups for i in group] == sorted(lens, reverse=True)
        assert sorted(sum(groups, [])) == list(range(len(lens)))
        assert all(sum(lens[group[0]] - lens[i] for i in group) <= PADDING for group in groups)
    assert len(groups_of_similar_length([200 + i for i in range(32)])) == 1
    assert groups_of_similar_length([9, 9000]) == [[1], [0]] and groups_of_similar_length([]) == []


# ------------------------------------------------------------------------------------- the switch


def test_it_is_the_default_where_it_applies_and_can_be_switched_off():
    small = tiny_model(dtype="float32")
    engine = Engine(small)
    assert isinstance(engine.model, FastLM) and isinstance(engine.backend, FastBackend)
    plain = Engine(small, fast=False)
    assert plain.model is small and type(plain.backend) is PagedBackend
    assert Engine(small, fast="torch").backend.kernels is None
    assert Engine(engine.model).model is engine.model, "prepared once"
    exact = tiny_model()
    assert prepare(exact) is exact, "oneDNN packs no float64"
    with pytest.raises(ValueError, match="fast must be True, False or \"torch\", but is 'no'"):
        Engine(small, fast="no")


def test_the_unpacked_weights_are_dropped_with_the_model():
    """An engine whose model is dropped has each matrix once."""
    small = tiny_model(dtype="float32")
    engine, gone = Engine(small), weakref.ref(small.layers[0].mlp.gate_up_proj.weight)
    del small
    gc.collect()
    assert gone() is None and engine.model.config.num_hidden_layers == 2


@pytest.mark.parametrize(("fast", "kind"), [(True, FastBackend), (False, PagedBackend)])
def test_two_passes_are_as_fast_and_the_trace_does_not_say_which(fast, kind):
    """The two-pass baseline computes products and attention in the engine's way, fast or simple."""
    small = tiny_model(dtype="float32")
    engine = Engine(small, parts=Parts(attend_backend=TwoPassBackend), fast=fast)
    assert type(engine.backend.paged) is kind
    header = Engine(small, record=True, fast=fast).trace.header
    assert header.backend == "paged" and header.parts == {}


def test_a_learners_functions_are_the_ones_used():
    """lab-05's write_kv and paged_attention take the place of the engine's, on the fast model too."""
    seen = set()

    def own_write(*args):
        seen.add("write")
        write_kv(*args)

    def own_attention(*args):
        seen.add("attend")
        return paged_attention(*args)

    def backend(model, kv, next_chunk):
        return PagedBackend(model, kv, next_chunk, write_kv=own_write, paged_attention=own_attention)

    engine = Engine(tiny_model(dtype="float32"), parts=Parts(attend_backend=backend))
    engine.add_request([5, 6, 7], greedy(2))
    engine.step()
    assert isinstance(engine.model, FastLM) and seen == {"write", "attend"}


# ------------------------------------------------------------------------------------ the kernels


def test_without_kernels_the_engine_runs(tmp_path, monkeypatch):
    """Not built, or damaged: torch alone, and for the latter a warning that says what to do."""
    monkeypatch.setattr(kernels, "cache_dir", lambda: tmp_path)
    assert kernels.load(torch.float32) is None
    kernels.library().write_bytes(b"no library")
    with pytest.warns(UserWarning, match="does not load .*; delete it and build it again"):
        assert FastLM(tiny_model(dtype="float32")).kernels is None


def test_a_build_is_a_library(library, tmp_path, monkeypatch):
    """A small source, for the kernels are kept: it is not built again, and only the library is left."""
    (tmp_path / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(kernels, "SOURCE", tmp_path / "one.cpp")
    monkeypatch.setattr(kernels, "cache_dir", lambda: tmp_path / "cache")
    path = kernels.build()
    assert ctypes.CDLL(str(path)).one() == 1 and [*path.parent.iterdir()] == [path]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert kernels.build() == path


def test_a_build_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "cache_dir", lambda: tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(kernels.BuildError, match="no-such-compiler cannot be run .* in CXX"):
        kernels.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(kernels.BuildError, match="install g\\+\\+ or clang\\+\\+"):
        kernels.build()
    assert list(tmp_path.iterdir()) == []


def test_another_processor_or_source_is_another_library(tmp_path, monkeypatch):
    """So a home that several machines share never runs one's instructions on the other."""
    monkeypatch.setattr(kernels, "cache_dir", lambda: tmp_path)
    here = kernels.library()
    monkeypatch.setattr(kernels.platform, "machine", lambda: "z80")
    assert kernels.library() != here


# ----------------------------------------------------------------------------- on a real model


@pytest.mark.parametrize("name", ["shakespeare", pytest.param("smollm2", marks=pytest.mark.soak)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_on_a_real_model(name, dtype, way):
    """In float32 all tokens are those of model.py and attention.py; in bfloat16 most are, where both
    read the same text so far."""
    if not registry.MODELS[name].is_present:
        pytest.skip("SmolLM2 is not here; `mini-engine models fetch smollm2` gets it")
    model = load_model(registry.resolve(name)).to(getattr(torch, dtype))
    rng, tokens = random.Random(0), []
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in (3, 40, 90, 17)]
    for fast in (False, True if way else "torch"):
        engine = Engine(model, max_num_batched_tokens=64, fast=fast)
        tokens.append(generated(engine, prompts, greedy(12, ignore_eos=True)))
    if dtype == "float32":
        assert tokens[0] == tokens[1]
    else:
        assert sum(a[0] == b[0] for a, b in zip(*tokens, strict=True)) >= 3


def test_the_little_measurements_run(library, monkeypatch):
    """At tiny sizes: a line for each product and number of rows, and for each kind of step."""
    sizes = {
        "SMOLLM2": replace(measure.SMOLLM2, vocab_size=64),
        "LAYERS": 1,
        "CACHE": 1,
        "ROWS": (1, 3),
        "PRODUCTS": {"small": (32, 48)},
    }
    for name, value in (sizes | {"STEPS": {"two": [(1, 20), (5, 5)]}}).items():
        monkeypatch.setattr(measure, name, value)
    with torch.inference_mode():
        assert [line[0] for line in measure.products("float32", 1)] == ["small, 1", "small, 3"]
        assert len([*measure.products("q4", 1)]) == 2
        (line,) = measure.attention("float32", 1)
        assert [line[0] for line in measure.sampling("float32")] == [*measure.SAMPLING]
    assert line[0] == "two" and all(float(us.replace(",", "")) > 0 for us in line[1:])
    with pytest.raises(SystemExit, match="bench.measure WHAT"):
        measure.main("everything")
