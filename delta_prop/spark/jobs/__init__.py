"""Jobs as functions of DataFrames: diff, import, replay, rebuild, audit, stats."""
