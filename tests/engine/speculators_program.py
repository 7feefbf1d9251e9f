"""Run with the package `speculators` on the path: loads, unrolls and writes a head.

python speculators_program.py HEAD INPUTS.pt LOGITS.pt WRITTEN
"""

import sys
from typing import Any

import torch
from speculators import SpeculatorModel  # type: ignore[import-not-found]
from speculators.models.eagle3 import (  # type: ignore[import-not-found]
    Eagle3SpeculatorConfig,
)


def main(head: str, inputs: str, logits: str, written: str) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(head, config=config).float().eval()
    seen: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> None:
        seen.append(output[0].detach().clone())

    model.lm_head.register_forward_hook(keep)
    given = torch.load(inputs, weights_only=True)
    with torch.no_grad():
        model(
            hidden_states=given["captured"][None],
            input_ids=given["token_ids"][None],
            document_ids=torch.zeros(1, len(given["token_ids"]), dtype=torch.long),
            ttt_steps=given["num_steps"],
        )
    torch.save(torch.stack(seen), logits)
    model.save_pretrained(written)


if __name__ == "__main__":
    main(*sys.argv[1:])
