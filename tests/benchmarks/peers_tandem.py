"""Tandem's engine as one of the peers: plain, and speculative in the mode `auto`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.config import SHIPPED_HEAD, EngineConfig, SpeculationConfig
from engine.engine import Engine
from tests.benchmarks.peers_jobs import Job, Served
from tests.benchmarks.peers_loop import serve_steps
from tests.benchmarks.workloads import greedy_request

_MODES = {"plain": "off", "speculative": "auto"}


class Tandem:
    """One engine for both modes; drafts by looking the prompt up and, where one is shipped, by
    the head."""

    def __init__(
        self, folder: str, dtype: str, max_num_rows: int, num_threads: int, **options: Any
    ) -> None:
        torch.set_num_threads(num_threads)
        config = EngineConfig(
            target=folder,
            dtype=dtype,  # type: ignore[arg-type]
            device="cpu",
            max_num_rows=max_num_rows,
            max_model_tokens=2560,
            speculation=SpeculationConfig(drafters=("prompt_lookup", "head"), head=SHIPPED_HEAD),
            **options,
        )
        self._engine = Engine.from_config(config)
        self._num_jobs = 0

    def versions(self) -> dict[str, str]:
        info = self._engine.info
        return {
            "torch": torch.__version__,
            "drafters": "+".join(info.drafters),
            "numerics": info.numerics,
            "guarantee": info.guarantee,
        }

    def run(self, job: Job) -> list[Served]:
        self._num_jobs += 1

        def submit(index: int) -> None:
            request = greedy_request(
                f"{self._num_jobs}-{index}",
                job.prompts[index],
                job.max_tokens[index],
                _MODES[job.mode],
                ignore_eos=True,
            )
            self._engine.submit(replace(request, tenant=job.tenants[index]))

        def step() -> Iterator[tuple[int, Sequence[int]]]:
            output = self._engine.step()
            for stats in output.finished:
                if stats.error:
                    raise RuntimeError(stats.error)
            for delta in output.deltas:
                yield int(delta.request_id.partition("-")[2]), delta.token_ids

        return serve_steps(job, submit, step)
