"""The E-step: contexts of a batch, draft paths for each, and what the target thinks of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from engine.drafter.head.model import Eagle3Head
from engine.training.capture import Features
from engine.training.scores import Teacher
from engine.training.trie import pack, states_of
from engine.training.unrolled import Batch, Unrolling, make_batch

_MIN_NOISE = 1e-30
_PREFERENCE = 3.0  # contexts where the head is wrong are drawn so much more often


@dataclass(frozen=True, slots=True)
class SampledPaths:
    """C contexts with S paths of K drafts each; path 0 is the conversation's own continuation.

    batch has each context's anchor S times in a row, [B, m * S]; C = B * m.
    token_ids [C, S, K]; draft_index [C, S, K] their places in the draft vocabulary, -1 where it
    lacks them (a path ends there). target_logprobs [C, S, K]; tempered_logprobs [C, S]: of the
    whole path under the tempered head that drew it. node_states [C * S * K, H] and
    node_normalizers: the target's view before each draft.
    """

    batch: Batch
    token_ids: torch.Tensor
    draft_index: torch.Tensor
    target_logprobs: torch.Tensor
    tempered_logprobs: torch.Tensor
    node_states: torch.Tensor
    node_normalizers: torch.Tensor

    @property
    def is_draftable(self) -> torch.Tensor:
        """[C, S, K]: the draft and all before it are in the draft vocabulary."""
        return (self.draft_index >= 0).cumprod(-1).bool()


def choose_contexts(
    batch: Batch,
    is_match: torch.Tensor,
    num_contexts: int,
    num_steps: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """[B, m] columns of `anchors`, drawn without replacement from those with num_steps teachers,
    more often where the head's first draft is wrong. is_match [B, A]. Raises ValueError if a
    conversation is too short."""
    usable = batch.depth_limits >= num_steps
    fewest = int(usable.sum(1).min())
    if fewest < 1:
        raise ValueError("a conversation has no position with a teacher for every step")
    weights = usable * torch.where(is_match, 1.0, _PREFERENCE)
    # The largest keys log w - log(exponential noise) are a draw without replacement in
    # proportion to w (Efraimidis and Spirakis 2006).
    noise = -torch.log1p(-_uniform(weights, generator))
    return (
        (weights.log() - noise.clamp(min=_MIN_NOISE).log())
        .topk(min(num_contexts, fewest), dim=1)
        .indices
    )


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """In [0, 1): drawn on the processor, so that every device draws the same."""
    return torch.rand(like.shape, generator=generator).to(like.device)


def _categorical(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[...] indices, each as likely as probs [..., V] says."""
    heights = probs.double().cumsum(-1)
    level = _uniform(heights[..., -1:].float(), generator).double() * heights[..., -1:]
    return torch.searchsorted(heights, level, right=True).squeeze(-1)


@torch.no_grad()
def sample_paths(
    head: Eagle3Head,
    teacher: Teacher,
    model: PreTrainedModel,
    conversations: Sequence[Features],
    columns: torch.Tensor,  # [B, m]
    *,
    num_paths: int,
    num_steps: int,
    temperature: float,
    generator: torch.Generator,
) -> SampledPaths:
    """num_paths - 1 paths drawn from the tempered head, the continuation in front of them."""
    device, vocabulary = head.device, teacher.draft_token_ids
    batch = _repeat(make_batch(conversations).to(device), columns, num_paths)
    index_of = torch.full((head.config.vocab_size,), -1, dtype=torch.long, device=device)
    index_of[vocabulary] = torch.arange(len(vocabulary), device=device)
    own = _continuations(batch, num_steps)  # [B, m * S, K]
    is_own = torch.arange(own.shape[1], device=device) % num_paths == 0
    token_ids, tempered = _draw(head, batch, teacher, own, is_own, index_of, temperature, generator)
    num_contexts = columns.numel()
    shaped = token_ids.view(num_contexts, num_paths, num_steps)
    states, logprobs, normalizers = _ask_target(
        model, conversations, batch, shaped, columns.shape[1]
    )
    return SampledPaths(
        batch,
        shaped,
        index_of[shaped],
        logprobs,
        tempered.view(num_contexts, num_paths),
        states,
        normalizers,
    )


def _repeat(batch: Batch, columns: torch.Tensor, num_paths: int) -> Batch:
    index = columns.repeat_interleave(num_paths, dim=1)
    return replace(
        batch,
        anchors=batch.anchors.gather(1, index),
        depth_limits=batch.depth_limits.gather(1, index),
        teacher_rows=batch.teacher_rows.gather(1, index),
    )


def _continuations(batch: Batch, num_steps: int) -> torch.Tensor:
    """[B, A, K]: tokens t + 2 .. t + 1 + K of each anchor."""
    device = batch.anchors.device
    places = batch.anchors.unsqueeze(-1) + 1 + torch.arange(num_steps, device=device)
    rows = torch.arange(len(batch.anchors), device=device).view(-1, 1, 1)
    return batch.next_token_ids[rows, places]


def _draw(
    head: Eagle3Head,
    batch: Batch,
    teacher: Teacher,
    own: torch.Tensor,
    is_own: torch.Tensor,
    index_of: torch.Tensor,
    temperature: float,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids [B, A, K], log-probability of each path under the tempered head [B, A])."""
    unrolling = Unrolling(head, batch)
    fed = unrolling.true_token_ids()
    drawn: list[torch.Tensor] = []
    total = torch.zeros(fed.shape, device=fed.device)
    weight = head.lm_head.weight
    for step in range(own.shape[-1]):
        output = unrolling.advance(fed)
        logits = torch.matmul(output.to(weight.dtype), weight.t()).float() / temperature
        logprobs = torch.log_softmax(logits, dim=-1)  # [B, A, Vd]
        sampled = teacher.draft_token_ids[_categorical(logprobs.exp(), generator)]
        fed = torch.where(is_own, own[:, :, step], sampled)
        place = index_of[fed]
        found = logprobs.gather(-1, place.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        total += found.masked_fill(place < 0, float("-inf"))
        drawn.append(fed)
    return torch.stack(drawn, dim=-1), total


def _ask_target(
    model: PreTrainedModel,
    conversations: Sequence[Features],
    batch: Batch,
    token_ids: torch.Tensor,  # [C, S, K]
    num_contexts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(states [C * S * K, H], log-probabilities [C, S, K], normalizers [C * S * K])."""
    num_paths = token_ids.shape[1]
    output_layer = model.get_output_embeddings()
    states, logprobs, normalizers = [], [], []
    for row, conversation in enumerate(conversations):
        first = row * num_contexts
        paths = token_ids[first : first + num_contexts].tolist()
        # Anchor t has seen token t + 1; nothing after the last context's is needed.
        contexts = (batch.anchors[row, ::num_paths] + 1).tolist()
        packed = pack(conversation.token_ids[: max(contexts) + 1].tolist(), contexts, paths)
        found = states_of(model, packed)
        used = torch.tensor(packed.places, device=found.device).flatten()  # [m * S * K]
        needed, place = torch.unique(used, return_inverse=True)
        logits = output_layer(found[needed]).float()
        normalizer = torch.logsumexp(logits, dim=-1)
        wanted = torch.tensor(paths, device=found.device).flatten()
        logprobs.append(logits[place, wanted] - normalizer[place])
        normalizers.append(normalizer[place])
        states.append(found[needed][place])
    return torch.cat(states), torch.cat(logprobs).view(token_ids.shape), torch.cat(normalizers)
