"""What later versions compare with what earlier ones have written."""

from __future__ import annotations

from sinks.sql.table import MergeOptions


def test_options_are_told_in_committables_as_ever() -> None:
    """By another text, what is in doubt would count as written for another target."""
    options = MergeOptions("upsert", ("id", "day"), "version", "deleted", keep_newer=True)
    assert str(MergeOptions()) == "append"
    assert str(options) == "upsert by id, day; the last by version; deletes by deleted; newer rows stay"
