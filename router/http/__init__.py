"""The OpenAI-compatible HTTP front of a router. Translates; who may call and what a call does is behind `FrontDoor`.

`server` owns sockets, `routes` the paths; `generation` reads requests, `shapes` and `sse` write answers.
"""
