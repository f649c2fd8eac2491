"""The part that knows Spark: its batches, classic and Connect, and its checkpointLocation."""
