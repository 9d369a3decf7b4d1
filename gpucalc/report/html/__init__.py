"""A plan as one page that needs nothing else."""
