"""Two processes: they learn what one does, one of them alone makes the files, and what one
hears or refuses holds for both."""

import json
import multiprocessing
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from engine.training import atomic_files, trainer
from engine.training.data_stage import answer_prompts
from engine.training.distillation import Distillation
from engine.training.errors import StoppedError, TrainingError
from engine.training.feature_stage import make_features
from engine.training.material import make_material
from engine.training.run import Run
from engine.training.stages import distill, train, variational
from engine.training.trainer import TrainSettings
from engine.training.unrolled import Batch
from engine.training.whole_run import compare_and_keep
from tests.engine.training.tiny_run import prepared_run, tiny_recipe
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # processes that load everything

SETTINGS = TrainSettings(
    num_steps=10,
    batch_tokens=256,
    batches_per_step=2,
    num_draft_steps=3,
    num_drafts_served=3,
    evaluate_every=5,
)


def in_two_processes(program: Any, folder: Path) -> None:
    """program(rank, folder) in both; each must end well."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processes = [
        context.Process(target=_with_rank, args=(program, rank, folder, port)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]


def _with_rank(program: Any, rank: int, folder: Path, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
    )
    torch.set_num_threads(1)
    program(rank, folder)


def run_of(folder: Path, name: str) -> Run:
    recipe = tiny_recipe(folder)
    recipe = replace(
        recipe,
        distill=replace(recipe.distill, batches_per_step=2, num_steps=8),
        variational=replace(recipe.variational, level="path"),
    )
    return Run(folder / name, recipe, Accelerator(cpu=True))


def all_stages(run: Run) -> None:
    answer_prompts(run)
    make_features(run)
    start = distill(run)
    compare_and_keep(run, {"distilled": start, "variational": variational(run, start)})


def _whole(rank: int, folder: Path) -> None:
    log = folder / f"written-{rank}.txt"
    log.touch()
    write_bytes, write_folder = atomic_files.write_bytes, atomic_files.write_folder

    def noted(write: Any) -> Any:
        def note(path: Path, content: Any) -> None:
            with log.open("a") as handle:
                handle.write(f"{path.relative_to(folder)}\n")
            write(path, content)

        return note

    atomic_files.write_bytes = noted(write_bytes)
    atomic_files.write_folder = noted(write_folder)
    run = run_of(folder, "two")
    assert run.accelerator.num_processes == 2
    all_stages(run)


def test_two_processes_learn_what_one_does_and_one_alone_makes_the_files(tmp_path: Path) -> None:
    one = run_of(tmp_path, "one")
    all_stages(one)
    in_two_processes(_whole, tmp_path)
    assert (tmp_path / "written-1.txt").read_text() == ""
    written = Counter((tmp_path / "written-0.txt").read_text().split())
    for name in ("data/shard-000000.jsonl", "features/shard-000000.safetensors", "vocabulary.json"):
        assert written[f"two/{name}"] == 1, name
    for stage in ("distill", "distill-finish", "variational"):
        folders = [sorted((tmp_path / run / stage).glob("step-*")) for run in ("one", "two")]
        assert [path.name for path in folders[0]] == [path.name for path in folders[1]]
        ours, theirs = (load_file(f[-1] / "master.safetensors") for f in folders)
        for name, tensor in ours.items():
            assert torch.allclose(tensor, theirs[name], atol=1e-5), (stage, name)
        told = (tmp_path / "two" / stage / "events.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in told]
        assert len(steps) == len(set(steps)) > 1
    best = [
        json.loads((tmp_path / r / "comparison.json").read_text())["best"] for r in ("one", "two")
    ]
    assert best[0] == best[1]


def _heard_by_one(rank: int, folder: Path) -> None:
    """The second process alone gets a signal, then runs out of time, each in its third step."""
    run = Run(folder / "run", tiny_recipe(folder), Accelerator(cpu=True))
    forward, is_over, calls = Distillation.forward, trainer._is_over, [0]

    def signalled(self: Distillation, batch: Batch) -> torch.Tensor:
        calls[0] += 1
        if rank == 1 and calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, batch)

    Distillation.forward = signalled  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        train(make_material(run), "stopped", SETTINGS)
    calls[0] = 0
    Distillation.forward = forward  # type: ignore[method-assign]

    def late(seconds: float, most: float | None) -> bool:
        calls[0] += 1
        return (rank == 1 and calls[0] == 4) or is_over(seconds, most)

    trainer._is_over = late  # type: ignore[assignment]
    train(make_material(run), "late", SETTINGS)
    trainer._is_over = is_over
    changed = replace(run.recipe, data=replace(run.recipe.data, max_output_tokens=12))
    other = Run(run.folder, changed, run.accelerator, run.target)
    with pytest.raises(TrainingError, match="max_output_tokens"):
        answer_prompts(other)


def test_what_one_process_hears_or_refuses_holds_for_both(tmp_path: Path) -> None:
    prepared_run(tmp_path)
    in_two_processes(_heard_by_one, tmp_path)
    for stage in ("stopped", "late"):
        assert (tmp_path / "run" / stage / "latest").read_text() == "step-000003"
