"""Values and keys in Avro, by the schemas of a registry."""

from typing import Literal

SchemaEvolution = Literal["none", "add", "widen"]
STEPS: tuple[SchemaEvolution, ...] = ("none", "add", "widen")
"""Each step includes the steps before it."""
