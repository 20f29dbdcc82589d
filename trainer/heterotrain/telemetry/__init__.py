"""What a rank tells the outside: metrics for the scrape, curves for people, lines that say who speaks."""
