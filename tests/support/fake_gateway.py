"""Stands in for another system's router: takes its flags, and answers as its workers would."""

from __future__ import annotations

import argparse

import uvloop

from bench.gateway_http_worker import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    flags, _ = parser.parse_known_args()
    uvloop.run(serve(flags.port))
