"""`coordinator ui`: the web page of a job, from checkpoint storage and the sinks."""

from __future__ import annotations

import shlex
import signal
import threading
from typing import Annotated, Any

import typer

from coordinator.cli.output import JOB_FILE, USAGE, Job, fail, opened, say
from coordinator.http.client import ask_driver
from coordinator.http.server import Server
from coordinator.ui.page import Page
from coordinator.ui.visitors import Visitors


def ui(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Where it listens; 0: a free one.")] = 0,
    host: Annotated[str, typer.Option("--host", help="The address of this machine that browsers use.")] = "127.0.0.1",
    driver: Annotated[
        bool, typer.Option("--driver", help="Serve nothing: print an address of the page of the driver that runs.")
    ] = False,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Whoever reaches the address may look, but change nothing.")
    ] = False,
    job: Job = JOB_FILE,
) -> None:
    """The web page of a job, also when no driver runs: from checkpoint storage and the sinks, until Ctrl-C or SIGTERM.
    Prints the address to open: it lets one browser in, within ten minutes. What a driver has done since its last sign
    of life is on the driver's own page (--driver)."""
    with opened(job) as coordinator:
        store = coordinator.protocol.store
        if driver:
            typer.echo(ask_driver(store, "/invitations", {})["address"])
            return

        def save(body: dict[str, Any]) -> dict[str, Any]:
            return ask_driver(store, "/savepoints", body)

        try:
            server = Server(host, port)
        except (OSError, ValueError) as error:
            fail(f"Cannot listen at {host}, port {port}: {error}", USAGE)
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ctrl-C does not reach it in the background
            visitors = Visitors(server.address, "", public=no_token)
            server.begin(Page(coordinator.facts(live=False), visitors, save, shlex.quote(job)).answer)
            typer.echo(visitors.invitation())
            if no_token:
                say(f"Whoever reaches {server.address}/ui/ may look.")
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            server.close()
