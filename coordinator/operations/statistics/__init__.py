"""What each checkpoint took and did: from the protocol's steps, into the log, storage,
OpenTelemetry and Prometheus."""
