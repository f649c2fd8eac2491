"""Deliberate bugs, and the tests of `make test` that catch each: `make mutants`, docs/testing.md."""
