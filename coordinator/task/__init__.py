"""The executor's half of the protocol: one task, which writes a partition of a checkpoint and
pre-commits it."""
