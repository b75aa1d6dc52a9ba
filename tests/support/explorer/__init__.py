"""Drives the hand-over through chosen interleavings and faults, in one thread, under a virtual clock.

What is real: both roles, engines with their block managers and schedulers, reservation tables, outgoing transfers,
frames, digests, and the router's sessions, lanes and attempts. What is replaced, and how: threads by steps that the
explorer chooses among (`agenda`), sockets by queues (`links`), the model by one that notices wrong KV (`model`), the
router's dispatcher by a copy of its path without asyncio (`client`). `world` says which steps there are, `checks` what
must hold after each, `explore` which of them are taken.
"""
