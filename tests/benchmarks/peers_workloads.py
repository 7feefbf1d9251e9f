"""What the peers are given: the same token ids, lengths and arrivals for all of them.

spec_bench            prompts of all 13 categories, outputs of mixed lengths
spec_bench/CATEGORY   prompts of one category
summary               long documents to be summarised
code                  source files of the standard library to be continued
agent                 agents whose every turn repeats the whole history: a growing shared prefix
azure                 prompts of spec_bench at recorded arrivals (open loop)
"""

import inspect
import itertools
import json.decoder
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.peers_jobs import Job
from tests.benchmarks.soak import arrivals

CODE_SOURCES = (json.decoder, textwrap, random)
_SEED = 3
_AGENT_TURNS = 3
_SUMMARY = "summarization"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run."""

    batch_sizes: tuple[int, ...]
    long_batch_sizes: tuple[int, ...]  # of summary, code and agent
    requests_per_row: int
    fewest_requests: int
    output_tokens: tuple[int, ...]  # taken in turn: mixed lengths
    longest_prompt: int  # of the chat workloads
    longest_context: int  # of summary and code
    num_arrivals: int
    rounds: int
    categories: bool


_ALL = (1, 4, 8, 16, 32)
QUICK = Effort((1, 8), (1, 8), 1, 1, (24, 12, 32, 16), 96, 512, 8, 2, categories=False)
MEDIUM = Effort(_ALL, (1, 8), 1, 3, (32, 16, 48, 24), 256, 700, 24, 2, categories=True)
FULL = Effort(_ALL, _ALL, 2, 2, (64, 24, 96, 48), 256, 1400, 60, 5, categories=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that run one after the other and are measured together."""

    name: str
    num_rows: int
    jobs: tuple[Job, ...]


class Workloads:
    """Makes workloads; encode turns a user's message into the prompt's token ids."""

    def __init__(
        self, encode: Callable[[str], list[int]], prompts: Sequence[tuple[str, str]], effort: Effort
    ) -> None:
        self._effort = effort
        self._encode = encode
        shuffled = random.Random(_SEED).sample(list(prompts), len(prompts))
        self._long_texts = [text for category, text in shuffled if category == _SUMMARY]
        self._by_category: dict[str, list[list[int]]] = {}
        wanted = max(effort.fewest_requests, max(effort.batch_sizes) * effort.requests_per_row)
        for category, text in shuffled:
            chosen = self._by_category.setdefault(category, [])
            # Four characters are about a token: what is far too long is not even encoded.
            if len(chosen) < wanted and len(text) <= 6 * effort.longest_prompt:
                ids = encode(text)
                if len(ids) <= effort.longest_prompt:
                    chosen.append(ids)

    def closed(self) -> list[Workload]:
        found: list[Workload] = []
        for num_rows in self._effort.batch_sizes:
            found.append(self._chat("spec_bench", num_rows, self._mixed()))
        for num_rows in self._effort.long_batch_sizes:
            found.append(self._chat("summary", num_rows, self._documents()))
            found.append(self._chat("code", num_rows, self._code()))
            found.append(self._agents(num_rows))
        if self._effort.categories:
            for category, prompts in self._by_category.items():
                if prompts:
                    found.extend(
                        self._chat(f"spec_bench/{category}", num_rows, prompts)
                        for num_rows in (1, 8)
                    )
        return found

    def open(self, requests_per_second: float, num_rows: int) -> Workload:
        """The first recorded arrivals, stretched to this mean rate: over so few of them the
        record's own rate is far from its mean."""
        count = self._effort.num_arrivals
        instants = [a.at_seconds for a in itertools.islice(arrivals(requests_per_second), count)]
        (job,) = self._chat("azure", num_rows, self._mixed(), count).jobs
        stretch = (count - 1) / requests_per_second / (instants[-1] - instants[0])
        timed = tuple(stretch * (instant - instants[0]) for instant in instants)
        return Workload(
            "azure",
            num_rows,
            (Job(job.mode, num_rows, job.prompts, job.max_tokens, job.tenants, timed),),
        )

    def _mixed(self) -> list[list[int]]:
        """One of every category in turn."""
        columns = itertools.zip_longest(*self._by_category.values())
        return [prompt for row in columns for prompt in row if prompt is not None]

    def _documents(self) -> list[list[int]]:
        limit = 5 * self._effort.longest_context
        return [self._fit("Summarize: ", text[:limit]) for text in self._long_texts[:8]]

    def _code(self) -> list[list[int]]:
        found: list[list[int]] = []
        for module in CODE_SOURCES:
            text = inspect.getsource(module)
            size = 4 * self._effort.longest_context
            found.extend(
                self._fit("Continue this file.\n", text[start : start + size])
                for start in (0, len(text) // 3)
            )
        return found

    def _fit(self, task: str, text: str) -> list[int]:
        """The task with as much of the text as the longest context holds."""
        ids = self._encode(task + text)
        while len(ids) > self._effort.longest_context:
            text = text[: int(0.98 * len(text) * self._effort.longest_context / len(ids))]
            ids = self._encode(task + text)
        return ids

    def _chat(
        self, name: str, num_rows: int, prompts: list[list[int]], count: int | None = None
    ) -> Workload:
        fewest = self._effort.fewest_requests
        count = count or max(fewest, num_rows * self._effort.requests_per_row)
        chosen = [prompts[index % len(prompts)] for index in range(count)]
        return Workload(name, num_rows, (self._job(num_rows, chosen, f"{name}-{num_rows}"),))

    def _job(self, num_rows: int, prompts: list[list[int]], name: str) -> Job:
        lengths = itertools.islice(itertools.cycle(self._effort.output_tokens), len(prompts))
        return Job(
            "plain",
            num_rows,
            tuple(map(tuple, prompts)),
            tuple(lengths),
            tuple(f"{name}-{index}" for index in range(len(prompts))),
        )

    def _agents(self, num_rows: int) -> Workload:
        """Turn after turn: the history, and one more observation behind it."""
        mixed = self._mixed()
        histories = [list(mixed[index % len(mixed)]) for index in range(num_rows)]
        jobs = []
        for turn in range(_AGENT_TURNS):
            made = self._job(num_rows, histories, f"agent-{num_rows}")
            jobs.append(replace(made, shares_prefixes=True))
            step = 1 + turn * num_rows
            histories = [
                [*history, *mixed[(step + index) % len(mixed)]]
                for index, history in enumerate(histories)
            ]
        return Workload("agent", num_rows, tuple(jobs))
