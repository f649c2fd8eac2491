"""What sinks into lake tables share."""
