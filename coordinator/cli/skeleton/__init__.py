"""The modules that `coordinator new-sink` writes.

They are linted, type-checked and tested here.
"""
