"""``python -m heterotrain_simulate SCENARIO``: compare policies on a simulated cluster."""

from heterotrain_simulate.command import simulate

simulate(prog_name="python -m heterotrain_simulate")
