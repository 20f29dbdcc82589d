"""Islands: ranks that add up their gradients on their own, by faster connections, before all ranks do."""
