"""The image's install steps in a clean folder, and what they make run as a pod runs it.

The programs run under the image's user id, where the tests are root: with no right to write but
into the home, and none to gain more.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from service.async_client import AsyncClient
from service.models import CATALOGUE, MANIFEST_NAME, model_path
from tests.k8s.manifests import ROOT, build, serve_pod
from tests.k8s.rollout import ServerProcess
from tests.k8s.test_image import IGNORE
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_WEIGHTS = {".safetensors", ".gguf", ".pt", ".ckpt", ".onnx"}
_OF_THE_TESTS = {"PYTHONPATH", "VIRTUAL_ENV"}
_INSTALLERS = {"pip", "setuptools"}  # of `python -m venv`: models are pulled with pip


@dataclass(frozen=True)
class Installed:
    """What the builder's last stage would hold, and folders as a pod has them."""

    app: Path
    home: Path
    working: Path
    user_id: int

    def environ(self) -> dict[str, str]:
        outside = {n: v for n, v in os.environ.items() if not n.startswith("TANDEM_")}
        return {
            **{n: v for n, v in outside.items() if n not in _OF_THE_TESTS},
            "PATH": f"{self.app / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.home),
            "TANDEM_HOME": str(self.home),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, *arguments: str) -> list[str]:
        """A program of the image, unprivileged, in a folder that it may not write into."""
        return [*unprivileged(self.user_id), "env", f"--chdir={self.working}", *arguments]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            self.command(*arguments),
            env=self.environ(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout


def unprivileged(user_id: int) -> list[str]:
    """A prefix that gives up being root. Reading stays allowed: Python may lie below a home."""
    if os.geteuid() != 0:
        return []
    reading = "-all,+dac_read_search"
    return [
        *("setpriv", f"--reuid={user_id}", f"--regid={user_id}", "--clear-groups"),
        *(f"--inh-caps={reading}", f"--ambient-caps={reading}", f"--bounding-set={reading}"),
        "--no-new-privs",
    ]


@pytest.fixture(scope="module")
def installed() -> Iterator[Installed]:
    # Not below pytest's folder, which is closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="tandem-image-"))
    folder.chmod(0o755)
    try:
        yield _install(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _install(folder: Path) -> Installed:
    source, app, home = folder / "src", folder / "app", folder / "home"
    for name in [line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")]:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    environ = {n: v for n, v in os.environ.items() if n not in _OF_THE_TESTS}
    environ |= {"PYTHON": sys.executable, "TORCH_INDEX": "", "HOME": str(folder / "builder")}
    subprocess.run(["sh", "k8s/install.sh", app, "cpu"], cwd=source, env=environ, check=True)
    assert not (folder / "builder" / ".cache").exists()
    shutil.rmtree(source)
    user_id = serve_pod(build("dev-cpu")).spec["securityContext"]["runAsUser"]
    home.mkdir()
    if os.geteuid() == 0:
        os.chown(home, user_id, user_id)
    working = folder / "working"
    working.mkdir(mode=0o555)
    return Installed(app, home, working, user_id)


def _distributions(installed: Installed) -> dict[str, str]:
    """Name and version of what is installed, as its own Python says."""
    program = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.name: d.version for d in m.distributions()}))"
    )
    found = json.loads(installed.run("python", "-c", program))
    return {canonicalize_name(name): version for name, version in found.items()}


def test_what_is_installed_are_the_tested_versions_and_no_tool_of_the_tests(
    installed: Installed,
) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    found = _distributions(installed)
    others = {
        name: version
        for name, version in found.items()
        if pins.get(name) != version.split("+")[0]  # torch says which build it is
    }
    assert others.keys() - _INSTALLERS == {"tandem"}
    assert found.keys() >= {"torch", "transformers", "grpcio", "psycopg", "pyjwt"}
    assert not found.keys() & {"pytest", "mypy", "ruff", "grpcio-tools", "cyclonedx-bom"}


def test_the_bill_of_materials_lists_exactly_what_is_installed(installed: Installed) -> None:
    bill = json.loads((installed.app / "sbom.cdx.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    listed = {canonicalize_name(c["name"]): c["version"] for c in bill["components"]}
    assert listed == _distributions(installed)
    packages = [c for c in bill["components"] if c["name"] not in {"tandem", *_INSTALLERS}]
    assert [c["name"] for c in packages if not c["purl"].startswith("pkg:pypi/")] == []
    assert [c["name"] for c in packages if not c.get("licenses")] == []
    known = {c["bom-ref"] for c in bill["components"]}
    assert known <= {entry["ref"] for entry in bill["dependencies"]}


def test_no_model_and_no_compiler_are_in_it(installed: Installed) -> None:
    files = (path for path in installed.app.rglob("*") if path.suffix in _WEIGHTS)
    weights = [path for path in files if "torch" not in path.parts]  # it has samples of its own
    assert [path.parent.name for path in weights] == ["pretrained"]  # the shipped head
    assert weights[0].stat().st_size < 11e6
    programs = {path.name for path in (installed.app / "bin").iterdir()}
    assert not {p for p in programs if re.fullmatch(r"(gcc|g\+\+|cc|clang|nvcc|cmake|ninja)", p)}


def test_all_that_is_not_torch_stays_small(installed: Installed) -> None:
    """PyPI's torch brings gigabytes of CUDA; what is not torch's is the same in every image."""
    (packages,) = installed.app.glob("lib/python*/site-packages")
    sizes = {
        folder.name: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        for folder in packages.iterdir()
        if folder.name not in {"torch", "nvidia", "triton"}
    }
    assert sum(sizes.values()) < 900e6, sorted(sizes.items(), key=lambda item: -item[1])[:10]


def test_commands_of_the_pods_write_nothing_beside_their_home(installed: Installed) -> None:
    before = _files(installed.app)
    for arguments in (
        ["--help"],
        ["serve", "--settings"],
        ["models", "list"],
        ["ledger", "migrate"],
        ["export", "--out", str(installed.home / "tables")],
        ["powerbi", "init", "--root", "/tables", "--out", str(installed.home / "powerbi")],
    ):
        installed.run("tandem", *arguments)
    assert list(installed.working.iterdir()) == []
    assert _files(installed.app) == before
    written = subprocess.run(installed.command("touch", "x"), capture_output=True, check=False)
    assert written.returncode != 0  # or the test would show nothing


def test_the_init_containers_command_pulls_a_model_that_an_unprivileged_user_owns(
    installed: Installed,
) -> None:
    (name,) = CATALOGUE
    installed.run("tandem", "models", "pull", name)
    manifest = model_path(name, installed.home) / MANIFEST_NAME
    assert manifest.stat().st_uid == (installed.user_id if os.geteuid() == 0 else os.geteuid())


class _Pod(ServerProcess):
    """`tandem serve` of the image."""

    def __init__(self, installed: Installed, model: Path) -> None:
        environ = {**installed.environ(), **dict.fromkeys(_OF_THE_TESTS, "")}
        super().__init__(model, installed.home, 20.0, **environ)
        self._installed = installed

    def command(self) -> list[str | Path]:
        return [*self._installed.command("tandem", "serve")]


async def test_the_server_answers_and_drains_as_an_unprivileged_user(
    installed: Installed,
) -> None:
    model = save_tiny_model(installed.app.parent / "models" / "tiny")
    before = _files(installed.app)
    pod = _Pod(installed, model)
    try:
        await pod.start()
        if os.geteuid() == 0:
            status = Path(f"/proc/{pod.process_id}/status").read_text(encoding="utf-8")
            assert re.findall(r"^Uid:\t(\d+)", status, re.MULTILINE) == [str(installed.user_id)]
        async with AsyncClient(f"127.0.0.1:{pod.port}") as client:
            result = await client.generate("the quick brown", max_tokens=5).result()
        assert 0 < len(result.token_ids) <= 5
        assert await pod.terminate() == 0
    finally:
        pod.kill()
    counted = installed.run("tandem", "ledger", "stats")
    assert "completed" in counted
    assert list(installed.working.iterdir()) == []
    assert _files(installed.app) == before


def _files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))
