"""A fleet of replicas in simulated time: requests, batches, an autoscaler. Discrete events, simpy.

A replica works as the engine does at a coarse grain: a prompt is computed first, for the time that
the measured cost table gives its tokens, then the request joins the batch, all rows of which get
the tokens per second that a step of that many rows yields with the best number of draft tokens.
While a prompt is computed the batch waits, which the engine avoids by mixing both in a step of
the same length; so the simulated tail of a token's latency is an upper bound.
"""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import simpy

from engine.cost_table import CostTable

CHUNK_TOKENS = 512
MAX_DRAFT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """One replica. acceptance: the chance that a draft token is accepted; 0 is no speculation."""

    cost: CostTable
    max_num_rows: int
    max_num_waiting: int
    kv_tokens: int
    acceptance: float
    start_seconds: float

    def prefill_seconds(self, num_tokens: int) -> float:
        """Time of a prompt, computed in chunks."""
        whole, rest = divmod(num_tokens, CHUNK_TOKENS)
        last = self.cost.forward_seconds(rest) if rest else 0.0
        return whole * self.cost.forward_seconds(CHUNK_TOKENS) + last

    def tokens_per_second(self, num_rows: int) -> float:
        """Of each of the rows, with the best number of draft tokens (0 included)."""
        return max(
            sum(self.acceptance**n for n in range(drafts + 1))
            / self.cost.forward_seconds(num_rows * (drafts + 1))
            for drafts in range(MAX_DRAFT_TOKENS + 1)
        )

    def best_tokens_per_second(self) -> float:
        """Of all rows together, when no prompt is computed."""
        return max(n * self.tokens_per_second(n) for n in range(1, self.max_num_rows + 1))


@dataclass(slots=True)
class Job:
    """A request on its way; instants are simulated seconds, NaN until they come."""

    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    started_at: float = float("nan")
    first_token_at: float = float("nan")
    finished_at: float = float("nan")

    @property
    def kv_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class Replica:
    """A server. `ready_at` is when its model is loaded; a leaving one takes no new requests."""

    def __init__(self, env: simpy.Environment, shape: Shape, ready_at: float) -> None:
        self.env, self.shape, self.ready_at = env, shape, ready_at
        self.is_leaving = False
        self.waiting: deque[Job] = deque()
        self.finished: list[Job] = []
        self.num_emitted = 0.0  # tokens since the start
        self._prefills: deque[Job] = deque()
        self._rows: list[tuple[float, int, Job]] = []  # by the progress at which they are done
        self._progress = 0.0  # tokens that each row has got since the start
        self._kv_tokens = 0
        self._rates = [0.0] + [shape.tokens_per_second(n + 1) for n in range(shape.max_num_rows)]
        self._woken = env.event()
        self._count = 0
        env.process(self._run())

    @property
    def num_rows(self) -> int:
        """Places in the batch that are taken."""
        return len(self._rows) + len(self._prefills)

    @property
    def load(self) -> int:
        """Requests that it has."""
        return self.num_rows + len(self.waiting)

    def submit(self, job: Job) -> bool:
        """False when its queue is full: the caller gets RESOURCE_EXHAUSTED."""
        if len(self.waiting) >= self.shape.max_num_waiting:
            return False
        self.waiting.append(job)
        if not self._woken.triggered:
            self._woken.succeed()
        return True

    def _admit(self) -> None:
        while self.waiting and self.num_rows < self.shape.max_num_rows:
            job = self.waiting[0]
            fits = self._kv_tokens + job.kv_tokens <= self.shape.kv_tokens
            if self.num_rows and not fits:
                return
            self.waiting.popleft()
            job.started_at = self.env.now
            self._kv_tokens += job.kv_tokens
            self._prefills.append(job)

    def _run(self) -> simpy.events.ProcessGenerator:
        while True:
            self._admit()
            if self._prefills:
                yield self.env.timeout(
                    self.shape.prefill_seconds(self._prefills[0].num_prompt_tokens)
                )
                job = self._prefills.popleft()
                job.first_token_at = self.env.now
                self._count += 1
                done_at = self._progress + max(job.num_output_tokens - 1, 0)
                heapq.heappush(self._rows, (done_at, self._count, job))
            elif self._rows:
                yield from self._decode()
            else:
                self._woken = self.env.event()
                yield self._woken

    def _decode(self) -> simpy.events.ProcessGenerator:
        rate = self._rates[len(self._rows)]
        began_at, seconds = self.env.now, (self._rows[0][0] - self._progress) / rate
        self._woken = self.env.event()
        yield self.env.timeout(max(seconds, 0.0)) | self._woken
        num_tokens = (self.env.now - began_at) * rate
        self._progress += num_tokens
        self.num_emitted += num_tokens * len(self._rows)
        while self._rows and self._rows[0][0] <= self._progress + 1e-6:
            job = heapq.heappop(self._rows)[2]
            job.finished_at = self.env.now
            self._kv_tokens -= job.kv_tokens
            self.finished.append(job)


@dataclass(slots=True)
class Fleet:
    """The replicas behind a gateway that sends each request to the emptier of two."""

    env: simpy.Environment
    shape: Shape
    seed: int = 0
    replicas: list[Replica] = field(default_factory=list)
    gone: list[Replica] = field(default_factory=list)
    num_refused: int = 0
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    def ready(self) -> list[Replica]:
        """Those that take requests."""
        return [r for r in self.replicas if r.ready_at <= self.env.now and not r.is_leaving]

    def wanted(self) -> list[Replica]:
        """Those that stay, ready or not: what a Deployment counts."""
        return [r for r in self.replicas if not r.is_leaving]

    def grow(self, count: int, ready_at: float) -> None:
        self.replicas += [Replica(self.env, self.shape, ready_at) for _ in range(count)]

    def shrink(self, count: int) -> None:
        """Let the emptiest drain: they finish what they have."""
        for replica in sorted(self.wanted(), key=lambda r: r.load)[:count]:
            replica.is_leaving = True

    def bury(self) -> None:
        """Forget those that have drained."""
        for replica in [r for r in self.replicas if r.is_leaving and not r.load]:
            self.replicas.remove(replica)
            self.gone.append(replica)

    def num_emitted(self) -> float:
        """Tokens of all replicas since the start."""
        return sum(replica.num_emitted for replica in (*self.replicas, *self.gone))

    def jobs(self) -> list[Job]:
        """Everything finished so far."""
        return [job for replica in (*self.replicas, *self.gone) for job in replica.finished]

    def feed(self, jobs: Sequence[Job]) -> simpy.events.ProcessGenerator:
        """Let the requests arrive, in order."""
        for job in jobs:
            yield self.env.timeout(job.arrived_at - self.env.now)
            ready = self.ready()
            if not ready:
                self.num_refused += 1
                continue
            choices = [self._random.choice(ready) for _ in range(2)]
            if not min(choices, key=lambda replica: replica.load).submit(job):
                self.num_refused += 1
