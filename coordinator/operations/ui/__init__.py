"""The web page of a job: what the statistics, checkpoint storage and the sinks tell people.

Served by `coordinator ui`, also when no driver runs.
"""
