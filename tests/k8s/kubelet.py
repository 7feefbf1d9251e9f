"""What a kubelet does to a mounted ConfigMap."""

import os
from pathlib import Path


def publish(mount: Path, name: str, content: str, version: str) -> None:
    """The file `name` with this content: a new folder, then one symbolic link is swapped."""
    (mount / version).mkdir(parents=True)
    (mount / version / name).write_text(content, encoding="utf-8")
    (mount / "..data_tmp").symlink_to(version)
    os.replace(mount / "..data_tmp", mount / "..data")
    if not (mount / name).is_symlink():
        (mount / name).symlink_to(Path("..data") / name)
