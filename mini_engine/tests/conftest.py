"""Fixtures of the engine's tests; the plain functions are in helpers.py."""

import signal
from functools import cache

import pytest

# In the background of a shell Ctrl-C is ignored, by all that is started there too; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model():
    """A tiny Llama in float64, where near ties cannot hide an error."""
    from mini_engine.tests.helpers import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def smollm2_oracle():
    """(path, tokenizer, model) of SmolLM2 as transformers reads them from the GGUF file, float32."""
    import gguf

    from mini_engine.loading import registry as models
    from mini_engine.loading.files import GGUFFile

    if not models.MODELS["smollm2"].is_present:
        pytest.skip("SmolLM2 is not here; `mini-engine models fetch smollm2` gets it")
    transformers = pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    path = models.resolve("smollm2")
    file = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with pytest.MonkeyPatch.context() as patch:
        # gguf's own reader takes seconds, and transformers opens the file more than once; test_checkpoint
        # shows that ours reads the same. A map of names is made anew for each of 400 modules.
        patch.setattr("gguf.GGUFReader", GGUFFile)
        patch.setattr("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map))
        tokenizer = transformers.AutoTokenizer.from_pretrained(**file)
        model = transformers.AutoModelForCausalLM.from_pretrained(**file, dtype="float32")
    return path, tokenizer, model.eval()
