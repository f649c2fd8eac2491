"""Tools for Arrow: what types hold, how values get into a column, and values as JSON."""
