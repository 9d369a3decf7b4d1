"""Is a launch script right, is a machine fit for a job, what to watch while it runs."""
