"""Tell what an interpreter lacks to build a vLLM checkout without build isolation.

Run by the interpreter that is to build; prints one missing thing a line and exits with 1
if there is any. Usage: python source_build_needs.py CHECKOUT cuda|cpu
"""

import importlib.metadata
import os
import shutil
import sys
import tomllib
from pathlib import Path


def missing(checkout: Path, device: str) -> list[str]:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["the Python package `packaging`, which reads the other needs"]
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    found = []
    for text in project["build-system"]["requires"]:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate():
            continue
        try:
            have = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"the Python package {text}")
            continue
        if not need.specifier.contains(have, prereleases=True):
            found.append(f"the Python package {text} (it has {have})")
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        found.append("a C++ compiler")
    if device == "cuda":
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        if not (shutil.which("nvcc") or (Path(home) / "bin" / "nvcc").exists()):
            found.append("nvcc of the CUDA toolkit (on PATH or under CUDA_HOME)")
        try:
            import torch

            if torch.version.cuda is None:
                found.append(f"a CUDA build of torch (it has {torch.__version__})")
        except ImportError:
            pass  # named above, as torch is among the requirements
    return found


if __name__ == "__main__":
    lacking = missing(Path(sys.argv[1]), sys.argv[2])
    print("\n".join(f"- {need}" for need in lacking))
    sys.exit(1 if lacking else 0)
