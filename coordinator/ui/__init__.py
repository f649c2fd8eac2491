"""The web page of a job: what `coordinator.statistics`, checkpoint storage and the sinks tell people. Served by the
driver (`CheckpointCoordinator.serve_http`, with the extra `ui`) and by `coordinator ui`, also when no driver runs."""
