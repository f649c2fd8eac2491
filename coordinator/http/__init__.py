"""HTTP from the driver, and from `coordinator ui`: who may ask, and how much."""
