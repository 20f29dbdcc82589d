"""Who trains: plans from the operator, formations that survivors make by themselves, what a formation agrees on."""
