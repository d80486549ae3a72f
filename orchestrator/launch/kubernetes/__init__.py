"""Kubernetes manifests of a cluster, from its YAML: ``render``.

Kubernetes places, restarts and replaces; splitserve says what to run. A node is one pod of its
pool's StatefulSet (``prefill-0``), with its agent and its engine; with the transport ``local``,
whose engines copy into each other's memory, all nodes are containers of one pod. The router is a
Deployment, the cache server a DaemonSet. Manifests are plain dicts and hold no secret, only the
names of Secrets.
"""
