"""The conversation over Flower: a `ServerApp` that asks and a `ClientApp` that answers. The only file that knows flwr.

A question carries the parameters and the step; an answer is the party's noisy gradient, its statement, or a refusal.
Nothing else crosses: what goes wrong while a party computes is told to the party's own log, and to the server as a
fixed sentence, because an error's text may speak of records.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from stobatch.federated.party import Answer, Party, Refused, Spent
from stobatch.federated.rounds import converse
from stobatch.federated.server import Federation, FederationError, Said, statement_of
from stobatch.results import Statement

PATIENCE = 600.0
"""Seconds that the server waits for parties to appear."""

CLOSING = 60.0
"""Seconds that parties which had been silent have in the end to say what they counted."""

_FAILED = {"what": "a party could not compute its answer.", "why": "Its own log says why.", "remedy": "Ask its owner."}


def pack(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return named tensors as Flower carries them, to the bit."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def unpack(record: ArrayRecord) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value.numpy().copy()) for name, value in record.items()}


# The party's side.


@cache
def _open_party(run: Path) -> Party:
    """Return the party of a run, kept by the process; its ledger, which counts, is read from disk every time."""
    return Party.open(run)


DirectoryOf = Callable[[Context], Path]


def _run_of_node(context: Context) -> Path:
    return Path(str(context.node_config["party"]))


def client_app(directory_of: DirectoryOf = _run_of_node) -> ClientApp:
    """Return the app of the party whose directory the node names: `--node-config 'party="/path/to/its/run"'`."""

    def state(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _pack_statement(_open_party(directory_of(context)).statement()))

    def answer(message: Message, context: Context) -> Message:
        content: Any = message.content
        question, parameters = content["question"], unpack(content["parameters"])

        def noisy() -> RecordDict:
            party = _open_party(directory_of(context))
            answer = party.answer(parameters, int(question["step"]), str(question["terms"]))
            return RecordDict({"answer": pack(answer.gradients), "count": ConfigRecord({"rounds": answer.rounds})})

        return _reply(message, noisy)

    app = ClientApp()
    app.query()(state)
    app.train()(answer)
    return app


def _pack_statement(statement: Statement) -> RecordDict:
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
class FlowerTransport:
    """Questions and answers through a Flower grid."""

    grid: Grid
    num_parties: int
    patience: float = PATIENCE
    registered: Mapping[str, int] = field(default_factory=dict)
    """The nodes that the parties' keys were registered for, if they were: then no other node is asked or believed."""
    nodes: dict[str, int] = field(default_factory=dict)

    def statements(self) -> dict[str, Statement]:
        statements: dict[str, Statement] = {}
        for reply in self._exchange(self._query(self._all_nodes()), self.patience):
            statement, node = self._statement(reply), reply.metadata.src_node_id
            if statement.name in statements:
                raise FederationError(f"two parties call themselves {statement.name}.", remedy="Start each party once.")
            if self.registered and self.registered.get(statement.name) != node:
                raise FederationError(
                    f"node {node} calls itself {statement.name}, whose key is another node's.",
                    remedy="Start every party with its own key and its own directory.",
                )
            statements[statement.name] = statement
            self.nodes[statement.name] = node
        return statements

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        counts: dict[str, int] = {}
        asked = self._query([self.nodes[name] for name in names if name in self.nodes])
        for reply in self._exchange(asked, min(self.patience, CLOSING)):
            with suppress(FederationError):
                statement = self._statement(reply)
                if self.nodes.get(statement.name) == reply.metadata.src_node_id:
                    counts[statement.name] = statement.rounds
        return counts

    def answers(self, names: Sequence[str], federation: Federation) -> dict[str, Said]:
        question = ConfigRecord({"step": federation.step, "terms": federation.agreed})
        asked = [
            Message(
                RecordDict({"question": question, "parameters": pack(federation.parameters())}),
                self.nodes[name],
                MessageType.TRAIN,
                group_id=str(federation.step),
            )
            for name in names
            if name in self.nodes
        ]
        who = {node: name for name, node in self.nodes.items()}
        answers: dict[str, Said] = {}
        for reply in self._exchange(asked, federation.method.answer_within):
            name = who.get(reply.metadata.src_node_id)
            if name is None:
                continue
            try:
                content = self._content_of(reply)
                answers[name] = _unpack_answer(content) if "answer" in content else None
            except FederationError as error:
                answers[name] = error
        return answers

    def _query(self, nodes: Iterable[int]) -> list[Message]:
        return [Message(RecordDict(), node, MessageType.QUERY) for node in nodes]

    def _statement(self, reply: Message) -> Statement:
        try:
            text = str(self._content_of(reply)["statement"]["json"])
        except (KeyError, TypeError):
            raise FederationError("a party's statement cannot be read.", remedy="Ask its owner.") from None
        return statement_of(text)

    def _all_nodes(self) -> list[int]:
        """Return all nodes; when patience is over, those that are there."""
        until = time.monotonic() + self.patience
        while len(nodes := self._present_nodes()) < self.num_parties and time.monotonic() < until:
            time.sleep(0.2)
        return nodes

    def _present_nodes(self) -> list[int]:
        known = set(self.registered.values())
        return [node for node in self.grid.get_node_ids() if not known or node in known]

    def _exchange(self, messages: list[Message], seconds: float) -> list[Message]:
        """Return the replies that come in time; a message that was not taken by then is not delivered any more."""
        for message in messages:
            message.metadata.ttl = seconds
        return list(self.grid.send_and_receive(messages, timeout=seconds)) if messages else []

    def _content_of(self, reply: Message) -> Any:
        """Return the content of a reply; None from a party whose rounds are spent, an error for any other refusal."""
        if reply.has_error():
            raise FederationError(f"a party failed: {reply.error.reason}", remedy="See that party's own log.")
        refusal = reply.content.get("refusal")
        if refusal is not None and refusal["kind"] != "spent":
            raise FederationError(str(refusal["what"]), why=str(refusal["why"]), remedy=str(refusal["remedy"]))
        return reply.content


def _unpack_answer(content: Any) -> Answer:
    try:
        return Answer(unpack(content["answer"]), int(content["count"]["rounds"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FederationError("a party's answer cannot be read.", remedy="Ask its owner.") from None


FederationOf = Callable[[Context], Federation]


def _federation_of_run(context: Context) -> Federation:
    return Federation.open(Path(str(context.run_config["run"])))


def _registered_nodes(context: Context) -> dict[str, int]:
    """Return which node is whose, from `--run-config 'nodes="north=123 east=456"'`; empty where nodes have no keys."""
    text = str(context.run_config.get("nodes", ""))
    try:
        return {name: int(node) for name, node in (pair.split("=") for pair in text.split())}
    except ValueError:
        raise FederationError(
            f"nodes={text} cannot be read.", remedy="Write name=node for each party, as in north=123 east=456."
        ) from None


def server_app(federation_of: FederationOf = _federation_of_run) -> ServerApp:
    """Return the app of the federation which the run names: `flwr run APP --run-config 'run="/path/to/the/run"'`."""

    def main(grid: Grid, context: Context) -> None:
        federation, registered = federation_of(context), _registered_nodes(context)
        converse(federation, FlowerTransport(grid, len(federation.parties), registered=registered))

    app = ServerApp()
    app.main()(main)
    return app


client = client_app()
server = server_app()
