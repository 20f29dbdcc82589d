"""Rules for sharing nodes between jobs, on random instances. Prints Markdown for docs/mathematics.md; half a minute.

Each rule is solved to its optimum (``tests/support/fairness.py``). Without fixed parts and exchange, speeds add up.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
from support.fairness import (
    Fairness,
    Rule,
    Running,
    an_instance,
    finish_ratios,
    finish_time_fairness,
    measured,
    product_above_equal,
    product_of_rates,
)


def main() -> None:
    """Print one table for each kind of speeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rules: dict[str, Rule] = {
        "product of rates (the operator's)": product_of_rates,
        "the same, no job below the equal part": product_above_equal,
        "least largest finish-time ratio": finish_time_fairness,
    }
    for additive in (True, False):
        print(f"\nSpeeds {'add up' if additive else 'with fixed parts and exchange'}:\n")
        print("| rule | below equal | worst | envy | beyond one | Pareto | mean rate | ratio: mean | 95 % | worst |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for name, rule in rules.items():
            rng = random.Random(arguments.seed)  # noqa: S311  # a drawn instance
            found, ratios = Fairness(), []
            for _ in range(arguments.instances):
                instance = an_instance(rng, additive=additive)
                jobs = [Running(each, each[instance.equal]) for each in instance.rates()]
                found = measured(found, instance, rule(jobs, instance.nodes))
                ratios += finish_ratios(instance, rule)
            print(
                f"| {name} | {found.below_equal / found.jobs:.0%} | {found.worst_of_equal:.2f} "
                f"| {found.envious / found.pairs:.0%} | {found.beyond_one / found.pairs:.1%} | {found.dominated} "
                f"| {found.mean_rate:.3f} | {statistics.mean(ratios):.3f} "
                f"| {statistics.quantiles(ratios, n=20)[-1]:.2f} | {max(ratios):.2f} |"
            )


if __name__ == "__main__":
    main()
