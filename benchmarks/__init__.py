"""Side-by-side measurements.

`make bench` runs those of each system; docs/benchmarks.md tells what came out.
"""
