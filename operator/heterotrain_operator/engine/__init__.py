"""The running operator: work queue, reconciling, acting, polling, supervision."""
