"""`coordinator ui`, the web page of a job, from checkpoint storage and the sinks."""

from __future__ import annotations

import shlex
import signal
import socket
from typing import Annotated

import typer

from coordinator.cli.output import JOB_FILE, USAGE, Job, coordinator_of, fail
from sinks._util.extras import needs_extra


def ui(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen at; 0: any free one.")
    ] = 0,
    job: Job = JOB_FILE,
) -> None:
    """Serve the web page of a job on loopback until Ctrl-C or SIGTERM, and print its address.

    It reads checkpoint storage and sinks, so no driver has to run. It changes nothing. Everybody
    with an account on this machine can see it.
    """
    try:
        with needs_extra("ui"):
            from waitress.server import create_server
        from coordinator.operations.ui.job import JobView
        from coordinator.operations.ui.page import page_of
    except ModuleNotFoundError as error:
        fail(str(error), USAGE)
    with coordinator_of(job) as coordinator:
        page = page_of(JobView(coordinator), shlex.quote(job))
        try:
            place = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            fail(f"Cannot listen at 127.0.0.1, port {port}: {error}", USAGE)
        # Ctrl-C does not reach a process in the background, so SIGTERM ends it in the same way.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with place:
            typer.echo(f"http://127.0.0.1:{place.getsockname()[1]}/")
            create_server(page, sockets=[place], ident=None).run()  # returns on KeyboardInterrupt
