"""The only wiring of formulas: a graph, a run and a fleet in, a tree of lines and a verdict out."""
