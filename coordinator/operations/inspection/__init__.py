"""The parts that the command `coordinator` and the web page share.

They find out what is in storage and in the sinks' systems, and say it to people.
"""
