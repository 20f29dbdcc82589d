"""The next plan of a job: its members, their shares, and when a better one is worth a revision."""
