"""What the sinks of SQL databases share; no driver is imported here.

A database's own part is a `Server` (or what lends connections like it), a `Ledger`, a `Planner`, a `Separate` and a
`Staged` strategy (`StagingTables`, with `Merge`, where each participant has a staging table), and a `TableSink`.
"""
