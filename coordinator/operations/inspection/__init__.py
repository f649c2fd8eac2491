"""What the command `coordinator` and the web page share: what is found in storage and in the sinks'
systems, and how people are told."""
