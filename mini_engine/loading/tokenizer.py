"""A model's tokenizer from its folder (a tokenizer.json) or from the vocabulary in a GGUF file.

Nothing here imports torch: reading a tokenizer must not cost the seconds that torch takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from mini_engine.loading.files import opened, read_json
from mini_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_engine.loading.gguf_file import GGUFFile


def load_tokenizer(path: str | Path | GGUFFile) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (its tokenizer.json) or of a .gguf file.

    Raises FileNotFoundError or ValueError naming the file at fault.
    """
    source = opened(path)
    if isinstance(source, Path):
        return _from_folder(source)
    from mini_engine.loading.gguf_tokenizer import tokenizer_of

    return tokenizer_of(source)


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
    own, config, generation = (
        read_json(path / name) if (path / name).is_file() else {}
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    special = {role: text for role in own if role.endswith("_token") and (text := _content(own[role]))}
    has_bos, has_eos = "bos_token" in special, "eos_token" in special
    own_eos = backend.token_to_id(special["eos_token"]) if has_eos else None
    eos = next(
        (e for e in (generation.get("eos_token_id"), config.get("eos_token_id"), own_eos) if e is not None),
        (),
    )
    tokenizer = Tokenizer(
        backend,
        source=str(path),
        eos_token_ids=eos if isinstance(eos, list | tuple) else (eos,),
        bos=backend.token_to_id(special["bos_token"]) if has_bos else config.get("bos_token_id"),
        chat_template=_folder_chat_template(path, own),
        special_tokens=special,
    )
    last = tokenizer.vocab_size - 1
    if last >= config.get("vocab_size", tokenizer.vocab_size):
        raise ValueError(
            f"{file}: token ids reach {last}, but vocab_size in {path / 'config.json'} is "
            f"{config['vocab_size']}; tokenizer and model do not belong together"
        )
    return tokenizer


def _folder_chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _content(token: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or a dict that says more."""
    return token.get("content") if isinstance(token, dict) else token
