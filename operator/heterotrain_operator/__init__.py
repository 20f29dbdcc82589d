"""The operator: places workers, measures their speed, and gives each one its share of the batch."""
