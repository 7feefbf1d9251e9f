"""Everything that must not matter, mixed at random: the bits stay those of the request alone."""

import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engine.driver import request
from tests.engine.real_model.engines import DTYPES, engine_of, small_engine
from tests.engine.real_model.observation import observe
from tests.engine.real_model.requests import (
    NUM_NEW_TOKENS,
    PROBED,
    PROMPTS,
    SAMPLING,
    alone,
    assert_same_bits,
    neighbours,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

watched = st.fixed_dictionaries(
    {
        "name": st.sampled_from(PROBED),
        "mode": st.sampled_from(["on", "on", "auto", "off"]),
        "drafter": st.sampled_from([None, "prompt_lookup", "draft_model"]),
        "max_draft_tokens": st.sampled_from([1, 3, 8]),
        "priority": st.integers(-2, 2),
        "tenant": st.sampled_from(["red", "blue"]),  # a tenant's second request finds a prefix
        "at_step": st.integers(0, 12),
    }
)
mixtures = st.fixed_dictionaries(
    {
        "watched": st.lists(watched, min_size=2, max_size=4),
        "num_neighbours": st.integers(0, 4),
        "max_step_tokens": st.sampled_from([9, 32, 256]),
        "is_small": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_mixture_gives_the_bits_of_the_request_alone(smollm2: Path, dtype: str) -> None:
    happened: Counter[str] = Counter()
    numbers = count()

    @settings(
        max_examples=8,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],  # a smaller example is not worth its minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(mixtures)
    def holds(mixture: dict[str, Any]) -> None:
        engine = (small_engine if mixture["is_small"] else engine_of)(smollm2, dtype)
        drafters = engine.info.drafters
        crowd = neighbours(
            engine, mixture["num_neighbours"], f"crowd {next(numbers)}", mixture["seed"]
        )
        asked = []
        for item in mixture["watched"]:
            name, drafter = item["name"], item["drafter"]
            asked.append(
                request(
                    f"{name} {next(numbers)}",
                    engine.tokenizer(PROMPTS[name]).input_ids,
                    max_tokens=NUM_NEW_TOKENS,
                    sampling=SAMPLING[name],
                    ignore_eos=True,
                    mode=item["mode"],
                    drafter=drafter if drafter in drafters else None,
                    max_draft_tokens=item["max_draft_tokens"],
                    priority=item["priority"],
                    tenant=item["tenant"],
                )
            )
        draw = random.Random(mixture["seed"])
        arrivals = [item["at_step"] for item in mixture["watched"]]
        arrivals += [draw.randrange(12) for _ in crowd]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._scheduler, "max_step_tokens", mixture["max_step_tokens"])
            observed = observe(engine, [*asked, *crowd], arrivals)
        for item in asked:
            name = item.request_id.split()[0]
            assert_same_bits(observed, item.request_id, alone(smollm2, dtype)[name])
            stats = observed.outcome.stats[item.request_id]
            happened["accepted"] += stats.num_accepted_tokens
            happened["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
            happened["preempted"] += stats.num_preemptions
            happened["cached"] += stats.num_cached_prompt_tokens

    holds()
    for event in ("accepted", "rejected", "preempted", "cached"):
        assert happened[event] > 0, f"no mixture {event} anything"
