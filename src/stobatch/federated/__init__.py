"""Parties with private data train one model through a server that nobody has to trust (docs/federated.md)."""

from stobatch.federated.conversation import Post, Rounds, Table, converse, in_process
from stobatch.federated.party import Answer, Party, Refused, Spent, Statement
from stobatch.federated.plan import Account, FederatedConfig, FederatedPlan
from stobatch.federated.server import Federation, FederationError
from stobatch.federated.simulation import federate, split

__all__ = [
    "Account",
    "Answer",
    "FederatedConfig",
    "FederatedPlan",
    "Federation",
    "FederationError",
    "Party",
    "Post",
    "Refused",
    "Rounds",
    "Spent",
    "Statement",
    "Table",
    "converse",
    "federate",
    "in_process",
    "split",
]
