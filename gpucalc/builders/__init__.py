"""From a model description to its graph: one module a form of network."""
