"""The state of a job in checkpoint storage, and how it is encoded."""
