"""What Tandem ships with: the licences of its dependencies, and their known vulnerabilities.

    python .ci/supply_chain.py licences            # offline; fails on a licence that may not ship
    python .ci/supply_chain.py audit [--strict]    # asks an index; --strict fails on a finding

Licences are those of what the distribution and its extras need, not of the tools that test it;
the list goes to build/licences.txt. The audit is pip-audit's over constraints.txt, at most once a
day unless --strict; where no index answers it says so and is no error.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LICENCES = ROOT / "build" / "licences.txt"
TOOL = ROOT / "build" / "audit"
DAY_SECONDS = 24 * 3600
# Works linked with these would have to be given away under the same terms.
_NOT_ALLOWED = re.compile(r"\b(A?GPL|SSPL|EUPL|CC-BY-NC)|Affero|(?<!Lesser )General Public", re.I)
_NO_LICENCE = "unknown"


def licence_of(distribution: importlib.metadata.Distribution) -> str:
    """As the distribution states it, in the order of reliability."""
    stated = distribution.metadata
    expression = stated.get("License-Expression")
    if expression:
        return expression
    classified = [
        entry.rpartition(" :: ")[2]
        for entry in stated.get_all("Classifier") or []
        if entry.startswith("License :: ") and not entry.endswith("OSI Approved")
    ]
    text = (stated.get("License") or "").strip().partition("\n")[0]
    return "; ".join(classified) or text or _NO_LICENCE


def shipped(name: str, extras: frozenset[str]) -> Iterator[importlib.metadata.Distribution]:
    """The distribution's dependencies that are installed, each once."""
    waiting = [(name, extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    found: set[str] = set()
    while waiting:
        item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        try:
            distribution = importlib.metadata.distribution(item[0])
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed here
        if item[0] != name and item[0] not in found:
            found.add(item[0])
            yield distribution
        for line in distribution.requires or ():
            needed = Requirement(line)
            marks = [{"extra": extra} for extra in (item[1] or {""})]
            if needed.marker is None or any(needed.marker.evaluate(mark) for mark in marks):
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))


def check_licences() -> int:
    """Write the list; 1 when something on it may not ship."""
    extras = importlib.metadata.metadata("tandem").get_all("Provides-Extra") or []
    rows = sorted(
        (canonicalize_name(d.metadata["Name"]), d.version, licence_of(d))
        for d in shipped("tandem", frozenset(extras))
    )
    LICENCES.parent.mkdir(exist_ok=True)
    LICENCES.write_text("".join(f"{name} {version}: {said}\n" for name, version, said in rows))
    refused = [row for row in rows if _NOT_ALLOWED.search(row[2]) or row[2] == _NO_LICENCE]
    for name, version, said in refused:
        _say(f"licence of {name} {version}: {said}")
    return 1 if refused else 0


def audit(*, strict: bool) -> int:
    """Print the known vulnerabilities; 1 when there are some and `strict`."""
    stamp = TOOL / "tried"
    if not strict and stamp.exists() and time.time() - stamp.stat().st_mtime < DAY_SECONDS:
        return 0
    report = _report()
    TOOL.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    known = [entry for entry in (report or {}).get("dependencies", ()) if "vulns" in entry]
    if report is None or not known:
        _say("no index answers: the pins are not audited")
        return 0
    found = [
        f"{entry['name']} {entry['version']}: {finding['id']}, fixed in "
        f"{', '.join(finding['fix_versions']) or 'no version'}"
        for entry in known
        for finding in entry["vulns"]
    ]
    num_pins = len(report["dependencies"])
    _say("\n".join(found) or f"no known vulnerability in {len(known)} of {num_pins} pins")
    return 1 if found and strict else 0


def _report() -> dict[str, Any] | None:
    """pip-audit's report; None where it cannot be installed or gets no answer."""
    program = TOOL / "bin" / "pip-audit"
    if not program.exists():
        commands = (
            [sys.executable, "-m", "venv", str(TOOL)],
            [str(TOOL / "bin" / "pip"), "install", "-q", "--retries", "0", "pip-audit"],
        )
        if any(_run(command).returncode for command in commands):
            return None
    arguments = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    done = _run([str(program), "-r", str(ROOT / "constraints.txt"), *arguments, "--timeout", "10"])
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return None


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(  # noqa: S603 - our own commands
            command, capture_output=True, text=True, timeout=240, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main() -> int:
    """The exit status."""
    match sys.argv[1:]:
        case ["licences"]:
            return check_licences()
        case ["audit"]:
            return audit(strict=False)
        case ["audit", "--strict"]:
            return audit(strict=True)
    _say(str(__doc__))
    return 2


if __name__ == "__main__":
    sys.exit(main())
