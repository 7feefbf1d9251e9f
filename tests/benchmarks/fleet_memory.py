"""The peak memory of what the pods run: `make bench-memory`, for k8s/figures.toml.

Prints its table [memory], in MB of 2**20 bytes, of the catalogue's model on a CPU: the highest
resident memory that the kernel counted for each command, as the pods of `dev-cpu` and of the
training Job run it. The server answers as many requests at once as it has rows, each with a long
prompt. Needs the pulled model, takes some minutes, and fetches the model once more. The export's
figure is that of `python -m tests.benchmarks.exports --rows 10000000`.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from service.async_client import AsyncClient
from service.client_calls import TandemError
from service.models import default_home
from tests.benchmarks.exports_ledger import fill
from tests.k8s.manifests import K8S, build, environment, serve_container
from tests.ports import free_port

TARGET = "smollm2-135m-instruct"
NUM_REQUESTS_IN_LEDGER = 300_000
TANDEM = Path(sys.executable).with_name("tandem")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 150  # some 1,500 tokens


def start(arguments: Sequence[str], variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    outside = {n: v for n, v in os.environ.items() if not n.startswith("TANDEM_")}
    return subprocess.Popen([TANDEM, *arguments], env={**outside, **variables})


def peak_mb(process: "subprocess.Popen[bytes]", expected_status: int = 0) -> int:
    """Of a process that ends now. Raises RuntimeError for another exit status."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != expected_status:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    return usage.ru_maxrss // 1024


def run(arguments: Sequence[str], **variables: str) -> int:
    return peak_mb(start(arguments, variables))


async def serve(home: Path) -> dict[str, int]:
    """At the start, and after a batch of long prompts, in which all keys and values are there."""
    resources = build("dev-cpu")
    given = environment(resources, serve_container(resources))
    port = free_port()
    own = {
        "TANDEM_HOME": str(home),
        "TANDEM_PORT": str(port),
        "TANDEM_PROMETHEUS_PORT": str(free_port()),
        "TANDEM_PRICE_BOOK": str(K8S / "base" / "prices.toml"),
        "TANDEM_REGISTRY": str(home / "registry"),
        "TANDEM_EXPERIMENT_FILE": str(home / "experiment.toml"),
        "TANDEM_NUM_THREADS": "2",
    }
    process = start(["serve"], {n: v for n, v in given.items() if v is not None} | own)
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            await _until_ready(client, process)
            at_start = _peak_so_far_mb(process.pid)
            rows = int(given["TANDEM_MAX_NUM_ROWS"] or 0)
            asked = [
                client.generate(f"{i}. {PROMPT}", max_tokens=48, ignore_eos=True)
                for i in range(rows)
            ]
            results = await asyncio.gather(*(stream.result() for stream in asked))
        num_cached = sum(
            result.usage.num_prompt_tokens + len(result.token_ids)
            for result in results
            if result.usage is not None
        )
        process.send_signal(signal.SIGTERM)
        return {
            "serve_start": at_start,
            "serve": peak_mb(process),
            "serve_cached_tokens": num_cached,
        }
    finally:
        process.kill()


async def _until_ready(client: AsyncClient, process: "subprocess.Popen[bytes]") -> None:
    while True:
        try:
            await client.model()
            return
        except TandemError:
            if process.poll() is not None:
                raise
            await asyncio.sleep(0.5)


def _peak_so_far_mb(process_id: int) -> int:
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("the kernel counts no peaks")


def batch_work(home: Path) -> dict[str, int]:
    """Migration, housekeeping of a ledger with rows that may go, and the pull of a model."""
    migrate = run(["ledger", "migrate"], TANDEM_HOME=str(home))
    fill(f"sqlite:///{home}/ledger.db", NUM_REQUESTS_IN_LEDGER, 3)
    run(["export", "--out", str(home / "tables")], TANDEM_HOME=str(home))
    prune = run(["ledger", "prune", "--keep-days", "1"], TANDEM_HOME=str(home))
    pull = run(["models", "pull", TARGET], TANDEM_HOME=str(home / "pulled"))
    return {"migrate": migrate, "prune": prune, "pull": pull}


def training(home: Path) -> dict[str, int]:
    """A run of the Job's own recipe on few prompts, and the registration of its head."""
    prompts = home / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i} words."}) + "\n" for i in range(24)))
    recipe = (K8S / "training" / "base" / "recipe.toml").read_text(encoding="utf-8")
    (home / "recipe.toml").write_text(recipe.replace("/prompts/train.jsonl", str(prompts)))
    options = [f"--out={home}/run", f"--recipe={home}/recipe.toml", f"--target={TARGET}"]
    train = run(["train", "run", *options, "--budget=60s", "--threads=2"], TANDEM_HOME=str(home))
    register = run(
        ["drafter", "register", f"{home}/run/head", "--name=chat"],
        TANDEM_HOME=str(home),
        TANDEM_REGISTRY=str(home / "registry"),
    )
    return {"train": train, "register": register}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-memory-") as folder:
        home = Path(folder)
        (home / "models").symlink_to(default_home() / "models")
        found = asyncio.run(serve(home))
        found |= batch_work(home / "batch")
        found |= training(home)
    print("[memory]")
    for name, value in found.items():
        print(f"{name} = {value}")


if __name__ == "__main__":
    main()
