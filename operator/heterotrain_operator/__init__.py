"""The operator: places workers, learns how fast they are, and gives each its share of the batch."""
