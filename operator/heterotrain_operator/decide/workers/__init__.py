"""Workers of a job: the state of each, whose fault an end was, how many each pool should have, how many fit."""
