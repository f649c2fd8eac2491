"""The extras of this package, by which the drivers of the sinks are installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(*names: str) -> Iterator[None]:
    """Explain a failed import of a package that one of these extras installs.

    The imports are in the body of the `with` statement. If one of them fails, the error says which
    extra to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("sinks", "coordinator"):
            raise
        extras = " or ".join(f"`{name}`" for name in names)
        raise ModuleNotFoundError(
            f"{error}. Install this library with its extra {extras}, as in pip install "
            f"'FOLDER_OR_WHEEL[{names[0]}]'",
            name=error.name,
        ) from error
