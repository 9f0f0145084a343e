"""Histories without a model: the real scheduler, KV cache manager, connector and host tier
of the pin, with a fake model and copies that carry labels instead of bytes.

Words used here:

history     settings of an engine, and operations: requests arrive or are aborted, the
            prefix cache is reset, the engine makes steps. It replays exactly, anywhere.
label       what a block of KV holds: the KV of which tokens, after which tokens, of which
            KV cache group. Two blocks have one label exactly when their KV is the same.
stream      the tokens of a request, and the label that each of its blocks must carry.
fake model  checks in every step each block that a request computes on, and labels those
            that it writes.
copy        what one worker does for a store (GPU to host) or a load. It moves labels, as
            late as it may, and looks whether its source stays as it is.
host tier   the chunks in host memory; a chunk is `blocks_per_chunk` blocks of one group.
geometry    the KV cache shapes of a model, at its real scale.
case        a kind of random history; case, geometry and seed name one.
finding     an invariant that does not hold, with its number in the design notes.

A finding is shrunk to a short history. Those that told something are kept in
`regressions`, with what the tree under test still has wrong.

    python -m pytest tests/histories              a few histories of each case
    python -m tests.histories                     all cases on all geometries
    python -m tests.histories --help

Run them with the Python of a pin's test environment (`make where`). Where to read first:
`history`, then `world`, which replays one; `checks` holds the invariants, `pins` what
differs between releases.
"""
