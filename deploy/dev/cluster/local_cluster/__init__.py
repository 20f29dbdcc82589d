"""A real Kubernetes cluster on one Linux machine, without Docker: upstream programs, one set of namespaces per node.

::

    __main__ ─┬─▶ lifecycle ─┬─▶ node ─┬─▶ (node_init)      up, down; one node; its first process, run as a program
              │              │         ├─▶ services         command lines and configuration of a node's programs
              │              │         └─▶ network, cgroups
              │              ├─▶ pki                        certificates
              │              ├─▶ toolchain                  system packages, Go, and programs compiled by it
              │              └─▶ template ─▶ images         the images of a node's pods
              │                   └──▶ oci ◀── assembly                written from what is there
              ├─▶ kind                                      the same commands where a Docker engine runs
              └─▶ control ─▶ kind, node, network            power and network for tests, on either of the two
    lab.scale ──▶ bare ─▶ services, pki                     a control plane without nodes
    all ────────▶ topology (pure), paths, record, process
"""
