"""What a job does: diff, import, replay, rebuild, audit, stats, each as a function of DataFrames."""
