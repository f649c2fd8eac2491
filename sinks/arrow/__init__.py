"""Values of Arrow: by what they hold, on their way into a column, and as JSON."""
