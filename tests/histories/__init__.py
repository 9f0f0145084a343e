"""Histories without a model: the real scheduler, KV cache manager, connector and host tier
of the pin, with a fake model and copies that carry labels instead of bytes.

A block's content is a label: which tokens, of which KV cache group, it holds the KV of. The
fake model checks, in every step, each block that a request computes on and labels those that
it writes; the copies move labels as late as they may. Random requests, aborts, preemptions,
resets and pool sizes come from a seed, and a history that breaks an invariant is shrunk to a
short one.

    python -m tests.histories --help

Where to read first: `history` says what a history is, `world` replays one, `checks` holds
the invariants, `pins` what differs between releases.
"""
