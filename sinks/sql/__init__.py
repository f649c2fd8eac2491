"""What the sinks into tables of a SQL database share.

A database's own part is a `Backend`, the conversions of its types, and a transaction that takes
rows. Ledger, both strategies, planning and the sink itself are the same for all:
docs/another-database.md.
"""
