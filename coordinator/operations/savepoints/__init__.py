"""Savepoints: checkpoints that the user asks for, owns, and restarts from."""
