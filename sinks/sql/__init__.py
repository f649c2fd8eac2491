"""What the sinks of SQL databases share: options, values in words, JSON. No driver is imported here."""
