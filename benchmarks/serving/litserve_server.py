"""The same network behind LitServe, without certificates: `python litserve_server.py RUN PORT`."""

import sys
from typing import Any

import litserve
import torch

import stobatch


class Network(litserve.LitAPI):
    """Batches of the bare network."""

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.network = stobatch.load(sys.argv[1], threads=1).network

    def decode_request(self, request: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(request["data"]).view(self.network.input_shape)

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    @torch.no_grad()
    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        return self.network(batch)

    def unbatch(self, output: torch.Tensor) -> list[torch.Tensor]:
        return list(output)

    def encode_response(self, output: torch.Tensor) -> dict[str, Any]:
        return {"label": int(output.argmax()), "scores": output.tolist()}


if __name__ == "__main__":
    api = Network(max_batch_size=32, batch_timeout=0.005)
    server = litserve.LitServer(api, accelerator="cpu", timeout=120)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, num_api_servers=1, log_level="error"
    )
