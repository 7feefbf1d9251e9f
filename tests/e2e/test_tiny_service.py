"""A tiny real model behind the whole service."""

import asyncio
import random
from contextlib import aclosing

import pytest
import torch

from service.client_calls import TandemError, build_request
from tests.e2e.conftest import TinyService
from tests.ledger_file import rows_filed
from tests.tiny import EOS_TOKEN_ID, tiny_llama, tiny_tokenizer

PROMPTS = [
    "the quick brown fox",
    "a person sees",
    "0123456789 " * 9,
    "the the the the the",
    "x",
    "jumps over the lazy dog and the other person",
    "más allá, 你好",
    "over " * 30,
]


def target_alone(prompt: str, max_tokens: int) -> list[int]:
    """Greedy tokens of transformers' own generate."""
    ids = tiny_tokenizer()(prompt)["input_ids"]
    with torch.inference_mode():
        output = tiny_llama().generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=0,
        )
    return [int(token) for token in output[0, len(ids) :]]


async def test_concurrent_streams_bring_the_tokens_of_the_target_alone(
    tiny_service: TinyService,
) -> None:
    client = tiny_service.client
    results = await asyncio.gather(
        *(client.generate(p, max_tokens=24, temperature=0).result() for p in PROMPTS)
    )
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == target_alone(prompt, 24), prompt
        shown = [t for t in result.token_ids if t != EOS_TOKEN_ID]
        assert result.text == tiny_tokenizer().decode(shown, skip_special_tokens=True)


async def test_a_seed_gives_the_same_text_with_and_without_speculation(
    tiny_service: TinyService,
) -> None:
    results = [
        await tiny_service.client.generate(
            PROMPTS[2], max_tokens=60, temperature=0.2, seed=7, speculation=speculation
        ).result()
        for speculation in (True, False)
    ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].outcome.speculation.num_draft_tokens > 0
    assert results[1].outcome.speculation.num_draft_tokens == 0


async def test_resuming_gives_what_the_unbroken_stream_gives(tiny_service: TinyService) -> None:
    options = {"max_tokens": 30, "temperature": 0.9, "seed": 11}
    whole = await tiny_service.client.generate(PROMPTS[5], **options).result()
    for num_received in (1, 7, len(whole.token_ids) - 1):
        request = build_request(PROMPTS[5], **options)
        request.resume_token_ids.extend(whole.token_ids[:num_received])
        resumed = await tiny_service.client.generate(request).result()
        assert resumed.token_ids == whole.token_ids
        assert resumed.text == whole.text


async def test_structured_output_is_what_was_asked_for(tiny_service: TinyService) -> None:
    request = build_request("the", max_tokens=20, temperature=1.0, seed=3)
    request.structured_output.choice.texts.extend(["yes", "no", "quick"])
    chosen = await tiny_service.client.generate(request).result()
    assert chosen.text in {"yes", "no", "quick"}
    request.structured_output.regex = "[0-9]{3}"
    digits = await tiny_service.client.generate(request).result()
    assert len(digits.text) == 3
    assert digits.text.isdigit()
    request.structured_output.regex = "(unclosed"
    with pytest.raises(TandemError) as wrong:
        await tiny_service.client.generate(request).result()
    assert wrong.value.field_violations[0][0] == "structured_output.regex"


async def test_a_grammar_without_end_is_refused_in_time(tiny_service: TinyService) -> None:
    request = build_request("the", max_tokens=20)
    terms = " & ".join(f"/(?s:.*a.{{{length}}})/" for length in range(200, 300))
    request.structured_output.grammar = f"start: A\nA: {terms}\n"
    with pytest.raises(TandemError) as slow:
        await tiny_service.client.generate(request).result()
    assert slow.value.field_violations == (
        ("structured_output.grammar", "takes longer than 2 s to compile"),
    )
    assert (await tiny_service.client.generate("the", max_tokens=4).result()).usage is not None


async def test_logprobs_come_for_every_token_of_output_and_prompt(
    tiny_service: TinyService,
) -> None:
    request = build_request(PROMPTS[0], max_tokens=6, temperature=0)
    request.output.top_logprobs = 2
    request.output.prompt_logprobs = True
    events = [event async for event in tiny_service.client.generate(request).events()]
    logprobs = [entry for event in events for entry in event.delta.logprobs]
    tokens = [token for event in events for token in event.delta.token_ids]
    assert [entry.token_id for entry in logprobs] == tokens
    assert all(entry.top[0].token_id == entry.token_id for entry in logprobs)  # greedy
    of_prompt = [entry for event in events for entry in event.delta.prompt_logprobs]
    assert len(of_prompt) == events[0].started.num_prompt_tokens - 1


async def test_random_cancellation_leaks_nothing_and_disturbs_nobody(
    tiny_service: TinyService,
) -> None:
    client, draw = tiny_service.client, random.Random(3)

    async def leave_early(index: int) -> None:
        stream = client.generate(
            PROMPTS[index % len(PROMPTS)], max_tokens=60, temperature=0, request_id=f"c{index}"
        )
        num_events = draw.randrange(6)
        async with aclosing(stream.events()) as events:
            for _ in range(num_events):
                if await anext(events, None) is None:
                    break

    async def keep(index: int) -> None:
        result = await client.generate(PROMPTS[index], max_tokens=24, temperature=0).result()
        assert result.token_ids == target_alone(PROMPTS[index], 24)

    await asyncio.gather(*(leave_early(index) for index in range(60)), *map(keep, range(3)))
    for _ in range(500):
        if tiny_service.server.num_live_requests == 0:
            break
        await asyncio.sleep(0.02)
    load = await client.load()
    assert tiny_service.server.num_live_requests == 0
    assert (load.num_running_requests, load.num_waiting_requests) == (0, 0)
    assert load.num_outstanding_tokens == 0
    assert load.num_free_blocks == load.num_total_blocks


async def test_every_outcome_has_one_ledger_row(tiny_service: TinyService) -> None:
    client = tiny_service.client
    await client.generate("one", max_tokens=5, temperature=0, request_id="done").result()
    with pytest.raises(TandemError):
        await client.generate("two", max_tokens=5, temperature=-1, request_id="wrong").result()
    stream = client.generate("three", max_tokens=400, temperature=0, request_id="left")
    async with aclosing(stream.events()) as events:
        await anext(events)
    with pytest.raises(TandemError):
        await client.generate(
            "four", max_tokens=490, temperature=0, request_id="late", timeout_seconds=0.25
        ).result()
    await tiny_service.server.stop(5.0)
    rows = rows_filed(
        tiny_service.ledger,
        "SELECT request_id, outcome, status_code, num_output_tokens FROM requests",
    )
    outcomes = {row[0]: row[1:3] for row in rows}
    assert len(rows) == len(outcomes) == 4
    assert outcomes["done"] == ("completed", "OK")
    assert outcomes["wrong"] == ("refused", "INVALID_ARGUMENT")
    assert outcomes["left"] == ("cancelled", "CANCELLED")
    assert outcomes["late"][1] == "DEADLINE_EXCEEDED"


async def test_finished_requests_are_audited_in_idle_time(tiny_service: TinyService) -> None:
    for seed, temperature in enumerate((0.0, 0.7, 1.0)):
        await tiny_service.client.generate(
            PROMPTS[seed], max_tokens=12, temperature=temperature, seed=seed
        ).result()
    audited: list[tuple[object, ...]] = []
    for _ in range(200):
        audited = rows_filed(tiny_service.ledger, "SELECT verdict FROM audit_results")
        if len(audited) == 3:
            break
        await asyncio.sleep(0.05)
    assert [verdict for (verdict,) in audited] == ["exact"] * 3
