"""Values of Kafka records as a schema registry's readers expect them. See docs/schema-registry.md"""
