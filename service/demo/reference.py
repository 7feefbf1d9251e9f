"""The same prompts decoded by transformers on the target alone: what the answers must equal."""

from collections.abc import Callable, Sequence

from service.demo.answers import Answer


def decode_alone(
    target: str, answers: Sequence[Answer], report: Callable[[int], None]
) -> tuple[tuple[int, ...], ...]:
    """Greedy float32 output of `generate` for each answer's prompt, one prompt at a time.

    Nothing of the engine is used here. `report` gets the number of prompts that are done.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    references = []
    for num_done, answer in enumerate(answers, start=1):
        prompt = torch.tensor([answer.prompt_token_ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=answer.prompt.max_tokens,
            do_sample=False,
        )
        references.append(tuple(output[0, prompt.shape[1] :].tolist()))
        report(num_done)
    return tuple(references)
