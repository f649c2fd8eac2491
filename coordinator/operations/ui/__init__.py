"""The web page of a job, with what the statistics, checkpoint storage and the sinks tell.

`coordinator ui` serves it, even when no driver runs.
"""
