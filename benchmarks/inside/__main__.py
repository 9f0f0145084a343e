"""Answers the requests of `benchmarks.workers`."""

import gc
import importlib
import json
import os
import sys
import traceback


def main() -> None:
    # vLLM prints; what is printed must not get into the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            module, _, name = request["call"].rpartition(".")
            function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
            answer = {"result": function(**request["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        gc.collect()
        answers.write(json.dumps(answer) + "\n")


main()
