"""The two-phase-commit protocol (docs/protocol.md).

To read it, begin with `CheckpointProtocol.process` in `protocol`.

`protocol` runs the steps on the driver. `decisions` and `memories` decide, as pure functions.
`fence` tells whether this driver is still the newest, `abort_rights` whether it may abort, and
`sweep` aborts orphans.
"""
