"""What the sinks of SQL databases share; no driver is imported here.

A database's own part is a `Server` (connections and statements), a `StagingDialect` (its tables, errors, two-phase
transactions and staging tables), the conversions of its types, and a transaction that takes rows. Ledger, strategies,
planning and `TableSink` are written over those.
"""
