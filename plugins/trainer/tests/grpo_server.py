"""In the place of trl's client of a vLLM server: it generates with a model of its own, and keeps digests of weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch
import trainer_cases
from torch import Tensor

WORDS = 12


def digests(named: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest() for name, tensor in named}


class Client:
    """See `trl.generation.vllm_client.VLLMClient`."""

    def __init__(self, **_: Any) -> None:
        with torch.random.fork_rng():
            self.model = trainer_cases.model().eval()
        self.updates, self.calls, self.resets = [], 0, 0

    def init_communicator(self, device: Any) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def update_named_params(self, metadata: Sequence[Any], named: Iterator[tuple[str, Tensor]]) -> None:
        places, found = dict(self.model.named_parameters()), {}
        for (name, kind, shape), (_, tensor) in zip(metadata, named, strict=True):
            assert (tensor.dtype, list(places[name].shape)) == (getattr(torch, kind), shape)
            found |= digests([(name, tensor)])
            places[name].data.copy_(tensor)
        assert found.keys() == places.keys()
        self.updates.append(found)

    @torch.no_grad()
    def generate(
        self, prompts: Any, *, n: int, temperature: float, max_tokens: int, generation_kwargs: Any, **_: Any
    ) -> dict[str, Any]:
        self.calls += 1
        completions, log_probs = [], []
        for number, prompt in enumerate(prompts):
            for index in range(n):
                seed = generation_kwargs["seed"] + 1000 * self.calls + 10 * number + index
                generator, tokens, found = torch.Generator().manual_seed(seed), [], []
                while len(tokens) < max_tokens and (not tokens or tokens[-1] != 1):
                    logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
                    every = (logits / temperature).log_softmax(-1)
                    tokens.append(int(torch.multinomial(every[1:WORDS].exp(), 1, generator=generator)) + 1)
                    found.append(float(every[tokens[-1]]))
                completions.append(tokens)
                log_probs.append(found)
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": [[[each] for each in found] for found in log_probs],
            "logprob_token_ids": [[[each] for each in tokens] for tokens in completions],
        }
