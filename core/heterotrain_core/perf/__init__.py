"""How fast each member is: from raw counters to observations, from observations to a model, from models to a step."""
