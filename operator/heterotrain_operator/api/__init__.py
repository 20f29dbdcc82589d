"""The user's side: typed models of the custom resource, and the CRD made from them."""
