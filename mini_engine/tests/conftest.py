"""Fixtures of the engine's tests; the plain functions are in helpers.py."""

import signal
from functools import cache

import pytest

from mini_engine.tests.browser import browser  # noqa: F401

# In the background of a shell Ctrl-C is ignored, by all that is started there too; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model():
    """A tiny Llama in float64, where near ties cannot hide an error."""
    from mini_engine.tests.helpers import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def shakespeare():
    """(model, tokenizer): the embedded model in float32. Shared: do not change it."""
    from mini_engine.loading.checkpoint import load

    return load("shakespeare", "float32", "cpu")


@pytest.fixture(scope="session")
def smollm2_path():
    """SmolLM2's GGUF file."""
    from mini_engine.loading import registry as models

    if not models.MODELS["smollm2"].is_present:
        pytest.skip("SmolLM2 is not here; `mini-engine models fetch smollm2` gets it")
    return models.resolve("smollm2")


@pytest.fixture(scope="session")
def smollm2_file(smollm2_path):
    """(path, what transformers' from_pretrained takes) of SmolLM2's GGUF file."""
    import gguf

    from mini_engine.loading.files import GGUFFile

    pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    path = smollm2_path
    file = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with pytest.MonkeyPatch.context() as patch:
        # gguf's own reader takes seconds, and transformers opens the file more than once; test_checkpoint
        # shows that ours reads the same. A map of names is made anew for each of 400 modules.
        patch.setattr("gguf.GGUFReader", GGUFFile)
        patch.setattr("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield path, file


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_file):
    """(path, model) of SmolLM2 as transformers reads it, float32: a gigabyte."""
    import transformers

    path, file = smollm2_file
    return path, transformers.AutoModelForCausalLM.from_pretrained(**file, dtype="float32").eval()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_file):
    """(path, tokenizer) of SmolLM2 as transformers reads it."""
    import transformers

    path, file = smollm2_file
    return path, transformers.AutoTokenizer.from_pretrained(**file)
