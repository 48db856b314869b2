"""Prints what to install beside penstock itself: its build tools, its dependencies and all its extras."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
wanted = set(project["build-system"]["requires"]) | set(project["project"]["dependencies"])
for extra in project["project"]["optional-dependencies"].values():
    wanted |= set(extra)
print("\n".join(sorted(wanted)))
