"""The moving parts: queue, reconcile, acting, polling, supervision."""
