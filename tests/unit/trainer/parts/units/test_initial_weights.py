"""Initial values of a model on the meta device are the same whatever else the process does meanwhile."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of

THREADS = 4


class Slow(torch.nn.Module):
    """Another thread runs while this layer draws its values."""

    def __init__(self) -> None:
        """Make the parameters."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4))
        self.bias = torch.nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        """Draw the values, in two parts."""
        with torch.no_grad():
            self.weight.normal_()
            time.sleep(0.001)  # hands the processor to another thread
            self.bias.normal_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs times the weights."""
        return inputs * self.weight + self.bias


def filled() -> dict[str, torch.Tensor]:
    """Return the values of a model of slow layers."""
    units = units_of(built(lambda: torch.nn.Sequential(*(Slow() for _ in range(8)))), None)
    InitialValues(seed=1, device=torch.device("cpu")).fill(units)
    return dict(units.model.state_dict())


def test_threads_that_fill_models_at_once_do_not_mix_their_draws() -> None:
    """Layers draw from torch's global generator, which all threads share."""
    expected = filled()
    with ThreadPoolExecutor(THREADS) as pool:
        for found in [future.result() for future in [pool.submit(filled) for _ in range(THREADS)]]:
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
