"""What checkpoint storage holds of a job, and how it is encoded."""
