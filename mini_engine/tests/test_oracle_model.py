"""The decoder and the readers against transformers: same weights, same logits (tokens: test_oracle_engine).

Checkpoints are tiny, random, and saved by transformers itself. Every weight is drawn, biases and
norms included: transformers starts those at 0 and 1, where leaving one out would not show.
"""

import re

import pytest
import torch

from mini_engine.loading.checkpoint import load_model
from mini_engine.loading.tokenizer import load_tokenizer
from mini_engine.model import sdpa


def transformers():
    """Return the oracle, which takes seconds to load, so files that import this one do not."""
    return pytest.importorskip("transformers", reason="the oracle is in the extra `dev`")


SIZES = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
CASES = {
    "llama-gqa-untied": ("Llama", {}),
    "llama-mha-tied": ("Llama", dict(num_key_value_heads=6, tie_word_embeddings=True)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-head-dim-eps": ("Llama", dict(head_dim=16, rms_norm_eps=1e-2)),
    "llama-rope-llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-rope-linear": ("Llama", dict(rope_parameters=LINEAR)),
    "qwen2-gqa-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-untied-theta": ("Qwen2", dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))),
    "qwen3-head-dim": ("Qwen3", dict(head_dim=16)),
    "qwen3-tied-biases": ("Qwen3", dict(head_dim=4, attention_bias=True, tie_word_embeddings=True)),
}
TOKENS = torch.randint(SIZES["vocab_size"], (2, 80), generator=torch.Generator().manual_seed(1))


def make(family: str, changes: dict):
    """A random transformers model, float32."""
    torch.manual_seed(0)
    config = getattr(transformers(), f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers(), f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None  # run to the end
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


@torch.no_grad()
def our_logits(model, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position, with nothing cached: the dense reference."""
    positions = torch.arange(token_ids.shape[-1]).expand(token_ids.shape)
    hidden = model(token_ids, positions, lambda layer, q, k, v: sdpa(q, k, v, is_causal=True))
    return model.logits(hidden)


@torch.inference_mode()
def their_greedy(model, prompts: list[list[int]], n: int) -> list[list[int]]:
    """transformers' greedy continuations, in one left-padded batch, with its own cache and its own stops."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    # Without a mask, transformers takes a prompt token that equals the pad token for padding.
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ids = model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False, pad_token_id=0)
    eos, answers = model.generation_config.eos_token_id, []
    for row in ids[:, width:].tolist():
        ends = (
            i for i, token_id in enumerate(row, 1) if token_id in (eos if isinstance(eos, list) else [eos])
        )
        answers.append(row[: next(ends, None)])
    return answers


def norms_in_double(model):
    """transformers' RMSNorm rounds to float32 whatever the model's type; for the tight comparison
    it is replaced by the formula itself."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    """In float32 to 1e-4; in float64 to 1e-9, where near ties cannot hide an error."""
    theirs = make(*CASES[case])
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, device="cpu")
    assert (ours.lm_head.weight is ours.embed_tokens.weight) == theirs.config.tie_word_embeddings
    torch.testing.assert_close(our_logits(ours, TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)
    ours, theirs = load_model(tmp_path, dtype="float64", device="cpu"), norms_in_double(theirs.double())
    torch.testing.assert_close(our_logits(ours, TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-9)


def test_sharded_checkpoint_equals_transformers(tmp_path):
    theirs = make(*CASES["qwen2-untied-theta"])
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    ours = load_model(tmp_path, device="cpu")
    torch.testing.assert_close(our_logits(ours, TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-gqa-untied", "qwen3-head-dim"])
def test_bfloat16_checkpoint_equals_transformers(case, tmp_path):
    """A bfloat16 checkpoint computes in float32 on the CPU; asked for bfloat16, it errs no more
    than transformers does."""
    make(*CASES[case]).bfloat16().save_pretrained(tmp_path)
    read = transformers().AutoModelForCausalLM.from_pretrained
    exact, rounded = (
        read(tmp_path, dtype=dtype)(TOKENS).logits.detach() for dtype in (torch.float32, torch.bfloat16)
    )
    ours = load_model(tmp_path, device="cpu")
    assert ours.dtype == torch.float32
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())
    torch.testing.assert_close(our_logits(ours, TOKENS), exact, rtol=1e-4, atol=1e-4)
    ours = load_model(tmp_path, dtype="bfloat16", device="cpu")
    assert ours.dtype == torch.bfloat16
    error = (our_logits(ours, TOKENS).float() - exact).square().mean()
    assert error < 1.5 * (rounded.float() - exact).square().mean()


# SmolLM2, from the GGUF file that transformers reads too

TEXTS = [
    "Hello, world!",
    "The answer is 42, not 4200; pi is 3.14159 and 1/2 = ½, x² = 9.",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # done\n\n\nprint(f(10))\n",
    "Grüße aus Köln, naïve café — “quoted” … ñ",
    "日本語のテキストと한국어 텍스트, и русский, عربى",
    "emoji 🙂👍🏽 and a family 👨‍👩‍👧, flags 🇫🇷",
    "tabs\tand   runs  of spaces\n\n  \n\r\n end ",
    " leading, don't I'LL we've they're it's",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start|",
    "",
]


def test_smollm2_token_ids_and_chats_equal_transformers(smollm2_tokenizer):
    """Digits stand alone in this tokenizer; transformers leaves that rule out when it reads a
    GGUF file (seen where spaces stand before a digit), so it is given the text cut at digits."""
    path, theirs = smollm2_tokenizer
    ours = load_tokenizer(path)
    for text in TEXTS:
        pieces = [piece for piece in re.split(r"([0-9½²])", text) if piece]
        assert ours.encode(text) == sum((theirs.encode(piece) for piece in pieces), []), text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    user, system = {"role": "user", "content": "Hi there!"}, {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Hello."}
    for messages in ([user], [system, user], [user, answer, user]):
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.encode_chat(messages) == ids
