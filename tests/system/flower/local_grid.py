"""A Flower grid without a network: messages go to client apps in this process, one node per party."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """Delivers and remembers every message, so that a test can look at all that ever crossed."""

    def __init__(self, app: ClientApp, directories: Iterable[Path]) -> None:
        # Flower's own runtimes set this before an app may make messages.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app = app
        self.contexts = {
            number: Context(1, number, {"party": str(path)}, RecordDict(), {})
            for number, path in enumerate(directories, start=101)
        }
        self.seen: list[Message] = []

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> NoReturn:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> NoReturn:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            reply = self.app(message, self.contexts[message.metadata.dst_node_id])
            self.seen += [message, reply]
            replies.append(reply)
        return replies[::-1]
