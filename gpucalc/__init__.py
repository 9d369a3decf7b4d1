"""gpucalc: does a model fit these GPUs, how fast will it run, what binds, and what would help."""

__version__ = "0.1.0"
