"""Tokenizers, chat templates, and text that streams without ever splitting a character.

(SmolLM2's token ids and chat text against transformers are in test_oracle_model.)
"""

import json

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers, processors

from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.text.detokenizer import Detokenizer
from mini_engine.text.tokenizer import Tokenizer

TEXT = "Grüße, 世界! 👨‍👩‍👧 naïve — don't  stop 123\n\tdef f(x): return x\r\n é"
SPECIAL = ["<|end|>", "<|user|>", "<|begin|>"]


def byte_level() -> tokenizers.Tokenizer:
    """256 byte tokens, and merges of English alone: every other character takes several tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": SPECIAL}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=292, show_progress=False, **alphabet)
    backend.train_from_iterator(["the quick brown fox don't stop returning " * 20], trainer)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """In the manner of Llama 2: a metaspace, bytes for what the vocabulary lacks, a strip."""
    vocab = {"<unk>": 0, "<|end|>": 1} | {f"<0x{i:02X}>": 2 + i for i in range(256)}
    vocab |= {token: 258 + i for i, token in enumerate(["▁", "a", "b", "c", "▁a", "▁ab", "ab"])}
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b")]
    bpe = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(list(steps))
    backend.add_special_tokens(["<|end|>"])
    return backend


BYTE_LEVEL = Tokenizer(byte_level(), source="byte level")
BYTE_FALLBACK = Tokenizer(byte_fallback(), source="byte fallback")


def streamed(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.feed(i) for i in ids] + [detokenizer.flush()]


# Detokenizer


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_character_comes_whole_or_not_at_all(tokenizer):
    """No delta holds a replacement character, though most characters here take several tokens."""
    ids = tokenizer.encode(TEXT)
    deltas = streamed(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)
    assert len(ids) > len(TEXT) and deltas.count("") > 10  # characters were in fact held back


@settings(deadline=None)  # of a busy machine
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_deltas_add_up_to_decode(tokenizer, data, skip):
    """Broken bytes, special tokens and all; what has come is never taken back."""
    if tokenizer is BYTE_LEVEL:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    else:
        ids = tokenizer.encode(data.draw(st.text(max_size=40)))
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)


def test_flush_gives_what_an_unfinished_character_is_worth():
    ids = BYTE_LEVEL.encode("ab世")[:-1]
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert "".join(map(detokenizer.feed, ids)) == "ab"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_context_decides_about_the_leading_space():
    """A decoder that strips the first space of a text must not strip that of a continuation."""
    ids = BYTE_FALLBACK.encode("ab ab")
    assert "".join(streamed(BYTE_FALLBACK, ids[1:])) == "ab"
    assert "".join(streamed(BYTE_FALLBACK, ids[1:], context=ids[:1])) == " ab"


STREAMS = {
    "text": BYTE_LEVEL.encode("the quick brown fox ") * 200,
    "characters of three tokens": BYTE_LEVEL.encode("世") * 700,
    "broken bytes": BYTE_LEVEL.encode("世")[:1] * 2000,
    "special tokens": BYTE_LEVEL.encode("<|end|>") * 2000,  # ignore_eos
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_token_costs_the_same_however_long_the_text_is(name, monkeypatch):
    """Counted in tokens handed to the decoder, not in seconds."""
    stream, decoded, decode = STREAMS[name], [], Tokenizer.decode

    def counted(self, ids, **options):
        decoded.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    text = "".join(streamed(BYTE_LEVEL, stream))
    assert max(decoded, default=0) < 20
    assert sum(decoded) < 60 * len(stream)
    assert text == decode(BYTE_LEVEL, stream)


# Hugging Face folders


@pytest.fixture
def folder(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", eos_token="<|end|>", bos_token={"content": "<|begin|>"})
    return tmp_path


def write(folder, name, **values):
    (folder / name).write_text(json.dumps(values))


def test_folder_roundtrip_and_special_tokens(folder):
    tokenizer = load_tokenizer(folder)
    text = f"<|user|>{TEXT}<|end|>"
    ids = tokenizer.encode(text)
    assert ids[0] == SPECIAL.index("<|user|>") and ids[-1] == SPECIAL.index("<|end|>")
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.bos) == (292, (0,), 2)


def test_eos_ids_come_from_the_generation_config_first(folder):
    write(folder, "config.json", eos_token_id=1)
    assert load_tokenizer(folder).eos_token_ids == (1,)
    write(folder, "generation_config.json", eos_token_id=[2, 0])
    assert load_tokenizer(folder).eos_token_ids == (2, 0)


def test_bos_is_added_only_where_the_model_s_own_tokenizer_does(folder):
    assert load_tokenizer(folder).encode("the")[0] != 2
    backend = byte_level()
    special = [("<|begin|>", 2)]
    backend.post_processor = processors.TemplateProcessing(["<|begin|>", "$A"], special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("the")[0] == 2
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 2


def test_training_time_truncation_and_padding_are_dropped(folder):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("a")) == 1


def test_more_tokens_than_the_config_has(folder):
    write(folder, "config.json", vocab_size=290)
    with pytest.raises(ValueError, match="tokenizer.json: token ids reach 291, but vocab_size in .* is 290"):
        load_tokenizer(folder)


# Chat templates

TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {% if m['role'] == 'tool' %}
        {{ raise_exception('no tools here') }}
    {% endif %}
<|user|>{{ m['content'] | trim }}{% endfor %}
{% if add_generation_prompt %}<|end|>{{ {'a': '<é>'} | tojson }}{% endif %}"""
MESSAGES = [{"role": "user", "content": " hi "}, {"role": "user", "content": "ho"}]


@pytest.mark.parametrize("where", ["string", "list", "file"])
def test_chat_template_wherever_it_is_written(folder, where):
    if where == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        write(folder, "tokenizer_config.json", bos_token="<|begin|>", chat_template="not this one")
    else:
        named = [{"name": "rag", "template": "not this"}, {"name": "default", "template": TEMPLATE}]
        template = TEMPLATE if where == "string" else named
        write(folder, "tokenizer_config.json", bos_token="<|begin|>", chat_template=template)
    tokenizer = load_tokenizer(folder)
    text = "<|begin|><|user|>hi<|user|>ho"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == text
    text += '<|end|>{"a": "<é>"}'
    assert tokenizer.apply_chat_template(MESSAGES) == text
    assert tokenizer.encode_chat(MESSAGES) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode_chat(MESSAGES)[:2] == [2, 1]


def test_chat_template_equals_transformers(folder):
    transformers = pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    write(folder, "tokenizer_config.json", bos_token="<|begin|>", chat_template=TEMPLATE)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False)
        assert ours.apply_chat_template(MESSAGES, prompt) == expected


def test_chat_template_errors(folder):
    with pytest.raises(ValueError, match="has no chat template; use a chat model, or give a plain prompt"):
        load_tokenizer(folder).apply_chat_template(MESSAGES)
    for template, match in (
        (TEMPLATE, "the chat template of .* failed: no tools here"),
        ("{% if %}", "the chat template of .* failed: Expected an expression"),
    ):
        write(folder, "tokenizer_config.json", chat_template=template)
        with pytest.raises(ValueError, match=match):
            load_tokenizer(folder).apply_chat_template([{"role": "tool", "content": ""}])


# GGUF


def write_gguf(path, backend, pre=None, scores=None, merges=None, **flags):
    """The vocabulary of a tokenizers.Tokenizer, as llama.cpp's converter writes it."""
    state = json.loads(backend.to_str())
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.get)
    special = {token["content"] for token in state["added_tokens"]}
    kinds = [3 if t in special else 2 if t == "<unk>" else 6 if t.startswith("<0x") else 1 for t in tokens]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if scores else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pre:
        writer.add_tokenizer_pre(pre)
    if scores:
        writer.add_token_scores([scores.get(token, 0.0) for token in tokens])
    else:
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]][:merges])
    writer.add_eos_token_id(vocab["<|end|>"])
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("gpt-2", ["don", "'t", " stop", " 1234", "  ", " x", "!!", "\n"]),
        ("default", ["don", "'t", " stop", " 1234", "  ", " x", "!!", "\n"]),
        ("smollm", ["don", "'t", " stop", " ", "1", "2", "3", "4", "  ", " x", "!!", "\n"]),
        ("llama-bpe", ["don", "'t", " stop", " ", "123", "4", "  ", " x", "!!\n"]),
        ("qwen2", ["don", "'t", " stop", " ", "1", "2", "3", "4", "  ", " x", "!!\n"]),
    ],
)
def test_gguf_byte_level_cuts_text_and_comes_back(pre, pieces, tmp_path):
    """Text is cut before merging, which decides about digits, spaces and punctuation."""
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level(), pre, eot_token_id=1))
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str("don't stop 1234   x!!\n")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == pieces
    text = f"<|user|>{TEXT}<|end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == 1 and ids[-1] == 0 and tokenizer.eos_token_ids == (0, 1)
    if pre in ("gpt-2", "default"):  # the split of the tokenizer that it was made from
        assert tokenizer.encode(TEXT * 3) == BYTE_LEVEL.encode(TEXT * 3)


def test_gguf_rules_beside_the_split(tmp_path):
    """Llama 3 takes a word that is in the vocabulary whole, merges or not; Qwen 2 composes
    characters first."""
    llama3 = load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level(), "llama-bpe", merges=1))
    gpt2 = load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level(), "gpt-2", merges=1))
    word = " returning"
    assert len(llama3.encode(word)) == 1 < len(gpt2.encode(word))
    qwen2 = load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level(), "qwen2"))
    composed, decomposed = "\u00e9", "e\u0301"
    assert qwen2.encode(decomposed) == qwen2.encode(composed)
    assert gpt2.encode(decomposed) != gpt2.encode(composed)


def test_gguf_bos(tmp_path):
    """Added where the file says so, and by Llama 3's files without a word; by no other."""
    for pre, flags, adds in (
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ):
        file = write_gguf(
            tmp_path / "m.gguf", byte_level(), pre, bos_token_id=2, chat_template=TEMPLATE, **flags
        )
        tokenizer = load_tokenizer(file)
        assert (tokenizer.encode("the")[0] == 2) == adds
        assert tokenizer.encode("the", add_special_tokens=False)[0] != 2
        assert tokenizer.bos == 2 and tokenizer.apply_chat_template(MESSAGES).startswith(
            "<|begin|><|user|>hi"
        )


def test_gguf_sentencepiece_equals_transformers(tmp_path):
    """Scores instead of merges: a trained vocabulary, its ranks written as scores."""
    transformers = pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    special = ["<unk>", "<s>", "<|end|>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.train_from_iterator([__doc__, *map(str, range(99)), "the quick brown fox " * 9], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in ("<s>", "<|end|>")]
    # Ids in another order than the scores: what is merged first must not follow from the ids.
    vocab = state["model"]["vocab"]
    last = len(vocab) - 1 + len(special)
    state["model"]["vocab"] = {t: i if i < len(special) else last - i for t, i in vocab.items()}
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    scores = {"".join(pair): -1.0 - rank for rank, pair in enumerate(state["model"]["merges"])}
    file = write_gguf(tmp_path / "m.gguf", backend, scores=scores, bos_token_id=1, unk_token_id=0)
    ours = load_tokenizer(file)
    merges = [tuple(pair) for pair in state["model"]["merges"]]
    theirs = transformers.LlamaTokenizer(vocab=backend.get_vocab(), merges=merges)
    quick = ["the quick fox", "stops  at the thing ", "quickly, 世界\n", " a leading space"]
    for text in (__doc__.strip(), TEXT, *quick):
        if not text.startswith(" "):  # transformers swallows that space; SentencePiece does not
            assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text)[0] == 1  # SentencePiece models open with BOS where the file is silent
        assert ours.decode(ours.encode(text)) == text
    pieces = map(ours._backend.id_to_token, ours.encode("the quick brown fox"))
    assert max(map(len, pieces)) > 4  # merges did happen
