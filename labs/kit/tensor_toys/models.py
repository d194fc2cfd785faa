"""Random models in float64, and the text of a request that runs alone on one. This module needs torch."""

from functools import cache

import torch

from labs.kit.toys.requests import VOCAB, make_request
from mini_engine.backends.dense import DenseCache, dense_attend
from mini_engine.model import CausalLM, ModelConfig
from mini_engine.request import Request, SamplingParams
from mini_engine.sampler import Sampler

# Two layers, four heads that share two pairs of keys and values.
SMALL = ModelConfig("llama", VOCAB, 32, 48, 2, 4, 2, 8, 512, tie_word_embeddings=True)


@cache
def random_model(config: ModelConfig = SMALL, scale: float = 0.3) -> CausalLM:
    """Return a model whose weights are so large that a wrong key shows in the logits."""
    generator = torch.Generator().manual_seed(0)
    net = CausalLM(config).double().requires_grad_(False)
    for name, parameter in net.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, scale, generator=generator)
    return net


def text_alone(request_id: str, prompt: int, max_tokens: int) -> list[int]:
    """Return the greedy text of a request of `make_request` alone on random_model()."""
    request = make_request(request_id, prompt, max_tokens)
    return run_alone(random_model(), tuple(request.prompt_token_ids), request.sampling_params)


@cache
@torch.inference_mode()
def run_alone(net: CausalLM, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """Return the tokens of a request with no engine at all: one sequence, one dense cache, one loop."""
    sampler, request = Sampler(), Request("alone", list(prompt), sampling)
    store, tokens = DenseCache(net.config, net.dtype), list(prompt)
    while request.finish_reason is None:
        positions = torch.arange(len(store), len(store) + len(tokens))
        hidden = net(torch.tensor(tokens), positions, dense_attend(store))
        tokens = sampler(net.logits(hidden[-1:]), [request])
        request.output_token_ids += tokens
        request.finish_reason = request.check_stop()
    return request.output_token_ids
