"""What `cachesmith profile` measures of a served model, for the planner."""
