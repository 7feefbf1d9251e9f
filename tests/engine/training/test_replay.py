"""Offline replay is exact: its rounds over a logged answer are those that an engine took."""

import itertools

import pytest
import torch

from engine.drafter.head.model import Eagle3Head
from engine.request import SamplingParams
from engine.training.capture import Capturer, Features
from engine.training.conversations import Conversation
from engine.training.evaluation import score_conversations
from engine.training.feature_cache import CacheInput, FeatureCache, build_cache
from engine.training.objectives import OBJECTIVES
from engine.training.scores import Teacher, score
from engine.training.unrolled import make_batch, unroll
from tests.engine.driver import request, run, tiny_engine
from tests.engine.head.heads import deep_tiny_llama, save_tiny_head, tiny_head
from tests.engine.head.test_head_drafter import PROMPTS, listen

pytestmark = pytest.mark.thorough

K = 3
TOKENS = 40
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=1.0, seed=11),
    "warm": SamplingParams(temperature=0.7, seed=3),
}


def answers() -> list[Conversation]:
    """Of the target alone."""
    engine = tiny_engine(target=deep_tiny_llama(), drafters=())
    asked = [
        request(f"{name}-{i}", prompt, max_tokens=TOKENS, sampling=sampling, ignore_eos=True)
        for name, sampling in SAMPLINGS.items()
        for i, prompt in enumerate(PROMPTS)
    ]
    outcome = run(engine, asked)
    return [
        Conversation(
            one.request_id,
            "test",
            tuple(one.prompt_token_ids),
            tuple(outcome.token_ids[one.request_id]),
            "length",
            one.sampling.temperature,
            one.sampling.seed,
        )
        for one in asked
    ]


def learned(target: torch.nn.Module, features: list[Features]) -> tuple[Eagle3Head, Teacher]:
    """A head that drafts some of the answers and not all."""
    head = tiny_head(target)  # type: ignore[arg-type]
    token_ids = head.draft_token_ids
    rows = target.get_output_embeddings().weight.detach()[token_ids]  # type: ignore[operator]
    teacher = Teacher(rows, token_ids)
    trained = [p.requires_grad_() for n, p in head.named_parameters() if n.startswith("layers")]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    batch = make_batch(features)
    for _ in range(25):
        optimizer.zero_grad()
        scores = score(
            unroll(head, batch, K),
            batch,
            head.lm_head.weight,
            teacher,
            needs_overlap_gradient=False,
        )
        torch.autograd.backward(OBJECTIVES["kl"].loss(scores))
        optimizer.step()
    return head.eval().requires_grad_(False), teacher


@pytest.fixture(scope="module")
def replayed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[str, list[tuple[int, int]]]]:
    """The folder of a head, and the rounds that replay says it would take, by request."""
    folder = tmp_path_factory.mktemp("replay")
    target = deep_tiny_llama()
    logged = answers()
    head_layers = tiny_head(target).config.captured_layers
    capturer = Capturer(target, head_layers)
    build_cache(
        folder / "features",
        [
            CacheInput(c.key, c.source, c.temperature, c.token_ids, len(c.prompt_token_ids))
            for c in logged
        ],
        capturer.capture,
        identity={},
        max_bytes=10**9,
    )
    capturer.close()
    cache = FeatureCache(folder / "features", {})
    head, teacher = learned(target, [cache.read(row) for row in cache.rows])
    seeds = {c.key: c.seed for c in logged}
    scores = score_conversations(head, teacher, cache, cache.rows, K, seeds=seeds)
    rounds = {s.key: list(s.coupled_walk or s.walk) for s in scores}
    save_tiny_head(folder / "head", head)
    return str(folder / "head"), rounds


@pytest.mark.parametrize("name", SAMPLINGS)
def test_its_rounds_are_the_engines(
    replayed: tuple[str, dict[str, list[tuple[int, int]]]], name: str
) -> None:
    head, rounds = replayed
    # A new one each time: behind a reused prefix a head begins without its context.
    engine = tiny_engine(
        target=deep_tiny_llama(), drafters=("head",), head=head, max_draft_tokens=K, max_num_rows=4
    )
    heard = listen(engine)
    asked = [
        request(f"{name}-{i}", prompt, max_tokens=TOKENS, sampling=SAMPLINGS[name], ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    run(engine, asked)
    accepted = 0
    for one in asked:
        starts = [n for key, n, proposal in heard if key == one.request_id]
        # A round of n accepted drafts is followed by one n + 1 tokens later.
        taken = [
            (start - len(one.prompt_token_ids) - 1, after - start - 1)
            for start, after in itertools.pairwise(starts)
            if start + K < len(one.prompt_token_ids) + TOKENS  # the end shortens the others
        ]
        assert len(taken) > 5
        assert rounds[one.request_id][: len(taken)] == taken
        accepted += sum(count for _, count in taken)
    assert accepted > 10, "nothing was accepted, so nothing was compared"
