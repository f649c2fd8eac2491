"""Everything that accompanies a query and serves its operators.

The protocol, its store and Spark's part import nothing of it.
"""
