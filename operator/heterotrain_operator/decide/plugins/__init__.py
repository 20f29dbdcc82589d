"""Extensions of the cluster that jobs may use: each has a folder, and nothing outside names any of them."""
