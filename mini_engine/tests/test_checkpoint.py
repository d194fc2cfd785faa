"""Reading checkpoints: fused weights land where they belong, and whatever is wrong with a file is
reported in one sentence that names it. (Agreement with transformers is in test_oracle_model.)"""

import dataclasses
import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from mini_engine.loading import weights
from mini_engine.loading.checkpoint import load, load_model
from mini_engine.loading.files import GGUFFile
from mini_engine.model import sdpa
from mini_engine.tests.helpers import byte_tokenizer

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "llama-tied-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}
LAYER = "model.layers.0."


def tensors_of(config: dict) -> dict[str, torch.Tensor]:
    """Random weights of a config, under Hugging Face's names."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        linear = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        names = {f"{name}.weight": shape for name, shape in linear.items()}
        names |= {f"{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, _) in linear.items():
            qkv = name[-6:] in ("q_proj", "k_proj", "v_proj")
            attention = config.get("attention_bias") or (qkv and config["model_type"] == "qwen2")
            if attention if "attn" in name else config.get("mlp_bias"):
                names[f"{name}.bias"] = (rows,)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in names.items()}
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def write_folder(path, config, tensors=None):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config) if tensors is None else tensors, path / "model.safetensors")
    return path


def whole_folder(path):
    """A model folder with all its files, and a tokenizer of bytes."""
    config = CONFIG | {"vocab_size": 257}
    folder = write_folder(path, config)
    byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    return folder


@torch.no_grad()
def logits(model):
    ids = torch.arange(0, 64, 2)
    return model.logits(model(ids, torch.arange(len(ids)), attend))


def attend(layer, q, k, v):
    return sdpa(q[None], k[None], v[None], is_causal=True)[0]


def test_old_checkpoints_without_the_prefix_and_with_rotary_frequencies_load_the_same(tmp_path):
    """The frequencies follow from the config."""
    bare = {name.removeprefix("model."): t for name, t in tensors_of(CONFIG).items()}
    bare[f"{LAYER.removeprefix('model.')}self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    folders = write_folder(tmp_path / "new", CONFIG), write_folder(tmp_path / "old", CONFIG, bare)
    new, old = (logits(load_model(folder, device="cpu")) for folder in folders)
    assert torch.equal(new, old)


# GGUF


def write_gguf(path, config, tensors, quant=Q.F32, extra=()):
    """Write a Hugging Face checkpoint as llama.cpp's converter does."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_token_list(["a", "b", "ü"])
    writer.add_array("test.floats", [0.5, 1.5])
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config["num_hidden_layers"])
    for name, tensor in tensors.items():
        data = tensor.numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if arch == "llama" and heads:  # rows of a head: half, half -> in turn
            n = config[heads]
            data = data.reshape(n, 2, len(data) // n // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        kind = quant if data.ndim == 2 else Q.F32
        raw = data if kind == Q.F32 else quantize(data, kind)
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", raw, raw_dtype=kind)
    for add in extra:
        add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_equals_the_folder_it_was_made_from(family, tmp_path):
    config = {**CONFIG, **FAMILIES[family]}
    tensors = tensors_of(config)
    ours = load_model(write_gguf(tmp_path / "model.gguf", config, tensors), device="cpu")
    expected = load_model(write_folder(tmp_path / "model", config), device="cpu")
    assert ours.config.rms_norm_eps == pytest.approx(1e-5)  # a float32 in the file
    assert dataclasses.replace(ours.config, rms_norm_eps=1e-5) == expected.config
    for (name, found), parameter in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, parameter), name


@pytest.mark.parametrize("quant", [Q.F16, Q.BF16, Q.Q8_0], ids=lambda q: q.name)
def test_gguf_quantized_types(quant, tmp_path):
    weight = tensors_of(CONFIG)["lm_head.weight"].numpy()
    model = load_model(write_gguf(tmp_path / "m.gguf", CONFIG, tensors_of(CONFIG), quant), device="cpu")
    assert np.array_equal(model.lm_head.weight.numpy(), dequantize(quantize(weight, quant), quant))


BLOCK_TYPES = sorted(gguf.quants._type_traits, key=lambda kind: kind.name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes make scales that overflow
@pytest.mark.parametrize("heads", [None, 8])
@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_pieces_hold_what_the_package_makes_of_the_whole(kind, heads):
    """Bit for bit, of every type that the package knows, with rows of interleaved heads too."""
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 144, 512
    shape = rows, columns // block_size * type_size
    raw = np.random.default_rng(kind.value).integers(0, 256, shape, np.uint8)
    tensor = gguf.ReaderTensor(
        "t", kind, np.array([columns, rows], np.uint32), rows * columns, raw.nbytes, 0, raw, None
    )
    pieces = list(weights._values(tensor, "m.gguf", heads))
    assert len(pieces) > 2 and max(map(len, pieces)) <= weights.PIECE
    expected = dequantize(raw, kind)
    if heads:
        expected = expected.reshape(heads, -1, 2, columns).swapaxes(1, 2)
    # As bits: NaN is not equal to itself.
    assert np.array_equal(torch.cat(pieces).numpy().view(np.int32), expected.reshape(-1).view(np.int32))


def test_load_opens_a_gguf_file_once(tmp_path, monkeypatch):
    """Parsing a large vocabulary takes a tenth of a second; model and tokenizer share it."""
    words = [lambda writer: writer.add_tokenizer_model("llama"), lambda w: w.add_token_scores([0.0] * 3)]
    file = write_gguf(tmp_path / "m.gguf", CONFIG, tensors_of(CONFIG), extra=words)
    opened, init = [], GGUFFile.__init__
    monkeypatch.setattr(GGUFFile, "__init__", lambda self, path: opened.append(path) or init(self, path))
    model, tokenizer = load(file, device="cpu")
    assert opened == [file]
    assert (model.config.vocab_size, tokenizer.vocab_size, tokenizer.decode([0, 2])) == (64, 3, "aü")


def test_gguf_rope_scaling_of_llama3_is_a_tensor_and_linear_a_key(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {**CONFIG, "rope_scaling": scaling | {"original_max_position_embeddings": 32}}
    expected = load_model(write_folder(tmp_path / "model", config), device="cpu")
    plain = 1 / 1000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / expected.inv_freq).numpy()
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    add = [lambda writer: writer.add_tensor("rope_freqs.weight", factors)]
    ours = load_model(write_gguf(tmp_path / "m.gguf", CONFIG, tensors_of(CONFIG), extra=add), device="cpu")
    torch.testing.assert_close(ours.inv_freq, expected.inv_freq)
    torch.testing.assert_close(logits(ours), logits(expected), rtol=1e-4, atol=1e-4)
    linear = [lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)]
    linear.append(lambda writer: writer.add_rope_scaling_factor(4.0))
    file = write_gguf(tmp_path / "linear.gguf", CONFIG, tensors_of(CONFIG), extra=linear)
    assert load_model(file, device="cpu").config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_quick_gguf_reader_reads_what_the_package_reads(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", CONFIG, tensors_of(CONFIG), Q.Q8_0)
    ours, theirs = GGUFFile(file), gguf.GGUFReader(file)
    values, expected = ({k: (f.contents(), f.types) for k, f in r.fields.items()} for r in (ours, theirs))
    assert values == expected
    assert ours.get("tokenizer.ggml.tokens") == ["a", "b", "ü"]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine[:2] == other[:2] and np.array_equal(mine.data, other.data)


# What is wrong, in one sentence (more of it is in test_input_errors)


def refused(path, match, error=ValueError):
    with pytest.raises(error, match=match) as caught:
        load_model(path, device="cpu")
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_model(tmp_path):
    refused(tmp_path / "nowhere", "nowhere: there is no such folder or file", FileNotFoundError)
    refused(tmp_path / "nowhere.gguf", "nowhere.gguf: there is no such file", FileNotFoundError)
    (tmp_path / "model.bin").write_text("x")
    refused(tmp_path / "model.bin", "model.bin: neither a folder nor a .gguf file")
    for raw in (b"", b"a page that says: not found" * 10):
        (tmp_path / "m.gguf").write_bytes(raw)
        refused(tmp_path / "m.gguf", "m.gguf: not a whole GGUF file")


@pytest.mark.parametrize(
    "name, tensor, match",
    [
        ("mlp.up_proj.weight", None, "model.safetensors: tensor 'layers.0.mlp.up_proj.weight' is missing"),
        (
            "self_attn.k_proj.weight",
            torch.zeros(16, 64),
            r"model.safetensors: tensor 'layers.0.self_attn.k_proj.weight' has shape \(16, 64\), "
            r"but .*config.json asks for \(32, 64\)",
        ),
        # A bias that the config does not announce must not be dropped in silence.
        (
            "self_attn.q_proj.bias",
            torch.zeros(64),
            "'layers.0.self_attn.q_proj.bias' has no place in the model",
        ),
        (
            "self_attn.q_proj.weight",
            torch.zeros(64, 64, dtype=torch.int8),
            "q_proj.weight' holds torch.int8; quantized weights are read from GGUF files only",
        ),
    ],
    ids=["missing", "shape", "unexpected", "quantized"],
)
def test_tensors_that_do_not_fit_the_config(tmp_path, name, tensor, match):
    tensors = tensors_of(CONFIG) | {LAYER + name: tensor}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    refused(write_folder(tmp_path / "model", CONFIG, present), match)


@pytest.mark.parametrize("share", [0.001, 0.004, 0.5, 0.99])
def test_truncated_gguf(tmp_path, share):
    """Wherever the file ends: in its metadata, its table or its tensors."""
    file = write_gguf(tmp_path / "m.gguf", CONFIG, tensors_of(CONFIG))
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * share)])
    refused(file, "m.gguf: " + ("cut short, tensor '.*' ends" if share > 0.1 else "not a whole GGUF file"))


def test_gguf_without_a_key(tmp_path):
    writer = gguf.GGUFWriter(file := tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(file, "m.gguf: the metadata key 'llama.block_count' is missing")
