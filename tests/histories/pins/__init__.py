"""What differs between the pinned releases; one module for each."""

import importlib
from types import ModuleType

from vllm.version import __version__

_MODULES = {"0.19.1": "v0_19_1", "0.33.0": "v0_33_0"}


def current() -> ModuleType:
    """The module of the vLLM that is installed."""
    release = __version__.partition("+")[0]
    if release not in _MODULES:
        raise ImportError(
            f"vLLM {__version__} is installed; the histories know {', '.join(_MODULES)}. "
            "A new pin needs a module beside this file."
        )
    return importlib.import_module(f"{__name__}.{_MODULES[release]}")
