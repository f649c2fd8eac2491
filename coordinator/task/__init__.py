"""The executor's half of the protocol.

One task writes a partition of a checkpoint and pre-commits it.
"""
