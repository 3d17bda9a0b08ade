"""The conversation over Flower: a `ServerApp` that asks and a `ClientApp` that answers. The only file that knows flwr.

A question carries the parameters and the step; an answer is the party's noisy gradient, its statement, or a refusal.
Nothing else crosses: what goes wrong while a party computes is told to the party's own log, and to the server as a
fixed sentence, because an error's text may speak of records.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from stobatch.federated.conversation import converse
from stobatch.federated.party import Answer, Party, Refused, Spent, Statement
from stobatch.federated.server import Federation, FederationError, statement_of

PATIENCE = 600.0
"""Seconds that the server waits for parties to appear, and for their answers."""

_FAILED = {"what": "a party could not compute its answer.", "why": "Its own log says why.", "remedy": "Ask its owner."}


def packed(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as Flower carries them, to the bit."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def unpacked(record: ArrayRecord) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value.numpy().copy()) for name, value in record.items()}


# The party's side.


@cache
def _opened(run: Path) -> Party:
    """A process that lives on keeps its parties; what counts, the ledger, is read from disk every time."""
    return Party.open(run)


DirectoryOf = Callable[[Context], Path]


def _named_in_node_config(context: Context) -> Path:
    return Path(str(context.node_config["party"]))


def client_app(directory_of: DirectoryOf = _named_in_node_config) -> ClientApp:
    """Answers for the party whose directory the node names: `--node-config 'party="/path/to/its/run"'`."""

    def state(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _said(_opened(directory_of(context)).statement()))

    def answer(message: Message, context: Context) -> Message:
        content: Any = message.content
        question, parameters = content["question"], unpacked(content["parameters"])

        def noisy() -> RecordDict:
            party = _opened(directory_of(context))
            found = party.answer(parameters, int(question["step"]), str(question["terms"]))
            return RecordDict({"answer": packed(found.gradients), "count": ConfigRecord({"rounds": found.rounds})})

        return _reply(message, noisy)

    app = ClientApp()
    app.query()(state)
    app.train()(answer)
    return app


def _said(statement: Statement) -> RecordDict:
    return RecordDict({"statement": ConfigRecord({"json": json.dumps(statement.to_dict())})})


def _reply(message: Message, content: Callable[[], RecordDict]) -> Message:
    refusal: dict[str, Any]
    try:
        return Message(content(), reply_to=message)
    except Refused as error:
        kind = "spent" if isinstance(error, Spent) else "refused"
        refusal = {"kind": kind, "what": error.what, "why": error.why, "remedy": error.remedy}
    except Exception:
        logging.getLogger(__name__).exception("this party could not answer")
        refusal = {"kind": "failed", **_FAILED}
    return Message(RecordDict({"refusal": ConfigRecord(refusal)}), reply_to=message)


# The server's side.


@dataclass
class FlowerPost:
    """Questions and answers through a Flower grid."""

    grid: Grid
    num_parties: int
    patience: float = PATIENCE
    nodes: dict[str, int] = field(default_factory=dict)

    def statements(self) -> dict[str, Statement]:
        found: dict[str, Statement] = {}
        for reply in self._exchange([Message(RecordDict(), node, MessageType.QUERY) for node in self._all_nodes()]):
            said = statement_of(str(self._content(reply)["statement"]["json"]))
            if said.name in found:
                raise FederationError(f"two parties call themselves {said.name}.", remedy="Start each party once.")
            found[said.name] = said
            self.nodes[said.name] = reply.metadata.src_node_id
        return found

    def answers(self, names: Sequence[str], federation: Federation) -> dict[str, Answer]:
        question = ConfigRecord({"step": federation.step, "terms": federation.agreed})
        asked = [
            Message(
                RecordDict({"question": question, "parameters": packed(federation.parameters())}),
                self.nodes[name],
                MessageType.TRAIN,
                group_id=str(federation.step),
            )
            for name in names
        ]
        who = {node: name for name, node in self.nodes.items()}
        found: dict[str, Answer] = {}
        for reply in self._exchange(asked):
            name, content = who[reply.metadata.src_node_id], self._content(reply)
            if "answer" in content:
                found[name] = Answer(unpacked(content["answer"]), int(content["count"]["rounds"]))
        return found

    def _all_nodes(self) -> list[int]:
        until = time.monotonic() + self.patience
        while len(nodes := list(self.grid.get_node_ids())) < self.num_parties:
            if time.monotonic() > until:
                raise FederationError(
                    f"{len(nodes)} of {self.num_parties} parties are there.", remedy="Start the others."
                )
            time.sleep(0.2)
        return nodes

    def _exchange(self, messages: list[Message]) -> list[Message]:
        replies = list(self.grid.send_and_receive(messages, timeout=self.patience))
        if len(replies) < len(messages):
            raise FederationError(
                f"{len(messages) - len(replies)} of {len(messages)} parties gave no answer in {self.patience:g} s.",
                remedy="See that they run, then continue with --resume.",
            )
        return replies

    def _content(self, reply: Message) -> Any:
        """What a reply says; a party whose rounds are spent has nothing to say, any other refusal is an error."""
        if reply.has_error():
            raise FederationError(f"a party failed: {reply.error.reason}", remedy="See that party's own log.")
        refusal = reply.content.get("refusal")
        if refusal is not None and refusal["kind"] != "spent":
            raise FederationError(str(refusal["what"]), why=str(refusal["why"]), remedy=str(refusal["remedy"]))
        return reply.content


FederationOf = Callable[[Context], Federation]


def _named_in_run_config(context: Context) -> Federation:
    return Federation.open(Path(str(context.run_config["run"])))


def server_app(federation_of: FederationOf = _named_in_run_config) -> ServerApp:
    """Runs the federation whose directory the run names: `flwr run APP --run-config 'run="/path/to/the/run"'`."""

    def main(grid: Grid, context: Context) -> None:
        federation = federation_of(context)
        converse(federation, FlowerPost(grid, len(federation.parties)))

    app = ServerApp()
    app.main()(main)
    return app


client = client_app()
server = server_app()
