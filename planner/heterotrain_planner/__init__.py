"""Pure decisions of the operator and of forecasts: fits of speeds, goodput, layouts, allocation."""
