"""How much accuracy each configuration of the phases keeps, on tasks with known answers."""
