"""Text to token ids and back, the chat template, and detokenizing token by token.

The work is done by the package `tokenizers`, from a Hugging Face tokenizer.json or from the
vocabulary inside a GGUF file.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors


class Tokenizer:
    """One model's tokenizer.

    `vocab_size` is one more than the largest id; `eos_token_ids` are the ids that end a text (of
    generation_config.json, else config.json, else the tokenizer's own); `bos` is the id that opens
    one, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str,
        eos_token_ids: Sequence[int] = (),
        bos: int | None = None,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ):
        self._backend = backend
        self._source = source
        self._template = None
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos = bos
        self.chat_template = chat_template
        self._special_tokens = special_tokens or {}  # by role ("bos_token"), as chat templates see them
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_path(cls, path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder (its tokenizer.json) or of a .gguf file.

        Raises FileNotFoundError or ValueError naming the file at fault.
        """
        path = Path(path)
        return _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, in which special tokens are recognised.

        `add_special_tokens` lets the tokenizer put its own around the text (a BOS, where the model
        has been trained with one). Leave it off for chat text: the template has written them.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[dict], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation: the chat template's text, with nothing added."""
        return self.encode(
            self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that make no character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[dict], add_generation_prompt: bool = True) -> str:
        """Messages, each {"role": ..., "content": ...}, as the text the model was trained on.

        Raises ValueError when the model has no chat template, or its template refuses the messages.
        """
        import jinja2

        if self.chat_template is None:
            raise ValueError(f"{self._source} has no chat template; use a chat model, or give a plain prompt")
        try:
            if self._template is None:
                self._template = _chat_environment().from_string(self.chat_template)
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self._source} failed: {error}") from None


def _chat_environment():
    """Jinja as transformers sets it up, so that templates render the same. Templates come with
    downloaded models: the sandbox keeps them from reaching anything but the messages."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment


# Hugging Face folders


def _from_folder(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: there is no such file; a model folder holds its tokenizer there")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself, whatever is wrong
        raise ValueError(f"{file}: not a tokenizer that can be read ({error})") from None
    backend.no_truncation()  # settings for training batches that some files carry
    backend.no_padding()
    own = _read_json(path / "tokenizer_config.json")
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json")

    special = {role: _content(own[role]) for role in own if role.endswith("_token") and _content(own[role])}
    own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    eos = next(
        (e for e in (generation.get("eos_token_id"), config.get("eos_token_id"), own_eos) if e is not None),
        (),
    )
    self = Tokenizer(
        backend,
        source=str(path),
        eos_token_ids=eos if isinstance(eos, list | tuple) else (eos,),
        bos=backend.token_to_id(special["bos_token"])
        if "bos_token" in special
        else config.get("bos_token_id"),
        chat_template=_folder_chat_template(path, own),
        special_tokens=special,
    )
    if self.vocab_size > config.get("vocab_size", self.vocab_size):
        raise ValueError(
            f"{file}: token ids reach {self.vocab_size - 1}, but vocab_size in {path / 'config.json'} is "
            f"{config['vocab_size']}; tokenizer and model do not belong together"
        )
    return self


def _folder_chat_template(path: Path, tokenizer_config: dict) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _content(token) -> str | None:
    """A special token of tokenizer_config.json: a string, or a dict that says more."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None


# GGUF files

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3 groups up to three digits, Qwen 2 keeps each apart; else they split alike.
LLAMA3_SPLIT, QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
# tokenizer.ggml.pre: how text is cut before merging; the regexes that follow one another.
SPLITS = {
    "default": [GPT2_SPLIT],
    "gpt-2": [GPT2_SPLIT],
    "smollm": [r"\p{N}", GPT2_SPLIT],
    "llama-bpe": [LLAMA3_SPLIT],
    "qwen2": [QWEN2_SPLIT],
}


def _from_gguf(path: Path) -> Tokenizer:
    from mini_engine.loading.gguf_file import GGUFFile

    gguf = GGUFFile(path)
    tokens = gguf.need("tokenizer.ggml.tokens")
    model = gguf.need("tokenizer.ggml.model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if build is None:
        raise ValueError(f"{path}: tokenizer.ggml.model {model!r} is not supported; gpt2 and llama are")
    backend, add_bos = build(gguf, tokens)
    kinds = gguf.get("tokenizer.ggml.token_type") or []
    typed = list(zip(tokens, kinds, strict=False))
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in typed if k == CONTROL]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in typed if k == USER_DEFINED])

    ids = {
        role: gguf.get(f"tokenizer.ggml.{role}_token_id")
        for role in ("bos", "eos", "eot", "unknown", "padding")
    }
    if gguf.get("tokenizer.ggml.add_bos_token", add_bos) and ids["bos"] is not None:
        bos = tokens[ids["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, ids["bos"])]
        )
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        backend,
        source=str(path),
        eos_token_ids=[ids[role] for role in ("eos", "eot") if ids[role] is not None],
        bos=ids["bos"],
        chat_template=gguf.get("tokenizer.chat_template"),
        special_tokens={role: tokens[ids[key]] for key, role in roles.items() if ids[key] is not None},
    )


def _byte_level(gguf, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""
    pre = gguf.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ValueError(f"{gguf.path}: tokenizer.ggml.pre {pre!r} is not supported; {', '.join(SPLITS)} are")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.need("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    llama3 = pre == "llama-bpe"
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=llama3))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(regex), "isolated") for regex in SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _sentencepiece(gguf, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE with byte fallback (Kudo and Richardson, SentencePiece, 2018).

    The file gives each piece a score instead of a list of merges: the pair that makes the piece
    with the best score is merged first.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = gguf.need("tokenizer.ggml.scores")
    kinds = gguf.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    merges = [
        (-scores[i], (token[:cut], token[cut:]))
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda merge: merge[0])
    unknown = tokens[kinds.index(UNKNOWN)] if UNKNOWN in kinds else None
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [pair for _, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # A space goes before the text, also where it begins with one: so SentencePiece has it.
    space = gguf.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True
