"""Run one router: `python -m router --model FOLDER --worker HOST:PORT ...`.

Prints one JSON line once it listens. SIGTERM and SIGINT drain it: live requests may finish for a while.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from pathlib import Path

import click
import uvloop

from engine.cluster_key import ClusterKey
from engine.errors import ConfigError, EngineError
from engine.log_format import LOG_FORMATS
from engine.native.build import default_cache
from kvrelay._logs import log_to_stderr
from router.config import RouterConfig
from router.server import RouterServer

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(config: RouterConfig, grace_s: float) -> None:
    """Until a stop signal. A second one ends the process at once."""
    loop = asyncio.get_running_loop()
    asked_to_stop = asyncio.Event()
    server = RouterServer(config)
    try:
        address = await server.start()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, asked_to_stop.set)
        ready = {"address": address, "http_address": server.http_address, "router_id": config.router_id}
        ready |= {"prefix_index": server.registry.index.implementation}
        print(json.dumps(ready | {"pid": os.getpid()}), flush=True)
        await asked_to_stop.wait()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
    finally:
        await server.stop(grace_s)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Model folder.")
@click.option("--model-name", default=None, help="What clients call it; by default the folder's name.")
@click.option("--worker", "workers", multiple=True, metavar="HOST:PORT", help="A worker; once for each.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on.")
@click.option("--port", type=int, default=0, show_default=True, help="For gRPC; 0 takes a free one.")
@click.option("--http-port", type=int, default=None, help="For HTTP. Default: the one after --port, or a free one.")
@click.option("--api-keys", default="", metavar="FILE", help="Tenants and digests of their keys. Default: no keys.")
@click.option("--audit-log", default="", metavar="FILE", help="A line of JSON for each call of the Admin service.")
@click.option("--public-prefixes", default="", metavar="FILE", help="Prompts' beginnings that all tenants share.")
@click.option("--tls-cert", default="", metavar="FILE", help="Certificate chain, PEM: serve over TLS only.")
@click.option("--tls-key", default="", metavar="FILE", help="Its private key, PEM.")
@click.option(
    "--tls-client-ca", default="", metavar="FILE", help="Serve only clients with a certificate of these, PEM."
)
@click.option(
    "--cluster-key-file",
    type=click.Path(path_type=Path),
    default=None,
    help="64 hexadecimal digits that workers demand of their routers.",
)
@click.option("--router-id", default=None, help="Name of this router; by default a new one.")
@click.option("--max-live-requests", type=int, default=1024, show_default=True)
@click.option("--default-timeout-s", type=float, default=600.0, show_default=True, help="For calls without a deadline.")
@click.option(
    "--local-prefill-max-tokens",
    type=int,
    default=128,
    show_default=True,
    help="Of a prompt, what a decode worker may compute itself at most, where that is faster.",
)
@click.option(
    "--routing-seed", type=int, default=0, show_default=True, help="The same for all routers of a cluster, best secret."
)
@click.option(
    "--native-cache",
    default=lambda: str(default_cache()),
    help="Folder for native libraries, compiled at the first start; '' does without.",
)
@click.option("--log-format", type=click.Choice(LOG_FORMATS), default="text", show_default=True)
@click.option("--log-calls", is_flag=True, help="One line of the log for each call.")
@click.option(
    "--otlp-endpoint", default="", metavar="URL", help="http://HOST:PORT of a collector of traces (OTLP, gRPC)."
)
@click.option("--trace-ratio", type=float, default=1.0, show_default=True, help="Of calls without a trace context.")
@click.option("--grace-s", type=float, default=5.0, show_default=True, help="For live requests on a stop.")
def main(
    model: Path,
    model_name: str | None,
    workers: tuple[str, ...],
    router_id: str | None,
    cluster_key_file: Path | None,
    grace_s: float,
    **settings: str | float,
) -> None:
    """Run one router until SIGTERM or SIGINT."""
    try:
        config = RouterConfig(
            model_path=str(model),
            model_name=model_name or model.resolve().name,
            router_id=router_id or f"router-{secrets.token_hex(3)}",
            cluster_key=None if cluster_key_file is None else ClusterKey.read(cluster_key_file),
            workers=workers,
            **settings,  # type: ignore[arg-type]  # click checks the types
        )
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    log_to_stderr("router", config.log_format)
    try:
        uvloop.run(serve(config, grace_s))
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
