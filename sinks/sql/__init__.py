"""What the sinks of SQL databases share; no driver is imported here.

A database's own part is a `Backend` (connections and statements, the target, errors, staging tables, two-phase
transactions), a `Column` (what its types hold), and a `RowTransaction`, which takes rows. Ledger, strategies, planning
and `TableSink` are written over those.
"""
