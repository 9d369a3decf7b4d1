"""Trainers' own files to a job, a file for each trainer.

Where a file says nothing, the trainer's own default holds and is listed as assumed. What cannot be
planned (a kind of parallelism the planner does not know for that trainer) is refused by name.
"""
