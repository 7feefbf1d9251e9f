"""transformers as a user would run it: generate, assisted generation, continuous batching.

Runs inside a worker process (peers_worker.py); needs torch and transformers only.
"""

import time
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
)

from tests.benchmarks.peers_jobs import Job, RefusedError, Served
from tests.benchmarks.peers_loop import serve_batches

_NUM_LOOKUP_TOKENS = 4
_RESULT_TIMEOUT_SECONDS = 120
_PAGE_TOKENS, _MAX_MODEL_TOKENS, _MAX_STEP_TOKENS = 256, 2560, 512


class TokenTimes(StoppingCriteria):
    """Notes when the batch reached each length; never stops anything."""

    def __init__(self, num_prompt_tokens: int, started: float) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._started = started
        self.reached: list[tuple[int, float]] = []  # (new tokens, seconds after the start)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        num_tokens = input_ids.shape[1] - self._num_prompt_tokens
        self.reached.append((num_tokens, time.perf_counter() - self._started))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def at(self, num_tokens: int) -> float:
        """When a row had as many new tokens."""
        return next(seconds for count, seconds in self.reached if count >= num_tokens)


class Generate:
    """`model.generate` over static batches, padded on the left: a batch starts with what has
    arrived and ends with its longest request. Speculation is prompt lookup, for one row only."""

    def __init__(self, folder: str, dtype: str, max_num_rows: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()

    @staticmethod
    def versions() -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def run(self, job: Job) -> list[Served]:
        if job.mode == "speculative" and job.num_rows > 1:
            raise RefusedError("assisted generation takes one row; batches are refused")
        return serve_batches(job, lambda batch, started: self._batch(job, batch, started))

    def _batch(self, job: Job, batch: list[int], started: float) -> list[Served]:
        prompts = [job.prompts[index] for index in batch]
        longest = max(map(len, prompts))
        most_tokens = max(job.max_tokens[index] for index in batch)
        sent = time.perf_counter() - started
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        times = TokenTimes(longest, started)
        lookup = (
            {"prompt_lookup_num_tokens": _NUM_LOOKUP_TOKENS} if job.mode == "speculative" else {}
        )
        output = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most_tokens,
            min_new_tokens=most_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[times],
            **lookup,
        )
        found = []
        for row, index in enumerate(batch):
            count = job.max_tokens[index]
            tokens = tuple(output[row, longest : longest + count].tolist())
            sent_at = job.arrived_at(index) if job.arrivals is not None else sent
            found.append(Served(tokens, sent_at, times.at(1), times.at(count)))
        return found


class ContinuousBatching:
    """transformers' own continuous batching, its manager started once and kept.

    Its prefix cache does not ask whose prefixes they are: it is on only for jobs whose tenants
    come back, in a manager that is started anew, untimed, when others come.
    """

    def __init__(self, folder: str, dtype: str, max_num_rows: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._max_num_rows = max_num_rows
        self._tenants: set[str] = set()
        self._num_jobs = 0
        self._manager = self._started(shares_prefixes=False)

    def _started(self, *, shares_prefixes: bool) -> Any:
        # Left to itself the manager takes more than half of the machine's free memory.
        blocks_per_row = -(-_MAX_MODEL_TOKENS // _PAGE_TOKENS)
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=self._max_num_rows * blocks_per_row,
                max_batch_tokens=_MAX_STEP_TOKENS,
                allow_block_sharing=shares_prefixes,
            ),
        )
        manager.start()
        return manager

    def _prepare(self, job: Job) -> None:
        wanted = set(job.tenants) if job.shares_prefixes else set()
        if wanted == self._tenants or (wanted and self._tenants >= wanted):
            return
        self._manager.stop(block=True)
        self._manager = self._started(shares_prefixes=job.shares_prefixes)
        self._tenants = wanted

    @staticmethod
    def versions() -> dict[str, str]:
        return Generate.versions()

    def close(self) -> None:
        """End the manager's thread."""
        self._manager.stop(block=True)

    def run(self, job: Job) -> list[Served]:
        if job.mode == "speculative":
            raise RefusedError("transformers' continuous batching does not speculate")
        self._prepare(job)
        self._num_jobs += 1
        sent: dict[str, float] = {}
        served: dict[str, Served] = {}
        names = [f"{self._num_jobs}-{index}" for index in range(len(job.prompts))]
        started = time.perf_counter()
        next_one = 0
        while len(served) < len(names):
            now = time.perf_counter() - started
            while (
                next_one < len(names)
                and len(sent) - len(served) < job.num_rows
                and job.arrived_at(next_one) <= now
            ):
                name = names[next_one]
                self._manager.add_request(
                    list(job.prompts[next_one]),
                    request_id=name,
                    max_new_tokens=job.max_tokens[next_one],
                    record_timestamps=True,
                )
                sent[name] = now if job.arrivals is None else job.arrived_at(next_one)
                next_one += 1
            if len(sent) == len(served):
                time.sleep(max(0.0, job.arrived_at(next_one) - now))
                continue
            result = self._manager.get_result(timeout=0.01)
            if result is not None and result.is_finished():
                served[result.request_id] = self._served(result, sent, started)
            elif not self._manager.is_running():
                raise RefusedError("the manager's thread ended")
            elif now > _RESULT_TIMEOUT_SECONDS + (job.arrivals or (0.0,))[-1]:
                raise RefusedError(f"no result within {_RESULT_TIMEOUT_SECONDS} s")
        return [served[name] for name in names]

    @staticmethod
    def _served(result: Any, sent: dict[str, float], started: float) -> Served:
        if result.error:
            raise RefusedError(result.error)
        return Served(
            tuple(result.generated_tokens),
            sent[result.request_id],
            result.timestamps[0] - started,
            result.timestamps[-1] - started,
        )
