"""Chaos: drivers, servers and networks fail by a seeded plan, and an oracle reads the real systems.

`python -m tests.chaos --help`, or `make chaos ARGS="--sink postgres --minutes 10 --seed 1"`. What it found is in
docs/proof.md.
"""
