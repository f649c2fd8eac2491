"""Small tools that several sinks, and the coordinator, share. Nothing here is public."""
