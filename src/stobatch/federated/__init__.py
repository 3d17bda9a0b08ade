"""Parties with private data train one model through a server that need not be trusted (docs/federated.md)."""

from stobatch.federated.party import Answer, Party, Refused, Spent
from stobatch.federated.plan import Account, FederatedConfig, FederatedPlan
from stobatch.federated.rounds import InProcessTransport, Rounds, Transport, converse, federate, in_process, split
from stobatch.federated.server import Federation, FederationError
from stobatch.results import Statement

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
