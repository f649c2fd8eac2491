"""What has to work on every Spark: `make test-matrix` runs `suite.py` with the newest release of each 4.x."""
