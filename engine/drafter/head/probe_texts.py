"""Texts to measure a head on when nobody has any: the target's own greedy answers."""

import torch

from engine.drafter.head.probe_head import ProbeText
from engine.loader import LoadedModel

# Plain requests of the kinds that Spec-Bench's categories have, none of them taken from it.
_REQUESTS = (
    "Explain how a bicycle stays upright.",
    "Write a short poem about rain on a tin roof.",
    "What is the capital of Portugal, and what is it known for?",
    "Write a Python function that reverses a list in place.",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost?",
    "Translate into French: The train leaves at seven in the morning.",
    "Summarize why bees matter for agriculture.",
    "Give me five names for a small bakery.",
)


@torch.inference_mode()
def own_texts(target: LoadedModel, *, num_texts: int, num_tokens: int) -> list[ProbeText]:
    """num_tokens greedy tokens each, after a request in the target's chat format if it has one;
    beyond the requests that are known here, a request is begun anew with another word."""
    found = []
    for index in range(num_texts):
        request = _REQUESTS[index % len(_REQUESTS)]
        if index >= len(_REQUESTS):
            request = f"{request} Answer in {1 + index // len(_REQUESTS)} sentences."
        prompt = _encode(target, request)
        found.append(_continue(target, prompt, num_tokens))
    return found


def _encode(target: LoadedModel, request: str) -> list[int]:
    tokenizer = target.tokenizer
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
        )
        return [int(t) for t in tokenizer.encode(str(text), add_special_tokens=False)]
    return [int(t) for t in tokenizer.encode(request)]


def _continue(target: LoadedModel, prompt: list[int], num_tokens: int) -> ProbeText:
    """Greedy; ends early at an end-of-sequence token."""
    input_ids = torch.tensor([prompt], device=target.model.device)
    output = target.model.generate(  # type: ignore[operator] # transformers' mixin
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=list(target.eos_token_ids),
        pad_token_id=target.eos_token_ids[0] if target.eos_token_ids else 0,
    )
    return ProbeText(tuple(int(t) for t in output[0]), len(prompt))
