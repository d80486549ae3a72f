"""What UCX says that it chose."""

from __future__ import annotations

from splitserve.orchestrator.launch.checks.transport_trial import lane_in

SAID = """
[1.1] [vm:1:0]   | a self cfg#0                                             |
[1.1] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.1] [vm:1:0]   | 0..inf | zero-copy   | self/memory                      |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | a intra-node cfg#1                                       |
[1.2] [vm:1:0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | Range  | Description |              Config               |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1:0]   | 0..2284   | short       | sysv/memory                    |
[1.2] [vm:1:0]   | 2285..inf | zero-copy   | cma/memory                     |
[1.2] [vm:1:0]   +--------+-------------+-----------------------------------+
[1.3] [vm:1:0]   | a intra-node cfg#1                              |
[1.3] [vm:1:0]   | active message by ucp_am_send* from host memory |
[1.3] [vm:1:0]   | 16516..inf | multi-frag copy-in | tcp/lo        |
"""

OLDER = """
[1.1] [vm:1:0]   | context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from host memory |
[1.1] [vm:1:0]   |                          0 | eager short                              | tcp/lo |
[1.1] [vm:1:0]   |                 16353..inf | (?) rendezvous fragmented copy-in        | tcp/lo |
[1.2] [vm:1:0]   | context_0 self cfg#1       | tagged message by ucp_tag_send* from host memory |
[1.2] [vm:1:0]   |                     8K..inf | (?) rendezvous zero-copy                | self/m |
"""


def test_what_ucx_chose() -> None:
    """The last row of the writes to another process counts: large pages go by it."""
    assert lane_in(SAID) == "cma/memory"
    assert lane_in(OLDER) == "tcp/lo"
    assert lane_in("nothing\n| of | that | kind |\n") == ""
