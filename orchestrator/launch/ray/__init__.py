"""A cluster as actors on the hosts of a Ray cluster.

Each process of the cluster (the router, an agent, a host's cache server) has one detached actor,
named as the process is, in a namespace of the cluster. The actor is thin: it starts the command
that a person would start on that host (``splitserve node NAME``, ``router``, ``cache-server``),
and dies when that dies, so that Ray starts it again, there or on another host. Placement groups
reserve what nodes take. How many nodes there are is in every actor's order, and a change of that
has a number (``Order.edition``): an actor that was away asks the others. No process here holds the
cluster together: ``up`` may be killed, and run again from any host; it finds what runs by the
names.

- ``order``: what an actor is told, and the YAML that its host reads (pure);
- ``placement``: placement groups from the YAML, and whether a Ray cluster has room (pure);
- ``keeper``: the actor; ``host_check``: what is asked of a host before anything starts there;
- ``ray_cluster``: the only module that calls Ray from outside;
- ``bring_up``: what is missing is added; ``resize``: another number of nodes;
- ``launcher``: the ``Launcher`` of ``up``; ``take_down``: how a cluster ends.

Ray is imported late: it is an extra.
"""
