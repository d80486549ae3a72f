"""The tokens of agents and operators follow from the secret and from nothing else."""

from __future__ import annotations

from splitserve.orchestrator.agent.auth import (
    agent_token,
    is_agent_token,
    is_operator_token,
    operator_token,
)

SECRET = bytes(range(32))


def test_the_token_proves_the_secret() -> None:
    """Made and checked with the same secret it is accepted, in every other case it is not."""
    token = agent_token(SECRET)
    assert is_agent_token(f"Bearer {token}", SECRET)
    assert not is_agent_token(f"Bearer {token}", SECRET[::-1])
    assert not is_agent_token(token, SECRET)
    assert not is_agent_token(None, SECRET)
    assert not is_agent_token("Bearer é", SECRET)
    assert not is_agent_token("Bearer \udcff", SECRET)
    assert SECRET.hex() not in token


def test_an_operators_token_is_another_one() -> None:
    """Neither is accepted for the other."""
    token = operator_token(SECRET)
    assert is_operator_token(f"Bearer {token}", SECRET)
    assert not is_operator_token(f"Bearer {token}", SECRET[::-1])
    assert not is_operator_token(f"Bearer {agent_token(SECRET)}", SECRET)
    assert not is_agent_token(f"Bearer {token}", SECRET)
    assert SECRET.hex() not in token
