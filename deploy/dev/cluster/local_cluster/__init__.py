"""A real Kubernetes cluster on one Linux machine, without Docker: upstream programs, each node in namespaces of its own.

::

    cli ─▶ lifecycle ─▶ node ─▶ node_init        up, down, power and cables
      │        │          └───▶ network, cgroups
      │        ├──────▶ services, pki            what runs on a node, and by which certificates
      │        └──────▶ images ─▶ template       what its pods run
      ├─▶ setup ─▶ toolchain                     system packages, Go, the programs
      ├─▶ control                                power and cables for tests, on kind as well
      └─▶ kind                                   the same commands where a Docker engine runs
    all ─▶ topology (pure), places, record, process
"""
