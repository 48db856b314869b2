"""Prints what to install beside penstock itself: its build tools, its dependencies and all its extras."""

from __future__ import annotations

import tomllib
from pathlib import Path


def wanted(*extras: str) -> list[str]:
    """For the build, for penstock, and of the extras named, or of all."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    names = [project["build-system"]["requires"], project["project"]["dependencies"]]
    names += [optional[extra] for extra in extras or optional]
    return sorted({requirement for some in names for requirement in some})


if __name__ == "__main__":
    print("\n".join(wanted()))
