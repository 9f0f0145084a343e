"""The part of the benchmarks that imports vLLM.

`python -m benchmarks.inside` answers requests, one JSON object per line: `call` names a
function in a module here, `arguments` are its arguments. It answers with `result`, or with
`error`, a traceback.
"""
