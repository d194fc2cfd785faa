"""Loading a tokenizer from a folder (tokenizer.json), or from a GGUF file (vocabulary, merges or scores).

Nothing here imports torch: reading a tokenizer must not cost the seconds that torch takes.
"""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from mini_engine.checks import shown
from mini_engine.loading.files import GGUFFile, ModelPath, opened, read_json
from mini_engine.sampling_params import SamplingParams
from mini_engine.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By tokenizer.ggml.pre: the regexes that split text before merging, one after the other.
SPLITS = {
    "default": [GPT2_SPLIT],
    "gpt-2": [GPT2_SPLIT],
    "smollm": [r"\p{N}", GPT2_SPLIT],
    "llama-bpe": [LLAMA3_SPLIT],
    "qwen2": [LLAMA3_SPLIT.replace("{1,3}", "")],  # each digit alone
}
# What the makers of a model advise, and the field of SamplingParams: transformers' names, and llama.cpp's.
GENERATION_KEYS = {key: key for key in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
GENERATION_KEYS["max_new_tokens"] = "max_tokens"
GGUF_KEYS = {f"general.sampling.{key}": key for key in ("top_k", "top_p", "min_p")}
GGUF_KEYS |= {"general.sampling.temp": "temperature", "general.sampling.penalty_repeat": "repetition_penalty"}
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def load_tokenizer(path: ModelPath) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder (its tokenizer.json) or of a .gguf file.

    Raises FileNotFoundError or ValueError naming the file at fault.
    """
    source = opened(path)
    return _from_folder(source) if isinstance(source, Path) else _from_gguf(source)


def _from_folder(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: there is no such file; a model folder holds its tokenizer there")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{file}: not a tokenizer that can be read ({why})") from None
    backend.no_truncation()  # settings for training batches that some files carry
    backend.no_padding()
    own, config, generation = (
        read_json(path / name) if (path / name).is_file() else {}
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    special = _special_tokens(own, path / "tokenizer_config.json")
    ids = {role: backend.token_to_id(special[role]) for role in special.keys() & {"bos_token", "eos_token"}}
    given = (generation.get("eos_token_id"), config.get("eos_token_id"), ids.get("eos_token"))
    eos = next((e for e in given if e is not None), ())
    eos = eos if isinstance(eos, list | tuple) else (eos,)
    bos = ids.get("bos_token", config.get("bos_token_id"))
    size = config.get("vocab_size")
    for key, number in (*(("eos_token_id", e) for e in eos), ("bos_token_id", bos), ("vocab_size", size)):
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{path / 'config.json'}: {key} must be a whole number, but is {shown(number)}")
    tokenizer = Tokenizer(
        backend,
        source=str(path),
        eos_token_ids=eos,
        bos=bos,
        chat_template=_chat_template(path, own),
        special_tokens=special,
    )
    tokenizer.default_sampling_params = _defaults(
        generation, GENERATION_KEYS, path / "generation_config.json"
    )
    last = tokenizer.vocab_size - 1
    if size is not None and last >= size:
        said = f"vocab_size in {path / 'config.json'} is {size}"
        apart = "tokenizer and model do not belong together"
        raise ValueError(f"{file}: token ids reach {last}, but {said}; {apart}")
    return tokenizer


def _special_tokens(config: dict[str, Any], file: Path) -> dict[str, str]:
    """Return the special tokens by role. In the file each is a string, or an object with its content."""
    special = {}
    for role, token in config.items():
        if not role.endswith("_token") or role.startswith("add_") or token is None:
            continue
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise ValueError(f"{file}: {role} must be a token's text, but is {shown(token)}")
        if text:
            special[role] = text
    return special


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 ({error})") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        where = path / "tokenizer_config.json"
        raise ValueError(f"{where}: chat_template must be text, but is {shown(template)}")
    return template


def _from_gguf(gguf: GGUFFile) -> Tokenizer:
    """Return the tokenizer of a GGUF file, which has one word for all splits and normalizers."""
    tokens = gguf.listed("tokenizer.ggml.tokens", str)
    model = gguf.need("tokenizer.ggml.model", str)
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if build is None:
        raise ValueError(f"{gguf.path}: tokenizer.ggml.model {model!r} is not supported; gpt2 and llama are")
    backend, add_bos = build(gguf, tokens)
    typed = list(zip(tokens, _kinds(gguf, tokens), strict=True))
    special = [AddedToken(t, normalized=False, special=True) for t, kind in typed if kind == CONTROL]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == USER_DEFINED])
    ids = {role: gguf.get(f"tokenizer.ggml.{role}_token_id") for role in (*ROLES, "eot")}
    ids = {role: number for role, number in ids.items() if number is not None}
    for role, number in ids.items():
        if type(number) is not int or not 0 <= number < len(tokens):
            what = f"must be one of {len(tokens)} tokens, but is {shown(number)}"
            raise ValueError(f"{gguf.path}: tokenizer.ggml.{role}_token_id {what}")
    if gguf.get("tokenizer.ggml.add_bos_token", add_bos, bool) and "bos" in ids:
        bos = tokens[ids["bos"]]
        opening = [(bos, ids["bos"])]
        backend.post_processor = processors.TemplateProcessing([bos, "$A"], special_tokens=opening)
    tokenizer = Tokenizer(
        backend,
        source=str(gguf.path),
        eos_token_ids=[ids[role] for role in ("eos", "eot") if role in ids],
        bos=ids.get("bos"),
        chat_template=gguf.get("tokenizer.chat_template", None, str),
        special_tokens={name: tokens[ids[role]] for role, name in ROLES.items() if role in ids},
    )
    given = {key: gguf.get(key) for key in GGUF_KEYS}
    tokenizer.default_sampling_params = _defaults(given, GGUF_KEYS, gguf.path)
    return tokenizer


def _defaults(given: dict[str, Any], keys: dict[str, str], file: Path) -> dict[str, Any]:
    """Return a file's advice on sampling, as fields of SamplingParams. Raises ValueError naming the file."""
    found = {name: given[key] for key, name in keys.items() if given.get(key) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return found


def _kinds(gguf: GGUFFile, tokens: list[str]) -> list[int]:
    key = "tokenizer.ggml.token_type"
    return gguf.listed(key, int, len(tokens)) if gguf.get(key) else [NORMAL] * len(tokens)


def _bpe(gguf: GGUFFile, vocab: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the package raises Exception itself
        why = " ".join(str(error).split())
        raise ValueError(f"{gguf.path}: tokenizer.ggml.merges do not fit the tokens ({why})") from None


def _byte_level(gguf: GGUFFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""
    pre = gguf.get("tokenizer.ggml.pre", "default", str)
    if pre not in SPLITS:
        raise ValueError(f"{gguf.path}: tokenizer.ggml.pre {pre!r} is not supported; {', '.join(SPLITS)} are")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.listed("tokenizer.ggml.merges", str)]
    vocab = {token: i for i, token in enumerate(tokens)}
    llama3 = pre == "llama-bpe"
    backend = tokenizers.Tokenizer(_bpe(gguf, vocab, merges, ignore_merges=llama3))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _sentencepiece(gguf: GGUFFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE with byte fallback (Kudo and Richardson, SentencePiece, 2018).

    The file gives each piece a score instead of a list of merges: the pair that makes the piece
    with the best score is merged first.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = gguf.listed("tokenizer.ggml.scores", float, len(tokens))
    kinds = _kinds(gguf, tokens)
    normal = [i for i, kind in enumerate(kinds) if kind == NORMAL]
    merges = [
        (tokens[i][:cut], tokens[i][cut:])
        for i in sorted(normal, key=lambda i: -scores[i])
        for cut in range(1, len(tokens[i]))
        if tokens[i][:cut] in vocab and tokens[i][cut:] in vocab
    ]
    unknown = tokens[kinds.index(UNKNOWN)] if UNKNOWN in kinds else None
    bpe = _bpe(gguf, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    # SentencePiece puts a space before the text, even where it begins with one.
    space = gguf.get("tokenizer.ggml.add_space_prefix", True, bool)
    prepend, strip = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if space else ([], [])
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    join = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*join, *strip])
    return backend, True
