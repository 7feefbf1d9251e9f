"""Writes the dashboard and the alerts of telemetry.dashboards as manifests beside this file.

Run from the repository's root: python -m k8s.components.monitoring.generate
kustomize reads no file outside its own folder, so these are copies; a test compares them.
"""

from pathlib import Path

from telemetry.dashboards.generate import generated_files

FOLDER = Path(__file__).parent
_RULE_HEAD = """\
# Written by generate.py from telemetry/dashboards.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tandem
spec:
"""


def manifests() -> dict[str, str]:
    """File names with their content, as telemetry.dashboards is now."""
    files = generated_files()
    groups = files["alerts.yaml"].split("\n", 1)[1]
    indented = "".join(f"  {line}" for line in groups.splitlines(keepends=True))
    return {"grafana.json": files["grafana.json"], "alerts.yaml": _RULE_HEAD + indented}


if __name__ == "__main__":
    for name, content in manifests().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
