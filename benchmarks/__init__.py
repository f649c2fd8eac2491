"""Side-by-side measurements. `make bench` runs `benchmarks.postgres`; docs/benchmarks.md tells what came out."""
