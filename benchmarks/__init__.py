"""What offloading is worth and what it costs, measured on vLLM's own classes, without a GPU.

    make bench                                all benchmarks; results in docs/benchmarks
    python -m benchmarks --help               one of them, or on another tree of vLLM

This package runs in the tools' Python and draws up the results. `inside` runs in the Python
of a pin's test environment, on the vLLM under test, and is driven through `workers`.
"""
