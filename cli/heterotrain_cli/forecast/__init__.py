"""What a batch, or a whole job, will cost in time and money, before anything runs."""
