"""What users and catalogues may write: strict, frozen descriptions of jobs, models, GPUs and systems."""
