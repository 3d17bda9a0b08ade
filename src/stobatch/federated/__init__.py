"""Parties with private data train one model through a server that nobody has to trust (docs/federated.md)."""

from stobatch.federated.conversation import InProcessTransport, Rounds, Transport, converse, in_process
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
    "InProcessTransport",
    "Party",
    "Refused",
    "Rounds",
    "Spent",
    "Statement",
    "Transport",
    "converse",
    "federate",
    "in_process",
    "split",
]
