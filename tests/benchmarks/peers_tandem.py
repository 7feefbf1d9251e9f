"""Tandem's engine as one of the peers: plain, and speculative in the mode `auto`."""

import time
from dataclasses import replace

import torch

from engine.config import SHIPPED_HEAD, EngineConfig, SpeculationConfig
from engine.engine import Engine
from tests.benchmarks.peers_jobs import Job, Served
from tests.benchmarks.workloads import greedy_request

_MODES = {"plain": "off", "speculative": "auto"}


class Tandem:
    """One engine for both modes; drafts by looking the prompt up and, where one is shipped, by
    the head."""

    def __init__(self, folder: str, dtype: str, max_num_rows: int) -> None:
        config = EngineConfig(
            target=folder,
            dtype=dtype,  # type: ignore[arg-type]
            device="cpu",
            max_num_rows=max_num_rows,
            max_model_tokens=2560,
            speculation=SpeculationConfig(drafters=("prompt_lookup", "head"), head=SHIPPED_HEAD),
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
        names = [f"{self._num_jobs}-{index}" for index in range(len(job.prompts))]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        sent: dict[str, float] = {}
        first: dict[str, float] = {}
        finished: dict[str, float] = {}
        started = time.perf_counter()
        next_one = 0
        while len(finished) < len(names):
            now = time.perf_counter() - started
            while (
                next_one < len(names)
                and len(sent) - len(finished) < job.num_rows
                and job.arrived_at(next_one) <= now
            ):
                request = greedy_request(
                    names[next_one],
                    job.prompts[next_one],
                    job.max_tokens[next_one],
                    _MODES[job.mode],
                    ignore_eos=True,
                )
                self._engine.submit(replace(request, tenant=job.tenants[next_one]))
                sent[names[next_one]] = now if job.arrivals is None else job.arrived_at(next_one)
                next_one += 1
            if not self._engine.has_work():
                time.sleep(max(0.0, job.arrived_at(next_one) - now))
                continue
            output = self._engine.step()
            now = time.perf_counter() - started
            for delta in output.deltas:
                tokens[delta.request_id].extend(delta.token_ids)
                first.setdefault(delta.request_id, now)
            for stats in output.finished:
                if stats.error:
                    raise RuntimeError(stats.error)
                finished[stats.request_id] = now
        return [Served(tuple(tokens[n]), sent[n], first[n], finished[n]) for n in names]
