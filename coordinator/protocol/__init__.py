"""The two-phase-commit protocol (docs/protocol.md). To read it, begin with `CheckpointProtocol.process` in `protocol`.

`protocol` runs the steps on the driver; `decisions` has what it decides, as pure functions; `fence` tells whether this
driver is still the newest; `sweep` aborts orphans; `records` and `spool` are what storage holds; `operators` is what
an operator may do without a query.
"""
