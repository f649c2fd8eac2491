"""The two-phase-commit protocol: `protocol` is it on one screen, `decisions` are its rules as pure functions."""
