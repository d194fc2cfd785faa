"""A model's tokenizer from its folder (a tokenizer.json) or from the vocabulary in a GGUF file.

Nothing here imports torch: reading a tokenizer must not cost the seconds that torch takes.
"""

from pathlib import Path
from typing import Any

import tokenizers

from mini_engine.loading.files import ModelPath, opened, read_json
from mini_engine.loading.gguf_tokenizer import tokenizer_of
from mini_engine.text.tokenizer import Tokenizer


def load_tokenizer(path: ModelPath) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (its tokenizer.json) or of a .gguf file.

    Raises FileNotFoundError or ValueError naming the file at fault.
    """
    source = opened(path)
    return _from_folder(source) if isinstance(source, Path) else tokenizer_of(source)


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
    # A special token is a string, or a dict that says more.
    contents = {role: t.get("content") if isinstance(t, dict) else t for role, t in own.items()}
    special = {role: text for role, text in contents.items() if role.endswith("_token") and text}
    ids = {role: backend.token_to_id(special[role]) for role in special.keys() & {"bos_token", "eos_token"}}
    given = (generation.get("eos_token_id"), config.get("eos_token_id"), ids.get("eos_token"))
    eos = next((e for e in given if e is not None), ())
    tokenizer = Tokenizer(
        backend,
        source=str(path),
        eos_token_ids=eos if isinstance(eos, list | tuple) else (eos,),
        bos=ids.get("bos_token", config.get("bos_token_id")),
        chat_template=_chat_template(path, own),
        special_tokens=special,
    )
    last = tokenizer.vocab_size - 1
    if last >= config.get("vocab_size", tokenizer.vocab_size):
        size = f"vocab_size in {path / 'config.json'} is {config['vocab_size']}"
        apart = "tokenizer and model do not belong together"
        raise ValueError(f"{file}: token ids reach {last}, but {size}; {apart}")
    return tokenizer


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
