"""Imports point one way, and package files stay empty so that reading a ledger loads no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "exports", "service", "telemetry", "tests")


def _package_files() -> list[Path]:
    folders = (folder for name in PACKAGES for folder in [ROOT / name, *(ROOT / name).rglob("*")])
    return sorted(f / "__init__.py" for f in folders if f.is_dir() and any(f.glob("*.py")))


def test_imports_keep_the_contracts() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", _package_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_folder_is_a_package_whose_init_imports_nothing(path: Path) -> None:
    assert path.is_file(), "a folder without __init__.py loses to any installed package of its name"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not imports


@pytest.mark.parametrize(
    "module",
    [
        "exports",
        "telemetry.ledger.models",
        "service.models",
        "engine.drafter.registry",
        "service.app",  # a server listens, and says that it is loading, before torch is there
    ],
)
def test_light_modules_do_not_load_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
