"""What the sinks of SQL databases share; no driver is imported here.

A database's own part is a `Server` (connections and statements), a `Dialect` (its tables, errors and two-phase
transactions), `StagingTables`, the conversions of its types, and a transaction that takes rows. Ledger, strategies,
planning and `TableSink` are written over those.
"""
