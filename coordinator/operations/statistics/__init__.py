"""Statistics of each checkpoint, from the protocol's steps.

They go into the log, storage, OpenTelemetry and Prometheus.
"""
