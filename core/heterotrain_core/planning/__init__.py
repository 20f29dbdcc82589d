"""What a job's plan says about shares, decided from evidence."""
