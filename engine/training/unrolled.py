"""The head over whole conversations: every draft step of every output position in one pass.

Training-time test (EAGLE-3, arXiv 2503.01840): draft step k at anchor t stands for position
t + k. It attends to the true prefix (keys of step 0 at positions up to t) and to its own
earlier steps, which are the only keys that serving would have there. Tokens fed are the true
ones: a draft at depth k matters only where all before it were right.

Anchors are the positions from the prompt's last token on, since what is drafted from there is
output; on demand all positions. Others give keys and values only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from engine.drafter.head.model import Eagle3Head
from engine.training.capture import Features


@dataclass(frozen=True, slots=True)
class Batch:
    """B conversations, padded to T positions and A anchors.

    next_token_ids [B, T]: token t + 1. anchors [B, A]: positions t. depth_limits [B, A]: how
    many draft steps have a teacher there, 0 for padding. The teacher of anchor (b, a) at step k
    is row teacher_rows[b, a] + k of last, log_normalizer and best_token_ids, which hold all
    conversations end to end.
    """

    next_token_ids: torch.Tensor
    captured: torch.Tensor  # [B, T, 3H]
    anchors: torch.Tensor
    depth_limits: torch.Tensor
    teacher_rows: torch.Tensor
    last: torch.Tensor  # [N, H]
    log_normalizer: torch.Tensor  # [N]
    best_token_ids: torch.Tensor  # [N]
    token_ids: torch.Tensor  # [N]

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


def make_batch(conversations: Sequence[Features], *, has_prompt_anchors: bool = False) -> Batch:
    """On the processor, as the conversations. They need two output tokens at least; shorter ones
    have no anchor.

    has_prompt_anchors adds the positions before: what the target would say there teaches too,
    and costs no answer.
    """
    num_rows = len(conversations)
    longest = max(c.num_tokens for c in conversations)
    firsts = [0 if has_prompt_anchors else c.num_prompt_tokens - 1 for c in conversations]
    most_anchors = max(
        1, *(c.num_tokens - 1 - first for c, first in zip(conversations, firsts, strict=True))
    )
    width = conversations[0].captured.shape[-1]
    next_token_ids = torch.zeros(num_rows, longest, dtype=torch.long)
    captured = torch.zeros(num_rows, longest, width, dtype=conversations[0].captured.dtype)
    anchors = torch.zeros(num_rows, most_anchors, dtype=torch.long)
    limits = torch.zeros(num_rows, most_anchors, dtype=torch.long)
    teacher_rows = torch.zeros(num_rows, most_anchors, dtype=torch.long)
    offset = 0
    for index, conversation in enumerate(conversations):
        count = conversation.num_tokens
        next_token_ids[index, : count - 1] = conversation.token_ids[1:]
        captured[index, :count] = conversation.captured
        positions = torch.arange(firsts[index], count - 1)
        anchors[index, : len(positions)] = positions
        # Step k feeds token t + 1 + k and is taught by the target's view after it. After the
        # last token the target has nothing to say: it may be the end.
        limits[index, : len(positions)] = (count - 2 - positions).clamp(min=0)
        teacher_rows[index, : len(positions)] = offset + positions + 1
        offset += count
    return Batch(
        next_token_ids,
        captured,
        anchors,
        limits,
        teacher_rows,
        torch.cat([c.last for c in conversations]),
        torch.cat([c.log_normalizer for c in conversations]),
        torch.cat([c.best_token_ids for c in conversations]),
        torch.cat([c.token_ids for c in conversations]),
    )


class Unrolling:
    """The draft steps of a batch's anchors, one after another."""

    def __init__(self, head: Eagle3Head, batch: Batch) -> None:
        fused = head.fuse(batch.captured.to(head.dtype))  # [B, T, H]
        num_rows, self._length, size = fused.shape
        positions = torch.arange(self._length, device=fused.device).expand(num_rows, self._length)
        keys, values = head.keys(batch.next_token_ids, fused, head.rotation(positions))
        index = batch.anchors.unsqueeze(-1).expand(-1, -1, size)
        self._states = fused.gather(1, index)  # [B, A, H]
        visible = positions[:, None, :] <= batch.anchors[:, :, None]  # [B, A, T]
        bias = torch.zeros(visible.shape, device=fused.device)
        bias.masked_fill_(~visible, float("-inf"))
        self._attend = _UnrolledAttention(keys.transpose(1, 2), values.transpose(1, 2), bias)
        self._head = head
        self._batch = batch
        self._step = 0

    def true_token_ids(self) -> torch.Tensor:
        """[B, A]: what the conversation has where the next step reads."""
        fed = (self._batch.anchors + self._step).clamp(max=self._length - 1)
        return self._batch.next_token_ids.gather(1, fed)

    def advance(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, A, H] that the output layer reads after token_ids [B, A]."""
        rotation = self._head.rotation(self._batch.anchors + self._step)
        output, self._states = self._head.advance(token_ids, self._states, rotation, self._attend)
        self._step += 1
        return output


def unroll(
    head: Eagle3Head, batch: Batch, num_steps: int, path_token_ids: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """What the output layer reads at each of num_steps draft steps, [B, A, H] each.

    path_token_ids [B, A, K]: drafts to feed from the second step on, in the place of the
    conversation's own tokens.
    """
    unrolling = Unrolling(head, batch)
    outputs = []
    for step in range(num_steps):
        is_true = path_token_ids is None or step == 0
        fed = unrolling.true_token_ids() if is_true else path_token_ids[:, :, step - 1]  # type: ignore[index]
        outputs.append(unrolling.advance(fed))
    return outputs


class _UnrolledAttention:
    """Attention of anchors to the true prefix and to their own steps after the first."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> None:
        self._keys, self._values = keys, values  # [B, Hkv, T, D]
        self._bias = bias  # [B, A, T]
        self._step_keys: list[torch.Tensor] = []  # [B, A, Hkv, D] each
        self._step_values: list[torch.Tensor] = []
        self._num_calls = 0

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self._num_calls:  # step 0's own key is in the prefix
            self._step_keys.append(key)
            self._step_values.append(value)
        self._num_calls += 1
        num_rows, num_anchors, num_heads, size = query.shape
        num_kv_heads = key.shape[2]
        fold = num_heads // num_kv_heads
        # [B, A, Hkv, G, D]
        grouped = query.view(num_rows, num_anchors, num_kv_heads, fold, size)
        folded = grouped.permute(0, 2, 3, 1, 4).reshape(
            num_rows, num_kv_heads, fold * num_anchors, size
        )
        length = self._keys.shape[2]
        scores = torch.matmul(folded, self._keys.transpose(2, 3))
        scores = scores.view(num_rows, num_kv_heads, fold, num_anchors, length)
        scores = scores.float() * size**-0.5 + self._bias[:, None, None]
        own = [
            (grouped * step_key.unsqueeze(3)).sum(-1).permute(0, 2, 3, 1).float() * size**-0.5
            for step_key in self._step_keys
        ]  # [B, Hkv, G, A] each
        weights = F.softmax(torch.cat([scores, *(o.unsqueeze(-1) for o in own)], dim=-1), dim=-1)
        weights = weights.to(value.dtype)
        attended = torch.matmul(weights[..., :length].flatten(2, 3), self._values)
        attended = attended.view(num_rows, num_kv_heads, fold, num_anchors, size)
        for step, step_value in enumerate(self._step_values):
            share = weights[..., length + step].unsqueeze(-1)  # [B, Hkv, G, A, 1]
            attended = attended + share * step_value.permute(0, 2, 1, 3).unsqueeze(2)
        joined: torch.Tensor = attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return joined  # [B, A, num_heads, D]
