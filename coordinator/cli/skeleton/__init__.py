"""What `coordinator new-sink` writes, as modules that are linted, type-checked and tested here."""
