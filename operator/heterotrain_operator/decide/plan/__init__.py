"""The next plan of a job: its members, their shares, and when new shares are worth a revision."""
