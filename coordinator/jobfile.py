"""The import path of `load_job` up to version 0.2. Since then it is `coordinator.load_job`."""

from coordinator.operations.jobfile import JobFileError, load_job

__all__ = ["JobFileError", "load_job"]
