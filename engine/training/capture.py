"""One forward of the target over whole conversations: the states a head is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.drafter.head.tap import HiddenStateTap

_LOGIT_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Features:
    """What is kept of one conversation of N tokens.

    captured [N, 3H]: inputs of three layers. last [N, H]: what the output layer reads; the
    target's logits follow from it. log_normalizer [N] float32: logsumexp of those logits.
    best_token_ids [N]: their argmax.
    """

    token_ids: torch.Tensor  # [N] int64
    num_prompt_tokens: int
    captured: torch.Tensor
    last: torch.Tensor
    log_normalizer: torch.Tensor
    best_token_ids: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Capturer:
    """Runs a target for its hidden states. Sequences are padded on the right: no token sees
    what follows it, so padding changes nothing."""

    def __init__(self, model: PreTrainedModel, captured_layers: Sequence[int]) -> None:
        self.model = model
        self._tap = HiddenStateTap(model, captured_layers)
        self._output_layer = model.get_output_embeddings()

    @torch.inference_mode()
    def capture(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[Features]:
        """rows: (token ids, number of them that are the prompt) of each conversation."""
        device = self.model.device
        longest = max(len(token_ids) for token_ids, _ in rows)
        padded = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, (token_ids, _) in enumerate(rows):
            padded[index, : len(token_ids)] = torch.tensor(token_ids)
        base = self.model.base_model
        output = base(input_ids=padded.to(device), use_cache=False)
        captured, last = self._tap.take(), output.last_hidden_state
        found = []
        for index, (token_ids, num_prompt_tokens) in enumerate(rows):
            count = len(token_ids)
            kept = last[index, :count]
            log_normalizer, best = self._summarize(kept)
            found.append(
                Features(
                    padded[index, :count].clone(),
                    num_prompt_tokens,
                    captured[index, :count].cpu().clone(),
                    kept.cpu().clone(),
                    log_normalizer.cpu(),
                    best.cpu(),
                )
            )
        return found

    def _summarize(self, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normalizers = torch.zeros(len(last), device=last.device)
        best = torch.zeros(len(last), dtype=torch.long, device=last.device)
        for start in range(0, len(last), _LOGIT_CHUNK):
            part = slice(start, min(start + _LOGIT_CHUNK, len(last)))
            logits = self._output_layer(last[part]).float()
            normalizers[part] = torch.logsumexp(logits, dim=-1)
            best[part] = logits.argmax(dim=-1)
        return normalizers, best

    def close(self) -> None:
        self._tap.close()
