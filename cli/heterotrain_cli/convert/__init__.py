"""``heterotrain init``: a job from the manifest of another project, or from a script."""
